r"""Soft Q-learning: the logits of a language model as Q values, learnt by the consistency of paths.

[Guo et al. 2022](https://arxiv.org/abs/2106.07704), and the training of RLPrompt
([Deng et al. 2022](https://arxiv.org/abs/2205.12548)). $Q(s, a)$ is the logit of a token, $V(s)$ the logsumexp of all
logits, so that the policy is $\log\pi(a \mid s) = A = Q - V$. With $V'$ that of a copy that follows slowly, and a
reward $r$ at the last of T tokens,

$$\text{loss} = \tfrac12 \sum_t \big(A_t - r_t - V'_{t+1} + V'_t\big)^2 + \tfrac12 \sum_t \Big(\sum_{l \ge t} A_l - r +
  V'_t\Big)^2,$$

the mean over replies, with $V'_{T+1} = 0$.

```
operant train prompt --algorithm soft_q
operant train letters --algorithm soft_q --advantage.shape 0,1,0,10
operant train letters --algorithm soft_q --advantage.shape 0,1,0,10 --replay.share 0.5
```

- `loss.version`: `v2_v3`, as above, or one of its halves, `v2` (one step) and `v3` (the whole path), or `v1`
  (one step of Q). `v0` (values alone) is refused, because nothing moves by it.
- `loss.forward_share` is the weight of these losses against those in which policy and copy change roles. The former
  train A alone, because $V'$ belongs to the copy, and the latter V alone. With both (0.5, the default) the policy goes
  to its optimum, which a test shows on a bandit. RLPrompt used the former alone (1): $V$ is then trained by nothing and
  stays near its beginning, which `output_mlp.logit_bias` sets.
- **The reference**: with one (the policy at its beginning, by default), its own Q and V are subtracted from those of
  policy and copy, so all of them begin at 0 and agree with a reward of 0, and the optimum is $\pi \propto
  \pi_{\text{ref}}\, e^r$. With `--reference none` it is $\pi \propto e^r$, as in RLPrompt. There, V of an untrained
  policy is $\log|V|$ everywhere, and ought to be $(T - t + 1) \log|V|$: at first every reply, good or bad, is made
  likelier.
- **No sampler appears in the loss**: it holds for replies from any source (`Learner.step(queries, responses, scores)`,
  where a KL in the loss must be an exact one, `kl.loss_kind=reverse`), and replies may be drawn from the likeliest
  tokens (`sampling.top_k` with `sampling.truncation=stored`), while V is taken over the whole vocabulary. `--mask.by
  model` draws from those that the frozen model behind an `output_mlp` finds likely, so that replies stay fluent.
- **Earlier replies**: `replay.share` is the share of each update's replies that are drawn from a buffer of the newest
  `replay.capacity` ones, with the scores that they had: 0 (the default) is on-policy, 1 off-policy, 0.5 mixed. RLPrompt
  names these modes and has the first alone. The buffer is in every checkpoint; `rollout/staleness` is the age of what
  is learnt from, and `learner.max_staleness` its bound. `kl/per_reply` is then no estimate of KL, because the policy
  has not drawn these replies.
- **Rewards**: `advantage.standardise` subtracts the mean and divides by the deviation, over a `step` (with `rlprompt`
  as there: 1e-4 is added to the deviation) or over the replies to one task (`group`); then `advantage.shape` maps the
  range a..b to c..d. Rewards that are k times as large make the optimum that much sharper.
- The copy moves by `target.rate` = 0.05 of the distance with each step, or becomes equal every `target.every` steps.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from operant.algorithms.base import Algorithm
from operant.objectives.soft_q import soft_q, with_shaped_rewards
from operant.types import Batch, OperantError, Outputs, require


def look(batch: Batch, outputs: Callable[[str], Outputs]) -> Mapping[str, Tensor]:
    """Before the update: Q and V of each action by the copy that follows, and by the reference if there is one."""
    if batch.choices is not None:
        raise OperantError(
            "algorithm soft_q needs the logits of tokens, which a choice among given replies has not: use a world "
            "without options"
        )
    found, names = dict[str, Tensor](), ["target"] if batch.ref_logprobs is None else ["target", "reference"]
    for name in names:
        copy: Any = outputs(name)
        require(copy.logsumexp is not None, "the policy computed no `Outputs.logsumexp`, of which soft_q makes Q and V")
        found |= {f"{name}_q": copy.raw_logprobs + copy.logsumexp, f"{name}_v": copy.logsumexp}
    return found


ALGORITHM = Algorithm(
    soft_q,
    with_shaped_rewards,
    look=look,
    per="sequence",
    copies={"reference": "frozen"},
    options=("mask", "target", "replay"),
    kl=("loss",),
    defaults={"update.epochs": 1, "kl.coef": 0.0, "optimizer.max_grad_norm": 5.0, "mask.by": "policy"},
    title="Soft Q-learning",
)
