"""The order of the tasks: each task once per pass, and the same order in a resumed run."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from operant.sampling import counter, uniforms
from operant.types import OperantError, require


def permutation(n: int, seed: int, name: str, number: int = 0) -> list[int]:
    """0..n-1 in a random order that depends only on (seed, name, number): sorted by one random number each."""
    keys = np.full(n, counter(seed, name, number), dtype=np.uint64)
    return np.argsort(uniforms(keys, np.arange(n)).numpy(), kind="stable").tolist()


class Order:
    """An endless sequence of task indices, one pass after the other.

    order = Order(3, seed=0)
    order.take(2)    # [2, 0]
    order.take(2)    # [1, 2]: the first pass ends, the second begins
    """

    def __init__(self, n: int, seed: int = 0, tasks: int | None = None):
        require(n >= 1, "there are no tasks to order; give at least one")
        self.n, self.seed, self.tasks, self.others = n, seed, tasks, False
        """`tasks`: a hash of what is ordered. `others`: whether the restored order was that of other tasks."""
        self.position = 0
        """Number of tasks taken since the run began."""
        self.retired = set[int]()
        """Indices that are not taken any more."""
        self._pass: tuple[int, list[int]] | None = None
        """Number and order of the current pass."""

    @property
    def passes(self) -> float:
        return self.position / self.n

    def take(self, k: int) -> list[int]:
        """The next `k` indices. They may run into the next pass, in which the same tasks come again."""
        taken = []
        while len(taken) < k:
            number, place = divmod(self.position, self.n)
            if self._pass is None or self._pass[0] != number:
                self._pass = number, permutation(self.n, self.seed, "order", number)
            index = self._pass[1][place]
            taken += [index] if index not in self.retired else []
            self.position += 1
        return taken

    @property
    def left(self) -> list[int]:
        return [i for i in range(self.n) if i not in self.retired]

    def retire(self, indices: Iterable[int], least: int) -> None:
        """Take these indices no more, one after the other, while more than `least` are left."""
        self.retired |= {*[i for i in indices if i not in self.retired][: max(len(self.left) - least, 0)]}

    def state_dict(self) -> dict[str, object]:
        state: dict[str, object] = {"n": self.n, "seed": self.seed, "position": self.position}
        state |= {} if self.tasks is None else {"tasks": self.tasks}
        return state | ({"retired": sorted(self.retired)} if self.retired else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position. Raises: OperantError for another number of tasks, or another seed."""
        for name, what in (("n", "number of tasks"), ("seed", "seed of the order")):
            if state[name] != getattr(self, name):
                raise OperantError(f"the saved run has {what} {state[name]}, this one {getattr(self, name)}")
        self.others = state.get("tasks", self.tasks) != self.tasks
        self.position, self.retired = state["position"], {*state.get("retired", ())}
