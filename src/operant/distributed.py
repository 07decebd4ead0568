"""Ranks, sums over ranks, and sharding. No other file imports `torch.distributed`.

torch's DistributedDataParallel would average the gradients of the ranks. Here they are summed, because the weights of a
loss sum to 1 over the whole minibatch. Several ranks are started by `torchrun --nproc-per-node 2 -m operant train ...`.
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
    """Number of ranks: processes that share the work."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Number of this rank, from 0."""
    return dist.get_rank() if world() > 1 else 0


@contextmanager
def launched() -> Iterator[None]:
    """Open the process group that torchrun asks for, and close it at the end. Without torchrun, do nothing."""
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
    """Sum of a tensor over ranks. Use float64 for scalars that become denominators."""
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
    """The objects that the ranks pass, in order of rank. Every rank must call."""
    if world() == 1:
        return [thing]
    out: list[Any] = [None] * world()
    dist.all_gather_object(out, thing)
    return out


def deal(keys: Sequence[Hashable]) -> list[int]:
    """Divide the indices of `keys` among the ranks; returns this rank's, in order.

    Indices of equal keys go to the same rank: the one that has the fewest so far.
    """
    groups: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    dealt: list[list[int]] = [[] for _ in range(world())]
    for indices in groups.values():
        min(dealt, key=len).extend(indices)
    return sorted(dealt[rank()])


def agree(error: OperantError | None) -> None:
    """Raise an error that any rank has met on all of them, so that no rank waits for another.

    Every rank must call, also without an error.
    """
    messages = gathered(None if error is None else str(error))
    if error is not None:
        raise error
    message = next((text for text in messages if text is not None), None)
    if message is not None:
        raise OperantError(message)


def together(work: Callable[[], Item]) -> Item:
    """Call `work` and return its result. An OperantError on one rank is raised on all. Every rank must call."""
    failed, made = None, None
    try:
        made = work()
    except OperantError as error:
        failed = error
    agree(failed)
    return made  # pyright: ignore[reportReturnType]: `agree` raises if there is no result


def align(parameters: Iterable[Tensor]) -> None:
    """Copy the parameters of rank 0 to every rank, so that randomly initialised ones are equal."""
    if world() > 1:
        for p in parameters:
            dist.broadcast(p.detach(), 0)


class GradientSum:
    """A module whose gradients DistributedDataParallel sums over ranks. In one process it is the module itself."""

    def __init__(self, module: nn.Module, *, idle: bool = False):
        """`idle`: some parameters have no gradient, so the ranks must not wait for one."""
        self.module = module
        self.forward: Any = module
        if world() > 1:
            with warnings.catch_warnings():  # the new name of `broadcast_buffers` is not in every torch
                warnings.simplefilter("ignore", FutureWarning)
                self.forward = DistributedDataParallel(
                    module, broadcast_buffers=False, init_sync=False, find_unused_parameters=idle
                )
            self.forward.register_comm_hook(None, _summed)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def gathering(self, last: bool) -> AbstractContextManager[Any]:
        """Context for the forward and backward pass of a micro-batch: gradients are summed in the `last` one only."""
        return nullcontext() if last or world() == 1 else self.forward.no_sync()


def _summed(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum a bucket of gradients over ranks, where DistributedDataParallel would average it."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None  # an asynchronous call returns one
    return work.get_future().then(lambda future: future.value()[0])


def pool(tally: Tally) -> Tally:
    """Merge the tallies of all ranks into one."""
    pooled = Tally()
    for other in gathered(tally):
        pooled.merge(other)
    return pooled
