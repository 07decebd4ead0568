"""Games of suites that others made: the same games as the suite's own, by name, and their failures as sentences."""

import json
import random
import re
import sys
import zlib
from dataclasses import dataclass
from importlib import import_module
from threading import Thread

import pytest
from cases import cases, slow
from worlds import SMALL

from operant import OperantError, Task, check_env, train
from operant.envs import ENVS
from operant.envs.games import GameState
from operant.envs.suites import SuiteGame, SuiteGames
from operant.runs.named_parts import flattened
from operant.tools.cli import main

GUESS = "GuessTheNumber-v0"


def made(suite, game, **options):
    pytest.importorskip(suite)
    return ENVS.find(suite)(game=game, **options)


def test_an_episode_is_that_of_textarena_itself():
    world = made("textarena", GUESS)
    import textarena

    task, peer = world.games("train")[3], textarena.make(GUESS)
    peer.reset(num_players=1, seed=zlib.crc32(task.id.encode()))
    assert world.reset({0: task})[0].text.strip("\n> ") in peer.get_observation()[1]
    done, paid, chance = False, 0.0, random.Random(0)
    while not done:
        guess = str(chance.randint(1, 20))
        step = world.step({0: guess})[0]
        done, _ = peer.step(f"[{guess}]")
        paid += step.reward
        assert step.terminated == done and step.text.removesuffix("\n>").strip() in peer.get_observation()[1]
    assert paid == pytest.approx(peer.close()[0][0])


def test_an_episode_is_that_of_gem_itself():
    world = made("gem", "game:GuessTheNumber-v0-hard")
    import gem

    task, peer = world.games("test")[1], gem.make("game:GuessTheNumber-v0-hard")
    rules, _ = peer.reset(seed=zlib.crc32(task.id.encode()))
    assert world.reset({0: task})[0].text == f"{rules.strip()}\n\n>"
    for guess in ("\\boxed{3}", "\\boxed{40}", "\\boxed{3}", "no number"):
        step, (text, reward, ended, _, info) = world.step({0: guess})[0], peer.step(guess)
        assert step.reward == pytest.approx(reward) and step.terminated == ended
        assert ended or step.text == f"\n\n{text}\n{info['suffix']}\n>"


@pytest.mark.slow
def test_a_solution_of_scienceworld_wins_its_game():
    world = made("scienceworld", "find-plant", train_games=3)
    train_games, test_games = world.games("train"), world.games("test")
    assert len(train_games) == 3 and not {t.id for t in train_games} & {t.id for t in test_games}
    step, paid = world.reset({0: train_games[0]})[0], 0.0
    begun = world.playing(0)[1]
    assert begun.score >= 0 and "look around" in begun.commands and "Your task is to find" in step.text
    while not step.terminated:
        step = world.step({0: world.playing(0)[0].expert()})[0]
        paid += step.reward
    assert paid == pytest.approx(1 - begun.score) and step.info["game"]["won"]
    world.reset({0: train_games[0]})
    assert not world.playing(0)[1].lost and world.step({0: "eat the moon"})[0].reward == 0
    assert not world.playing(0)[1].valid and world.playing(0)[0].expert() is None
    world.close()


@cases(
    ("textarena", GUESS, {"commands": ("1", "2", "33")}),
    slow("textarena", "FrozenLake-v0-random", {}),
    slow("gem", "game:Minesweeper-v0-easy", {}),
    slow("scienceworld", "find-plant", {}),
)
def test_a_game_of_a_suite_passes_the_check(suite, game, options):
    env = made(suite, game, **options)
    check_env(env, env.games("train")[:2])
    env.close()


@pytest.mark.slow
@cases(
    (f"textarena:{GUESS}", {"env.choose": True, "env.commands": ["5", "10", "15"]}),
    (f"workers:textarena:{GUESS}", {"env.workers": 2}),
    ("gem:game:GuessTheNumber-v0-easy", {}),
    ("scienceworld:find-plant", {"env.max_turns": 2, "env.train_games": 4}),
)
def test_two_steps_of_training_in_a_suite(name, more, tmp_path):
    pytest.importorskip(name.removeprefix("workers:").partition(":")[0])
    given = {"evaluate": "none", "batch": 2, "sampling.max_tokens": 6, **more}
    run = train("builtin:rooms", env=name, out=tmp_path / "run", **SMALL | given)
    assert len(run.metrics) == 2 and run.metrics[-1]["rollout/turns"] >= 1


