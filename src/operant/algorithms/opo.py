r"""OPO: exact on-policy steps with the baseline of least variance, a mean of the group weighted by length.

[Hao et al. 2025](https://arxiv.org/abs/2505.23585). $A_i = r_i - \sum_j |y_j| r_j / \sum_j |y_j|$, REINFORCE's loss
summed over each reply, every batch used for one optimizer step (several with `update.minibatch`), no KL, no entropy.
"""

from operant.algorithms.base import Comparison
from operant.objectives import group_baselines, losses

ALGORITHM = Comparison(losses.score_function, group_baselines.with_length_baseline, per="sequence", update="one-pass")
