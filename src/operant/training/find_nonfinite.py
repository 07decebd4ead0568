"""An optimizer step once more, number by number: which is the first that is not finite.

What an update notices is sums, which leave the device anyway. Where one of them is no number, this looks for the place;
`operant replay` does the same in another process.
"""

from dataclasses import dataclass, replace

import torch

from operant.models.policy import Policy
from operant.objectives import losses
from operant.rollouts.collate import cut, units
from operant.sampling import Sampling
from operant.training.nonfinite import NonFinite, find_at_actions
from operant.training.objective import Objective, forward
from operant.types import Batch


@dataclass(frozen=True)
class RefusedUpdate:
    """An optimizer step that was not made; the weights are as they were before it."""

    fault: NonFinite | None
    """None where it cannot be found again: the sum of several ranks' gradients, say."""
    batch: Batch
    """This rank's minibatch, with its weights."""
    tokens: int
    """Of a pass."""
    first: bool
    """Whether nothing had moved before it in its training step."""


def first_fault(
    policy: Policy, batch: Batch, objective: Objective, sampling: Sampling, tokens: int
) -> NonFinite | None:
    """Forward, loss and backward of a minibatch in the order of the update; None where every number is finite.

    The parameters are left without gradients.
    """
    if fault := find_at_actions(
        {"advantage": batch.advantages, "return": batch.returns, "weight": batch.weights}, batch
    ):
        return fault
    try:
        for rows in cut(batch, units(batch, objective.unit), tokens):
            if fault := _of_piece(policy, batch.rows(torch.tensor(rows)), objective, sampling):
                return fault if fault.row is None else replace(fault, row=rows[fault.row])
        norms = [p.grad.norm() for p in policy.parameters() if p.grad is not None]
        norm = float(torch.stack(norms).norm()) if norms else 0.0
        return None if norm - norm == 0 else NonFinite("gradient norm", str(norm))
    finally:
        for p in policy.parameters():
            p.grad = None


def _of_piece(policy: Policy, piece: Batch, objective: Objective, sampling: Sampling) -> NonFinite | None:
    out, terms = forward(policy, piece, objective, sampling)
    loss = terms["loss"]
    seen = {"log-prob": out.logprobs, "logsumexp": out.logsumexp, "value": out.values}
    seen |= {"loss": loss} if loss.ndim == 2 else {}
    if fault := find_at_actions(seen, piece):
        return fault
    whole = losses.total(loss, piece)
    if not bool(whole.isfinite()):
        return NonFinite("loss", str(float(whole.detach())))
    whole.backward()
    for name, p in reversed(list(policy.named_parameters())):  # as the backward pass goes
        if p.grad is not None and not bool(p.grad.isfinite().all()):
            return NonFinite(f"gradient of {name}", str(float(p.grad[~p.grad.isfinite()][0])))
    return None
