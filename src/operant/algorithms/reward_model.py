r"""Reward model: a score of whole replies, learnt from what people prefer.

```
operant reward-model --trunk runs/sft --tasks labels.jsonl --evaluate held-out.jsonl
operant train sentiment --reward runs/reward-model --policy runs/sft
```

The trunk is a causal language model, usually the one that PPO will begin from, or an encoder. Its new head reads the
last token of prompt and reply (without a stop token), and is drawn with standard deviation $1/\sqrt{D+1}$. Nothing is
dropped out. A row has one of the forms of [labels](rlhf.md#labels-from-people): `chosen` and `rejected`, or `replies`
with `ranks`, `best`, `ratings` or `good`, or labels of steps. All replies to one prompt are read in the same pass. With
the score $s_i$ of reply $i$ and its label $y_i$, the loss of a group is, by `--kind` (`loss.kind`):

| kind | loss |
|---|---|
| `pairwise` | mean over pairs with $y_i > y_j$ of $-\log\sigma(s_i - s_j - m (y_i - y_j))$, with $m$ = `loss.margin` |
| `best` | $-\log \mathrm{softmax}(s)_{\arg\max y}$: best of k ([Ziegler et al.](https://arxiv.org/abs/1909.08593)) |
| `ranking` | $-\log$ probability of the whole order (Plackett-Luce), divided by its number of choices |
| `rating` | mean of $(s_i - y_i)^2$ |
| `good` | sum over the labels of the cross-entropy of $\sigma(s_i)$ with $y_i$, 0 or 1 |

With `loss.margin` 1, a `margin` in each row of `chosen` and `rejected` says how far the scores should differ: 3 where
one reply is much better, 0 where it hardly is ([Llama 2](https://arxiv.org/abs/2307.09288)).

With two replies, the first three are equal. Equal labels are left out by `pairwise`, or modelled with `loss.ties`:
`davidson` or `rao-kupper`. The loss of a step is the mean over groups.

**Process rewards**: rows of `{"prompt", "completions": ["step", ...], "labels": [true, false, null]}` label each step
of a reply, where a step is a line, and `--kind good --policy.normalise none` learns from them: the reply until the end
of each labelled step is read as a reply of its own. As a reward, `--reward.steps min` scores a reply by its worst step
([Lightman et al. 2023](https://arxiv.org/abs/2305.20050)); `mean` and `last` are the others. Of a wrong solution, label
the steps until the first wrong one.

- Before and after training, gain and bias are set so that 256 replies have scores of mean 0 and variance 1: the
  labelled ones, which should be those of the policy that is trained later, or those of a file:
  `--policy.normalise replies.jsonl`. Use `--policy.normalise none` with `rating` and `good`, where labels have a scale
  of their own.
- Text that is longer than the model is cut on the left.
- The export is a plain folder of a transformers sequence classifier. Gain and bias are `reward_gain` and `reward_bias`
  in its config.
- `preference/accuracy` is the share of pairs whose order is right. It is measured on held-out rows too: look at it
  before anything is trained against the model.
"""

from collections.abc import Mapping, Sequence

from operant.algorithms.base import Algorithm, Needs
from operant.objectives.labelled import reward_model
from operant.objectives.preference import good_or_bad, paired
from operant.types import OperantError


def usable(labels: Sequence[Sequence[float]], loss: Mapping[str, object], *, whole: bool) -> list[bool]:
    """Of the labels of each prompt: whether the kind of the loss learns from them."""
    kind = loss["kind"]
    if kind == "good":
        return good_or_bad(labels, loss, whole=whole)
    if kind != "rating":
        with_ties = kind == "pairwise" and loss["ties"] != "none"
        return many if with_ties and any(many := [len(of) > 1 for of in labels]) else paired(labels, loss, whole=whole)
    if whole and len({label for of_prompt in labels for label in of_prompt}) == 1:
        raise OperantError(f"all ratings are {labels[0][0]:g}: there is nothing to learn from them")
    return [True] * len(labels)


ALGORITHM = Algorithm(
    reward_model,
    source="data",
    unit="group",
    per="group",
    usable=usable,
    needs=Needs(reward=False, labels=True, policy="reward_model"),
    defaults={"update.epochs": 1, "kl.coef": 0.0},
)