@cases(
    ("textarena:GuesTheNumber-v0", r"'GuesTheNumber-v0': TextArena has no such game; did you mean 'GuessTheN"),
    slow("textarena:Countdown-v0", "cannot play 'Countdown-v0' here: it pays a sentence for a wrong command: 'Inv"),
    slow("textarena:MarketEntryGame-v0", "cannot play 'MarketEntryGame-v0' here: it is a game for several players"),
    ("textarena:TicTacToe-v0", r"here: it raised AssertionError: The number of players has to be 2, received 1"),
    ("gem:game:Wordle-v1-easy", r"Gem has no such game; did you mean 'game:Wordle-v0-easy'\?"),
    ("scienceworld:find-plants", r"ScienceWorld has no such game; did you mean 'find-plant'\?"),
)
def test_a_game_that_cannot_be_played_is_a_sentence(name, error, capsys):
    pytest.importorskip(name.partition(":")[0])
    assert main(["play", name, "--player", "random"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and re.search(error, message)


@pytest.mark.parametrize("suite", ["textarena", "gem", "scienceworld"])
def test_a_suite_that_is_not_installed_names_its_extra(suite, monkeypatch):
    monkeypatch.setitem(sys.modules, suite, None)
    with pytest.raises(OperantError, match=rf"env={suite} needs .*: pip install 'operant\[{suite}\]'"):
        import_module(f"operant.apps.games.{suite}").package()
    with pytest.raises(OperantError, match=rf"env={suite} needs"):
        train("builtin:rooms", env=f"{suite}:x", out="nowhere")


def test_a_name_with_a_game_is_a_suite_and_its_option():
    assert flattened({"env": "textarena:A-v0", "steps": 2}) == {"env": "textarena", "env.game": "A-v0", "steps": 2}
    assert flattened({"env": "workers:gem:game:A"}) == {"env": "workers:gem", "env.game": "game:A"}
    named = flattened({"env": {"name": "gymnasium:A-v1", "choose": False}})
    assert named == {"env": "gymnasium", "env.id": "A-v1", "env.choose": False}
    for name, error in (("kwargs", "use env.simplifications"), ("commands", "leave it out")):
        with pytest.raises(OperantError, match=rf"env.{name}=.*{error}"):
            ENVS.find("scienceworld")(game="find-plant", **{name: {"easy": True}})
    for other in ("rooms", "workers:rooms", "mine.py:World", "isolated:mine.py:World", None):
        assert flattened({"env": other}) == {"env": other}
    for beside in ("game", "env.game"):
        with pytest.raises(OperantError, match=rf"option {beside} is given twice, in env=textarena:A and beside it"):
            flattened({"env": "textarena:A", beside: "B"})


class Drawing(SuiteGame):
    """Draws from Python's own generator, and raises in the games 1, after a command, and 3, at once."""

    def reset(self):
        if self.seed == 3:
            raise KeyError("no such map")
        with self.seeded():
            return GameState(f"draws {random.random()}")

    def step(self, command):
        if self.seed == 1:
            raise KeyError("no such room")
        with self.seeded():
            return GameState(f"draws {random.random()}", won=command == "end", score=float(command == "end"))


@dataclass(kw_only=True)
class Drawings(SuiteGames):
    def names(self):
        return []

    def check(self):
        """No episode in another process: this one raises."""

    def make(self, task):
        return Drawing(int(task.id.rpartition("/")[2]))


def test_a_game_that_raises_costs_its_episode_and_no_other():
    world, tasks = Drawings(game="x"), {i: Task(f"x/{i}", "x") for i in range(3)}
    before, first = random.getstate(), world.reset(tasks)
    steps = world.step({0: "go\non", 1: "go", 2: "end"})
    assert steps[1].failed == "raised" and steps[1].info == {"failure": "raised KeyError: 'no such room'"}
    assert [steps[i].failed for i in (0, 2)] == [None, None] and steps[2].terminated and steps[2].reward == 1
    assert random.getstate() == before and len({step.text for step in first.values()}) == 3
    assert f"draws {random.Random(2).random()}" in first[2].text  # whatever the games beside it have drawn
    check_env(world, [tasks[0], tasks[2]])
    with pytest.raises(OperantError, match=r"env.examples needs the commands that are possible: env.commands=up,down"):
        Drawings(game="x", examples=0.5)


def test_a_game_that_raises_is_left_out_of_a_table(tmp_path, capsys):
    own = ["--env.game", "x", "--env.max-turns", "2", "--games", "5", "--record", str(tmp_path / "games.jsonl")]
    assert main(["play", "test_suites:Drawings", "--player", "random", *own]) == 0
    out, error = capsys.readouterr()
    for game, why in ((1, "room"), (3, "map")):
        assert f"random: game 'x/test/{game}' has failed and is left out: raised KeyError: 'no such {why}'" in error
    assert "6 turns recorded" in out and out.splitlines()[-1].split()[:3] == ["random", "3", "0"]


def serve(websocket):
    """An OpenEnv session as its server speaks it: two numbers to guess, an error, and an answer that never comes."""
    for message in websocket:
        asked = json.loads(message)
        text = f"Guess 1 or {asked['data'].get('most')}:"
        data = {"observation": {"text": text, "length": 3}, "reward": None, "done": False}
        if asked["type"] == "step":
            said = asked["data"]["message"]
            if said == "sleep":
                continue
            data = {"observation": {"text": "yes" if said == "1" else "no"}, "reward": said == "1", "done": said == "1"}
            if said == "boom":
                websocket.send(json.dumps({"type": "error", "data": {"message": "'boom'", "code": "EXECUTION_ERROR"}}))
                continue
        websocket.send(json.dumps({"type": "observation", "data": data}))


def test_an_openenv_server_is_a_world_whose_sessions_may_fail():
    with pytest.importorskip("websockets.sync.server").serve(serve, "127.0.0.1", 0) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        world = ENVS.find("openenv")(game=url, most=2, timeout=0.5, kwargs={"most": 2})
        [one, two] = world.games("train")[:2]
        assert world.reset({0: one, 1: two})[0].text == "Guess 1 or 2:\n>"
        steps = world.step({0: "2", 1: "boom"})
        assert steps[0].text == "\n\nno\n>" and steps[1].info["failure"].startswith("answers step with an error")
        last = world.step({0: "1"})[0]
        assert last.terminated and last.reward == 1 and last.info["game"]["won"]
        world.reset({1: two})
        assert world.step({1: "sleep"})[1].failed == "timeout"
        world.close()
        server.shutdown()
    assert "no server that answers at ws://127.0.0.1" in world.reset({0: one})[0].info["failure"]
    with pytest.raises(OperantError, match=r"env.game='localhost': it must be the URL of an OpenEnv server"):
        ENVS.find("openenv")(game="localhost")
