"""Ranks, and sums over ranks. Beside `training/sharding.py`, no other file imports `torch.distributed`.

torch's DistributedDataParallel would average the gradients of the ranks. Here they are summed, because the weights of a
loss sum to 1 over the whole minibatch. Several ranks are started by `torchrun --nproc-per-node 2 -m operant train ...`.
"""

import hashlib
import json
import os
import time
import uuid
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from operant.machine import beat
from operant.tally import Tally
from operant.types import Divided, HeardError, OperantError, StoppedError, shown

Item = TypeVar("Item")
MEETING = timedelta(minutes=5)
"""How long the ranks wait for each other at the start."""
met = False
"""Whether this process has looked for other ranks: before, an error is most likely that of all of them."""
store: dist.Store | None = None
"""Where the ranks that `launched` has brought together leave words for each other."""
WAIT = 30.0
"""Minutes that a rank waits for the others afterwards, unless `launched` is told otherwise: torch's own default."""


def world() -> int:
    """Number of ranks: processes that share the work."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Number of this rank, from 0."""
    return dist.get_rank() if world() > 1 else 0


@contextmanager
def launched(minutes: float = 0.0) -> Iterator[None]:
    """Open the process group that torchrun asks for, and close it at the end. Without torchrun, do nothing.

    minutes: how long a rank waits for the others before it ends; 0: 30 minutes.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ or dist.is_initialized():
        yield
        return
    global met, store
    met = True
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        meeting, number, count = next(dist.rendezvous("env://", timeout=MEETING))
        store = fresh_store(meeting, number, count)
        options = {"store": store, "rank": number, "world_size": count}
        dist.init_process_group(backend, timeout=timedelta(minutes=minutes or WAIT), **options)
    except (RuntimeError, ValueError) as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        alone = f"rank {os.environ['RANK']} did not find the other {int(os.environ['WORLD_SIZE']) - 1} at {place}"
        how = "its port must be free (--master-port) and every rank must be started, within 5 minutes"
        raise OperantError(f"{alone}: {_first_line(error)}; the first rank listens there, so {how}") from error
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        what = f"lost another rank, which has ended or has not answered for {minutes or WAIT:g} minutes"
        how = "the same command with --resume goes on from the last checkpoint"
        raise OperantError(f"rank {number} of {count} {what}: {_first_line(error)}; {how}") from error
    finally:
        store = None
        dist.destroy_process_group()


def fresh_store(store: dist.Store, number: int, count: int) -> dist.Store:
    """A part of the store that no earlier start of the job has used.

    A restarted job (`torchrun --max-restarts`) may get the store of its last try, with the keys of processes that are
    gone, and the number of the restart differs between machines that joined at different times. So rank 0 draws a new
    name, and tells it each of the ranks that ask now.
    """
    name, mine = uuid.uuid4().hex, uuid.uuid4().hex
    if number:
        store.set(f"operant/asks/{number}", mine)
        name = store.get(f"operant/answer/{mine}").decode()
        store.set(f"operant/{name}/{number}", mine)
        return dist.PrefixStore(name, store)
    missing, end = set(range(1, count)), time.monotonic() + MEETING.total_seconds()
    while missing:
        for other in missing:
            if store.check([f"operant/asks/{other}"]):
                store.set(f"operant/answer/{store.get(f'operant/asks/{other}').decode()}", name)
        time.sleep(0.02)
        missing = {other for other in missing if not store.check([f"operant/{name}/{other}"])}
        if missing and time.monotonic() > end:
            raise RuntimeError(f"ranks {sorted(missing)} are missing")
    return dist.PrefixStore(name, store)


def _first_line(error: Exception) -> str:
    """What torch says of an error, without where in torch's source it happened."""
    return str(error).partition("\n")[0].rpartition("] ")[2].partition(". This is typically")[0].rstrip(".")


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
    """Maximum of one count over ranks."""
    return int(largest_float(x))


def largest_float(x: float) -> float:
    """Maximum of one number over ranks."""
    most = torch.tensor(x, dtype=torch.float64)
    if world() > 1:
        dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def gathered(thing: Item) -> list[Item]:
    """The objects that the ranks pass, in order of rank. Every rank must call."""
    out = [thing] * world()
    if world() > 1:
        dist.all_gather_object(out, thing)
    return out


