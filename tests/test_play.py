"""`operant play`: tables and demonstrations of players, people at the terminal, models, and wrong input."""

import json
from itertools import chain, repeat
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from cases import cases
from texts import mistyped, parts, write_rows
from texts import read_rows as rows
from toys import letters, on_disk
from transformers import GPT2Config, GPT2LMHeadModel

from operant.api import runs
from operant.apps.games.rooms import Rooms
from operant.data import DataOptions, load_tasks
from operant.envs.players import RandomPlayer
from operant.tools.cli import main

pytestmark = pytest.mark.filterwarnings("ignore")


def play(*words, code=0):
    assert main(["play", *map(str, words)]) == code


def table(capsys):
    printed = capsys.readouterr().out.splitlines()
    lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in printed]
    head = next(i for i, line in enumerate(lines) if line[:1] == ["player"])
    return {line[0]: dict(zip(lines[head], line)) for line in lines[head + 1 :]}


def test_players_side_by_side_on_the_same_games(capsys):
    play("rooms", "--player", "random", "--player", "walkthrough", "--games", 10, "--env.rooms", 4)
    found, world = table(capsys), Rooms(rooms=4)
    shortest = [world.make(task).optimum for task in world.games("test")[:10]]
    assert found["walkthrough"]["won"] == "10 (100 %)"
    assert found["walkthrough"]["turns"].startswith(f"{sum(shortest) / 10:.3g} ")
    assert found["walkthrough"]["95 %"] == "72 to 100 %"  # Wilson: n / (n + z²) = 10 / 13.84
    assert found["random"]["games"] == "10" and found["random"]["won"] != "10 (100 %)"


@cases({}, {"memory": 1}, {"memory": "none"}, {"template": "thought"}, {"choose": "true"}, ids=str)
def test_a_recorded_game_is_what_the_policy_sees_and_writes(options, tmp_path, capsys):
    path, named = tmp_path / "demos.jsonl", [word for n, x in options.items() for word in (f"--env.{n}", x)]
    play("rooms", "--player", "walkthrough", "--games", 1, "--env.rooms", 4, "--record", path, *named)
    world = Rooms(rooms=4, **{n: {"none": None, "true": True}.get(x, x) for n, x in options.items()})
    step = world.reset({0: world.games("test")[0]})[0]
    text = step.text
    for row in rows(path):
        assert row["prompt"] == text and (step.options is None or row["completion"] in step.options)
        step = world.step({0: row["completion"]})[0]
        text = step.text if step.fresh else text + row["completion"] + step.text
    assert step.terminated and step.info["game"]["won"]
    tasks = load_tasks(str(path), None, DataOptions(), with_replies=True)
    assert [(task.prompt, task.replies[0]) for task in tasks] == [(r["prompt"], r["completion"]) for r in rows(path)]


def test_only_won_games_are_recorded_if_asked(tmp_path):
    both = ["rooms", "--player", "random", "--player", "walkthrough", "--games", 3, "--env.max_turns", 14]
    play(*both, "--record", tmp_path / "all.jsonl")
    play(*both, "--record", tmp_path / "won.jsonl", "--only-won")
    world = Rooms(max_turns=14)
    shortest = [world.make(task).optimum for task in world.games("test")[:3]]
    assert len(rows(tmp_path / "won.jsonl")) == sum(n for n in shortest if n <= 14)
    assert len(rows(tmp_path / "all.jsonl")) == 3 * 14 + sum(min(n, 14) for n in shortest)


def test_what_an_interrupted_player_has_played_is_recorded(tmp_path, monkeypatch, capsys):
    act, asked = RandomPlayer.act, []

    def interrupted(self, *known):
        asked.append(act(self, *known))
        if len(asked) == 5:
            raise KeyboardInterrupt
        return asked[-1]

    monkeypatch.setattr(RandomPlayer, "act", interrupted)
    play("rooms", "--player", "random", "--games", 2, "--record", tmp_path / "part.jsonl", code=130)
    assert [row["completion"].strip() for row in rows(tmp_path / "part.jsonl")] == asked[:4]
    out, error = capsys.readouterr()
    assert "4 turns recorded" in out and "interrupted; no player has finished" in error
    asked.clear()
    play("rooms", "--player", "walkthrough", "--player", "random", "--games", 1, code=130)
    assert [*table(capsys)] == ["walkthrough"]


def test_a_record_of_unseen_games_and_too_few_of_them_are_said(tmp_path, capsys):
    """What a model learns from a recorded game is no longer measured on games that it never saw."""
    few = ["rooms", "--player", "walkthrough", "--env.test-games", 0, "--env.train-games", 2]
    for words, split in ((["rooms", "--player", "random", "--games", 1], "test"), ([*few, "--games", 3], "train")):
        play(*words, "--split", split, "--record", tmp_path / f"{split}.jsonl")
        told = capsys.readouterr().err
        assert ("games of split test are recorded" in told) is (split == "test")
    assert "rooms: 2 games of split train are played; it has no more" in told


