"""A world of several turns: the policy guesses a letter, and hears whether it is right."""

import random
from collections.abc import Mapping
from typing import Any

from operant.types import Step, Task


class Guess:
    """Each turn pays 1 for a reply with the wanted letter, which ends the episode, and 0 otherwise.

    Options: --env guess --env.letters aeiou --env.turns 3
    """

    pays = True

    def __init__(self, letters: str = "aeiou", turns: int = 3):
        self.letters, self.turns = letters, turns
        self.live: dict[int, tuple[str, int]] = {}

    def reset(self, tasks: Mapping[int, Task]) -> dict[int, Step]:
        for slot, task in tasks.items():
            self.live[slot] = (random.Random(task.id).choice(self.letters), 0)
        return {slot: Step(fresh=True) for slot in tasks}

    def step(self, replies: Mapping[int, str]) -> dict[int, Step]:
        return {slot: self._answer(slot, reply) for slot, reply in replies.items()}

    def _answer(self, slot: int, reply: str) -> Step:
        letter, turn = self.live[slot]
        right, last = letter in reply, turn + 1 == self.turns
        self.live[slot] = (letter, turn + 1)
        return Step(text=" no;", reward=float(right), terminated=right or last)

    def state_dict(self) -> dict[str, Any]:
        return {}  # nothing is kept from one episode to the next

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass
