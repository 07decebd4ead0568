r"""KTO: replies that are good or bad each by itself; no pairs.

```
operant train --algorithm kto --policy runs/sft --tasks good-and-bad.jsonl --evaluate held-out.jsonl
```

[Ethayarajh et al. 2024](https://arxiv.org/abs/2402.01306). A row is `{"prompt", "completion", "label": true}`, or has
`replies` with `good`; of pairs, the better reply is good and the other one bad. With the log-ratio of a whole reply
$h(y) = \log\pi(y \mid x) - \log\pi_{ref}(y \mid x)$,

$$\text{loss} = \mathrm{mean}_{\text{replies}}\ \begin{cases}
  \lambda_g\,\big(1 - \sigma(\beta (h(y) - z_0))\big) & \text{good} \\
  \lambda_b\,\big(1 - \sigma(\beta (z_0 - h(y)))\big) & \text{bad}\end{cases}, \qquad
  z_0 = \max\Big(0,\ \mathrm{mean}_i\ \log\frac{\pi(y_{i-1} \mid x_i)}{\pi_{ref}(y_{i-1} \mid x_i)}\Big)$$

- **The baseline** $z_0$ estimates KL(policy || reference) from prompts with replies to other prompts: each prompt of
  the step with the reply to the one before it, over all ranks (with `Learner.step`, the rows of the first rank come
  first, then those of the second); rows with equal prompts count as one. It has no gradient
  and is one number a step, computed before the update, so that neither micro-batches nor ranks change a gradient. With
  several optimizer steps a training step (`update.epochs`, `update.minibatch`), the later ones have the same $z_0$: it
  is that of the policy before the first. It costs one more forward pass of policy and reference. Rows that are longer
  than the model's context are cut.
- $\lambda_g$ is `loss.good_weight`, $\lambda_b$ `loss.bad_weight`. The paper advises weights for which
  $\lambda_g n_g / \lambda_b n_b$ lies between 1 and 4/3, with the numbers of good and bad replies $n$.
- TRL 1.16 estimates $z_0$ from each micro-batch by itself, so that its gradient depends on how a batch is cut; in one
  micro-batch the numbers are equal.
- At least two prompts a step are needed. Labels other than good and bad, or only one of the two, are refused.
- `preference/accuracy` is the share of replies on the right side of $z_0$.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from operant import distributed
from operant.algorithms.base import Algorithm, Needs
from operant.objectives.preference import good_or_bad, kto
from operant.types import Batch, OperantError, Outputs


def look(batch: Batch, outputs: Callable[..., Outputs]) -> Mapping[str, Tensor]:
    """Before the update: the log-ratio [B] of a reply to another prompt, behind the prompt of each row.

    NaN at a row without any action, which a rank has that has no replies.
    """
    other, ratios = exchanged(batch), torch.full_like(batch.rewards[:, 0], torch.nan)
    if other is not None:
        ratio = outputs("policy", other).raw_logprobs - outputs("reference", other).raw_logprobs
        ratios[batch.actions.any(1)] = ratio.sum(1).to(ratios)
    return {"mismatched": ratios}


def exchanged(batch: Batch) -> Batch | None:
    """The rows of a batch with the replies to the prompts before them, over all ranks. Every rank must call.

    None on a rank without replies.

    Prompts are in the order of their first groups; the j-th reply to a prompt becomes the j-th to the one before it,
    counted again from the first if that one has fewer. Everything from a row's first action on is its reply.
    """
    own = []
    for row in range(len(batch)):
        where = batch.actions[row].nonzero()[:, 0].tolist()
        tokens = batch.tokens[row, : int(batch.mask[row].sum())].tolist()
        begin = where[0] if where else len(tokens)  # a rank without rows has one without any action
        own.append((int(batch.groups[row]), distributed.rank(), row, tokens[:begin], tokens[begin:], begin, where))
    ranked = sorted(found for part in distributed.gathered(own) for found in part if found[-1])
    by_prompt: dict[tuple[int, ...], list[Any]] = {}  # two tasks may have the same one
    for found in ranked:
        by_prompt.setdefault(tuple(found[3]), []).append(found)
    prompts = list(by_prompt.values())
    if len(prompts) == 1:
        raise OperantError(
            "algorithm kto reads replies to other prompts, and here is one alone: raise batch, held-out rows or probes"
        )
    pairs = [
        (found, before[number % len(before)])
        for before, rows in zip([prompts[-1], *prompts], prompts)
        for number, found in enumerate(rows)
    ]
    mine = sorted((found[2], found, given) for found, given in pairs if found[1] == distributed.rank())
    if not mine:
        return None
    made = Batch.given([f[3] for _, f, _ in mine], [given[4] for _, _, given in mine])
    for row, (_, found, given) in enumerate(mine):
        made.actions[row] = False
        made.actions[row, [found[5] + place - given[5] for place in given[6]]] = True
    return made.with_(turns=torch.where(made.actions, 0, -1)).to(batch.tokens.device)


def with_baseline(batch: Batch) -> Batch:
    """Add the baseline z0: the mean over all ranks of the mismatched log-ratios, at least 0 [B]."""
    ratios = batch.extra["mismatched"].double()
    ratios = ratios[~ratios.isnan()]
    total, count = (distributed.total_float(x) for x in (float(ratios.sum()), float(len(ratios))))
    baseline = batch.rewards.new_full((len(batch),), max(0.0, total / count))
    return batch.with_(extra={"baseline": baseline})


ALGORITHM = Algorithm(
    kto,
    with_baseline,
    source="data",
    look=look,
    usable=good_or_bad,
    per="episode",
    copies={"reference": "frozen"},
    needs=Needs(reward=False, labels=True),
    defaults={"update.epochs": 1, "kl.coef": 0.0},
)
