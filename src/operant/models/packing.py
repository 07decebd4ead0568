"""Rows end to end: a model reads many rows as one of [1, S] tokens, and its attention stays within each of them.

    packing = Packing(model)
    with packing.within([5, 3]):
        model(input_ids=ids, position_ids=places)        # [1, 8]; places begin anew with each row

Written once for every decoder-only architecture that looks its attention up by name, as those of transformers do: while
this lasts, the name is ours. On a GPU one kernel attends within rows of any length; without it they are attended to one
after the other, which a processor is quick at. Whoever asks attention for more than a causal softmax is refused.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property
from inspect import signature
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NAME = "operant_rows"
MORE = ("softcap", "s_aux", "position_bias", "head_mask", "block_mask", "cache")
"""What some architectures ask of attention besides, by transformers' names."""
WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "attention_window")
"""How configurations call the tokens that are seen at most: longer rows stay padded."""
RAGGED = 0.9
"""Share of real tokens up to which rows are packed: attention takes more calls then, 4 to 8 % of a small model's time
on a processor where nothing is padding."""

Kernel = Callable[..., Tensor]
"""As `torch.nn.attention.varlen.varlen_attn`: [S, H, D] queries, keys and values, and the edges between the rows."""


@dataclass(frozen=True)
class _Within:
    """The rows that attention stays within."""

    lengths: Sequence[int]
    device: torch.device

    @cached_property
    def edges(self) -> Tensor:
        """[R + 1] int32: where each row begins, and the end of the last."""
        return torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(self.device)


_within: ContextVar[_Within | None] = ContextVar("rows", default=None)


class Packing:
    """A model whose attention can be kept within rows; whether it then computes what it should, the probe tells."""

    def __init__(self, model: Any):
        import transformers

        transformers.AttentionInterface.register(NAME, attend)
        held = (getattr(module, "config", None) for module in model.modules())
        self.configs = list({id(c): c for c in held if hasattr(c, "_attn_implementation")}.values())
        self.replaceable = all(
            getattr(model, f"_supports_{what}", False) for what in ("attention_backend", "flash_attn")
        )
        """Whether the architecture says that attention is a function by name, and all that it asks of it arguments."""
        seen = [getattr(c, name, None) for c in self.configs for name in WINDOWS]
        self.window = min((n for n in seen if isinstance(n, int) and n > 0), default=None)

    def pays(self, mask: Tensor) -> bool:
        """Whether rows [B, T] are short enough to be packed, and ragged enough for it."""
        lengths = mask.sum(1)
        most, real = torch.stack([lengths.max(), lengths.sum()]).tolist()
        return real <= RAGGED * mask.numel() and (self.window is None or most <= self.window)

    @contextmanager
    def within(self, lengths: Sequence[int], device: torch.device) -> Iterator[None]:
        """While this lasts, the model reads rows of these lengths end to end."""
        before = [c._attn_implementation for c in self.configs]
        token = _within.set(_Within(lengths, device))
        try:
            for config in self.configs:
                config._attn_implementation = NAME
            yield
        finally:
            for config, name in zip(self.configs, before, strict=True):
                config._attn_implementation = name
            _within.reset(token)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """[1, H, S, D] -> [1, S, H, D]: every token of rows end to end attends to those of its row up to itself.

    Raises: ValueError where the architecture asks for anything else.
    """
    rows = _within.get()
    odd = [name for name in MORE if more.get(name) is not None]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None or odd or not causal:
        raise ValueError(f"attention within rows knows no {', '.join(odd) or 'mask'}")
    if rows is None or (len(query), query.shape[2], key.shape[2]) != (1, sum(rows.lengths), sum(rows.lengths)):
        raise ValueError("these are not the rows that were laid out")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    run = kernel(q.device, q.dtype)
    if run is not None and q.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0:
        return _by_kernel(run, q, k, v, rows, scaling)[None], None
    return _row_by_row(q, k, v, rows, scaling)[None], None


def _by_kernel(run: Kernel, q: Tensor, k: Tensor, v: Tensor, rows: _Within, scale: float | None) -> Tensor:
    longest, shared = max(rows.lengths), q.shape[1] != k.shape[1]
    causal = {"scale": scale, "window_size": (-1, 0), "enable_gqa": shared}
    return run(q, k, v, rows.edges, rows.edges, longest, longest, **causal)


def _row_by_row(q: Tensor, k: Tensor, v: Tensor, rows: _Within, scale: float | None) -> Tensor:
    """[S, H, D]; neighbours of equal length go together."""
    out, begin, shared = [], 0, q.shape[1] != k.shape[1]
    for length, run in groupby(rows.lengths):
        end = begin + length * len(list(run))
        few = (x[begin:end].unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
        some = scaled_dot_product_attention(*few, is_causal=True, scale=scale, enable_gqa=shared)
        out.append(some.transpose(1, 2).flatten(0, 1))
        begin = end
    return torch.cat(out)


def quick(device: torch.device, numbers: torch.dtype) -> bool:
    """Whether attention within rows is quick here: by a kernel, or on a processor, to which every call is as good."""
    return device.type == "cpu" or kernel(device, numbers) is not None


def kernel(device: torch.device, numbers: torch.dtype) -> Kernel | None:
    """The kernel for rows of any length; None where there is none for this device and these numbers."""
    if device.type != "cuda" or numbers not in (torch.bfloat16, torch.float16):
        return None
    return _kernel() if torch.cuda.get_device_capability(device) >= (8, 0) else None


@cache
def _kernel() -> Kernel | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    found: Any = varlen_attn  # older ones take less
    return found if {"scale", "window_size", "enable_gqa"} <= set(signature(found).parameters) else None
