"""Ranks, sums and sharding: the only importer of `torch.distributed`. One process is the reference.

Gradients are gathered by torch's DistributedDataParallel; weights are shares of the whole minibatch, so they are summed
over ranks where it would average. Started by `torchrun --nproc-per-node 2 -m operant train ...`.
"""

import os
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from operant.tally import Tally
from operant.types import OperantError

Item = TypeVar("Item")


def world() -> int:
    """How many processes share the work."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if world() > 1 else 0


@contextmanager
def launched() -> Iterator[None]:
    """The process group that torchrun has asked for, while this lasts; nothing without it, or where one is there."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ or dist.is_initialized():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


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
    """Maximum of one whole number over ranks."""
    return int(_maximum(torch.tensor(x))) if world() > 1 else x


def largest_float(x: float) -> float:
    """Maximum of one number over ranks."""
    return float(_maximum(torch.tensor(x, dtype=torch.float64))) if world() > 1 else x


def _maximum(x: Tensor) -> Tensor:
    dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


def gathered(thing: Any) -> list[Any]:
    """What every rank holds, in order of rank."""
    if world() == 1:
        return [thing]
    out: list[Any] = [None] * world()
    dist.all_gather_object(out, thing)
    return out


def deal(keys: Sequence[Hashable]) -> list[int]:
    """This rank's places, in order: those of one key go together, to the rank that has the fewest so far."""
    held: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        held.setdefault(key, []).append(place)
    dealt: list[list[int]] = [[] for _ in range(world())]
    for places in held.values():
        min(dealt, key=len).extend(places)
    return sorted(dealt[rank()])


def agree(error: OperantError | None) -> None:
    """Raise on every rank what one of them ran into, so that none waits for it.

    Every rank must call, also with no error.
    """
    met = gathered(None if error is None else str(error))
    if error is not None:
        raise error
    said = next((text for text in met if text is not None), None)
    if said is not None:
        raise OperantError(said)


def together(work: Callable[[], Item]) -> Item:
    """What `work` makes on this rank; what it runs into on one rank is raised on all. Every rank must call."""
    failed, made = None, None
    try:
        made = work()
    except OperantError as error:
        failed = error
    agree(failed)
    return made  # pyright: ignore[reportReturnType]: or `agree` has raised


def align(parameters: Iterable[Tensor]) -> None:
    """Give every rank the numbers of the first: what was drawn afresh is then the same."""
    if world() > 1:
        for p in parameters:
            dist.broadcast(p.detach(), 0)


class Together:
    """A module whose gradients are summed over ranks, by DistributedDataParallel; in one process, the module itself."""

    def __init__(self, module: nn.Module, *, idle: bool = False):
        """`idle`: there are parameters that no loss reaches, which must not be waited for."""
        self.module = module
        self.forward: Any = module
        if world() > 1:
            with warnings.catch_warnings():  # the new name of `broadcast_buffers` is not in every torch
                warnings.simplefilter("ignore", FutureWarning)
                given = {"broadcast_buffers": False, "init_sync": False, "find_unused_parameters": idle}
                self.forward = DistributedDataParallel(module, **given)
            self.forward.register_comm_hook(None, _summed)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def gathering(self, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch: only the `last` one's backward talks to the other ranks."""
        return nullcontext() if last or world() == 1 else self.forward.no_sync()


def _summed(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum a bucket of gradients; without this, they would be averaged."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None  # for asynchronous ones there is one
    return work.get_future().then(lambda future: future.value()[0])


def pool(tally: Tally) -> Tally:
    """One tally of all ranks'."""
    pooled = Tally()
    for other in gathered(tally):
        pooled.merge(other)
    return pooled
