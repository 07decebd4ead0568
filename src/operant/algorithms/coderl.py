r"""CodeRL: REINFORCE on the policy's programs, paid token by token, and cross-entropy on right ones in the same step.

```
operant train code --algorithm coderl --reward critic:runs/critic --tasks problems-with-programs.jsonl
```

[Le et al. 2022](https://arxiv.org/abs/2207.01780). Each row has a prompt, what its tests need, and a right program
(`prompt`, `completion`), or a `--form` reads them. A step has the policy's replies to its prompts and the programs of
the same rows, with

$$\text{loss} = -\frac{1}{N}\sum_{\text{own}} A_t \log \pi(a_t) - \frac{c}{M} \sum_{\text{given}} \log \pi(a_t),
\qquad A_t = \sum_{k \ge t} \gamma^{k - t} r_k$$

where N and M are the numbers of own and given tokens of an optimizer step, and c = `loss.given_coef` is 1: equal
weight, as there. With `advantage.gamma` 0, the default, $A_t$ is what the reward pays to the token:
`critic:runs/critic` pays CodeRL's return, and its other `returns` are corrected forms of it
([a critic of programs](code.md#a-critic-of-programs)). A reward that pays the last token alone, such as `tests`, needs
`--advantage.gamma 1`, and is refused without.

- CodeRL trained offline, on samples, outcomes and critic scores that were computed once; here every step plays, so that
  the gradient is that of the policy that drew the replies, and a batch is used once. CodeRL's steps alternated between
  both losses; here both are in every step.
- There is no KL penalty by default, as there: `--kl.loss-coef` charges one. KL and importance weights
  (`--rollouts-ahead`, `--partial-rollout-tokens`) are about the policy's own tokens alone, because it has not drawn the
  given ones. Nor do `sampling.min_tokens` and a stored truncation hold for these.
- Without given programs in a step (`Learner.step`) the second sum is absent. `given/loss` is its mean before c: the
  cross-entropy of the policy at the temperature that it samples with, `sampling.temperature`, which is 1 by default.
"""

import torch
from torch import Tensor

from operant.algorithms.base import Needs, Rewarded
from operant.objectives import advantages, losses
from operant.types import Batch, Outputs, require


def returns_and_programs(
    out: Outputs, batch: Batch, *, given_coef: float = 1.0, entropy_coef: float = 0.0
) -> dict[str, Tensor]:
    """[B, T] minus advantage times log-prob where the policy has acted, and `given_coef` times minus log-prob of given
    programs; the weights of a batch take the mean of each."""
    require(given_coef >= 0, f"loss.given_coef={given_coef:g}: it must be at least 0")
    terms = losses.score_function(out, batch, entropy_coef=entropy_coef)
    if batch.demonstrated is None:
        return terms
    given = batch.demonstrated[:, None]
    loss = torch.where(given, given_coef * -out.logprobs, terms["loss"])
    return terms | {"loss": loss, "given/loss": -out.logprobs}


ALGORITHM = Rewarded(
    returns_and_programs,
    advantages.with_returns,
    source="both",
    per="source",
    needs=Needs(token_scores=True),
    defaults={"update.epochs": 1, "advantage.gamma": 0.0, "kl.coef": 0.0},
    title="CodeRL",
    update="one-pass",
)
