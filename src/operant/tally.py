"""Metrics as sums and counts, so that pooling over minibatches, steps and ranks is exact.

tally = Tally()
tally.mean("reward/mean", scores)             # every value has weight 1
tally.add("policy/clip_fraction", 12.0, 480)  # a sum and its count
tally.extreme("policy/ratio_max", 1.31)
tally.histogram("reward", scores)
tally.things("text/distinct_1", words)        # how many are different; how often the most common one occurs
tally.result()                                # {"reward/mean": ..., ...}
tally.histograms                              # {"reward": Histogram(...)}
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from torch import Tensor

ROUNDING = 2.0**-21
"""A spread below this share of the numbers' own size is rounding: four units in the last place of float32."""
BINS = 64
"""The largest number of bins of a histogram. When its range grows, neighbouring bins are merged."""


@dataclass(frozen=True)
class Histogram:
    """Counts on a grid: bin i covers [(start + i) * width, (start + i + 1) * width).

    The width is a power of two and the grid begins at 0, so any two histograms have a common grid. Merging them, in
    any order, gives the histogram of all values together.
    """

    width: float
    start: int
    counts: tuple[int, ...]

    @classmethod
    def of(cls, values: Tensor | Iterable[float], where: Tensor | None = None, bins: int = BINS) -> "Histogram | None":
        """Return the histogram of the finite values (of those where `where` is True); None if there are none."""
        x = _numbers(values, where)
        x = x[np.isfinite(x)]
        if not len(x):
            return None
        low, high = float(x.min()), float(x.max())
        # Numbers that differ only by rounding are one value, so the grid is not finer than float64 resolves here.
        least = max((high - low) / bins, max(abs(low), abs(high)) * 2.0**-40, 2.0**-60)
        width = 2.0 ** math.ceil(math.log2(least))  # the smallest power of two, unless the ends fall badly
        width = width if math.floor(high / width) - math.floor(low / width) < bins else 2 * width
        places = np.floor(x / width).astype(np.int64)
        start = int(places.min())
        return cls(width, start, tuple(np.bincount(places - start).tolist()))

    def merge(self, other: "Histogram") -> "Histogram":
        """Return the histogram of both, on the coarser grid of the two, or a coarser one if they are far apart."""
        width = max(self.width, other.width)
        while True:
            a, b = self.coarser(width), other.coarser(width)
            start, end = min(a.start, b.start), max(a.start + len(a.counts), b.start + len(b.counts))
            if end - start <= BINS:
                break
            width *= 2
        counts = np.zeros(end - start, dtype=np.int64)
        for part in (a, b):
            counts[part.start - start :][: len(part.counts)] += part.counts
        return Histogram(width, start, tuple(counts.tolist()))

    def coarser(self, width: float) -> "Histogram":
        """Return the histogram on a coarser grid of `width`, a power of two at least as large as this one's."""
        if width == self.width:
            return self
        places = np.floor_divide(np.arange(len(self.counts)) + self.start, round(min(width / self.width, 2.0**62)))
        start = int(places[0])
        return Histogram(width, start, tuple(np.bincount(places - start, self.counts).astype(int).tolist()))

    def as_plain(self) -> dict[str, object]:
        return {"width": self.width, "start": self.start, "counts": list(self.counts)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Histogram":
        return cls(plain["width"], plain["start"], tuple(plain["counts"]))


def _numbers(values: Tensor | Iterable[float], where: Tensor | None) -> np.ndarray:
    """Return the values, of a tensor those where `where` is True, as a flat array of float64."""
    if isinstance(values, Tensor):
        return (values if where is None else values[where]).detach().double().flatten().cpu().numpy()
    return np.asarray(list(values), dtype=np.float64)


class Tally:
    """Sums, counts, spreads, extremes, histograms and counted things by name."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}
        self.squares: dict[str, tuple[float, float, float]] = {}
        self.extremes: dict[str, float] = {}
        self.histograms: dict[str, Histogram] = {}
        self.counted: dict[str, Counter[int]] = {}

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        """Add `total`, which is a sum over `count` items. If all counts are 0, the result is the sum itself."""
        old = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (old[0] + float(total), old[1] + float(count))

    def mean(self, name: str, values: Tensor | Iterable[float], where: Tensor | None = None) -> None:
        """Add every value (of those where `where` is True) with weight 1."""
        if flat := _numbers(values, where).tolist():
            self.add(name, sum(flat), len(flat))

    def spread(self, name: str, values: Tensor | Iterable[float], where: Tensor | None = None) -> None:
        """Add the values to a (biased) standard deviation, which is merged exactly (Chan et al., 1979)."""
        if flat := _numbers(values, where).tolist():
            mean = sum(flat) / len(flat)
            self._spread(name, (float(len(flat)), mean, sum((x - mean) ** 2 for x in flat)))

    def extreme(self, name: str, value: float) -> None:
        """Keep the largest value so far, or the smallest if the name ends in `min`."""
        extreme = min if name.endswith(("_min", "/min")) else max
        self.extremes[name] = extreme(self.extremes.get(name, value), float(value))

    def histogram(self, name: str, values: Tensor | Iterable[float], where: Tensor | None = None) -> None:
        """Add the finite values (of those where `where` is True) to the histogram of that name."""
        self._histogram(name, Histogram.of(values, where))

    def things(self, name: str, things: Iterable[Hashable]) -> None:
        """Count things, such as words, where equal ones are one, also on several ranks.

        The result is the number of different ones over that of all: 1,000 times that if the name ends in `_per_1000`;
        and if the last part of the name begins with `top_`, the share of the most common one. Hashes are kept.
        """
        if counts := Counter(things):
            # 64 bits that are the same in every process; Python's own hash of a text is not.
            found = {blake2b(repr(x).encode(errors="replace"), digest_size=8).digest(): n for x, n in counts.items()}
            self._count(name, Counter({int.from_bytes(digest): n for digest, n in found.items()}))

    def merge(self, other: "Tally") -> "Tally":
        """Add the numbers of another tally, and return self."""
        for name, (total, count) in other.sums.items():
            self.add(name, total, count)
        for name, moments in other.squares.items():
            self._spread(name, moments)
        for name, value in other.extremes.items():
            self.extreme(name, value)
        for name, histogram in other.histograms.items():
            self._histogram(name, histogram)
        for name, counts in other.counted.items():
            self._count(name, counts)
        return self

    def result(self) -> dict[str, float]:
        """Return one number per name; histograms are not included."""
        means = {k: total / count if count else total for k, (total, count) in self.sums.items()}
        spreads = {k: (m2 / n) ** 0.5 for k, (n, _, m2) in self.squares.items()}
        shares = {}
        for name, counts in self.counted.items():
            different = len(counts) * (1000 if name.endswith("_per_1000") else 1)
            most_common = name.rpartition("/")[2].startswith("top_")
            shares[name] = (max(counts.values()) if most_common else different) / counts.total()
        return means | spreads | self.extremes | shares

    def _count(self, name: str, new: Counter[int]) -> None:
        self.counted[name] = self.counted.get(name, Counter()) + new

    def _histogram(self, name: str, new: Histogram | None) -> None:
        if new is not None:
            old = self.histograms.get(name)
            self.histograms[name] = new if old is None else old.merge(new)

    def _spread(self, name: str, new: tuple[float, float, float]) -> None:
        n0, m0, s0 = self.squares.get(name, (0.0, 0.0, 0.0))
        n1, m1, s1 = new
        n, gap = n0 + n1, m1 - m0
        self.squares[name] = (n, m0 + gap * n1 / n, s0 + s1 + gap * gap * n0 * n1 / n)
