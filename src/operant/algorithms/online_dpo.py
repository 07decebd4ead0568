r"""Online DPO: the loss of DPO on the policy's own replies, in the order of their scores.

```
operant train sentiment --algorithm online-dpo --samples 4
operant train --algorithm online-dpo --tasks prompts.txt --reward runs/reward-model
```

[Guo et al. 2024](https://arxiv.org/abs/2402.04792). Every step, the policy gives several replies to each prompt, and
the reward orders them: a reward model, a function, or a person on the page (the world `feedback`). Pairs, options and
metrics are those of `dpo`: with two samples there is one pair a prompt, with more all pairs, or with `--loss.pairs
ends` only the best reply against the worst one.

- Only the order of the scores counts, so `score.scale` and `score.normalise` change nothing; `score.clip` makes ties.
- `--select` is refused: it would leave the better replies without worse ones.
- Equal scores are no pair, nor are those that differ only by rounding. A prompt whose replies all have the same score
  has no gradient, and counts in the mean over prompts, as in GRPO; `preference/unpaired` is the share of such prompts.
- The log-ratio to the reference is that of the distribution that replies are drawn from, before any truncation. There
  is no other KL penalty. `samples` below 2 is refused.
- With more than one optimizer step for the same replies (`update.epochs`, `update.minibatch`), later ones are off
  policy, which this loss allows: there is no ratio and no clipping.
"""

from operant.algorithms.base import Algorithm, Needs
from operant.objectives.preference import preference

ALGORITHM = Algorithm(
    preference,
    unit="group",
    per="group",
    copies={"reference": "frozen"},
    needs=Needs(samples=2),
    defaults={"samples": 2, "update.epochs": 1, "kl.coef": 0.0},
    title="Online DPO",
)
