r"""REINFORCE++: PPO's clip and token-wise KL with returns in the place of a critic, whitened over the whole step.

[Hu 2025](https://arxiv.org/abs/2501.03262). The advantage of a token is the discounted sum of the rewards from it on,
KL charges included, less the mean and divided by the deviation of all tokens of the step. One reply to a prompt is
enough, as nothing is compared within groups; `reinforce++-baseline` compares.
"""

from operant.algorithms.base import Rewarded
from operant.objectives import advantages, losses

DEFAULTS: dict[str, object] = {"update.epochs": 1, "advantage.whiten_scope": "rollout"}

ALGORITHM = Rewarded(losses.surrogate, advantages.with_returns, title="REINFORCE++", defaults=DEFAULTS)
