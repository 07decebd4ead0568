"""Metrics as sums and counts, so that pooling over minibatches, steps and ranks is exact.

tally = Tally()
tally.mean("reward/mean", scores)            # every value counts once
tally.add("policy/clip_fraction", 12.0, 480)  # a sum and how many it is over
tally.extreme("policy/ratio_max", 1.31)
tally.result()                                # {"reward/mean": ..., ...}
"""

from collections.abc import Iterable

from torch import Tensor


class Tally:
    """Sums, counts, spreads and extremes by name."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}
        self.squares: dict[str, tuple[float, float, float]] = {}
        self.extremes: dict[str, float] = {}

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        """Add `total`, which is a sum over `count` things; a count of 0 throughout keeps the sum itself."""
        old = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (old[0] + float(total), old[1] + float(count))

    def mean(self, name: str, values: Tensor | Iterable[float], where: Tensor | None = None) -> None:
        """Add every value (where `where` holds) with weight 1."""
        flat = _flat(values, where)
        if flat:
            self.add(name, sum(flat), len(flat))

    def spread(self, name: str, values: Tensor | Iterable[float], where: Tensor | None = None) -> None:
        """As `mean`, for the standard deviation (biased) of the values: merged exactly (Chan et al., 1979)."""
        flat = _flat(values, where)
        if flat:
            mean = sum(flat) / len(flat)
            self._spread(name, (float(len(flat)), mean, sum((x - mean) ** 2 for x in flat)))

    def extreme(self, name: str, value: float) -> None:
        """Keep the largest value seen, or the smallest where the name ends in `min`."""
        choose = min if name.endswith(("_min", "/min")) else max
        self.extremes[name] = choose(self.extremes.get(name, value), float(value))

    def merge(self, other: "Tally") -> "Tally":
        """Take another tally's numbers in; returns self."""
        for name, (total, count) in other.sums.items():
            self.add(name, total, count)
        for name, moments in other.squares.items():
            self._spread(name, moments)
        for name, value in other.extremes.items():
            self.extreme(name, value)
        return self

    def result(self) -> dict[str, float]:
        """One number a name."""
        means = {k: total / count if count else total for k, (total, count) in self.sums.items()}
        spreads = {k: (m2 / n) ** 0.5 for k, (n, _, m2) in self.squares.items()}
        return means | spreads | self.extremes

    def _spread(self, name: str, new: tuple[float, float, float]) -> None:
        n0, m0, s0 = self.squares.get(name, (0.0, 0.0, 0.0))
        n1, m1, s1 = new
        n = n0 + n1
        gap = m1 - m0
        self.squares[name] = (n, m0 + gap * n1 / n, s0 + s1 + gap * gap * n0 * n1 / n)


def _flat(values: Tensor | Iterable[float], where: Tensor | None) -> list[float]:
    if isinstance(values, Tensor):
        picked = values if where is None else values[where]
        return picked.detach().double().flatten().tolist()
    return [float(v) for v in values]
