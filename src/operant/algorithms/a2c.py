r"""A2C: the plain policy gradient with a critic; each batch is used once.

[Mnih et al. 2016](https://arxiv.org/abs/1602.01783), in the synchronous form of OpenAI's baselines and
Stable-Baselines3, which RL4LMs used:

$$\text{loss} = -A_t \log \pi(a_t) + c_v\,\tfrac12 (V_t - R_t)^2 - c_e H_t$$

- Advantages are GAE's with lambda 1, so $A_t$ is the discounted return less the value: REINFORCE with a learned
  baseline. They are not whitened. `advantage.lam` and `advantage.whiten_scope` change both.
- A batch is used once, as one minibatch: there is no ratio, and `update.epochs` other than 1 is refused. The gradient
  is that of PPO's first minibatch where nothing is clipped.
- The optimizer is RMSProp with the published constants (mean square 0.99, eps 1e-5 outside the root, gradients of
  length 0.5 at most). `--optimizer.kind adamw` uses Adam.
- The value error is halved here. `loss.value_coef=1` is the 0.5 of the published code, whose error is not.
"""

from operant.algorithms.base import Needs, Rewarded
from operant.objectives import advantages, losses

ALGORITHM = Rewarded(
    losses.actor_critic,
    advantages.with_gae,
    needs=Needs(critic=True),
    defaults={
        "update.epochs": 1,
        "optimizer.kind": "rmsprop",
        "optimizer.alpha": 0.99,
        "optimizer.eps": 1e-5,
        "optimizer.max_grad_norm": 0.5,
        "advantage.lam": 1.0,
        "advantage.whiten_scope": "none",
        "loss.value_coef": 1.0,
    },
    update="one-pass",
)
