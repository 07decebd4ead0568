"""TextWorld and Jericho: games agree with TextWorld's own environment, unseen games are new, wrong input is refused."""

import importlib.util
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cases import cases

from operant import OperantError, Task, check_env
from operant.apps.games import textworld as worlds
from operant.apps.games.textworld import Jericho, JerichoGame, TextWorld, TextWorldGame, clean
from operant.envs import players
from operant.envs.games import GameState
from operant.envs.players import PLAYERS, FixedPlayer, OverlapPlayer, RandomPlayer, WalkthroughPlayer

needs_textworld = pytest.mark.skipif(
    not importlib.util.find_spec("textworld"),
    reason='TextWorld is not installed: pip install "operant[textworld]" (needs a C toolchain)',
)
SHARED = Path(__file__).parents[2] / "shared/data/games_textworld"
KINDS = [{"game": "tw-coin_collector", "level": 3}, {"game": "tw-simple"}, {"game": "custom", "rooms": 2, "quest": 2}]


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def game_file(**options) -> str:
    return TextWorld(**options, train_games=1).games("train")[0].target["file"]


# --- the game ---------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@needs_textworld
@pytest.mark.parametrize("kind", KINDS)
def test_a_game_agrees_with_textworlds_own_environment(kind, cached):
    import textworld

    path, chance = game_file(**kind), random.Random(1)
    infos = textworld.EnvInfos(description=True, inventory=True, admissible_commands=True)
    peer, game = textworld.start(path, infos), TextWorldGame(path)
    theirs, ours, done, seen = peer.reset(), game.reset(), False, []
    for _ in range(80):
        if done:
            theirs, ours = peer.reset(), game.reset()
        assert ours.commands == tuple(theirs["admissible_commands"])
        assert ours.description == clean(theirs["description"]) and ours.inventory == clean(theirs["inventory"])
        assert ours.most == theirs["max_score"]
        command = chance.choice([*ours.commands, *ours.commands, "go up", "eat hat"])
        theirs, _, done = peer.step(command)
        ours = game.step(command)
        assert (ours.score, ours.won, ours.lost) == (theirs["score"], theirs["won"], theirs["lost"])
        assert done or ours.text == clean(theirs["feedback"])
        seen.append(ours)
    worlds._SEEN.clear()  # what was remembered of a state is what the game says
    chance, again = random.Random(1), game.reset()
    for state in seen:
        again = game.reset() if again.won or again.lost else again
        again = game.step(chance.choice([*again.commands, *again.commands, "go up", "eat hat"]))
        assert again == state
    peer.close()
    game.close()


@needs_textworld
@pytest.mark.slow
def test_a_command_is_valid_if_the_game_carries_it_out_and_the_map_has_the_rooms_where_it_has_them(cached):
    game = TextWorldGame(game_file(game="tw-simple"))
    start = game.reset()
    box = game.expert().removeprefix("open ")  # the container with the key
    assert (start.place, start.score, start.won) == ("bedroom", 0.0, False)
    script = [
        (f"open {box}", True),
        (f"open {box}", False),  # twice in a row, and the second time it is open
        ("examine wooden door", True),
        ("examine wooden door", True),  # twice in a row is nothing wrong
        ("go north", False),
        ("fly to the moon", False),
        ("restart", False),
        ("quit", False),
        ("tw-trace-actions", False),
        ("\\boxed{go east}", False),  # a backslash speaks to the interpreter, which would wait for more
        (f"open {box}\\_", False),
        ("look\0", False),
        ("\N{GRINNING FACE}" * 150, False),
        (f"take old key from {box}. unlock wooden door with old key", False),
        ("take old key", True),
        ("look\nlook", False),
        ("look " * 2000, False),
    ]
    states = [game.step(command) for command, _ in script]
    assert [state.valid for state in states] == [valid for _, valid in script]
    assert [state.score for state in states] == [1.0] * 14 + [2.0] * 3
    assert "old key" in states[14].inventory and "old key" not in states[13].inventory
    assert len({state.key for state in states}) == 2
    for state in states:
        assert not any(mark in state.text + state.description for mark in ("-=", "[", "<", "$$", ">"))
    drawn = game.map()
    x, y = ({name: place[i] for name, place in drawn["rooms"].items()} for i in (0, 1))
    assert (x["kitchen"] - x["bedroom"], x["backyard"] - x["bedroom"], y["garden"] - y["backyard"]) == (1, 2, 1)
    assert ["bedroom", "kitchen", "locked"] in drawn["ways"] and len(drawn["ways"]) == 5


