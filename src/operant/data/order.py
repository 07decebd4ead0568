"""The order of the tasks: every task exactly once a pass, the same wherever the run is resumed."""

from typing import Any

import numpy as np

from operant.sampling import counter, uniforms
from operant.types import OperantError


def permutation(n: int, seed: int, name: str, number: int = 0) -> list[int]:
    """0..n-1 in an order that (seed, name, number) alone decides: indices sorted by random numbers of their own."""
    keys = np.full(n, counter(seed, name, number), dtype=np.uint64)
    return np.argsort(uniforms(keys, np.arange(n)).numpy(), kind="stable").tolist()


class Order:
    """Positions of a run, as indices of its tasks.

    order = Order(3, seed=0)
    order.take(2)    # [2, 0]
    order.take(2)    # [1, 2]: the first pass ends, the second begins
    """

    def __init__(self, n: int, seed: int = 0, *, shuffle: bool = True):
        if n < 1:
            raise OperantError("an order of no tasks; give at least one")
        self.n, self.seed, self.shuffle = n, seed, shuffle
        self.position = 0
        """How many tasks were taken since the run began."""
        self._made: tuple[int, list[int]] | None = None

    @property
    def passes(self) -> float:
        """How often every task was taken, in passes."""
        return self.position / self.n

    def take(self, k: int) -> list[int]:
        """The next `k` indices. A number above `n` runs into the next pass, so that a task comes twice."""
        taken = [self._at(self.position + i) for i in range(k)]
        self.position += k
        return taken

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n, "seed": self.seed, "shuffle": self.shuffle, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: OperantError where the tasks are not those of the saved run."""
        for name in ("n", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                what = {"n": "number of tasks", "seed": "seed of the order", "shuffle": "shuffling"}[name]
                raise OperantError(
                    f"the saved run has {what} {state[name]}, this one {getattr(self, name)}; "
                    "resume with the same tasks and options, or start a new run"
                )
        self.position = state["position"]

    def _at(self, position: int) -> int:
        turn, place = divmod(position, self.n)
        if not self.shuffle:
            return place
        if self._made is None or self._made[0] != turn:
            self._made = turn, permutation(self.n, self.seed, "order", turn)
        return self._made[1][place]
