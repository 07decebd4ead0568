r"""GSPO: one ratio for each reply, the geometric mean of its tokens' ratios.

[Zheng et al. 2025](https://arxiv.org/abs/2507.18071). With $s_i = \exp\big(\frac{1}{|y_i|}\sum_t \log \rho_{i,t}\big)$
and GRPO's advantage:

$$\text{loss} = \frac{1}{n}\sum_i \max\big(-s_i A_i,\ -\mathrm{clip}(s_i, 1 - \epsilon, 1 + \epsilon') A_i\big)$$

with $\epsilon = 3 \cdot 10^{-4}$ and $\epsilon' = 4 \cdot 10^{-4}$. A whole reply is clipped, or none of it. The
bounds are as small as a mean of log-ratios is. `loss.ratio=token` is GSPO-token, whose gradient is the token's own.
TRL has it as `importance_sampling_level="sequence"` with `loss_type="grpo"`; its other loss types then add the ratio
of a reply once for each of its tokens. There and in verl the bounds are 0.2 unless they are set, far more than a mean
of log-ratios moves.
"""

from operant.algorithms.base import Comparison
from operant.objectives import groups, ratios

ALGORITHM = Comparison(ratios.sequence_ratio, groups.with_groups, per="episode")
