r"""OPO: exact on-policy steps with the baseline of least variance, a mean of the group weighted by length.

[Hao et al. 2025](https://arxiv.org/abs/2505.23585). $A_i = r_i - \sum_j |y_j| r_j / \sum_j |y_j|$, REINFORCE's loss
summed over each reply, every batch used for one optimizer step, no KL and no entropy term.
"""

from operant.algorithms.base import Algorithm, Needs
from operant.objectives import group_baselines, losses

DEFAULTS: dict[str, object] = {"samples": 8, "update.epochs": 1, "kl.coef": 0.0}

ALGORITHM = Algorithm(
    losses.score_function,
    group_baselines.with_length_baseline,
    per="sequence",
    copies={"reference": "frozen"},
    needs=Needs(samples=2),
    kl=("loss",),
    defaults=DEFAULTS,
    update="one-pass",
)
