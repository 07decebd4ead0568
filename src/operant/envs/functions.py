"""A world as a plain Python function: a generator function that plays one episode.

def guess(task, *, guesses: int = 6):
    reply = yield task.prompt                    # what the policy reads; the reply comes back
    for _ in range(guesses - 1):
        if reply == task.target:
            return 1.0                           # the reward of the last reply; the episode has ended
        reply = yield " No. Guess again:", -0.1  # a text, and the reward of the reply before it
    return 1.0 if reply == task.target else 0.0

run = operant.train(policy, tasks, env=guess, **{"env.guesses": 3})
"""

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, TypeVar

from operant.envs import ENVS
from operant.types import Env, EnvBase, OperantError, Step, Task, name_of, shown, with_defaults

MakeWorld = TypeVar("MakeWorld", bound=Callable[..., Any])


class FunctionEnv(EnvBase):
    """An `Env` that calls a generator function once for each episode: `function(task, **options)`.

    The function yields what the policy reads: a text, which is appended after the reply; a pair of a text and the
    reward of the reply before it; or a `Step`. It gets the reply, and ends the episode by returning: the reward of the
    last reply, a pair, a `Step` (which may be truncated or failed), or nothing, which is a reward of 0.
    """

    def __init__(self, function: Callable[..., Generator[object, str | None, object]], **options: object):
        self.function, self.options = function, options
        self.__name__, declared = name_of(function), with_defaults(function, EnvBase)
        self.pays, self.games = declared.pays, declared.games
        self.episodes: dict[int, Generator[Any, Any, Any]] = {}

    def reset(self, tasks: Mapping[int, Task]) -> dict[int, Step]:
        self.episodes |= {slot: self.function(task, **self.options) for slot, task in tasks.items()}
        return {slot: self.advance(slot, None) for slot in tasks}

    def step(self, replies: Mapping[int, str]) -> dict[int, Step]:
        return {slot: self.advance(slot, reply) for slot, reply in replies.items()}

    def advance(self, slot: int, reply: str | None) -> Step:
        """Let the episode go on to its next text, or its end. Raises: OperantError for anything else that it yields."""
        try:
            answer = self.episodes[slot].send(reply)
            return self.read(answer, answer, "yielded", "yield a text, (text, reward) or a Step")
        except StopIteration as end:
            del self.episodes[slot]
            answer = ("", end.value or 0.0) if end.value is None or isinstance(end.value, Real) else end.value
            last = self.read(answer, end.value, "returned", "return a reward, (text, reward), a Step, or nothing")
            return replace(last, terminated=not (last.truncated or last.failed))

    def read(self, answer: object, original: object, did: str, remedy: str) -> Step:
        """The step that a function means by a text, a pair or a step."""
        pair = answer if isinstance(answer, tuple) else (answer, 0.0)
        if isinstance(answer, Step):
            return answer
        if len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Real):
            return Step(pair[0], reward=float(pair[1]))
        raise OperantError(f"world {self.__name__!r} {did} {shown(original)}: {remedy}")


def maker(world: object) -> Any:
    """What makes the world that a user has named: of a generator function its `FunctionEnv`, with the function's
    arguments after the task; of a function `play(task, client)` the world `program`; anything else is itself."""
    if inspect.isfunction(world) and [*inspect.signature(world).parameters] == ["task", "client"]:

        def program(*, deadline: float = 60.0, ignore: Sequence[str] = ()) -> Env:
            return ENVS.find("program")(world, deadline=deadline, ignore=ignore)

        return program
    if not (inspect.isroutine(world) and inspect.isgeneratorfunction(world)):
        if inspect.isfunction(world) and [*inspect.signature(world).parameters][:1] == ["task"]:
            how = "an episode yields what the policy reads, and gets its reply (docs/worlds.md)"
            raise OperantError(f"world {name_of(world)!r} is a function of a task without yield: {how}")
        return world

    def make(**options: object) -> FunctionEnv:
        return FunctionEnv(world, **options)

    signature = inspect.signature(world)
    make.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])  # pyright: ignore
    make.__wrapped__ = world  # pyright: ignore[reportFunctionMemberAccess]  its annotations are read there
    make.__annotations__ = world.__annotations__
    return declared_as(world, make)


def declared_as(world: object, make: MakeWorld) -> MakeWorld:
    """`make`, which makes the world and says beforehand what it is asked about: whether it pays, and its games."""
    declared = with_defaults(world, EnvBase)
    vars(make).update(pays=declared.pays, games=declared.games)
    make.__name__ = name_of(world)
    return make
