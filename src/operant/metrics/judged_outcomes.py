"""How an outcome critic judges held-out programs: beside the most frequent outcome, how sure, and how early.

metrics(critic, rollouts)    # {"critic/majority": 0.41, "critic/calibration_error": 0.03, "critic/auc_25": 0.61, ...}
"""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from operant.models.outcome_critic import OutcomeCritic
from operant.types import OUTCOMES, Rollout

BINS = 10
"""Intervals of confidence, from 0 to 1."""
QUARTERS = (25, 50, 75, 100)
"""Per cent of the tokens of a program."""
PASSED = OUTCOMES.index("passed")


def metrics(critic: OutcomeCritic, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The metrics of demonstrated programs whose reward is the number of the outcome.

    The areas under the curve are absent if all have passed, or none has.
    """
    true = torch.tensor([round(rollout.paid) for rollout in rollouts])
    read = critic.read([(rollout.turns[-1].prompt, rollout.turns[-1].action) for rollout in rollouts])
    whole = torch.stack([pooled[-1].double().softmax(-1) for _, pooled in read])
    found = {
        "critic/majority": max(Counter(true.tolist()).values()) / len(true),
        "critic/calibration_error": calibration_error(whole, true),
    }
    for share in QUARTERS:
        at = [math.ceil(share / 100 * (len(pooled) - 1)) for _, pooled in read]
        scores = torch.stack([pooled[k].double().softmax(-1)[PASSED] for k, (_, pooled) in zip(at, read)])
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
