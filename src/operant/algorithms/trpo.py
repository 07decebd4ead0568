r"""TRPO: a natural-gradient step whose KL to the policy before it is bounded, with a critic.

[Schulman et al. 2015](https://arxiv.org/abs/1502.05477). With the surrogate $L(\theta) = \mathrm{mean}_t\,A_t\,\rho_t$,
its gradient $g$ and the Fisher matrix $F$ of the policy's tokens:

$$\theta' = \theta + \alpha\,\sqrt{\frac{2\delta}{x^\top F x}}\,x, \qquad (F + c\,I)\,x = g$$

- Conjugate gradients solve for $x$ with products of $F$ and a vector. $F$ is the second derivative of the mean KL at
  the policy itself, over the whole vocabulary; attention is computed without fusion there, because the fused one has no
  second derivative.
- **Line search**: $\alpha$ is 1, then 0.8, 0.64, ..., until the surrogate has risen and the KL from the old policy to
  the new one is at most $\delta$, `update.target_kl` nats per token. If none of `update.backtracks` is accepted, the
  weights stay as they were, and `trust/accepted` is 0; the diagnosis says so. `update.kl=sampled` estimates
  that KL from the drawn tokens, `exact` sums over the vocabulary.
- **Stale replies**: importance weights (`learner.importance`) are in the surrogate, and in neither $F$ nor the KL, so
  they do not loosen the bound. The estimate of `sampled` weighs each drawn token by its probability under the policy
  before the step over that under its sampler, and divides by the sum of these weights.
- **The critic** is trained by `update.critic_epochs` passes with an optimizer of its own, whose options are
  `optimizer.*`. Its gradient stops at the language model: the policy only moves along $x$. Which parameters belong to
  the critic is known from where they are (the value head, or the critic network), not from their names.
- `update.fisher_share` takes the Fisher matrix from a share of the replies, because a product costs about two passes of
  PPO over them; four replies are the least, drawn among those of all ranks. Few replies underestimate it, which the
  line search corrects.
- `trust/kl`, `trust/improvement`, `trust/predicted` and `trust/backtracks` say what a step did.
"""

from operant.algorithms.base import Needs, Rewarded
from operant.objectives import advantages, losses

ALGORITHM = Rewarded(
    losses.trust_region,
    advantages.with_gae,
    needs=Needs(critic=True),
    defaults={"optimizer.lr": 1e-3},
    update="trust-region",
)
