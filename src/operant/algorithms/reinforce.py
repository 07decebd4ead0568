r"""REINFORCE: log-probs of replies, weighted by what came after; a running mean as baseline, and no critic.

[Williams 1992](https://doi.org/10.1007/BF00992696). The advantage of a token is the discounted sum of the rewards from
it on, KL charges included:

$$G_t = \sum_{k \ge t} \gamma^{k - t} r_k, \qquad \text{loss} = -\sum_t G_t \log \pi(a_t)$$

- The baseline is the running mean of all scores so far (`score.centre`), which is part of a run's state. With
  `--score.centre false` there is none: plain REINFORCE. `--score.normalise true` also divides by the running deviation.
  A score is all that an attempt is paid, by reward and world. The mean is subtracted at the end of the attempt, so in a
  world which pays turn by turn, later turns have a baseline that is too high: there `rloo` or `a2c` fits better.
- With a learned value of each state as baseline it is `a2c`, whose lambda is 1. With the other replies to a prompt as
  baseline it is `rloo`.
- The gradient is that of the policy which drew the replies, so a batch is used once, and `update.epochs` other than 1
  is refused. `update.minibatch` still cuts it into several optimizer steps.
"""

from operant.algorithms.base import Rewarded
from operant.objectives import advantages, losses

ALGORITHM = Rewarded(
    losses.score_function,
    advantages.with_returns,
    defaults={"score.centre": True, "update.epochs": 1},
    update="one-pass",
)
