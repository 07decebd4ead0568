"""Shared by the exactness tests: rollouts written by hand, captured gradients, and several ranks."""

import os
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from processes import Child

from operant import distributed
from operant.storage.checkpoint import RunState
from operant.types import Batch, Rollout, Task, Turn


def said(prompt: list[int], action: list[int], *, group: int = 0, **turn) -> Rollout:
    only = Turn(prompt, action, **turn)
    return Rollout(Task(f"task/{group}", prompt), group, [only], [""], only.end)


def wider(batch: Batch, more: int, ids: int, numbers: float) -> Batch:
    """The batch with `more` columns of padding, which has the id `ids`; places without action get `numbers`."""
    changed = {}
    for name in ("tokens", "mask", "actions", "turns"):
        value = getattr(batch, name)
        extra = torch.full((len(batch), more), {"tokens": ids, "turns": -1}.get(name, False), dtype=value.dtype)
        changed[name] = torch.cat([value, extra], 1)
    changed["tokens"] = torch.where(changed["mask"], changed["tokens"], ids)
    for name in ("rewards", "logprobs", "raw_logprobs", "ref_logprobs", "kl", "values", "advantages", "returns"):
        value = getattr(batch, name)
        if value is not None:
            value = torch.cat([value, torch.zeros(len(batch), more)], 1)
            changed[name] = torch.where(changed["actions"], value, numbers)
    return batch.with_(**changed)


def pushed_right(batch: Batch, junk: int) -> Batch:
    """The same rows padded on the left with `junk`."""
    width = batch.tokens.shape[1]
    places = (torch.arange(width) - (width - batch.mask.sum(1))[:, None]) % width
    moved = {n: getattr(batch, n).gather(1, places) for n in ("tokens", "mask", "actions", "turns", "rewards")}
    return batch.with_(**moved | {"tokens": torch.where(moved["mask"], moved["tokens"], junk)})


def scores(policy) -> torch.Tensor:
    """The log-probs of two replies."""
    with torch.no_grad():
        return policy.forward(Batch.given([[3, 4, 5, 6], [7, 8]], [[9, 10], [11, 12]])).logprobs


class Caught(torch.optim.Optimizer):
    """An optimizer that changes no weight and records the gradient of every step as one vector in float64."""

    def __init__(self, parameters):
        super().__init__(list(parameters), {"lr": 0.0})
        self.gradients = []

    def step(self):
        parameters = [p for group in self.param_groups for p in group["params"]]
        pieces = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten().double() for p in parameters]
        self.gradients.append(torch.cat(pieces))


def gap(mine: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference over the norm of the truth."""
    return float((mine.double() - truth.double()).norm() / truth.double().norm())


def alike(a, b) -> bool:
    """Whether two nested states are the same to the bit, with the same types, dtypes and order; nan is like nan."""
    if isinstance(a, torch.Tensor):
        pair = (x.detach().contiguous().flatten().view(torch.uint8) for x in (a, b))
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*pair)
    if isinstance(a, dict):
        return list(a) == list(b) and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
    return type(a) is type(b) and a == b


def state_of(learner) -> RunState:
    state = RunState()
    for name, part in learner.parts().items():
        state.register(name, part)
    state.ranks = distributed if learner.policy.shards is not None else None
    return state


# --- several ranks ----------------------------------------------------------------------------------------------------
def fork_server():
    """Processes that have imported everything and started no thread: they start quickly and safely."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["operant.api", "transformers.models.gpt2.modeling_gpt2"])
    return context


def on_ranks(work, world: int, *args, deadline: float = 120.0) -> list:
    """Return what `work(rank, world, *args)` returned on each of `world` gloo processes, which rendezvous in a file."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [Child(partial(_rank, work, r, world, folder, args)) for r in range(world)]
        end = time.monotonic() + deadline
        while any([rank.running() for rank in ranks]) and time.monotonic() < end:
            time.sleep(0.01)
        late = [r for r, rank in enumerate(ranks) if rank.running()]
        for r in late:
            ranks[r].kill()
        codes = [rank.ends() for rank in ranks]
        assert not late, f"ranks {late} of {world} still ran after {deadline:.0f} s"
        assert codes == [0] * world
        return [torch.load(Path(folder) / f"{r}.pt", weights_only=False) for r in range(world)]


def _rank(work, rank: int, world: int, folder: str, args: tuple) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    try:
        torch.save(work(rank, world, *args), Path(folder) / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def partitions(count: int):
    """Every way to cut a row of `count` things into pieces."""
    for marks in range(2 ** (count - 1)):
        yield list(pairwise([0, *(i + 1 for i in range(count - 1) if marks >> i & 1), count]))


SCORES = [0.5, -1.0, 2.0, 0.25, 3.0, -0.5, 1.5]
REPLIES = [([5, 6], [7] * 9), ([4], [8, 2]), ([9, 9, 9], [10, 11, 12]), ([5], [6]), ([7, 3], [3] * 5)]
REPLIES += [([6], [4, 4]), ([5], [9] * 4)]
DEALT = [[0, 2, 4, 6], [1, 3, 5]]
"""Who holds which of the replies: 21 tokens on rank 0, 5 on rank 1."""
