"""Options of parts: what their signatures may hold, and that config.yaml brings all of it back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest
import yaml
from cases import cases
from toys import letters, lm

from operant.api import runs
from operant.apps.games.rooms import Rooms
from operant.runs.config import as_mapping, configure
from operant.runs.named_parts import sources
from operant.types import OperantError, Step

if TYPE_CHECKING:
    from somewhere import Nothing  # pyright: ignore[reportMissingImports]

HERE = Path(__file__)
WORLD, REWARD, TASKS = (f"{HERE}:{name}" for name in ("World", "at_most", "rows"))
GIVEN = {"tasks": ["a", "b"], "env": WORLD}


class World:
    def __init__(
        self,
        extra: Nothing = None,
        *,
        name: str = "corridor",
        root: Path = Path("."),
        sizes: list[int] | None = None,
        mode: Literal["x", "y"] = "x",
        table: dict[str, float] | None = None,
    ):
        self.known = {"name": name, "root": root, "sizes": sizes, "mode": mode, "table": table}

    def reset(self, tasks):
        return {slot: Step(fresh=True) for slot in tasks}

    def step(self, replies):
        return {slot: Step(terminated=True, reward=1.0) for slot in replies}


def at_most(rollouts: list[Nothing], *, target: int = 3) -> list[float]:
    return [float(len(r.reply) <= target) for r in rollouts]


def rows(*, fail: bool = False):
    if fail:
        raise KeyError("no file")
    return ["a"]


class Broken:
    def __init__(self, *, level: int = 0):
        raise ValueError(f"level {level}")


@cases(
    ("name", "maze", "maze"),
    ("root", "here", Path("here")),
    ("sizes", "1,2", [1, 2]),
    ("mode", "y", "y"),
    ("table", {"a": "0.5"}, {"a": 0.5}),
)
def test_options_have_the_types_of_the_signature_and_come_back(option, text, value):
    config = configure({**GIVEN, f"env.{option}": text})
    assert config.parts["env"][option] == value
    stored = yaml.safe_load(yaml.safe_dump(as_mapping(config)))
    assert configure(stored | {"tasks": ["a"]}).parts["env"] == config.parts["env"] and stored["env"] == WORLD


@cases(
    ({"env.sizes": "foo"}, "env.sizes='foo': it must be a whole number"),
    ({"env.mode": "zzz"}, "env.mode='zzz': it must be x or y"),
    ({"env.table": {"a": "x"}}, r"env.table.a='x': it must be a finite number"),
    ({"reward": REWARD, "reward.target": "foo"}, "reward.target='foo': it must be a whole number"),
    ({"env": {"name": WORLD, "mode": "x"}, "env.mode": "y"}, "option env.mode is given twice"),
)
def test_a_wrong_option_of_a_part_is_a_sentence(given, message):
    with pytest.raises(OperantError, match=message):
        configure({**GIVEN, **given})


@cases(
    ({"reward": f"{HERE}:Broken", "reward.level": 2}, r"reward '.*:Broken' cannot be made: ValueError: level 2"),
    ({"tasks": TASKS, "tasks.fail": True}, r"tasks: rows raised KeyError: 'no file'"),
    ({"env": f"isolated:{HERE}:Broken"}, r"environment isolated:.*:Broken lacks the methods reset, step"),
)
def test_a_part_that_cannot_be_made_is_a_sentence(given, message, tmp_path):
    everything: dict[str, Any] = {"policy": "builtin:reviews-lm", "tasks": ["a"], "reward": "letters:e", **given}
    with pytest.raises(OperantError, match=message):
        list(runs(tmp_path / "run", **everything))


def test_a_part_with_an_option_called_name_resumes(tmp_path):
    given = {"tokenizer": letters(), "batch": 2, "max_tokens": 2, "probes": 0, "env.name": "maze"}
    list(runs(tmp_path / "run", policy=lm(vocab=40), **GIVEN | given, steps=1))
    again = {"policy": lm(vocab=40), "tokenizer": letters(), "tasks": GIVEN["tasks"]}
    (*_, run) = runs(tmp_path / "run", **again, resume=True, steps=2)
    assert run.learner.env.known["name"] == "maze" and run.learner.progress.step == 2


@pytest.mark.parametrize("given", ["none", "None", "false", False])
def test_a_world_evaluates_nothing_where_the_word_none_says_so(given):
    """Also when the run is resumed, with its config.yaml; a run that names nothing plays the world's tests."""
    named = {"env": "rooms", "evaluate": given}
    for options in (named, as_mapping(configure(named))):
        train = configure(options).train
        assert sources(train, {}, Rooms())[1] is None and not train.evaluates
    for options in ({"env": "rooms"}, as_mapping(configure({"env": "rooms"}))):
        assert sources(configure(options).train, {}, Rooms())[1] == Rooms().games("test") != []
    with pytest.raises(OperantError, match="evaluate='10%': the tasks are the world's own, which keeps some for"):
        configure({"env": "rooms", "evaluate": "10%"})
    assert configure({"tasks": ["ab"], "reward": "letters:e", "evaluate": given}).train.evaluate in (None, False)


def test_held_out_problems_are_those_that_the_run_is_asked_for():
    config = configure({"order": "usual", "digits": 3}, "arithmetic")
    for one in sources(config.train, config.parts["tasks"], None):
        task = next(iter(one()))
        assert min(map(int, task["prompt"].rstrip("=").split("+"))) > 99 and task["target"].get("order") != "units"
