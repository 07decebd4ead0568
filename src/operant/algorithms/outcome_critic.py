r"""Outcome critic: predicts from a problem and a program whether it compiles, runs, fails a test or passes.

```
operant train outcome-critic --trunk runs/sft --tasks samples.jsonl --evaluate held-out.jsonl --out runs/critic
operant train code --algorithm coderl --reward critic:runs/critic
```

The critic of CodeRL ([Le et al. 2022](https://arxiv.org/abs/2207.01780)). The trunk is a language model, causal or
encoder-decoder; the encoder reads the problem and the decoder the program, a causal model reads both as one text. With
the state $s_t$ behind the first $t$ of a program's $T$ tokens and a head of two layers $h$, the prediction for the
program is

$$p = \mathrm{softmax}\big(\max_{0 \le t \le T} h(s_t)\big), \qquad \text{loss} = -\log p_{y}$$

with the maximum taken for each outcome by itself, and the mean over programs. The maximum is over the program's own
positions. CodeRL's code took it over the padding behind the program too, where most maxima lay;
`--policy.pool-padding 512` does the same, for comparison, with a trunk that reads more than 512 tokens.

A row is `{"prompt", "completion", "outcome"}`, or `{"prompt", "completions": [...], "outcomes": [...]}`. An outcome is
`compile error`, `runtime error`, `failed test` or `passed`, or its number from 0 to 3. `--tasks outcomes --tasks.run
runs/code` reads all replies that a run has stored with their outcomes: the policy's own samples. Right programs that
people wrote are rows with the outcome `passed`.

- `critic/accuracy` is the share of right predictions, and stands beside `critic/majority` on held-out rows: the share
  of the most frequent outcome. `critic/calibration_error` and `critic/auc_25` to `critic/auc_100` are measured on
  held-out rows as well ([metrics](metrics.md)).
- The export is a plain transformers folder of the trunk, with the head in `outcome_head.safetensors` beside it.
- [A critic of programs](code.md#a-critic-of-programs) shows the rewards that it makes, and how it is trained further
  during a run.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from operant.algorithms.base import Algorithm, Needs
from operant.objectives.labelled import at_last
from operant.types import OUTCOMES, Batch, OperantError, Outputs


def outcome(out: Outputs, batch: Batch) -> dict[str, Tensor]:
    """Minus the log-prob of the true outcome [B], whose number is the sum of the rewards of a row; one row an episode.

    `out.outcomes` [B, T, C]: the pooled logits, which at the last action are those of the whole program.
    """
    logits = torch.stack([at_last(x, batch) for x in out.outcomes.unbind(-1)], -1)
    true = (batch.rewards * batch.actions).sum(1).round().long()
    loss = cross_entropy(logits, true, reduction="none")
    likely = logits.detach().softmax(-1).max(-1)
    return {
        "loss": loss,
        "critic/loss": loss.detach(),
        "critic/accuracy": (likely.indices == true).to(loss),
        "critic/confidence": likely.values,
    }


def usable(labels: Sequence[Sequence[float]], loss: Mapping[str, object], *, whole: bool) -> list[bool]:
    """All are."""
    found = {label for of_prompt in labels for label in of_prompt}
    if odd := found - {float(i) for i in range(len(OUTCOMES))}:
        raise OperantError(
            f"the label {min(odd):g} is no outcome: give rows with `outcome`, which is one of {', '.join(OUTCOMES)}, "
            f"or its number from 0 to {len(OUTCOMES) - 1}"
        )
    if whole and len(found) == 1:
        outcome = OUTCOMES[int(found.pop())]
        raise OperantError(f"all programs have the outcome {outcome!r}: there is nothing to learn from them")
    return [True] * len(labels)


ALGORITHM = Algorithm(
    outcome,
    source="data",
    per="episode",
    usable=usable,
    needs=Needs(reward=False, labels=True, policy="outcome_critic"),
    defaults={"update.epochs": 1, "kl.coef": 0.0},
)
