r"""Rejection sampling: the policy imitates the best of its own replies; no critic.

```
operant train letters --algorithm rejection --select top:25%
```

Every step, the best replies of the batch, over all ranks, are trained on as if they were demonstrations, and the others
are left out ([RAFT](https://arxiv.org/abs/2304.06767), [ReST](https://arxiv.org/abs/2308.08998)). With the set $S$ of
the actions that stay:

$$\text{loss} = -\frac{1}{|S|}\sum_{t \in S} \log \pi(a_t) \;(-\;c\,H) \;+\; \beta\,\mathrm{KL}$$

- `--select` says which stay: `top:64` the best 64 of a step, `top:50%` the best half (at least one; rounded down),
  `group:1` the best of the `samples` replies to each prompt, `above:0.5` those with a score above 0.5, maybe none: the
  step then changes nothing. Of equal scores, the first in the order of the tasks stays, so that exactly so many do.
- **Expert iteration** ([Anthony et al. 2017](https://arxiv.org/abs/1705.08439)) imitates the best of several replies to
  each prompt: `--preset expert-iteration` is `--samples 8 --select group:1`. With `top:P%`, easy prompts have more of
  their replies among the best than hard ones; with `group:N`, each prompt has N.
- `--select-unit episode` (the default) scores an episode by its total of reward and world. `--select-unit turn` keeps
  single turns, each by its return across the episode, $R_k = r_k + \gamma R_{k+1}$, with $\gamma$
  `advantage.turn_gamma`; the other turns of its episode are only read. A turn that is not trained on discounts too.
- Scores are those that a step trains on: after `score.*`, and less `kl.coef` for each nat of KL in the reply or turn.
  KL in the reward only decides what stays. `kl.loss_coef` holds the policy near the reference; its kind is `reverse`
  or `forward`, over the whole vocabulary, because the drawn tokens that stay are no fair sample of the policy's.
- `select/share`, `select/threshold` and `select/score` say what stayed; metrics of replies are still of all of them.
- Any method that plays takes `--select`. Groups, baselines and whitening are then those of all replies, and only the
  best are in the loss: `--algorithm grpo --select top:50% --kl.loss-kind reverse` is GRPO on the better half. A critic
  then learns from the best alone, and expects too much of the others, as the run says at its start: methods without
  one fit better. Methods that learn from pairs refuse a selection, and so do those without a reward in a world that
  pays nothing.

Log-probs are those of the distribution that was sampled from, temperature included. Prompts and the world's text are
never trained on. The preset `textworld-rejection` has the values of the rejection sampler in the TextWorld fork of TRL.
"""

from operant.algorithms.base import Rewarded
from operant.objectives import losses
from operant.objectives.turn_returns import with_turn_returns

ALGORITHM = Rewarded(
    losses.imitation,
    with_turn_returns,
    defaults={"learner.select": "top:50%", "update.epochs": 1, "kl.coef": 0.0, "kl.loss_kind": "reverse"},
    title="Rejection sampling",
)
