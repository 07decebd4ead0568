r"""MaxRL: the likelihood of a right reply is raised, not its probability: hard prompts count more.

[Tajwar et al. 2026](https://arxiv.org/abs/2602.02710). $A_i = (r_i - \mathrm{mean}(r)) / \mathrm{mean}(r)$: GRPO
divides by the group's deviation, this by its rate of success $p$. As $\nabla \log p = \nabla p / p$, the steps climb
$\log p$, cut after n - 1 terms with n replies: $\sum_{k < n} \text{pass@}k$, each with the weight $1 / k$.
Rewards have to be 0 for a wrong reply and above 0 for a right one, so KL is charged in the loss alone.
"""

from operant.algorithms.base import Comparison
from operant.objectives import group_baselines, losses

ALGORITHM = Comparison(losses.surrogate, group_baselines.with_success_rate, per="sequence", title="MaxRL")
