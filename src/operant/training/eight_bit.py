"""AdamW whose two moments take one byte each: 2 bytes per weight instead of 8.

After Dettmers et al., 2022 (arXiv:2110.02861): every 256 numbers share a scale, and the 256 codes of a byte are denser
near 0. Two things differ from the paper. The codes are powers of evenly spaced numbers, the 2nd power for the first
moment and the 4th for the second, so no table is needed. And a number between two codes is rounded up in some steps and
down in others, so that its mean over the steps is correct: with rounding to the nearest code, a second moment that
decays by a thousandth per step would never change.
"""

from typing import Any

import torch
from torch import Tensor

from operant.training.optimizer import MasterAdamW

BLOCK = 256
"""The number of moments that share a scale."""
CHUNK = {"cpu": 1 << 18}
"""The number of moments that are unpacked at a time; on a processor, so few that they stay in its cache."""
KINDS = {"first": torch.int8, "first_scale": torch.float32, "second": torch.uint8, "second_scale": torch.float32}
"""The type of each part of the state."""
TURNS = (0.7548776662466927, 0.5698402909980532)
"""Powers of the inverse plastic number. Multiples of the first spread evenly over places, of the second over steps."""


class EightBit(MasterAdamW):
    """torch's AdamW with moments of 8 bits. A resumed run is bit-identical."""

    @torch.no_grad()
    def move(self, shrink: float) -> None:
        """Make a step of every parameter that has a gradient, with the gradient times `shrink`."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if shrink != 1:
                        p.grad.mul_(shrink)
                    if not self.state[p]:  # all moments begin at 0
                        blocks = -(-p.numel() // BLOCK)
                        self.state[p]["step"] = torch.zeros((), dtype=torch.float32)
                        for name, kind in KINDS.items():
                            width = 1 if name.endswith("scale") else BLOCK
                            self.state[p][name] = torch.zeros(blocks, width, dtype=kind, device=p.device)
                    _step(p, self.state[p], group)

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """torch converts loaded states to the dtype of the parameter; this converts them back, without loss."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state |= {name: state[name].to(kind) for name, kind in KINDS.items() if name in state}


def _step(p: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    """Make an AdamW step of one parameter in chunks: unpack the moments, update them and the weights, pack them."""
    state["step"] += 1
    t, (beta1, beta2) = int(state["step"]), group["betas"]
    p.mul_(1 - group["lr"] * group["weight_decay"])
    size, root = group["lr"] / (1 - beta1**t), (1 - beta2**t) ** 0.5
    turn = _turn(t, p.device)
    flat, gradient = p.detach().reshape(-1), p.grad.reshape(-1)
    chunk = CHUNK.get(p.device.type, 1 << 24)
    for start in range(0, p.numel(), chunk):
        piece = slice(start, min(start + chunk, p.numel()))
        rows = slice(start // BLOCK, -(-piece.stop // BLOCK))
        packed = {name: state[name][rows] for name in KINDS}
        g = gradient[piece].float()
        g = torch.nn.functional.pad(g, (0, -len(g) % BLOCK)).view(-1, BLOCK)
        first = unpack_first(packed["first"], packed["first_scale"]).lerp_(g, 1 - beta1)
        second = unpack_second(packed["second"], packed["second_scale"]).mul_(beta2).addcmul_(g, g, value=1 - beta2)
        change = first / (second.sqrt() / root + group["eps"])
        flat[piece].add_(change.view(-1)[: piece.stop - start], alpha=-size)
        pack_first(first, turn, packed["first"], packed["first_scale"])
        pack_second(second, turn, packed["second"], packed["second_scale"])
    if flat.data_ptr() != p.data_ptr():  # `p` is not contiguous, so `flat` is a copy
        p.copy_(flat.view_as(p))


def _turn(step: int, device: torch.device) -> Tensor:
    """[256] thresholds in [0, 1) of a step. Over the steps, those of each place are spread evenly."""
    place = torch.arange(BLOCK, dtype=torch.float64, device=device)
    return ((place * TURNS[0] + step * TURNS[1]) % 1).float()


def unpack_first(codes: Tensor, scale: Tensor) -> Tensor:
    """[R, 256] of int8 -> float32."""
    x = codes.float().div_(127)
    return x.mul_(x.abs()).mul_(scale)


def unpack_second(codes: Tensor, scale: Tensor) -> Tensor:
    """[R, 256] of uint8 -> float32."""
    return codes.float().div_(255).square_().square_().mul_(scale)


def pack_first(x: Tensor, turn: Tensor, codes: Tensor, scale: Tensor) -> None:
    """Write [R, 256] numbers of either sign as int8 and a scale.

    turn: [256] thresholds, which round the code and not the number. This adds a little to small numbers (a quarter of
    the squared distance of codes), which does not accumulate, because a tenth of the moment is forgotten per step.
    """
    size = x.abs()
    scale.copy_(size.amax(1, keepdim=True))
    code = size.div_(scale.clamp(min=1e-38)).sqrt_().mul_(127).add_(turn).floor_().clamp_(max=127)
    codes.copy_(code.copysign_(x))


def pack_second(x: Tensor, turn: Tensor, codes: Tensor, scale: Tensor) -> None:
    """Write [R, 256] numbers of at least 0 as uint8 and a scale. Numbers above 0 stay above 0, for they divide."""
    scale.copy_(x.amax(1, keepdim=True))
    code = (x / scale.clamp(min=1e-38)).sqrt_().sqrt_().mul_(255)
    below = code.floor().clamp_(max=254)
    part = code.sub_(below)
    # From the fraction of the code to the fraction of the number, its 4th power q^4, to first order in 1 / q.
    part.addcdiv_(part * (1 - part), below + 1, value=-1.5)
    up = (part > turn) | ((below == 0) & (x > 0))
    codes.copy_(below.add_(up))
