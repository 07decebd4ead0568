"""Keys and values that stay from one call of the engine to the next: a prompt that begins the same is not read again.

    kept = Prefixes(gigabytes=2)
    kept.add(ids, keys_and_values)          # of a prompt and its reply, whose row has ended
    prefix, shared = kept.find(prompt)      # the row that shares the most tokens with the beginning of the prompt

Which episode a prompt belongs to need not be known: it begins with the last prompt and reply of its episode, or with a
part of them.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

Ids = tuple[int, ...]


@dataclass
class Prefix:
    """What the model has computed for a row of tokens."""

    ids: Ids
    keys_and_values: Tensor
    """[layers, 2, heads, number of ids, width of a head]"""
    states: Tensor | None = None
    """[number of ids, D] the trunk states, if there is a trunk and they are known."""


class Prefixes:
    """Rows of tokens with their keys and values, at most `gigabytes`: the oldest make room for new ones."""

    def __init__(self, gigabytes: float):
        self.most, self.bytes = int(gigabytes * 1e9), 0
        self._rows: dict[Ids, Prefix] = {}
        """By age, the oldest first."""
        self._sorted: list[Ids] = []

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, prompt: Sequence[int]) -> tuple[Prefix | None, int]:
        """The row that begins with the most tokens of the prompt, and their number: all but one at the most, so that
        there is one to read.
        """
        ids = tuple(prompt)
        place = bisect_left(self._sorted, ids)  # in alphabetical order, the longest common prefix is beside it
        beside = [(_common(ids, row), row) for row in self._sorted[max(place - 1, 0) : place + 1]]
        shared, row = max(beside, default=(0, ()))
        shared = min(shared, len(ids) - 1)
        return (self._rows[row], shared) if shared else (None, 0)

    def add(self, ids: Sequence[int], keys_and_values: Tensor, states: Tensor | None = None) -> None:
        """Keep a row, if it fits, in place of the row that it goes on from."""
        row, size = tuple(ids), keys_and_values.numel() * keys_and_values.element_size()
        before = self._sorted[max(bisect_left(self._sorted, row) - 1, 0) :][:1]
        for old in [row, *(b for b in before if b == row[: len(b)])]:
            self.remove(old)
        while self._rows and self.bytes + size > self.most:
            self.remove(next(iter(self._rows)))
        if self.bytes + size <= self.most:
            self._rows[row] = Prefix(row, keys_and_values, states)
            self.bytes += size
            insort(self._sorted, row)

    def set_states(self, ids: Sequence[int], states: Tensor | None) -> None:
        """Add the trunk states of a row that is kept."""
        prefix = self._rows.get(tuple(ids))
        if prefix is not None:
            prefix.states = states

    def remove(self, row: Ids) -> None:
        """Remove a row, if it is kept."""
        prefix = self._rows.pop(row, None)
        if prefix is not None:
            self.bytes -= prefix.keys_and_values.numel() * prefix.keys_and_values.element_size()
            del self._sorted[bisect_left(self._sorted, row)]


def _common(a: Ids, b: Ids) -> int:
    """Number of tokens that both begin with."""
    if b == a[: len(b)]:
        return len(b)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
