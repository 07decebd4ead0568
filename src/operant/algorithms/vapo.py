r"""VAPO: PPO with two lambdas, one of which grows with the length of a reply, and the likelihood of right replies.

[Yue et al. 2025](https://arxiv.org/abs/2504.05118). Rewards come at the end of a reply. With one lambda below 1 they
do not reach the first of many tokens, neither as advantages nor as targets of the critic.

- The critic's targets have lambda 1 (`advantage.critic_lam`); the advantages have $1 - 1/(\alpha\,l)$ in a reply of
  $l$ tokens, $\alpha = 0.05$: .95 at 400 tokens, 0 below 20. `advantage.alpha=1` suits replies of 20 to 100 tokens.
- The surrogate is clipped at $1 - 0.2$ and $1 + 0.28$. To the loss comes `loss.right_coef` (0.1) times the mean
  cross-entropy of right replies, those with a return of at least `advantage.right`. It is that mean where all
  tokens of a step have one weight: with `update.per` or `learner.select`, its share of the loss is another.
- The paper trains the critic alone for 50 steps first, on replies of the policy of the start
  (`learner.critic_steps=50`; 0 unless it is given), and draws 16 replies to each of 512 prompts (`samples`).
"""

from operant.algorithms.base import Algorithm, Needs
from operant.objectives import value_augmented

ALGORITHM = Algorithm(
    value_augmented.ppo_and_right_replies,
    value_augmented.with_two_lambdas,
    copies={"reference": "frozen"},
    needs=Needs(critic=True),
    kl=("loss",),
    defaults={"kl.coef": 0.0, "update.epochs": 1},
)
