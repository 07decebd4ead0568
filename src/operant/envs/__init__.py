"""Worlds by name. Each is a file of this package; other packages add theirs as entry points of `operant.envs`."""

from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Literal, TypeVar

from operant.import_by_name import Table
from operant.types import Env, EnvBase, OperantError, Step, Task, name_of, of_user, shown, with_defaults

ENVS = Table(
    "environment",
    "operant.envs",
    {
        "extract": "operant.envs:Extract",
        "feedback": "operant.rewards.feedback:Feedback",
        "gem": "operant.apps.games.gem:Gem",
        "gymnasium": "operant.apps.games.gymnasium:Gymnasium",
        "http": "operant.envs.http:Http",
        "jericho": "operant.apps.games.textworld:Jericho",
        "openenv": "operant.apps.games.openenv:OpenEnv",
        "program": "operant.apps.agents.program:AgentWorld",
        "programs": "operant.apps.code.unit_tests:Programs",
        "rooms": "operant.apps.games.rooms:Rooms",
        "scienceworld": "operant.apps.games.scienceworld:ScienceWorld",
        "single_turn": "operant.envs:SingleTurn",
        "textarena": "operant.apps.games.textarena:TextArena",
        "textworld": "operant.apps.games.textworld:TextWorld",
        "tools": "operant.apps.agents.tools:ToolWorld",
    },
)
"""The class or function that makes each environment; its arguments are the options `env.*`."""

Answer = TypeVar("Answer")


def for_evaluation(env: Env) -> Env:
    """The world in which a policy is measured: what its method `for_evaluation` returns if it has one, or itself."""
    made = with_defaults(env, EnvBase).for_evaluation
    return env if made is None else asked(env, "for_evaluation", made)


def check_parts(env: Env) -> None:
    """Call the world's own `check`. Raises: OperantError if that raises, and if it can play no episode at a time."""
    parts = with_defaults(env, EnvBase)
    if parts.check is not None:
        asked(env, "check", parts.check)
    for name, number in (("most", parts.most), ("waves", parts.waves)):
        if number is not None and not (isinstance(number, Integral) and number >= 1):
            raise OperantError(f"world {name_of(env)!r}: {name}={shown(number)}; it must be a number of at least 1")


def asked(env: object, part: str, call: Callable[..., Answer], *given: object) -> Answer:
    """What an optional part of a world answers. Raises: OperantError that names world and part if it raises."""
    with of_user(f"world {name_of(env)!r}: {part} raised "):
        return call(*given)


def own_games(env: object, split: Literal["train", "test"]) -> list[Task]:
    """The tasks that a world has itself. Raises: OperantError if it has none, or returns anything else."""
    name = name_of(env)
    if (method := with_defaults(env, EnvBase).games) is None:
        raise OperantError(f"tasks is missing: world {name!r} has no tasks of its own (games); pass tasks")
    own = asked(env, f"games({split!r})", method, split)
    if not isinstance(own, list) or not all(isinstance(task, Task) for task in own):
        raise OperantError(f"world {name!r}: games({split!r}) returned {shown(own)}; it must be a list of operant.Task")
    if not own and split == "train":
        raise OperantError(f"world {name!r}: games('train') returned no task; let it have more games, or pass --tasks")
    return own


class SingleTurn(EnvBase):
    """An `Env` whose episodes are one turn long. It pays no rewards of its own: a reward function judges the reply."""

    pays = False
    turns = 1

    def reset(self, tasks: Mapping[int, Task]) -> dict[int, Step]:
        return {slot: Step(fresh=True) for slot in tasks}

    def step(self, replies: Mapping[int, str]) -> dict[int, Step]:
        return {slot: Step(terminated=True) for slot in replies}


class Extract(SingleTurn):
    """An `Env` of one turn whose reply is one of the sentences in `Task.target`, such as the row form `extract` makes.

    It pays nothing: a reward such as `rouge` judges the sentence. Options: --env extract
    """

    def reset(self, tasks: Mapping[int, Task]) -> dict[int, Step]:
        """Raises: OperantError for a task whose target is no list of sentences."""
        first = dict[int, Step]()
        for slot, task in tasks.items():
            texts = task.target if isinstance(task.target, (list, tuple)) else []
            if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
                how = "as form=extract makes of a row, or data.target_field=sentences of a row that has them"
                what = f"the target of task {task.id!r} is {shown(task.target)}; it must be a list of sentences"
                raise OperantError(f"world 'extract': {what}, {how}")
            first[slot] = Step(fresh=True, options=list(texts))
        return first
