"""A world of one reply: the prompt is the task's, and the reply ends the episode."""

from collections.abc import Mapping

from operant.types import Step, Task


class SingleTurn:
    """An `Env` whose episodes are one turn long, and which pays nothing: a reward function judges the reply."""

    pays = False

    def reset(self, tasks: Mapping[int, Task]) -> dict[int, Step]:
        return {slot: Step(fresh=True) for slot in tasks}

    def step(self, replies: Mapping[int, str]) -> dict[int, Step]:
        return {slot: Step(terminated=True) for slot in replies}
