"""Micro-batches: how much is computed at once. Bounds memory, and changes no number."""

from typing import Any

import torch

from operant import distributed
from operant.distributed import Together
from operant.models.embedding import direct_gradients
from operant.rollouts.collate import cut, units
from operant.sampling import Sampling
from operant.tally import Tally
from operant.training.objective import Objective, backward
from operant.types import Batch, OperantError
from operant.watchdog import beat

LEAST = 64
"""Tokens below which halving has not helped: something else holds the memory."""


class Budget:
    """Tokens of one forward and backward pass, padding included where rows are padded; halved where memory runs out.

    What was found by running out is part of the run's state, so a resumed run need not find it again.
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


def accumulate(
    policy: Together, whole: Batch, objective: Objective, sampling: Sampling, budget: Budget, *, gap: bool
) -> Tally:
    """Gradients of a whole minibatch over all ranks, micro-batch by micro-batch; out of memory, anew with smaller ones.

    The parameters must have no gradients yet. Ranks wait for each other, so with several the size stays as it is.
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
            if not _out_of_memory(error) or distributed.world() > 1:
                raise
            failed = error.with_traceback(None)  # frames of the failed pass hold its tensors
        for p in policy.module.parameters():
            p.grad = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        budget.halve(failed)


def micro_batches(batch: Batch, unit: str, budget: int, *, packed: bool = False) -> list[Batch]:
    """Units of near-equal length under a budget of tokens; every rank makes the same number."""
    parts = [batch.rows(torch.tensor(rows)) for rows in cut(batch, units(batch, unit), budget, packed=packed)]
    spare = parts[0].rows(slice(0, 1))
    dummy = spare.with_(weights=torch.zeros_like(spare.weights))
    return parts + [dummy] * (distributed.largest(len(parts)) - len(parts))


def _out_of_memory(error: BaseException) -> bool:
    """torch's allocators of GPU and processor say it in different ways."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
