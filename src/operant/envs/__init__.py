"""Worlds by name. Each is a file of this package; other packages add theirs as entry points of `operant.envs`."""

from typing import Any, Literal

from operant.import_by_name import Table
from operant.types import OperantError, Task, shown

ENVS = Table(
    "environment",
    "operant.envs",
    {
        "extract": "operant.envs.extract:Extract",
        "feedback": "operant.rewards.feedback:Feedback",
        "gymnasium": "operant.apps.games.gymnasium:Gymnasium",
        "http": "operant.envs.http:Http",
        "jericho": "operant.apps.games.textworld:Jericho",
        "programs": "operant.apps.code.programs_world:Programs",
        "rooms": "operant.apps.games.rooms:Rooms",
        "single_turn": "operant.envs.single_turn:SingleTurn",
        "textworld": "operant.apps.games.textworld:TextWorld",
    },
)
"""The class or function that makes each environment; its arguments are the options `env.*`."""


def for_evaluation(env: Any) -> Any:
    """The world in which a policy is measured: what its method `for_evaluation` returns if it has one, or itself."""
    made = getattr(env, "for_evaluation", None)
    return env if made is None else made()


def own_games(env: Any, split: Literal["train", "test"]) -> list[Task]:
    """The tasks that a world has itself. Raises: OperantError if it has none, or returns anything else."""
    name = getattr(env, "__name__", None) or type(env).__name__
    if (method := getattr(env, "games", None)) is None:
        raise OperantError(f"tasks is missing: world {name!r} has no tasks of its own; pass --tasks")
    own = method(split)
    if not isinstance(own, list) or not all(isinstance(task, Task) for task in own):
        raise OperantError(f"world {name!r}: games({split!r}) returned {shown(own)}; it must be a list of operant.Task")
    if not own and split == "train":
        raise OperantError(f"world {name!r}: games('train') returned no task; let it have more games, or pass --tasks")
    return own
