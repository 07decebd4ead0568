r"""DPO: preference optimisation; replies that were preferred become more likely than those that were not.

```
operant train --algorithm dpo --policy runs/sft --tasks pairs.jsonl --evaluate held-out.jsonl
operant train --algorithm dpo --policy runs/sft --tasks pairs.jsonl --loss.kind ipo --loss.beta 0.1
```

[Rafailov et al. 2023](https://arxiv.org/abs/2305.18290). It learns from labelled replies, without a reward model and
without generating. A row has `chosen` and `rejected`, or `replies` with `ranks`, `best` or `ratings`. With the
log-ratio of a whole reply $h(y) = \log\pi(y \mid x) - \log\pi_{ref}(y \mid x)$, every pair of a better reply $y_w$ and
a worse reply $y_l$ to one prompt, and $d = h(y_w) - h(y_l)$:

$$\text{loss} = \mathrm{mean}_{\text{prompts}}\ \mathrm{mean}_{\text{pairs}}\ -\log\sigma(\beta d)$$

| `loss.kind` | loss of a pair, $\epsilon$ = `loss.label_smoothing` |
|---|---|
| `sigmoid` | $-(1 - \epsilon) \log\sigma(\beta d) - \epsilon \log\sigma(-\beta d)$ |
| `robust` | $(-(1 - \epsilon) \log\sigma(\beta d) + \epsilon \log\sigma(-\beta d)) / (1 - 2\epsilon)$ |
| `hinge` | $\max(0, 1 - \beta d)$ |
| `ipo` | $(d - 1 / 2\beta)^2$ |
| `ipo-mean` | the same with log-probs per token of a reply |

`robust` is by [Chowdhury et al. 2024](https://arxiv.org/abs/2403.00409), `hinge` that of
[SLiC](https://arxiv.org/abs/2305.10425), `ipo` by [Azar et al. 2023](https://arxiv.org/abs/2310.12036) (equation 17).
TRL's `ipo` is `ipo-mean`, and TRL 1.16 ignores label smoothing under `sigmoid`.

- The reference is the first policy (`--reference copy`), which should be one that was trained to imitate (`sft`). There
  is no other KL penalty: `loss.beta` is its coefficient in the reward that the pairs would be explained by.
- A ranking of k replies has up to k (k - 1) / 2 pairs; all are computed in one pass over the k replies, and their mean
  is the loss of the prompt. `loss.pairs=ends` takes only the best replies against the worst ones. Equal labels are no
  pair. Prompts without a pair are left out, and their number is logged; data without any pair are refused.
- `batch` and `update.minibatch` count prompts, and all replies to a prompt are in one micro-batch.
- `preference/accuracy` is the share of pairs that $h$ puts in the right order, `preference/margin` the mean of
  $\beta d$. Look at `preference/better`, too: both log-ratios often fall together, so that the better reply becomes
  less likely than it was. Held-out rows have the same numbers (`evaluate/preference/...`).
"""

from operant.algorithms.base import Algorithm, Needs
from operant.objectives.preference import paired, preference

ALGORITHM = Algorithm(
    preference,
    source="data",
    usable=paired,
    unit="group",
    per="group",
    copies={"reference": "frozen"},
    needs=Needs(samples=2, reward=False, labels=True),
    defaults={"update.epochs": 1, "kl.coef": 0.0},
)
