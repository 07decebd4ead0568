"""Ranks, sums and sharding: the only importer of `torch.distributed`. One process is the reference."""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from operant.tally import Tally

Item = TypeVar("Item")


def world() -> int:
    """How many processes share the work."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world() > 1 else 0


def total(x: Tensor) -> Tensor:
    """Sum over ranks, float64 in and out for scalars that become denominators."""
    if world() > 1:
        x = x.clone()
        dist.all_reduce(x)
    return x


def total_float(x: float) -> float:
    """Sum of one number over ranks."""
    return float(total(torch.tensor(x, dtype=torch.float64))) if world() > 1 else float(x)


def largest(x: int) -> int:
    """Maximum of one number over ranks."""
    if world() == 1:
        return x
    held = torch.tensor(x)
    dist.all_reduce(held, dist.ReduceOp.MAX)
    return int(held)


def gathered(thing: Any) -> list[Any]:
    """What every rank holds, in order of rank."""
    if world() == 1:
        return [thing]
    out: list[Any] = [None] * world()
    dist.all_gather_object(out, thing)
    return out


def shard(items: Sequence[Item]) -> list[Item]:
    """This rank's part: every n-th item."""
    return list(items[rank() :: world()])


def sum_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Add up every rank's gradients. Weights are shares of the whole minibatch, so the sum is its gradient."""
    if world() == 1:
        return
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)


def pool(tally: Tally) -> Tally:
    """One tally of all ranks'."""
    pooled = Tally()
    for other in gathered(tally):
        pooled.merge(other)
    return pooled
