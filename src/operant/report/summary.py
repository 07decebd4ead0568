"""What a few runs say about all runs like them: a mean and a 95 % interval of Student's t.

    interval([7.1, 7.4, 6.9])     # Interval(mean=7.13, half=0.625, n=3)

With one run there is no interval, and with two it is wide: nothing here pretends otherwise.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean and half the width of its interval; None where one value allows none."""

    mean: float
    half: float | None
    n: int


def interval(values: Sequence[float | None]) -> Interval | None:
    """Of the values that are known; None where none is."""
    known = [float(v) for v in values if v is not None and math.isfinite(v)]
    if not known:
        return None
    n = len(known)
    half = t_quantile(n - 1) * statistics.stdev(known) / math.sqrt(n) if n > 1 else None
    return Interval(statistics.fmean(known), half, n)


def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """t with P(|T| < t) = confidence for so many degrees of freedom, by bisection: 12.706 for 1, 1.96 for many."""
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """P(|T| < sqrt(freedom) * tan(angle)): the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    cos, sin = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term, total = (cos, 0.0) if odd else (1.0, 0.0)
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cos * cos * (k - 1) / k
    return 2 / math.pi * (angle + sin * total) if odd else sin * total
