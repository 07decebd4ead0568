"""An environment whose episodes are one reply to the task's prompt."""

from collections.abc import Mapping

from operant.types import Step, Task


class SingleTurn:
    """An `Env` whose episodes are one turn long. It pays no rewards of its own: a reward function judges the reply."""

    pays = False
    """Whether the environment pays rewards."""
    turns = 1
    """Most turns of an episode: an engine need not keep anything for a next one."""

    def reset(self, tasks: Mapping[int, Task]) -> dict[int, Step]:
        return {slot: Step(fresh=True) for slot in tasks}

    def step(self, replies: Mapping[int, str]) -> dict[int, Step]:
        return {slot: Step(terminated=True) for slot in replies}
