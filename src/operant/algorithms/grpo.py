r"""GRPO: several replies to each prompt are compared with each other; no critic.

[Shao et al. 2024](https://arxiv.org/abs/2402.03300). Several replies to each prompt form a group and are compared with
each other; there is no critic. With the replies' scores $r_1 \dots r_n$ of one group:

$$A_i = \frac{r_i - \mathrm{mean}(r)}{\mathrm{std}(r)}, \qquad
  \text{loss} = \frac{1}{n}\sum_i \frac{1}{|y_i|}\sum_t \max\big(-\rho_{i,t}A_i,\ -\mathrm{clip}(\rho_{i,t})A_i\big)
  + \beta\,\mathrm{KL}$$

- A group consists of all attempts at one task, at any position in the batch. The advantage is 0 in a group of one
  reply, in a group with equal scores, and in one whose scores differ only by rounding. The diagnosis reports a step in
  which every advantage is 0, on the console and on the page.
- `advantage.deviation`: `population` divides by n and adds 1e-6; `sample` divides by n - 1 and adds 1e-4, as TRL
  does. The default is `population`: two replies have advantages of ±1 (`sample`: ±0.71), their size does not depend on
  the number of samples, and rewards of a small scale (a spread of 1e-4) are not damped. `advantage.scale=false` omits
  the division (Dr. GRPO).
- KL is charged in the loss (`kl.loss_coef`). `kl.loss_kind=k3` has the gradient of KL; `plain_k3`, the published
  term, has a different gradient ([where KL is charged](methods/ppo.md#where-kl-is-charged-and-the-effect)).
- `samples` below 2 is refused. In a loop of your own, `learner.step(queries, responses, scores)` compares the responses
  to equal queries, or those with the same number in `groups=`. If no group has two responses, the step is refused.
  Under `torchrun` all replies to a query must be on one rank, as `operant train` places them, or the step is refused.
"""

from operant.algorithms.base import COMPARED, Comparison
from operant.objectives import groups, losses

# With the published coefficient of 0.04 the demo ends at 69 nats per reply, with a third of all words the same; with
# 0.2 at 7 nats (docs/algorithms.md).
DEFAULTS = COMPARED | {"kl.loss_coef": 0.2, "kl.loss_kind": "k3"}

ALGORITHM = Comparison(losses.surrogate, groups.with_groups, per="episode", defaults=DEFAULTS)
