"""The workloads, and the differences that are allowed between the sides that do them."""

import random
from dataclasses import dataclass, field, replace
from typing import Any

SHAPES = {
    "124m": {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024},
    "built-in": {"vocab_size": 8192, "n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 256},
    "small": {"vocab_size": 4096, "n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 256},
    "0.3m": {"vocab_size": 512, "n_embd": 64, "n_layer": 5, "n_head": 4, "n_positions": 256},
    "30m": {"vocab_size": 8192, "n_embd": 512, "n_layer": 8, "n_head": 8, "n_positions": 256},
    "tiny": {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 256},
}
TRUNK = "no trunk: trains every layer"
VALUES = "trains a second, full-size network for values"
BESIDE = "beside one other process per core that computes"
FASTER = "the faster of float32 and bfloat16 autocast as measured here"


@dataclass(frozen=True)
class Peer:
    """A library that the work is compared with, and the differences that the work allows: what differs -> why."""

    name: str
    variant: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    differs: dict[str, str] = field(default_factory=dict)
    faster: bool = False
    """Run in the faster of float32 and bfloat16 autocast, which is measured first."""

    @property
    def label(self) -> str:
        return f"{self.name} {self.variant}".strip()


@dataclass(frozen=True)
class Work:
    """One workload: `queries` prompts of `query` tokens, each answered `groups` times with `new` tokens."""

    name: str
    about: str
    shape: str
    queries: int
    epochs: int
    minibatch: int
    peers: tuple[Peer, ...]
    query: int = 8
    new: int = 24
    groups: int = 1
    algorithm: str = "ppo"
    reference: bool = True
    lengths: tuple[int, int] | None = None
    presets: tuple[str, ...] = ("trl",)
    options: dict[str, Any] = field(default_factory=dict)
    busy: bool = False
    """Measured beside one other process per core that computes."""

    def spec(self, seed: int = 0) -> dict[str, Any]:
        """The specification of the work as plain JSON, which every side receives."""
        draw = random.Random(seed)
        lengths = [draw.randint(*self.lengths) for _ in range(self.queries)] if self.lengths else None
        fields = {name: getattr(self, name) for name in ("queries", "query", "new", "groups", "epochs", "minibatch")}
        fields |= {name: getattr(self, name) for name in ("algorithm", "reference", "presets", "options")}
        return fields | {"shape": SHAPES[self.shape], "lengths": lengths, "seed": seed, "precision": "float32"}

    def quick(self) -> "Work":
        """A tiny work of the same kind, to check that every side runs; not a measurement."""
        rows = max(1, 16 // self.groups)
        lengths = (2, 12) if self.lengths else None
        small = {"shape": "tiny", "queries": rows, "minibatch": min(self.minibatch, 8) if self.epochs > 1 else 16}
        return replace(self, **small, new=12, lengths=lengths, about=f"{self.about} (quick)")


OLD = Peer("trl-0.11.4")
LAST = Peer("trl-1.12.0", differs={"trained": VALUES})
TRUNKLESS = (replace(OLD, differs={"trained": TRUNK}), replace(LAST, differs={"trained": f"{TRUNK}; {VALUES}"}))
GROUPS = (Peer("trl-1.16.0", "generate"), Peer("trl-1.16.0", "continuous batching", {"continuous": True}))

_W1 = Work(
    "W1", "GPT-2 124M, 32 queries of 8 + 24 tokens, 4 epochs, minibatch 8, float32", "124m", 32, 4, 8, (OLD, LAST)
)
_W3 = Work(
    "W3",
    "ragged: built-in shape, 128 queries, replies of 4 to 64 tokens, 4 epochs, minibatch 8",
    "built-in",
    128,
    4,
    8,
    (OLD,),
    lengths=(4, 64),
    new=64,
)
_W4 = Work(
    "W4",
    "4 layers x 256, vocabulary 4,096, 256 queries of 8 + 24 tokens, 4 epochs, minibatch 32",
    "small",
    256,
    4,
    32,
    (OLD,),
)
_W5 = Work("W5", "8 prompts x 8 samples, 8 + 24 tokens, one optimizer step, KL 0", "built-in", 8, 1, 64, GROUPS)
_W5 = replace(_W5, groups=8, reference=False, presets=())
_BEST = {"model.precision": "bfloat16"}


def _group(name: str, shape: str, algorithm: str) -> Work:
    about = f"{algorithm.upper()}, {'GPT-2 124M' if shape == '124m' else 'built-in shape'}, {_W5.about}"
    return replace(_W5, name=name, about=about, shape=shape, algorithm=algorithm)


WORKS = {
    work.name: work
    for work in (
        _W1,
        replace(
            _W1,
            name="W2",
            about=f"as W1 with our trunk and bfloat16; the peers in {FASTER}",
            presets=("trl", "trunk"),
            options=_BEST,
            peers=tuple(replace(p, faster=True, differs=p.differs | {"precision": FASTER}) for p in TRUNKLESS),
        ),
        _W3,
        _W4,
        replace(_W4, name="W4t", about=f"{_W4.about}; our trunk", presets=("trl", "trunk"), peers=TRUNKLESS),
        replace(_W4, name="W4s", about="as W4 with 5 layers x 64, vocabulary 512: 0.3M parameters", shape="0.3m"),
        replace(
            _W4,
            name="W4l",
            about="as W4 with 8 layers x 512, vocabulary 8,192, and 64 queries: 30M parameters",
            shape="30m",
            queries=64,
        ),
        _group("W5a", "built-in", "grpo"),
        _group("W5a-rloo", "built-in", "rloo"),
        _group("W5b", "124m", "grpo"),
        _group("W5b-rloo", "124m", "rloo"),
    )
}
WORKS |= {
    f"{name}-busy": replace(WORKS[name], name=f"{name}-busy", about=f"{WORKS[name].about}; {BESIDE}", busy=True)
    for name in ("W3", "W4", "W4s", "W5a")
}
"""Workloads whose sides take turns at equal work. W6 (scale.py) and W7 (learning.py) are measured separately."""
COUNTED = ("tokens", "optimizer_steps", "batch", "minibatch", "epochs", "precision", "trained")
"""Counts and settings that must be equal on two sides."""


class WorkDiffers(Exception):
    """Two sides did not do the same work, and the workload does not allow the difference."""


def compare(ours: dict[str, Any], theirs: dict[str, Any], allowed: dict[str, str]) -> list[str]:
    """The differences between two sides, in words. Raises: WorkDiffers for one that is not allowed or not reported."""
    differences = []
    for what in COUNTED:
        if what not in ours or what not in theirs:
            raise WorkDiffers(f"only one side reports {what}: {ours.get(what)} and {theirs.get(what)}")
        if ours[what] == theirs[what]:
            continue
        if what not in allowed:
            raise WorkDiffers(f"{what}: {ours[what]} here, {theirs[what]} there")
        differences.append(f"{what} {_plain(ours[what])} here, {_plain(theirs[what])} there: {allowed[what]}")
    return differences


def _plain(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
