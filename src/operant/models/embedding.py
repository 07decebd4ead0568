"""An embedding whose backward pass only touches the rows that were looked up.

For a few hundred looked-up rows, torch makes a gradient of the whole table: 154 MB for GPT-2, filled with zeros and
added to the gradient of the tied head, in every backward pass. Inside `direct_gradients`, the rows are added to the
parameter's own gradient instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from operant.types import OperantError

_direct = False


@contextmanager
def direct_gradients(on: bool = True) -> Iterator[None]:
    """Inside this context, `backward` adds looked-up rows to `weight.grad` itself, so hooks of the weight do not run.

    It must not be used with `torch.autograd.grad`, gradients of gradients, or hooks that sum gradients over ranks.
    """
    global _direct
    before, _direct = _direct, on
    try:
        yield
    finally:
        _direct = before


class Lookup(nn.Embedding):
    """`nn.Embedding` that adds gradients directly inside `direct_gradients`."""

    def forward(self, input: Tensor) -> Tensor:
        plain = self.max_norm is not None or self.scale_grad_by_freq or self.sparse
        if not _direct or plain or not self.weight.requires_grad or self.weight.device.type != "cpu":
            return super().forward(input)
        # With an edge to the weight, autograd would hold a tied head's gradient back until this one is computed too.
        anchor = torch.zeros((), requires_grad=True)
        return _Rows.apply(anchor, input, (self.weight,), self.padding_idx)


class _Rows(torch.autograd.Function):
    """Look up rows of a weight; the backward pass adds to the weight's gradient.

    The weight is passed in a tuple, so that autograd does not see it. `anchor` makes the result require a gradient.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ids: Tensor, weights: tuple[Tensor], padding: int | None) -> Tensor:
        (weight,) = weights
        ctx.weight, ctx.padding = weight, padding
        ctx.save_for_backward(ids)
        return nn.functional.embedding(ids, weight.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        if torch.is_grad_enabled():  # only where the backward pass has create_graph=True
            raise OperantError("direct_gradients has no gradients of gradients: leave it for create_graph=True")
        (ids,), weight = ctx.saved_tensors, ctx.weight
        rows, flat = grad.reshape(-1, grad.shape[-1]), ids.flatten()
        if ctx.padding is not None:  # as in nn.Embedding, the padding row has no gradient
            rows = rows * (flat != ctx.padding)[:, None]
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, flat, rows.to(weight.grad.dtype))
        return None, None, None, None


def look_up_directly(model: nn.Module) -> None:
    """Turn every embedding whose class is exactly `nn.Embedding` into a `Lookup` with the same weight."""
    for module in model.modules():
        if type(module) is nn.Embedding:
            module.__class__ = Lookup
