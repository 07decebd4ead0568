r"""GRPO: several replies to each prompt are compared with each other; no critic.

[Shao et al. 2024](https://arxiv.org/abs/2402.03300). Several replies to each prompt are compared; there is no critic.
With the replies' scores $r_1 \dots r_n$ of one group:

$$A_i = \frac{r_i - \mathrm{mean}(r)}{\mathrm{std}(r)}, \qquad
  \text{loss} = \frac{1}{n}\sum_i \frac{1}{|y_i|}\sum_t \max\big(-\rho_{i,t}A_i,\ -\mathrm{clip}(\rho_{i,t})A_i\big)
  + \beta\,\mathrm{KL}$$

- Groups are attempts at one task, whatever their position. A group of one, a constant group, and one whose scores
  differ by rounding have advantage 0. A step in which every advantage is 0 is a finding, on the console and on the
  page.
- `advantage.deviation`: `population` divides by n and adds 1e-6; `sample` divides by n - 1 and adds 1e-4, as TRL
  does. The default is `population`: two replies get ±1 (`sample`: ±0.71), the size does not depend on the number of
  samples, and rewards of a small scale (a spread of 1e-4) are not damped. `advantage.scale=false` leaves the division
  out (Dr. GRPO).
- KL stands in the loss (`kl.loss_coef`, `kl.loss_kind=k3` with the right gradient; `plain_k3` is the published term,
  whose gradient is another: [kl.md](kl.md)).
- `samples` below 2 is refused. In a loop of your own, `learner.step(queries, responses, scores)` compares the
  responses to equal queries, or those that `groups=` puts together; where no group has two, it is refused. Under
  `torchrun` all replies to a query belong on one rank (`operant train` deals them so); a query on several is refused.
"""

from operant.algorithms.base import Algorithm, Needs
from operant.objectives import advantages, losses

# KL is charged in the loss, so that equal scores have advantage 0 whatever KL is. At the published price of 0.04 the
# demo ends at 69 nats a reply with one word in three the same, at 0.2 at 7 nats (docs/algorithms.md).
DEFAULTS: dict[str, object] = {
    "samples": 8,
    "update.epochs": 1,
    "kl.coef": 0.0,
    "kl.loss_coef": 0.2,
    "kl.loss_kind": "k3",
}

ALGORITHM = Algorithm(
    losses.surrogate,
    advantages.with_groups,
    per="episode",
    copies={"reference": "frozen"},
    needs=Needs(samples=2),
    kl=("loss",),
    defaults=DEFAULTS,
)

PRESETS: dict[str, dict[str, object]] = {}
