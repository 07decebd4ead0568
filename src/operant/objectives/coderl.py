"""CodeRL's two losses in one step: REINFORCE on the policy's programs, cross-entropy on given ones."""

import torch
from torch import Tensor

from operant.objectives import losses
from operant.types import Batch, OperantError, Outputs


def returns_and_programs(
    out: Outputs, batch: Batch, *, given_coef: float = 1.0, entropy_coef: float = 0.0
) -> dict[str, Tensor]:
    """[B, T] minus advantage times log-prob where the policy has acted, and `given_coef` times minus log-prob of given
    programs; the weights of a batch take the mean of each.

    Raises: OperantError if `given_coef` is below 0.
    """
    if given_coef < 0:
        raise OperantError(f"loss.given_coef={given_coef:g}: it must be at least 0")
    terms = losses.score_function(out, batch, entropy_coef=entropy_coef)
    if batch.demonstrated is None:
        return terms
    given = batch.demonstrated[:, None]
    loss = torch.where(given, given_coef * -out.logprobs, terms["loss"])
    return terms | {"loss": loss, "given/loss": -out.logprobs}
