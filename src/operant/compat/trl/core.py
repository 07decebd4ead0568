"""`trl.core` of TRL 0.11: statistics over masks, dictionaries of statistics, and sampling by hand."""

import gc
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from operant.objectives import advantages
from operant.types import Tokenizer, require


def lacking(module: str) -> Callable[[str], object]:
    """The `__getattr__` of a module that lacks some of TRL's names.

    Raises, when called: ImportError, also where `hasattr` asks, as `import` would hide an AttributeError's sentence.
    """

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{module}.{name}" in sys.modules:
            return sys.modules[f"{module}.{name}"]
        remedy = "import it from trl itself"
        if name.endswith(("Trainer", "Config")):
            remedy = "`operant migrate SCRIPT` moves scripts of the other trainers"
        raise ImportError(f"{module} has what TRL 0.11.4 had around PPO, and no {name}: {remedy}")

    return __getattr__


__getattr__ = lacking(__name__)
WANDB_PADDING = -1
"""What fills up the rows of stacked statistics."""


def set_seed(seed: int) -> None:
    """Seed the generators of `random`, NumPy and torch (every device)."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class LengthSampler:
    """Called, it draws a length uniformly from `min_value` to `max_value - 1`, with NumPy's generator.

    Raises: OperantError if there is no such length.
    """

    def __init__(self, min_value: int, max_value: int):
        require(min_value < max_value, f"LengthSampler({min_value}, {max_value}): the second is exclusive; raise it")
        self.values = list(range(min_value, max_value))

    def __call__(self) -> int:
        return int(np.random.choice(self.values))


class PPODecorators:
    """`@PPODecorators.empty_device_cache()` frees a device's unused memory after a call, if `optimize_device_cache`."""

    optimize_device_cache = False

    @classmethod
    @contextmanager
    def empty_device_cache(cls) -> Iterator[None]:
        yield
        if cls.optimize_device_cache and torch.cuda.is_available():
            gc.collect()
            torch.cuda.empty_cache()


def logprobs_from_logits(logits: Tensor, labels: Tensor | None, gather: bool = True) -> Tensor:
    """Log-probs [B, T] of `labels` [B, T] under `logits` [B, T, V]; with `gather=False` those of all tokens."""
    table = logits.log_softmax(-1)
    if not gather:
        return table
    require(labels is not None, "logprobs_from_logits(labels=None): give the tokens, or gather=False")
    return table.gather(-1, labels[..., None]).squeeze(-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats over the last axis: [..., V] -> [...]."""
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Mean of the values where `mask` (0 or 1) is 1, over everything or along an axis."""
    chosen = values * mask
    return chosen.sum() / mask.sum() if axis is None else chosen.sum(axis) / mask.sum(axis)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of the values where `mask` (0 or 1) is 1; `unbiased` divides by their number less one.

    Raises: OperantError for a mask without any 1.
    """
    count = mask.sum()
    require(count > 0, "the mask has no 1, so there is no variance: raise mini_batch_size, or check the responses")
    squares = masked_mean((values - masked_mean(values, mask)) ** 2, mask)
    return squares * count / (count - 1) if unbiased else squares


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(values - mean) / sqrt(variance + 1e-8) where `mask` is 1, and 0 elsewhere; `shift_mean=False` keeps the mean."""
    return advantages.whiten(values, mask.bool(), unbiased=True, shift_mean=shift_mean)


def whiten(values: Tensor, shift_mean: bool = True) -> Tensor:
    """`masked_whiten` of all values."""
    return masked_whiten(values, torch.ones_like(values), shift_mean)


def clip_by_value(x: Tensor, tensor_min: Tensor | float, tensor_max: Tensor | float) -> Tensor:
    """`x`, but nowhere below `tensor_min` or above `tensor_max`, which may be tensors."""
    return x.clamp(torch.as_tensor(tensor_min).to(x), torch.as_tensor(tensor_max).to(x))


def flatten_dict(nested: Mapping[str, object], sep: str = "/") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a/b": 1}. Raises: OperantError for a key that contains `sep` already."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        require(sep not in key, f"the key {key!r} contains the separator {sep!r}: give another one as sep")
        inner = flatten_dict(value, sep) if isinstance(value, Mapping) else None
        flat |= {key: value} if inner is None else {f"{key}{sep}{name}": x for name, x in inner.items()}
    return flat


def stack_dicts(stats_dicts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """One [N, L] tensor a key from N dictionaries; shorter tensors are filled up with `WANDB_PADDING`."""
    columns = {key: [stats[key].flatten() for stats in stats_dicts] for key in stats_dicts[0]}
    return {key: pad_sequence(rows, batch_first=True, padding_value=WANDB_PADDING) for key, rows in columns.items()}


def stats_to_np(stats_dict: Mapping[str, object]) -> dict[str, object]:
    """The dictionary with NumPy arrays for tensors (float32 for bfloat16), and floats for plain numbers."""
    found = dict(stats_dict)
    for key, value in found.items():
        if isinstance(value, Tensor):
            bare = value.detach().cpu()
            found[key] = (bare.float() if bare.dtype == torch.bfloat16 else bare).numpy()
        elif np.isscalar(value) and not isinstance(value, str):
            found[key] = float(value)
    return found


def convert_to_scalar(stats: Mapping[str, object]) -> dict[str, object]:
    """The dictionary with a plain number for each tensor or array of a single one."""
    kinds = (Tensor, np.ndarray)
    return {k: x.item() if isinstance(x, kinds) and tuple(x.shape) in ((), (1,)) else x for k, x in stats.items()}


def build_bert_batch_from_txt(text_list: Sequence[str], tokenizer: Tokenizer, device: object) -> tuple[Tensor, Tensor]:
    """(ids, attention mask) [B, T] of texts for a classifier, padded; the name is older than 0.11."""
    made = tokenizer(list(text_list), padding=True, return_tensors="pt").to(device)
    return made["input_ids"], made["attention_mask"]


def top_k_top_p_filtering(
    logits: Tensor, top_k: int = 0, top_p: float = 1.0, filter_value: float = -np.inf, min_tokens_to_keep: int = 1
) -> Tensor:
    """Logits [B, V] with `filter_value` at all but the `top_k` likeliest tokens (0: all), and then at all but the
    likeliest ones that together have the probability `top_p`; at least `min_tokens_to_keep` stay."""
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    limits: dict[str, Any] = {"filter_value": filter_value, "min_tokens_to_keep": min_tokens_to_keep}
    warpers: list[Any] = [TopKLogitsWarper(top_k, **limits)] if top_k > 0 else []
    warpers += [TopPLogitsWarper(top_p, **limits)] if 0 <= top_p < 1 else []
    for warper in warpers:
        logits = warper(None, logits)
    return logits


@torch.no_grad()
def respond_to_batch(
    model: nn.Module, queries: Tensor, txt_len: int = 20, top_k: int = 0, top_p: float = 1.0
) -> Tensor:
    """Sample `txt_len` tokens after each of the queries [B, T], without a cache; returns them, [B, txt_len]."""
    ids = queries
    for _ in range(txt_len):
        logits = top_k_top_p_filtering(model(ids)[0][:, -1], top_k=top_k, top_p=top_p)
        ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], 1)
    return ids[:, -txt_len:]
