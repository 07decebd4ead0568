"""An embedding whose gradient touches the rows that were looked up, and no others.

torch makes a gradient of the whole table for a few hundred looked-up rows: of GPT-2's 154 MB, filled with zeros and
added to that of the tied head, in every backward pass. While `direct_gradients` lasts, the rows are added to the
parameter's own gradient instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_direct = False


@contextmanager
def direct_gradients(on: bool = True) -> Iterator[None]:
    """While this lasts, `backward` adds looked-up rows to `weight.grad` itself: no hook of the weight sees them.

    Not for `torch.autograd.grad`, for gradients of gradients, or where hooks gather gradients over ranks.
    """
    global _direct
    held, _direct = _direct, on
    try:
        yield
    finally:
        _direct = held


class Lookup(nn.Embedding):
    """`nn.Embedding`, and that."""

    def forward(self, input: Tensor) -> Tensor:
        plain = self.max_norm is not None or self.scale_grad_by_freq or self.sparse
        if not _direct or plain or not self.weight.requires_grad or self.weight.device.type != "cpu":
            return super().forward(input)
        # With an edge to the weight, a tied head's gradient would wait for this one, and not be there to be added to.
        anchor = torch.zeros((), requires_grad=True)
        return _Rows.apply(anchor, input, (self.weight,), self.padding_idx)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ids: Tensor, held: tuple[Tensor], padding: int | None) -> Tensor:
        (weight,) = held
        ctx.weight, ctx.padding = weight, padding
        ctx.save_for_backward(ids)
        return nn.functional.embedding(ids, weight.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        (ids,), weight = ctx.saved_tensors, ctx.weight
        rows, flat = grad.reshape(-1, grad.shape[-1]), ids.flatten()
        if ctx.padding is not None:  # as nn.Embedding has it: its row learns nothing
            rows = rows * (flat != ctx.padding)[:, None]
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, flat, rows.to(weight.grad.dtype))
        return None, None, None, None


def look_up_directly(model: nn.Module) -> None:
    """Make every plain embedding of the model a `Lookup`; nothing else about it changes."""
    for module in model.modules():
        if type(module) is nn.Embedding:
            module.__class__ = Lookup
