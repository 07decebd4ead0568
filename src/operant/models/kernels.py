"""Faster ways for a model of transformers to compute: packed rows, unfused attention, activations, embeddings.

    packing = Packing(model)
    with packing.within([5, 3], device):
        model(input_ids=ids, position_ids=places)        # [1, 8]; positions begin at 0 in each row

Packed, it reads many rows as one row of [1, S] tokens, and attention stays within each of them. That works for every
decoder-only architecture that looks its attention function up by name, as transformers' models do: inside `within`, the
name is that of `attend`. On a GPU one kernel attends within rows of any length. Without that kernel, rows are computed
one after the other, which is quick on a CPU. An architecture whose attention is more than a causal softmax is refused.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property
from inspect import signature
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from operant.models.safe_loading import LanguageModel
from operant.types import OperantError, with_defaults

NAME = "operant_rows"
MORE = ("softcap", "s_aux", "position_bias", "head_mask", "block_mask", "cache")
"""Arguments, by transformers' names, that some architectures pass to attention and that are not supported here."""
WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "attention_window")
"""Names under which configs store the length of an attention window. A batch with a longer row is not packed."""
RAGGED = 0.9
"""Rows are packed if at most this share of the batch is real tokens. Packed attention takes more calls: without any
padding, that costs 4 to 8 % of a small model's time on a CPU."""
SHORT = 256
"""Longest row, in tokens, for which `plain_attention` is faster."""

Kernel = Callable[..., Tensor]
"""Has the signature of `torch.nn.attention.varlen.varlen_attn`: queries, keys and values [S, H, D], and row edges."""


@dataclass(frozen=True)
class _PackedRows:
    lengths: Sequence[int]
    device: torch.device

    @cached_property
    def edges(self) -> Tensor:
        """[R + 1] int32: the start of each row, and the end of the last."""
        return torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(self.device)


_packed: ContextVar[_PackedRows | None] = ContextVar("rows", default=None)


class Packing:
    """Replaces the attention function of a model. `capabilities.packs_exactly` finds out if the results are exact."""

    def __init__(self, model: LanguageModel):
        self.__setstate__({})
        configs = (with_defaults(module, LanguageModel).config for module in model.modules())
        self.configs = list({id(c): c for c in configs if hasattr(c, "_attn_implementation")}.values())
        self.replaceable = all(getattr(model, f"_supports_{what}", 0) for what in ("attention_backend", "flash_attn"))
        """Whether the architecture declares that it looks attention up by name and passes everything as arguments."""
        windows = [getattr(c, name, None) for c in self.configs for name in WINDOWS]
        self.by_columns = any(hasattr(c, "window_size") and c.window_size for c in self.configs)  # as GPT-Neo's window
        self.window = min((n for n in windows if isinstance(n, int) and n > 0), default=None)

    def __setstate__(self, state: dict[str, object]) -> None:
        """Also of a model that was sent to another process: there, too, transformers has to know the attention."""
        import transformers

        transformers.AttentionInterface.register(NAME, attend)
        self.__dict__ |= state

    def pays(self, mask: Tensor) -> bool:
        """Whether packing saves time: rows [B, T] fit into the attention window, and enough of the batch is padding."""
        lengths = mask.sum(1)
        most, real = torch.stack([lengths.max(), lengths.sum()]).tolist()
        return real <= RAGGED * mask.numel() and (self.window is None or most <= self.window)

    @contextmanager
    def within(self, lengths: Sequence[int], device: torch.device) -> Iterator[None]:
        """Inside this context, the model reads packed rows of these lengths."""
        before = [c._attn_implementation for c in self.configs]
        token = _packed.set(_PackedRows(lengths, device))
        try:
            for config in self.configs:
                config._attn_implementation = NAME
            yield
        finally:
            for config, name in zip(self.configs, before, strict=True):
                config._attn_implementation = name
            _packed.reset(token)


