"""CodeRL's two losses in one step: REINFORCE on the policy's programs, cross-entropy on given ones."""

import torch
from torch import Tensor

from operant import distributed
from operant.objectives import losses
from operant.types import Batch, OperantError, Outputs


def shares(batch: Batch, outputs: object) -> dict[str, Tensor]:
    """`share` [B]: all actions over those of the row's kind, so that a mean over all is a sum of two means."""
    given = batch.demonstrated if batch.demonstrated is not None else torch.zeros_like(batch.episodes, dtype=torch.bool)
    actions = batch.actions.sum(1).double()
    both = [distributed.total_float(float(actions[of].sum())) for of in (~given, given)]
    own, theirs = (sum(both) / count if count else 0.0 for count in both)
    return {"share": torch.where(given, theirs, own).to(batch.rewards)}


def returns_and_programs(
    out: Outputs, batch: Batch, *, given_coef: float = 1.0, entropy_coef: float = 0.0
) -> dict[str, Tensor]:
    """[B, T] minus advantage times log-prob where the policy has acted, and `given_coef` times minus log-prob of given
    programs, each times its row's `share`.

    Raises: OperantError if `given_coef` is below 0.
    """
    if given_coef < 0:
        raise OperantError(f"loss.given_coef={given_coef:g}: it must be at least 0")
    terms = losses.score_function(out, batch, entropy_coef=entropy_coef)
    share = batch.extra["share"][:, None]
    own = share * terms["loss"]
    if batch.demonstrated is None:
        return terms | {"loss": own}
    given = given_coef * share * -out.logprobs
    return terms | {"loss": torch.where(batch.demonstrated[:, None], given, own), "given/loss": -out.logprobs}