def test_the_commands_of_the_page_play(here, monkeypatch, capsys):
    page = (Path(__file__).parents[1] / "docs" / "text-worlds.md").read_text(encoding="utf-8")
    found = [line.split()[2:] for line in page.splitlines() if line.startswith("operant play ")]
    monkeypatch.setattr("builtins.input", lambda prompt: "quit")
    for words in found:
        play(*["2" if before == "--games" else word for before, word in zip(["", *words], words)])
    assert len(found) >= 3 and rows(here / "demos.jsonl")


# --- a person ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def typed(monkeypatch):
    """Lines that are typed, and exceptions that are raised in their place; behind them the input has ended."""
    return lambda *lines: monkeypatch.setattr("builtins.input", Mock(side_effect=chain(lines, repeat(EOFError))))


def test_a_person_plays_to_the_end(typed, capsys):
    game = Rooms(rooms=4).make(Rooms(rooms=4).games("test")[0])
    game.reset()
    solution = []
    while command := game.expert():
        solution.append(command)
        game.step(command)
    typed("?", "dance", *solution)
    play("rooms", "--env.rooms", 4)
    out = capsys.readouterr().out
    assert out.startswith(f"{game.reset().objective}\n(? lists the commands, quit leaves)\nYou are in the ")
    assert ", ".join(game.reset().commands) in out and "You can't do that." in out
    assert f"Won in {len(solution) + 1} turns." in out and "human" in out


OWN = """
from operant import Step
class Count:
    def __init__(self, goal: int = 3):
        self.goal = goal
    def reset(self, tasks):
        return {slot: Step(examples=[("0", 0.5)] if task.id.endswith("0") else []) for slot, task in tasks.items()}
    def step(self, replies):
        won = {slot: reply == str(self.goal) for slot, reply in replies.items()}
        return {slot: Step(" no. Again:", terminated=r, reward=r / 4, paid={0: r / 4}) for slot, r in won.items()}
def choose(task):
    reply = yield __import__("operant").Step("Left or right?", options=["left", task.target])
    return float(reply == "right")
"""


def test_a_person_plays_a_world_of_ones_own(typed, here, capsys):
    Path("my.py").write_text(OWN, encoding="utf-8")
    write_rows("tasks.jsonl", [{"text": text, "way": "right"} for text in ("A number?", "Another?")])
    typed("3", "5", "5", "quit")
    play("--env", "my.py:Count", "--env.goal", 5, "--tasks", "tasks.jsonl", "--games", 2)
    shown = "A number?\n no. Again:\n no. Again:\nThe episode has ended after 2 turns, with a reward of 1.\nAnother?\n"
    assert capsys.readouterr().out.startswith(shown)
    typed("up", "right")
    play("my.py:choose", "--tasks", "tasks.jsonl", "--data.target-field", "way")
    out = capsys.readouterr().out
    assert out.count("choose one: left, right") == 2 and "after 1 turn, with a reward of 1" in out
    for player in ("human", "random"):
        play("my.py:Count", "--player", player, code=2)
        assert "Any other is played by a person, with --tasks FILE" in capsys.readouterr().err


@cases("quit", EOFError, KeyboardInterrupt)
def test_leaving_a_game_keeps_what_was_recorded(end, typed, tmp_path, capsys):
    """But no command that the game has refused: nobody should learn it."""
    typed("go east", "jump", "go west", end)
    play("rooms", "--record", tmp_path / "mine.jsonl")
    assert [row["completion"] for row in rows(tmp_path / "mine.jsonl")] == [" go east", " go west"]
    out = capsys.readouterr().out
    assert "2 turns recorded" in out and "; 1 that the game did not understand were left out" in out


def test_texts_of_a_world_move_no_cursor(typed, monkeypatch, capsys):
    """Names of rooms may come from anywhere."""
    typed("quit")
    monkeypatch.setattr("operant.apps.games.rooms.NAMES", ["hall\x1b[2J", "cellar\x1b]0;x\x07", "attic"])
    play("rooms", "--env.rooms", 3)
    out = capsys.readouterr().out
    assert "You are in the" in out and not {"\x1b", "\x07"} & set(out)


