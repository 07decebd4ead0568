"""Repeat an optimizer step number by number to find the first NaN or infinity.

An update only checks sums, which leave the device anyway. If one of them is not finite, this module finds the tensor,
row and token. `operant replay` does the same in another process.
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
    """An optimizer step that was not made because of NaN or infinity. The weights are those from before it."""

    fault: NonFinite | None
    """None if no number of this rank is at fault, for example if only the sum over ranks is infinite."""
    batch: Batch
    """This rank's minibatch, with its weights."""
    tokens: int
    """The token budget of one forward and backward pass."""
    first: bool
    """Whether no optimizer step came before it in its training step."""


def first_fault(
    policy: Policy, batch: Batch, objective: Objective, sampling: Sampling, tokens: int
) -> NonFinite | None:
    """Compute forward pass, loss and backward pass of a minibatch as the update does, and return the first fault.

    Returns None if every number is finite. Afterwards the parameters have no gradients.
    """
    if fault := find_at_actions(
        {"advantage": batch.advantages, "return": batch.returns, "weight": batch.weights}, batch
    ):
        return fault
    try:
        for rows in cut(batch, units(batch, objective.unit), tokens):
            if fault := _fault_in_micro_batch(policy, batch.rows(torch.tensor(rows)), objective, sampling):
                return fault if fault.row is None else replace(fault, row=rows[fault.row])
        norms = [p.grad.norm() for p in policy.parameters() if p.grad is not None]
        norm = float(torch.stack(norms).norm()) if norms else 0.0
        return None if norm - norm == 0 else NonFinite("gradient norm", str(norm))
    finally:
        for p in policy.parameters():
            p.grad = None


def _fault_in_micro_batch(policy: Policy, piece: Batch, objective: Objective, sampling: Sampling) -> NonFinite | None:
    """The first fault of a micro-batch; its row is counted within the micro-batch."""
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
    for name, p in reversed(list(policy.named_parameters())):  # in the order of the backward pass
        if p.grad is not None and not bool(p.grad.isfinite().all()):
            return NonFinite(f"gradient of {name}", str(float(p.grad[~p.grad.isfinite()][0])))
    return None