def numbers(places: Sequence[int | None]) -> list[int]:
    """A number for each of this rank's things, unique over all ranks: its place, if all places are known and unique."""
    of_all_ranks = [place for part in gathered(list(places)) for place in part]
    if None in of_all_ranks or len(set(of_all_ranks)) < len(of_all_ranks):  # from elsewhere, or from several calls
        return [rank() + world() * i for i in range(len(places))]
    return [place for place in places if place is not None]


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

    Every rank must call, also without an error. The first rank that has met it raises it as it is, and the others raise
    a `HeardError`, which the command line does not print again. Where all others have met none, a stop is one of all.
    """
    stops = isinstance(error, StoppedError)
    found = gathered(None if error is None else (str(error), isinstance(error.__cause__, OSError), stops))
    heard = min((one for one in found if one is not None), key=lambda one: one[2], default=None)
    if heard is None:
        return
    if error is None or stops or [one and one[0] for one in found].index(str(error)) != rank():
        error = (StoppedError if heard[2] else HeardError)(heard[0])
        error.__cause__ = OSError() if heard[1] else None  # who calls may go on without the disk
    vars(error)["agreed"] = True  # every rank raises it: all may write together once more
    raise error


def check_equal(what: str, facts: Mapping[str, object]) -> None:
    """Raise OperantError on all ranks if they pass different facts, with the first one that differs.

    what: the facts in a word or two. facts: plain data by name; in the order in which they are compared.
    """
    text = json.dumps(facts, default=str)
    if len(set(gathered(hashlib.sha256(text.encode()).hexdigest()))) == 1:
        return
    every = [json.loads(other) for other in gathered(text)]
    names = dict.fromkeys(name for each in every for name in each)
    name = next(name for name in names if any(each.get(name) != every[0].get(name) for each in every))
    by_value: dict[str, list[int]] = {}
    for number, each in enumerate(every):
        by_value.setdefault(shown(each.get(name)), []).append(number)
    told = []
    for value, on in by_value.items():
        more = f" and {len(on) - 3} more" if len(on) > 3 else ""
        told.append(f"{value} on rank{'s' * (len(on) > 1)} {', '.join(map(str, on[:3]))}{more}")
    differs = f"the ranks have different {what}: {name} is {'; '.join(told)}"
    agree(OperantError(f"{differs}. Start every rank with the same command, versions and files"))


def on_first(work: Callable[[], Item]) -> Item:
    """Call `work` on the first rank alone and return its result. An OperantError is raised on all. Every rank must
    call."""
    return gathered(together(lambda: [work()] if rank() == 0 else []))[0][0]


def together(work: Callable[[], Item]) -> Item:
    """Call `work` and return its result. An OperantError on one rank is raised on all. Every rank must call.

    The ranks wait for each other as long as it takes: one may wait for people, and a collective would time out.
    """
    failed, made, pause = None, None, 1e-3
    try:
        made = work()
    except OperantError as error:
        failed = error
    if store is not None:
        here = store.add("arrived", 1)  # of all calls: those of this one are up to the next multiple of the ranks
        while store.add("arrived", 0) < -(-here // world()) * world():
            time.sleep(pause := min(2 * pause, 0.05))
            beat()
    agree(failed)
    return made  # pyright: ignore[reportReturnType]: `agree` raises if there is no result


def align(parameters: Iterable[Tensor]) -> None:
    """Copy the parameters of rank 0 to every rank, so that randomly initialised ones are equal."""
    if world() > 1:
        for p in parameters:
            dist.broadcast(p.detach(), 0)


class GradientSum:
    """A module whose gradients DistributedDataParallel sums over ranks. In one process it is the module itself."""

    def __init__(self, module: nn.Module):
        self.module: Any = module
        self.forward: Any = module
        if world() > 1:
            with warnings.catch_warnings(action="ignore", category=FutureWarning):  # `broadcast_buffers` has a new name
                # Ranks would wait for weights that no text reads, such as a vision tower's. Without one, torch warns.
                module.idle = nn.Parameter(torch.zeros(1, device=next(module.parameters()).device))
                how = {"broadcast_buffers": False, "init_sync": False, "find_unused_parameters": True}
                self.forward = DistributedDataParallel(module, **how)
                del module.idle
            self.forward.register_comm_hook(None, _summed)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.forward(*args, **kwargs)

    def gathering(self, last: bool) -> AbstractContextManager[None]:
        """Context for the forward and backward pass of a micro-batch: gradients are summed in the `last` one only."""
        return nullcontext() if last or world() == 1 else self.forward.no_sync()

    def gather(self) -> None:
        """Make the module whole, if its parameters are divided over the ranks. Every rank must call."""


def _summed(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sum a bucket of gradients over ranks, where DistributedDataParallel would average it."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def bounds(rows: int) -> slice:
    """Which of so many rows this rank has: all ranks the same number, rounded up, and the last ones what is left."""
    each = -(-rows // world())
    return slice(min(each * rank(), rows), min(each * (rank() + 1), rows))


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that an optimizer changes, by name: of a divided module, this rank's rows."""
    shards = getattr(module, "shards", None)
    return {n: p for n, p in module.named_parameters() if p.requires_grad} if shards is None else shards.trained


def joined(norms: Mapping[str, float]) -> dict[str, float]:
    """The norms of tensors whose rows are divided over the ranks, from the norms of the rows."""
    squares = total(torch.tensor([*norms.values()], dtype=torch.float64).square())
    return dict(zip(norms, squares.sqrt().tolist(), strict=True))


def write_parts(folder: str, parts: Mapping[str, Divided]) -> None:
    """Write the parts of all ranks into a folder, a safetensors file each, by torch's distributed checkpoint.

    Every rank calls it, with the same names. Nothing is pickled. Raises: OSError.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    state: dict[str, Any] = {}
    for name, part in parts.items():
        mesh = init_device_mesh(part.rows.device.type, (world(),))
        known = {"shape": torch.Size(part.shape), "stride": torch.empty(part.shape, device="meta").stride()}
        state[name] = DTensor.from_local(part.rows, mesh, [Shard(0)], run_check=False, **known)
    try:
        dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(folder, save_distributed=True))
    except CheckpointException as error:
        raise OSError(None, f"rank {min(error.failures)}: {error.failures[min(error.failures)][0]}") from error


def pool(tally: Tally) -> Tally:
    """Merge the tallies of all ranks into one."""
    pooled = Tally()
    for other in gathered(tally):
        pooled.merge(other)
    return pooled
