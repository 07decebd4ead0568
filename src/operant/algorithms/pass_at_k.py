r"""pass@k: a reply is worth what it adds to the best of k.

[Tang et al. 2025](https://arxiv.org/abs/2503.19595). The objective is $\mathbb{E}[\max(r_1, \dots, r_k)]$, which is
pass@k for rewards of 0 and 1. $A_i = k\,[\max_S r - \max_{S \setminus i} r]$, averaged over all sets S of
`advantage.k` replies (all of the group, where it is not set) of the group that contain i: an unbiased gradient, also
with more samples than k (as in [Walder and Karkhanis 2025](https://arxiv.org/abs/2505.15201)). With k = 1 the
objective is the mean score; then `rloo` has less variance. verl's `grpo_passk` is this with k the size of the group,
without the factor k, and divided by the group's deviation, which moves its optimum.
"""

from operant.algorithms.base import Comparison
from operant.objectives import group_baselines, losses

ALGORITHM = Comparison(losses.surrogate, group_baselines.with_best_of, per="sequence", title="pass@k")
