"""pass@k and n@k: the chance that k sampled programs solve a problem, without bias from a larger number of samples."""

import re
from collections.abc import Sequence
from fractions import Fraction
from math import comb

from operant.types import OperantError, require


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The probability that k of the samples, drawn without replacement, hold a right one (Chen et al., 2021, eq. 1).

    1 - C(samples - right, k) / C(samples, k), in integers, and rounded once.
    Raises: OperantError unless 0 <= right <= samples and 1 <= k <= samples.

    pass_at_k(4, 1, 2) == 0.5
    """
    if not (0 <= right <= samples and 1 <= k <= samples):
        raise OperantError(f"pass@{k} of {samples} samples, {right} of them right: k and right are at most the samples")
    return float(_solved(samples, right, k))


def n_at_k(samples: int, kept: int, right: int, n: int, k: int) -> float:
    """The probability that k of the samples solve a problem with n submissions (n@k of AlphaCode and CodeRL).

    Of the k, those that pass the example tests are kept, and n of these are drawn and submitted; all of them, if they
    are fewer. kept: how many of all samples pass the examples. right: how many of `kept` pass the hidden tests too.
    The number of kept ones among k is hypergeometric, and given it the submitted ones are drawn from `kept` uniformly:
    a mean of `pass_at_k`.
    Raises: OperantError unless 0 <= right <= kept <= samples and 1 <= n <= k <= samples.

    n_at_k(4, 2, 1, 1, 4) == 0.5
    """
    if not (0 <= right <= kept <= samples and 1 <= n <= k <= samples):
        raise OperantError(
            f"{n}@{k} of {samples} samples, of which {kept} are kept and {right} right: "
            "n is at most k, k at most the samples, and the right ones are among the kept ones"
        )
    shares = (
        Fraction(comb(kept, m) * comb(samples - kept, k - m), comb(samples, k)) * _solved(kept, right, min(n, m))
        for m in range(1, min(k, kept) + 1)
    )
    return float(sum(shares))


def _solved(samples: int, right: int, k: int) -> Fraction:
    return 1 - Fraction(comb(samples - right, k), comb(samples, k))


def of_samples(name: str, samples: Sequence[tuple[bool, bool]]) -> float:
    """The metric of that name of a task. samples: of each, whether it is right, and whether it passes the examples."""
    n, k = numbers_in(name) or (None, 1)
    if n is None:
        return pass_at_k(len(samples), sum(right for right, _ in samples), k)
    return n_at_k(len(samples), sum(kept for _, kept in samples), sum(map(all, samples)), n, k)


def numbers_in(name: str) -> tuple[int | None, int] | None:
    """n and k in the name of a metric: (None, 8) for "pass@8", (5, 100) for "5@100"; None for any other name."""
    if (found := re.fullmatch(r"(pass|\d+)@(\d+)", name)) is None:
        return None
    n, k = (None if found[1] == "pass" else int(found[1])), int(found[2])
    require(1 <= (1 if n is None else n) <= k, f"{name}: write pass@k or n@k with 1 <= n <= k, such as pass@8 or 1@8")
    return n, k


def check_samples(names: Sequence[str], samples: int, option: str) -> None:
    """Raises: OperantError for pass@k or n@k of more replies than `samples`, the value of `option`."""
    for name in names:
        numbers = numbers_in(name)
        if numbers is not None and numbers[1] > samples:
            raise OperantError(
                f"{name} needs {numbers[1]} replies to each task, and there are {samples}: {option}{numbers[1]}"
            )