# --- models -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A tiny model, and a run of it in small rooms with options of its own."""
    path = tmp_path_factory.mktemp("play")
    shape = {"n_positions": 1024, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    on_disk(path / "model", GPT2LMHeadModel(GPT2Config(vocab_size=len(letters()), initializer_range=0.3, **shape)))
    world = Rooms(rooms=4)
    own = {"env.rooms": 4, "env.memory": 1, "env.choose": True, "env.max_turns": 8, "max_tokens": 6, "probes": 0}
    given = {"policy": str(path / "model"), "env": "rooms", "tasks": world.games("train"), "steps": 1, "batch": 2}
    given |= {"algorithm": "decision", "condition.evaluated": 1.0}
    list(runs(path / "run", evaluate=world.games("test")[:2], **given, **own))
    return path


def test_a_run_plays_as_in_its_evaluation(trained, capsys):
    """In the same world, with the same random numbers: command by command."""
    capsys.readouterr()
    play("rooms", "--player", trained / "run", "--games", 2, "--transcript", 2)
    said = [line[2:] for line in capsys.readouterr().out.splitlines() if line.startswith("> ")]
    judged = json.loads((trained / "run" / "evaluation.json").read_text(encoding="utf-8"))["after"]["replies"]
    assert said == [turn["command"] for reply in judged for turn in reply["game"]["turns"]]
    assert len(said) > 8 and len(set(said)) > 3


@pytest.mark.slow
def test_a_run_in_worker_processes_plays_with_its_own_options(trained, tmp_path, capsys):
    """A run of `workers:rooms` is one of `rooms`; the number of its workers is no option of a world."""
    own = {"env.rooms": 4, "env.memory": 1, "env.max_turns": 3, "env.workers": 1, "max_tokens": 6, "probes": 0}
    given = {"policy": str(trained / "model"), "env": "workers:rooms", "steps": 1, "batch": 2, "env.test_games": 2}
    list(runs(tmp_path / "run", **given, **own))
    assert f"operant play rooms --player {tmp_path / 'run'}" in capsys.readouterr().out
    assert main(["eval", str(tmp_path / "run")]) == 2
    assert f"operant play rooms --player {tmp_path / 'run'}" in capsys.readouterr().err
    for world in ("rooms", "workers:rooms"):
        capsys.readouterr()
        play(world, "--player", tmp_path / "run", "--player", "random", "--env.max_turns", 5, "--games", 2)
        assert [row["turns"] for row in table(capsys).values()] == ["5 ± 0", "5 ± 0"]
        play(world, "--player", "random", "--player", tmp_path / "run", "--games", 2)
        assert [row["turns"] for row in table(capsys).values()] == ["3 ± 0", "3 ± 0"], "the limit of the run"
    three = [word for player in (tmp_path / "run", trained / "run", trained / "model") for word in ("--player", player)]
    play("rooms", *three, "--games", 2)
    assert [row["turns"] for row in table(capsys).values()] == ["8 ± 0"] * 3, "the larger one of two runs"


def test_a_model_beside_a_run_with_other_options(trained, tmp_path, capsys):
    both = ["--player", trained / "model", "--player", trained / "run", "--games", 2]
    both += ["--env.max_turns", 3, "--sampling.top_k", 1, "--transcript", 1]
    games = {}
    for seed in (0, 7):
        play("rooms", *both, "--record", tmp_path / f"{seed}.jsonl", "--seed", seed)
        captured = capsys.readouterr().out
        players = (str(trained / "model"), str(trained / "run"))
        lines = [line for line in captured.splitlines() if line.startswith(players)]
        assert len(lines) == 2 and all("3 ± 0" in line for line in lines)
        games[seed] = captured.split("--- ")[1:]
    assert games[0][0] == games[7][0]  # greedy: no random numbers
    assert games[0][1] != games[7][1]  # a choice among commands is drawn
    assert len(rows(tmp_path / "0.jsonl")) == 2 * 3  # the run's own; the game has refused what the model wrote


# --- a player of one's own --------------------------------------------------------------------------------------------
def test_a_player_of_ones_own(here, capsys):
    Path("mine.py").write_text(parts("programs.txt")["players"], encoding="utf-8")
    play("rooms", "--player", "mine.py:Eastward", "--games", 2, "--record", "demos.jsonl", "--env.max_turns", 5)
    assert table(capsys)["mine.py:Eastward"]["games"] == "2"
    assert " go east" in [row["completion"] for row in rows(here / "demos.jsonl")]
    for name, why in {
        "Broken": "player 'mine.py:Broken' raised IndexError: ",
        "Wordless": "player 'mine.py:Wordless' returned None; a command is a text",
        "Nothing": "has no act(state, game, chance)",
        "None": "'mine.py' has no 'None'",
        "Unready": "cannot be made without arguments: ValueError: no book",
        "standing": "cannot be made without arguments: TypeError: 'Jumping' object is not callable",
    }.items():
        play("rooms", "--player", f"mine.py:{name}", "--games", 1, code=2)
        assert why in capsys.readouterr().err
    examples = ["--env.examples", 0.6, "--env.max_turns", 12, "--record", "jumps.jsonl"]
    play("rooms", "--player", "mine.py:Jumping", "--games", 2, *examples)
    assert rows(here / "jumps.jsonl") == [], "the world's own commands were understood, and not the player's"


# --- wrong input ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("words", "said"), mistyped("play"))
def test_a_mistake_gets_a_sentence(words, said, here, capsys):
    (here / "run").mkdir()
    for name, content in (("there.jsonl", ""), ("run/config.yaml", "env: extract")):
        (here / name).write_text(content, encoding="utf-8")
    play(*words, code=2)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("operant: ") and said in captured.err
