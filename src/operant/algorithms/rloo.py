r"""RLOO: each reply is compared with the mean of the other replies to its prompt; no critic.

[Ahmadian et al. 2024](https://arxiv.org/abs/2402.14740). The advantage of a reply is its return minus the mean return
of the other replies of its group. As published, KL (`k1`) is part of the return before that mean is subtracted. The
loss is summed over the tokens of a reply.
"""

from operant.algorithms.base import Needs, Rewarded
from operant.objectives import groups, losses

ALGORITHM = Rewarded(
    losses.surrogate,
    groups.with_leave_one_out,
    per="sequence",
    needs=Needs(samples=2),
    defaults={"samples": 4, "update.epochs": 1},
)
