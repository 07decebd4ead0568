"""The loss of an outcome critic: cross-entropy of what it predicts for a program with what became of it."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from operant.objectives.labelled import at_last
from operant.types import Batch, Outputs


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
