r"""REINFORCE++ with a baseline: the mean of the group is subtracted, and the whole step is whitened.

[Hu 2025](https://arxiv.org/abs/2501.03262). $r_i - \mathrm{mean}(r)$ of each group, less the mean and divided by the
deviation of all tokens of the step: the deviation of the step in the place of the group's, so that a prompt whose
replies hardly differ does not count as much as any other. KL is charged in the loss (`k2`, whose gradient is that of
KL). Lite PPO ([Liu et al. 2025](https://arxiv.org/abs/2508.08221)) is near to it: no KL, the same clip, and the
deviation is that of the scores of all replies before their group's mean is subtracted. TRL has that one as
`scale_rewards="batch"`.
"""

from operant.algorithms.base import COMPARED, Comparison
from operant.objectives import group_baselines, losses

ALGORITHM = Comparison(
    losses.surrogate,
    group_baselines.with_group_mean,
    title="REINFORCE++ with a baseline",
    defaults=COMPARED | {"kl.loss_coef": 0.2, "kl.loss_kind": "k2"},
)
