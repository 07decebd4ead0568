"""Memory, batches and checkpoints of ranks with whole and with divided weights: `python -m benchmarks.sharding`.

Each way of training is two gloo ranks of its own (`--ranks`), which make PPO steps of a random GPT-2 with a value head
and a reference. `held`: bytes of a rank's tensors by kind. `peak`: growth of the resident set of the first rank over
what it was before the learner was made, in a step with so many replies (`replies`); Linux forgets the peak before each
step. `largest`: the most replies in one pass whose peak stays within the budget. On a CPU there is no other memory, so
offloading is run for its numbers and cannot save any. Seconds of checkpoints include syncing to the disk.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import RESULTS, machine
from operant import distributed
from operant.engines.native.engine import NativeEngine
from operant.sampling import Sampling
from operant.storage.checkpoint import RunState
from operant.training.learner import Learner
from operant.training.sharding import Shards

WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"learner.parallel": "fsdp"},
    "fsdp, summed in the last micro-batch": {"learner.parallel": "fsdp"},
    "fsdp, offload": {"learner.parallel": "fsdp", "learner.offload": "both"},
}
SHAPES = {
    "small": {"vocab_size": 6000, "n_embd": 384, "n_layer": 6, "n_head": 6, "n_positions": 64},
    "tiny": {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
}
TOKENS = 32
"""Tokens of a prompt and its reply."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="small", help="tiny: only check that it runs")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--replies", type=int, nargs="+", default=[8, 24, 40, 56], help="of a rank in one pass")
    parser.add_argument("--budget", type=float, default=0.4, help="GB of a rank's peak, for the largest batch")
    args = parser.parse_args()
    rows = []
    # The C library returns freed tensors at once: its pools would count memory that nothing uses.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    for world, way in ((world, way) for world in args.ranks for way in WAYS):
        rows.append(of_ranks(world, way, args))
        print(json.dumps(rows[-1]), flush=True)
    if args.shape == "small":
        about = {"command": "python -m benchmarks.sharding", "machine": machine(), "load": os.getloadavg()[0]}
        about |= {"shape": SHAPES["small"], "tokens": TOKENS, "budget_gb": args.budget}
        (RESULTS / "sharding.json").write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


def of_ranks(world: int, way: str, args: argparse.Namespace) -> dict[str, Any]:
    """The row of one way of training, from the first of its ranks."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        given = (world, way, args.shape, args.replies, args.budget, folder)
        mp.start_processes(_rank, given, nprocs=world, start_method="spawn")
        return json.loads((Path(folder) / "row.json").read_text(encoding="utf-8"))


def _rank(rank: int, world: int, way: str, shape: str, replies: list[int], budget: float, folder: str) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + os.getppid() % 1000), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world), **address})
    torch.set_num_threads(1)
    with distributed.launched():
        row = measured(way, shape, replies, budget, Path(folder))
        if rank == 0:
            (Path(folder) / "row.json").write_text(json.dumps({"ranks": world, "way": way, **row}), encoding="utf-8")


def measured(way: str, shape: str, replies: list[int], budget: float, folder: Path) -> dict[str, Any]:
    from importlib import import_module

    from transformers import GPT2Config, GPT2LMHeadModel

    for name in ("_dynamo", "distributed.checkpoint", "distributed.fsdp", "distributed.tensor"):
        import_module(f"torch.{name}")  # so that the growth of memory is that of tensors
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SHAPES[shape], bos_token_id=1, eos_token_id=2)).eval()
    base = _memory("VmRSS") - _bytes(model.parameters())
    options = {"max_tokens": TOKENS, "stop_tokens": (2,), "epochs": 1, "watch_every": 0, "keep_memory": False}
    learner = Learner(model, **options | {"micro_tokens": TOKENS * max(replies)} | WAYS[way])
    shards = learner.policy.shards
    peaks, seconds = {}, {}
    with _summed_last() if "last" in way else _nothing():
        for count in sorted(replies):
            step(learner, count)
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
            begun = time.perf_counter()
            step(learner, count)
            seconds[count] = time.perf_counter() - begun
            peaks[count] = max(distributed.gathered(_memory("VmHWM") - base))
        learner.budget.tokens = TOKENS * min(replies)
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        step(learner, 4 * min(replies))
        of_four = max(distributed.gathered(_memory("VmHWM") - base))
    states = [x for values in learner.optimizer.state.values() for x in values.values()]
    own = [p for p in learner.policy.parameters()] if shards is None else list(shards.local.values())
    copy = learner.reference.policy.parameters() if shards is None else learner.reference.shards.local.values()
    held = {"weights in an update": _bytes(own), "reference at rest": _bytes(copy), "states": _bytes(states)}
    held |= {"gradients": _bytes(distributed.trained(learner.policy).values())}
    row: dict[str, Any] = {"held": held, "peak": peaks, "peak of 4 micro-batches": of_four, "seconds": seconds}
    row["largest"] = max((count for count, peak in peaks.items() if peak <= budget * 1e9), default=0)
    row["checkpoints"] = saved(learner, folder)
    if shards is not None:
        row["generation"] = generated(learner)
    return row


def step(learner: Learner, count: int) -> None:
    """A step on so many replies of each rank."""
    draw = torch.Generator().manual_seed(distributed.rank())
    ids = torch.randint(3, 90, (count, TOKENS), generator=draw)
    half = TOKENS // 2
    learner.step(list(ids[:, :half]), list(ids[:, half:]), [float(i % 3) for i in range(count)])


def saved(learner: Learner, folder: Path) -> dict[str, dict[str, float]]:
    """Bytes and seconds of each kind of checkpoint."""
    state, found = RunState(), {}
    state.ranks = distributed if learner.policy.shards is not None else None
    for name, part in learner.parts().items():
        state.register(name, part)
    for kind in ("resume", "light"):
        if state.ranks is not None or distributed.rank() == 0:
            done = state.save(folder, 1, kind=kind)
            found[kind] = {"bytes": done.bytes, "seconds": done.seconds}
    return found


def generated(learner: Learner, rows: int = 8, tokens: int = 16) -> dict[str, float]:
    """Seconds until replies are generated: by a full copy, gathering included; and by gathering block by block."""
    shards, seconds = learner.policy.shards, {}
    sampling = Sampling(max_tokens=tokens, fixed_length=True)
    prompts, keys = [[5, 6, 7, 8]] * rows, list(range(rows))
    with torch.no_grad():
        for name, model in (("full copy", learner.policy), ("block by block", shards.module)):
            if model is shards.module:  # the value head, which belongs to no block
                shards.root.unshard()
            NativeEngine(model).generate(prompts, sampling, keys)  # the modes of decoding are tried once
            if name == "full copy":
                shards.free()
            begun = time.perf_counter()
            shards.gather()
            gathered = time.perf_counter() - begun
            NativeEngine(model).generate(prompts, sampling, keys)
            seconds |= {name: time.perf_counter() - begun, f"{name}, to gather it": gathered}
    return seconds


@contextmanager
def _summed_last() -> Any:
    """Each rank keeps gradients of the whole model until the last micro-batch, where alone they are summed."""
    usual = Shards.gathering

    @contextmanager
    def gathering(self: Any, last: bool) -> Any:
        self.root.set_requires_gradient_sync(last)
        with usual(self, last):
            yield

    Shards.gathering = gathering
    yield


@contextmanager
def _nothing() -> Any:
    yield


def _bytes(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


if __name__ == "__main__":
    sys.exit(main())
