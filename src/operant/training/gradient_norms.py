"""Norms of gradients, updates and weights by block, which show where in the model learning happens."""

import re
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from operant import distributed
from operant.metrics.collect import BLOCKS, GRADIENTS
from operant.tally import Tally

SAMPLE = 1 << 16
"""The largest sample of one tensor, in numbers. Norms of larger tensors are estimated from an evenly spaced sample."""


def block_names(parameters: Iterable[str]) -> dict[str, str]:
    """The block of each parameter, by name. In every architecture, the first number in a name is that of the block.

    Parameters before the first block belong to `embedding`, those after it without a number to `final`, and those of a
    critic to `value`.
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


class NormRecorder:
    """Adds the norms of one update to a tally. It is made before the update, because it compares weights with those."""

    def __init__(self, policy: nn.Module, tally: Tally, *, detailed: bool = False):
        """`detailed`: also add histograms of every gradient, and the norms of weights and of their change."""
        self.tally = tally
        self.parameters = distributed.trained(policy)
        self.divided = getattr(policy, "shards", None) is not None
        self.blocks = block_names(self.parameters)
        self.detailed = detailed
        self.before = {name: _sample(p).clone() for name, p in self.parameters.items()} if detailed else {}

    def gradients(self, norms: dict[str, float]) -> None:
        """Add the gradients of an optimizer step. `norms`: their norms by parameter."""
        self._add("gradient", norms)
        if self.detailed and (self.divided or distributed.rank() == 0):  # whole ones are the same on every rank
            for name, p in self.parameters.items():
                if p.grad is not None:
                    self.tally.histogram(GRADIENTS + name, _sample(p.grad))
        self.detailed = False  # histograms of the first optimizer step only

    def whole(self, norms: dict[str, float]) -> dict[str, float]:
        """The norms of whole parameters from those of this rank's rows, if they are divided. Every rank must call."""
        return distributed.joined(norms) if self.divided else norms

    def weights(self) -> None:
        """Add the norms of the weights after the update, and of their change in it."""
        if not self.before:
            return
        now = {name: _sample(p) for name, p in self.parameters.items()}
        ratios = {name: p.numel() / max(len(now[name]), 1) for name, p in self.parameters.items()}
        sizes = {name: _norm(x, ratios[name]) for name, x in now.items()}
        changes = {name: _norm(x - self.before[name], ratios[name]) for name, x in now.items()}
        for kind, norms in (("weight", sizes), ("update", changes)):
            self._add(kind, self.whole(norms))

    def _add(self, kind: str, norms: dict[str, float]) -> None:
        """Add the norm of each block: the root of the sum of its parameters' squared norms."""
        squares: dict[str, float] = {}
        for name, norm in norms.items():
            squares[self.blocks[name]] = squares.get(self.blocks[name], 0.0) + norm**2
        for block, square in squares.items():
            self.tally.add(f"{BLOCKS}{kind}/{block}", square**0.5)


def _sample(x: Tensor) -> Tensor:
    """An evenly spaced sample of a tensor. The distance is odd, so that it does not hit the same few columns only."""
    flat = x.detach().flatten()
    step = -(-len(flat) // SAMPLE)
    return flat[:: step | 1 if step > 1 else 1]


def _norm(x: Tensor, ratio: float) -> float:
    """The norm of a tensor, estimated from a sample `x`. `ratio`: the size of the tensor over that of the sample."""
    return float(torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))) * ratio**0.5
