"""Micro-batches, which bound the memory of a pass. Their size changes no number."""

from dataclasses import dataclass
from typing import Any

import torch

from operant import distributed
from operant.bounds import bounded, check_bounds
from operant.distributed import GradientSum
from operant.models.embedding import direct_gradients
from operant.rollouts.collate import cut, units
from operant.sampling import Sampling
from operant.tally import Tally
from operant.training.objective import Objective, backward
from operant.types import Batch, OperantError
from operant.watchdog import beat

LEAST = 64
"""The smallest budget in tokens. If memory runs out with less, something else uses it."""


class TokenBudget:
    """The tokens of one forward and backward pass, including padding if rows are padded; halved if memory runs out.

    It is part of the state of a run, so a resumed run starts with the size that fitted.
    """

    def __init__(self, tokens: int, *, fixed: bool = False):
        self.tokens, self.fixed = tokens, fixed

    def halve(self, error: BaseException) -> None:
        """Raises: OperantError where the size is fixed, or nothing is left to halve."""
        if self.fixed or self.tokens <= LEAST:
            asked = "micro_batch=fixed" if self.fixed else f"at {self.tokens} tokens a pass"
            raise OperantError(
                f"memory ran out in the update ({asked}): lower update.micro_tokens (now {self.tokens}), train fewer "
                "layers (preset=trunk), or set model.gradient_checkpointing; `operant doctor --plan` estimates the need"
            ) from error
        self.tokens //= 2

    def state_dict(self) -> dict[str, int]:
        return {"tokens": self.tokens}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.tokens = min(self.tokens, state["tokens"])


@dataclass(frozen=True)
class MicroBatchOptions:
    """How a batch is cut to fit into memory: the options `update.*` that every update rule has."""

    micro_tokens: int = bounded(8192, at_least=1)
    """Tokens of one forward and backward pass, including padding if rows are padded. It bounds memory, and changes no
    number."""
    micro_batch: str = bounded("auto", choices=("auto", "fixed"))
    """If memory runs out, auto: micro_tokens is halved and the optimizer step repeated; fixed: an error."""

    def __post_init__(self) -> None:
        check_bounds(self, "update")

    @property
    def copies(self) -> int:
        """Number of further copies of the trained weights that an update keeps."""
        return 0

    def budget(self) -> TokenBudget:
        """The tokens of a micro-batch, which are halved if memory runs out."""
        return TokenBudget(self.micro_tokens, fixed=self.micro_batch == "fixed")


def accumulate(
    policy: GradientSum, whole: Batch, objective: Objective, sampling: Sampling, budget: TokenBudget, *, gap: bool
) -> Tally:
    """Add the gradients of a minibatch over all ranks, micro-batch by micro-batch, and return its metrics.

    If memory runs out, it starts again with half the token budget; with several ranks, which wait for each other, that
    is an error. The parameters must have no gradients before.
    """
    module: Any = policy.module
    while True:
        tally = Tally()
        try:
            with direct_gradients(distributed.world() == 1):
                pieces = micro_batches(whole, objective.unit, budget.tokens, packed=module.packs(whole))
                for number, piece in enumerate(pieces, 1):
                    beat()
                    with policy.gathering(last=number == len(pieces)):
                        backward(policy, piece, objective, sampling, tally, gap=gap)
            return tally
        except (torch.OutOfMemoryError, RuntimeError) as error:
            # Without a GPU, torch raises a RuntimeError with this text.
            exhausted = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
            if not exhausted or distributed.world() > 1:
                raise
            failed = error.with_traceback(None)  # the frames of the failed pass would keep its tensors alive
        for p in policy.module.parameters():
            p.grad = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        budget.halve(failed)


def micro_batches(batch: Batch, unit: str, budget: int, *, packed: bool = False) -> list[Batch]:
    """Cut a batch into units of similar length within a budget of tokens. Every rank makes the same number of them."""
    parts = [batch.rows(torch.tensor(rows)) for rows in cut(batch, units(batch, unit), budget, packed=packed)]
    spare = parts[0].rows(slice(0, 1))
    dummy = spare.with_(weights=torch.zeros_like(spare.weights))
    return parts + [dummy] * (distributed.largest(len(parts)) - len(parts))
