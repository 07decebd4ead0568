"""Metrics as sums and counts, so that pooling over minibatches, steps and ranks is exact.

tally = Tally()
tally.mean("reward/mean", scores)            # every value counts once
tally.add("policy/clip_fraction", 12.0, 480)  # a sum and how many it is over
tally.extreme("policy/ratio_max", 1.31)
tally.histogram("reward", scores)
tally.result()                                # {"reward/mean": ..., ...}
tally.histograms                              # {"reward": Histogram(...)}
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

ROUNDING = 2.0**-21
"""A spread below this share of the numbers' own size is rounding: four units of float32's last digit."""
BINS = 64
"""A histogram has at most so many bins: when its range grows, neighbours are merged."""


@dataclass(frozen=True)
class Histogram:
    """Counts on a grid: bin i covers [(start + i) * width, (start + i + 1) * width).

    The width is a power of two and the grid begins at 0, so any two histograms have a grid in common, and merging them
    gives what the histogram of all values together would have been, in any order.
    """

    width: float
    start: int
    counts: tuple[int, ...]

    @classmethod
    def of(cls, values: Tensor | Iterable[float], where: Tensor | None = None, bins: int = BINS) -> "Histogram | None":
        """The histogram of the finite values (where `where` holds); None where there are none."""
        x = _numbers(values, where)
        x = x[np.isfinite(x)]
        if not len(x):
            return None
        low, high = float(x.min()), float(x.max())
        width = _width(low, high, bins)
        places = np.floor(x / width).astype(np.int64)
        start = int(places.min())
        return cls(width, start, tuple(np.bincount(places - start).tolist()))

    def merge(self, other: "Histogram", bins: int = BINS) -> "Histogram":
        """Both together, on the coarser grid of the two, or a coarser one still where they lie far apart."""
        width = max(self.width, other.width)
        while True:
            a, b = self.coarser(width), other.coarser(width)
            start, end = min(a.start, b.start), max(a.start + len(a.counts), b.start + len(b.counts))
            if end - start <= bins:
                break
            width *= 2
        counts = np.zeros(end - start, dtype=np.int64)
        for part in (a, b):
            counts[part.start - start :][: len(part.counts)] += part.counts
        return Histogram(width, start, tuple(counts.tolist()))

    def coarser(self, width: float) -> "Histogram":
        """The same values on a grid of `width`, a power of two at least as large as this one's."""
        if width == self.width:
            return self
        places = np.floor_divide(np.arange(len(self.counts)) + self.start, round(min(width / self.width, 2.0**62)))
        start = int(places[0])
        return Histogram(width, start, tuple(np.bincount(places - start, self.counts).astype(int).tolist()))

    def as_plain(self) -> dict[str, Any]:
        """For a file."""
        return {"width": self.width, "start": self.start, "counts": list(self.counts)}

    @classmethod
    def from_plain(cls, held: Mapping[str, Any]) -> "Histogram":
        """What `as_plain` kept."""
        counts: Sequence[int] = held["counts"]
        return cls(held["width"], held["start"], tuple(counts))


def _numbers(values: Tensor | Iterable[float], where: Tensor | None) -> np.ndarray:
    if isinstance(values, Tensor):
        picked = values if where is None else values[where]
        return picked.detach().double().flatten().cpu().numpy()
    return np.asarray(list(values), dtype=np.float64)


def _width(low: float, high: float, bins: int) -> float:
    """The smallest power of two whose grid holds low..high in at most `bins` bins."""
    # Numbers that differ only by rounding are one value: no finer than float64 can tell at this size.
    least = max((high - low) / bins, max(abs(low), abs(high)) * 2.0**-40, 2.0**-60)
    width = 2.0 ** math.ceil(math.log2(least))
    return width if math.floor(high / width) - math.floor(low / width) < bins else 2 * width


class Tally:
    """Sums, counts, spreads, extremes and histograms by name."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}
        self.squares: dict[str, tuple[float, float, float]] = {}
        self.extremes: dict[str, float] = {}
        self.histograms: dict[str, Histogram] = {}

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

    def histogram(self, name: str, values: Tensor | Iterable[float], where: Tensor | None = None) -> None:
        """Count the finite values (where `where` holds) into the histogram of that name."""
        self._histogram(name, Histogram.of(values, where))

    def merge(self, other: "Tally") -> "Tally":
        """Take another tally's numbers in; returns self."""
        for name, (total, count) in other.sums.items():
            self.add(name, total, count)
        for name, moments in other.squares.items():
            self._spread(name, moments)
        for name, value in other.extremes.items():
            self.extreme(name, value)
        for name, histogram in other.histograms.items():
            self._histogram(name, histogram)
        return self

    def result(self) -> dict[str, float]:
        """One number a name; histograms stand apart."""
        means = {k: total / count if count else total for k, (total, count) in self.sums.items()}
        spreads = {k: (m2 / n) ** 0.5 for k, (n, _, m2) in self.squares.items()}
        return means | spreads | self.extremes

    def _histogram(self, name: str, new: Histogram | None) -> None:
        if new is not None:
            old = self.histograms.get(name)
            self.histograms[name] = new if old is None else old.merge(new)

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