def attend(
    module: object,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: object,
) -> tuple[Tensor, None]:
    """[1, H, S, D] -> [1, S, H, D]: every token of the packed rows attends to its row, up to itself."""
    rows = _packed.get()
    odd = [name for name in MORE if more.get(name) is not None]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None or odd or not causal:
        raise ValueError(f"attention within rows knows no {', '.join(odd) or 'mask'}")
    if rows is None or (len(query), query.shape[2], key.shape[2]) != (1, sum(rows.lengths), sum(rows.lengths)):
        raise ValueError("these are not the rows that were laid out")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    run, shared = kernel(q.device, q.dtype), q.shape[1] != k.shape[1]
    if run is not None and q.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0:
        longest = max(rows.lengths)
        causal = {"scale": scaling, "window_size": (-1, 0), "enable_gqa": shared}
        return run(q, k, v, rows.edges, rows.edges, longest, longest, **causal)[None], None
    # Without a kernel for it, adjacent rows of equal length share one call.
    runs = [(length, length * len(list(equal))) for length, equal in groupby(rows.lengths)]
    # One split: the backward pass of a slice would write zeros for the whole of q, k and v, once for each slice.
    parts = zip(*(x.split([size for _, size in runs]) for x in (q, k, v)), strict=True)
    out = []
    for (length, _), part in zip(runs, parts, strict=True):
        few = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in part)
        some = scaled_dot_product_attention(*few, is_causal=True, scale=scaling, enable_gqa=shared)
        out.append(some.transpose(1, 2).flatten(0, 1))
    return torch.cat(out)[None], None


def quick(device: torch.device, numbers: torch.dtype) -> bool:
    """Whether packed attention is quick: there is a kernel, or a CPU, where one call per row costs little."""
    return device.type == "cpu" or kernel(device, numbers) is not None


@cache
def kernel(device: torch.device, numbers: torch.dtype) -> Kernel | None:
    """The kernel that attends within rows of any length; None if there is none for this device and dtype."""
    if device.type != "cuda" or numbers not in (torch.bfloat16, torch.float16):
        return None
    if torch.cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    found: Any = varlen_attn  # that of older torch versions has fewer parameters
    return found if {"scale", "window_size", "enable_gqa"} <= set(signature(found).parameters) else None


def compute_in(model: LanguageModel, precision: str) -> LanguageModel:
    """Convert the model to its precision, and use faster kernels for activations and embeddings; returns the model."""
    fuse_activations(model)
    look_up_directly(model)
    # In float32 or float64 it stays as it was loaded, and a quantised one is loaded in its precision.
    casts = precision == "bfloat16" and not with_defaults(model, LanguageModel).is_quantized
    return model.to(torch.bfloat16) if casts else model


def fuse_activations(model: nn.Module) -> None:
    """Replace the tanh form of GELU, for which transformers calls seven kernels, by torch's single kernel.

    Results agree up to the last bits. A forward and backward pass of GPT-2 124M takes a tenth less time.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ in ("NewGELUActivation", "FastGELUActivation", "BloomGelu"):
                setattr(module, name, nn.GELU(approximate="tanh"))


def plain_attention(states: torch.dtype, device: torch.device, width: int) -> AbstractContextManager[object]:
    """A context in which attention over short bfloat16 rows on a CPU uses torch's unfused implementation.

    There, the backward pass of the fused kernel takes twice as long for up to a few hundred tokens.
    """
    short = states == torch.bfloat16 and device.type == "cpu" and width <= SHORT
    return sdpa_kernel(SDPBackend.MATH) if short else nullcontext()


# For a few hundred looked-up rows, torch makes a gradient of the whole table: 154 MB for GPT-2, filled with zeros and
# added to the gradient of the tied head, in every backward pass. Inside `direct_gradients`, the rows are added to the
# parameter's own gradient instead.

_direct = False


@contextmanager
def direct_gradients(on: bool = True) -> Iterator[None]:
    """Inside this context, `backward` adds looked-up rows to `weight.grad` itself, unless the weight has a hook.

    It must not be used with `torch.autograd.grad`, gradients of gradients, or hooks that sum gradients over ranks.
    """
    global _direct
    before, _direct = _direct, on
    try:
        yield
    finally:
        _direct = before


def hooked(weight: Tensor) -> bool:
    """Whether a hook sees the gradient of a weight."""
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


class Lookup(nn.Embedding):
    """`nn.Embedding` that adds gradients directly inside `direct_gradients`."""

    def forward(self, input: Tensor) -> Tensor:
        plain = self.max_norm is not None or self.scale_grad_by_freq or self.sparse or hooked(self.weight)
        if not _direct or plain or not self.weight.requires_grad or self.weight.device.type != "cpu":
            return super().forward(input)
        # With an edge to the weight, autograd would hold a tied head's gradient back until this one is computed too.
        return _Rows.apply(torch.zeros((), requires_grad=True), input, (self.weight,), self.padding_idx)


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
