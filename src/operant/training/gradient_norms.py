"""Norms of gradients, updates and weights, block by block: where in the model the learning happens."""

import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from operant import distributed
from operant.metrics.collect import BLOCKS, GRADIENTS
from operant.tally import Tally

SAMPLE = 1 << 16
"""Numbers of one tensor that a close look sees, evenly over it: of larger ones, norms are estimated from these."""


def block_names(parameters: Iterable[str]) -> dict[str, str]:
    """The block of each parameter's name: the first number in it counts the blocks, in any architecture.

    What comes before the first block is `embedding`, what comes after `final`; a critic is `value`.
    """
    names = list(parameters)
    sided = any(".encoder." in name for name in names)
    out, seen = {}, set[str]()
    for name in names:
        side = next((s for s in ("encoder", "decoder") if sided and f".{s}." in name), "")
        numbered = re.match(r".*?\.(\d+)\.", name)
        if name.startswith(("value_head", "critic")):
            out[name] = "value"
        elif numbered:
            out[name] = f"{side} block {numbered[1]}".strip()
            seen |= {side, ""}
        else:
            out[name] = "final" if side in seen else "embedding"
    return out


class Watch:
    """The parts of a policy that are looked at: made once a step, before its update."""

    def __init__(self, policy: nn.Module, tally: Tally, *, detailed: bool = False):
        """`detailed`: also histograms of every gradient, and norms of weights and of their change."""
        self.tally = tally
        self.held = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        self.blocks = block_names(self.held)
        self.detailed = detailed
        self.before = {name: _sample(p).clone() for name, p in self.held.items()} if detailed else {}

    def gradients(self, norms: dict[str, float]) -> None:
        """Note the gradients of an optimizer step, whose norms by parameter are known."""
        self._note("gradient", norms)
        if self.detailed and distributed.rank() == 0:  # they are the same on every rank
            for name, p in self.held.items():
                if p.grad is not None:
                    self.tally.histogram(GRADIENTS + name, _sample(p.grad))
        self.detailed = False  # the first optimizer step stands for all

    def weights(self) -> None:
        """Note the weights after the update, and how far they have moved in it."""
        if not self.before:
            return
        now = {name: _sample(p) for name, p in self.held.items()}
        whole = {name: p.numel() / max(len(now[name]), 1) for name, p in self.held.items()}
        self._note("weight", {name: _norm(x, whole[name]) for name, x in now.items()})
        self._note("update", {name: _norm(x - self.before[name], whole[name]) for name, x in now.items()})

    def _note(self, kind: str, norms: dict[str, float]) -> None:
        squares: dict[str, float] = {}
        for name, norm in norms.items():
            squares[self.blocks[name]] = squares.get(self.blocks[name], 0.0) + norm**2
        for block, square in squares.items():
            self.tally.add(f"{BLOCKS}{kind}/{block}", square**0.5)


def _sample(x: Tensor) -> Tensor:
    """Numbers evenly over a tensor; at odd distances, so that they do not all stand in the same few columns."""
    flat = x.detach().flatten()
    step = -(-len(flat) // SAMPLE)
    return flat[:: step | 1 if step > 1 else 1]


def _norm(x: Tensor, times: float) -> float:
    """Of a tensor of which x is one number in so many."""
    return float(torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))) * times**0.5
