"""Student's t, for intervals of means."""

import math
from functools import cache

MANY = 1000
"""Degrees of freedom from which the quantile no longer changes in three digits."""


@cache
def t_quantile(freedom: int, confidence: float = 0.95) -> float:
    """Solve P(|T| < t) = confidence by bisection; freedom: degrees of freedom. 12.706 for 1, 1.96 for many."""
    freedom = min(freedom, MANY)
    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _probability_within(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _probability_within(angle: float, freedom: int) -> float:
    """Compute P(|T| < sqrt(freedom) * tan(angle)) by the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    cos, sin = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term, total = (cos, 0.0) if odd else (1.0, 0.0)
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= cos * cos * (k - 1) / k
    return 2 / math.pi * (angle + sin * total) if odd else sin * total
