"""How an outcome critic judges held-out programs: beside the most frequent outcome, how sure, and how early.

metrics(pooled, outcomes)    # {"critic/majority": 0.41, "critic/calibration_error": 0.03, "critic/auc_25": 0.61, ...}
"""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from operant.types import OUTCOMES

BINS = 10
"""Intervals of confidence, from 0 to 1."""
QUARTERS = (25, 50, 75, 100)
"""Per cent of the tokens of a program."""
PASSED = OUTCOMES.index("passed")


def metrics(pooled: Sequence[Tensor], outcomes: Sequence[float]) -> dict[str, float]:
    """The metrics of N programs and the numbers of their true outcomes.

    pooled: of each program of T tokens the logits [T + 1, C] for its first 0 to T tokens (`OutcomeCritic.logits`).
    The areas under the curve are absent if all have passed, or none has.
    """
    true = torch.tensor([round(outcome) for outcome in outcomes])
    chances = [logits.double().softmax(-1) for logits in pooled]
    found = {
        "critic/majority": max(Counter(true.tolist()).values()) / len(true),
        "critic/calibration_error": calibration_error(torch.stack([own[-1] for own in chances]), true),
    }
    for share in QUARTERS:
        scores = torch.stack([own[math.ceil(share / 100 * (len(own) - 1)), PASSED] for own in chances])
        area = area_under_curve(scores, true == PASSED)
        if area is not None:
            found[f"critic/auc_{share}"] = area
    return found


def calibration_error(probabilities: Tensor, true: Tensor) -> float:
    """The expected calibration error of predictions [N, C] for classes [N]: over ten intervals of the probability of
    the predicted class, the distance of its mean from the share that is right, weighted by their number
    (arXiv:1706.04599)."""
    sure, guess = probabilities.max(-1)
    where = (sure * BINS).ceil().clamp(1, BINS).long() - 1
    gap = sure - (guess == true).to(sure)
    return float(torch.zeros(BINS, dtype=gap.dtype).index_add(0, where, gap).abs().sum() / len(true))


def area_under_curve(scores: Tensor, positive: Tensor) -> float | None:
    """The share of pairs of a positive and a negative whose order the scores [N] tell; equal ones count half. None
    without such a pair."""
    above, below = scores[positive], scores[~positive]
    if not len(above) or not len(below):
        return None
    ordered = below.sort().values
    beaten = torch.searchsorted(ordered, above) + torch.searchsorted(ordered, above, right=True)
    return float(beaten.double().sum()) / (2 * len(above) * len(below))