@needs_textworld
@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.slow
def test_the_expert_wins_also_after_random_commands(kind, cached):
    game = TextWorldGame(game_file(**kind))
    for seed in range(4):
        chance, state = random.Random(seed), game.reset()
        for _ in range(3 * seed):
            state = game.step(chance.choice([c for c in state.commands if not c.startswith("eat")]))
            if state.won:
                break
        turns = 0
        while not state.won:
            state, turns = game.step(game.expert()), turns + 1
            assert turns < 30
        assert seed or turns == game.optimum
        assert state.score == state.most


# --- the worlds -------------------------------------------------------------------------------------------------------
@needs_textworld
@pytest.mark.slow
def test_unseen_games_repeat_no_walkthrough_and_are_kept(cached):
    world = TextWorld(game="tw-coin_collector", level=2, train_games=5, test_games=3)
    train, test = world.games("train"), world.games("test")
    ways = {t.id: worlds.summary(Path(t.target["file"]).with_suffix(".json"))[0] for t in (*train, *test)}
    # Of two moves, the first in four directions and the second in three, there are twelve walkthroughs.
    assert len(train) == 5 and len(test) == 3 and world.dropped > 0
    assert not {ways[t.id] for t in train} & {ways[t.id] for t in test}
    made = {t.target["file"]: os.stat(t.target["file"]).st_mtime_ns for t in (*train, *test)}
    assert world.games("train") == train and world.games("test") == test
    assert made == {path: os.stat(path).st_mtime_ns for path in made}
    check_env(world, train[:2], replies=("go north", "go south", "restart", "x" * 10_000, "look\nlook", ""))
    with pytest.raises(OperantError, match="repeat the walkthrough of a training game"):
        TextWorld(game="tw-coin_collector", level=1, train_games=2, test_games=1).games("test")


@pytest.mark.slow
@needs_textworld
def test_processes_that_make_one_game_at_once_leave_it_whole(cached, tmp_path):
    request = {"path": str(tmp_path / "1.json"), "kind": TextWorld(game="custom").kind(False), "seed": 1}
    for what in (request, {"path": request["path"]}):
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(worlds.make_files, [[what, what]] * 2, ["", ""]))
    assert sorted(os.listdir(tmp_path)) == ["1.json", "1.z8"]
    assert TextWorldGame(tmp_path / "1.z8").reset().commands


@needs_textworld
@pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is missing")
def test_given_files_are_played_packed_or_not_also_by_jericho(cached, tmp_path):
    world = TextWorld(files=(str(SHARED),), examples=0.3, show_commands=True)
    tasks = world.games("train")
    assert len(tasks) == 8
    check_env(world, tasks[:2], replies=("go east", "open antique trunk", "quit"))
    walkthrough = worlds._story(tasks[0].target["file"], 0).walkthrough
    for game in (world.make(tasks[0]), JerichoGame(tasks[0].target["file"])):
        played = players.play(game, FixedPlayer(walkthrough), seed="", max_turns=50)
        assert played[-1][1].won and len(played) == len(walkthrough)
        assert [state.valid for _, state in played] == [True] * len(played) and not game.reset().won
    classics = Jericho(files=str(SHARED / "tw-another_game.z8.gz"))  # one name alone will do
    check_env(classics, classics.games("train"), replies=("go east", "open antique trunk", "fly", "save"))


# --- wrong input ------------------------------------------------------------------------------------------------------
@cases(
    ("nowhere.z8", "nowhere.z8 does not exist"),
    ("empty", "contains no game"),
    ("a.ulx", "Glulx game, which TextWorld 1.7 no longer plays"),
    ("a.txt", "is no game file"),
    ("a.z8.gz", "cannot be unpacked"),
)
def test_wrong_files_are_refused_before_a_game(file, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.ulx", "a.txt", "a.z8.gz"):
        Path(name).write_text("no game", encoding="utf-8")
    Path("empty").mkdir()
    with pytest.raises(OperantError, match=words):
        TextWorld(files=(file,)).games("train")


@needs_textworld
@pytest.mark.slow
@cases(
    (b"no game", "is no Z-machine game"),
    (150_000, r"a.z8 is damaged: it has 150,000 byte"),
    (None, "is not a game of Tex"),
)
def test_a_file_that_is_no_game_of_textworld_is_refused(content, words, cached, tmp_path):
    """Its bytes, a part of a game, or a game whose .json is missing."""
    game, path = Path(game_file(**KINDS[1])), tmp_path / "a.z8"
    path.write_bytes(content if isinstance(content, bytes) else game.read_bytes()[:content])
    if content:
        (tmp_path / "a.json").write_bytes(game.with_suffix(".json").read_bytes())
    with pytest.raises(OperantError, match=words):
        TextWorld().reset({0: Task("a", "", target={"file": str(path)})})


FAKE = bytes([8, *[0] * 13, 0, 64, *[0] * 10, 0, 64]) + bytes(484)
"""What says of itself that it is a whole game of 512 bytes."""


def put(folder, **files):
    """Write game files, each with a .json beside it; returns their paths."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.z8").write_bytes(content)
        (folder / f"{name}.json").write_bytes(b"{}")
    return tuple(str(folder / f"{name}.z8") for name in files)


def test_given_files_are_evaluated_on_others_or_not_at_all(tmp_path):
    file = put(tmp_path, game=FAKE)
    assert [len(TextWorld(files=file).games(split)) for split in ("train", "test")] == [1, 0]
    assert [task.id for task in TextWorld(test_files=file).games("test")] == ["textworld/game"]
    link = tmp_path / "other.z8"
    link.symlink_to(file[0])
    link.with_suffix(".json").symlink_to(Path(file[0]).with_suffix(".json"))
    for world in (TextWorld, Jericho):
        with pytest.warns(UserWarning, match=r"1 of the 1 games in env\.test_files are also in env\.files"):
            assert len(world(files=file, test_files=(str(link),)).games("test")) == 1


@pytest.mark.parametrize("world", [TextWorld, Jericho])
@cases(
    (b"no game", "no Z-machine game"),
    (b"\x08" + bytes(300), "no Z-machine game"),
    (FAKE[:400], "is damaged: it has 400"),
)
def test_given_files_are_looked_at_before_a_model_is_loaded(content, words, world, tmp_path):
    """Not in the step that first plays the bad one of many."""
    files = put(tmp_path, good=FAKE, bad=content)
    for split, given in {"train": {"files": files}, "test": {"files": files[:1], "test_files": files[1:]}}.items():
        with pytest.raises(OperantError, match=words):
            world(**given).games(split)


def test_a_game_of_textworld_has_its_json_beside_it(tmp_path):
    (path,) = put(tmp_path, alone=FAKE)
    (tmp_path / "alone.json").unlink()
    with pytest.raises(OperantError, match=r"has no alone\.json"):
        TextWorld(files=path).games("train")
    with pytest.raises(OperantError, match="names no game"):
        TextWorld().reset({0: Task("a", "play")})


@pytest.mark.parametrize("world", [TextWorld, Jericho])
def test_files_of_one_name_in_two_folders_are_two_games(world, tmp_path):
    files = [put(tmp_path / folder, game=FAKE)[0] for folder in "ab"]
    kind = world.__name__.lower()
    assert [task.id for task in world(files=(*files, files[0])).games("train")] == [f"{kind}/a/game", f"{kind}/b/game"]
    assert [task.id for task in world(files=(files[0],)).games("train")] == [f"{kind}/game"]


def test_without_the_extra_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jericho", None)
    with pytest.raises(OperantError, match=r'pip install "operant\[textworld\]".*C compiler'):
        TextWorld().games("train")
    with pytest.raises(OperantError, match="Jericho brings no games"):
        Jericho().games("train")


def test_players_choose_as_they_say():
    state = GameState("A room.", objective="Take the red key.", commands=("look", "take red key", "take hat"), key="a")

    class Knows:
        def expert(self):
            return "win"

    def first(player):
        return [player.act(state, Knows(), random.Random(n)) for n in range(60)]

    assert set(first(RandomPlayer())) == set(state.commands) and set(first(WalkthroughPlayer())) == {"win"}
    assert first(FixedPlayer(["a", "b"]))[:2] == ["a", "b"]
    assert first(OverlapPlayer())[:3] == ["take red key", "take hat", "take red key"]
    numbers = GameState("A number?", objective="Guess.", commands=("1", "2"))  # no command has a letter
    assert OverlapPlayer().act(numbers, Knows(), random.Random(0)) in ("1", "2")
    assert all(hasattr(PLAYERS.find(name), "act") for name in PLAYERS.names())
