"""Log-probability, entropy, logsumexp and exact KL of chosen tokens: the one place that sees the vocabulary.

Logits exist at action positions only, and in chunks. One sweep over a chunk, in blocks that stay in a core's cache,
gives every number; a second one, in the backward pass, gives the gradient with respect to the logits. With gradients, a
chunk's logits are computed again in the backward pass rather than kept, as soon as there is more than one chunk.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from operant.sampling import Sampling

BUDGET = 48_000_000
"""Logits held at once, in numbers."""

BLOCK = 1 << 18
"""Logits swept at once on a processor, in numbers: few enough to stay in a core's cache between the passes."""

Head = Callable[[Tensor], Tensor]
"""[N, D] -> [N, V]."""

NAMES: tuple[str, ...] = ("logprobs", "logsumexp", "entropy", "reverse", "forward")


@dataclass(frozen=True)
class Swept:
    """What a sweep is told besides the logits."""

    ids: Tensor
    """[N] the chosen tokens."""
    places: Tensor
    """[N] index of each in its reply."""
    sampling: Sampling
    other: Tensor | None = None
    """[N, V] logits of another model, for the exact divergences."""

    @property
    def masks(self) -> bool:
        """Whether some tokens may have no probability."""
        return bool(self.sampling.banned or (self.sampling.min_tokens and self.sampling.stops))


class Sweep(torch.autograd.Function):
    """Log-prob of the chosen ids, logsumexp, entropy and both divergences of logits [N, V], each [N].

    With z = adjusted logits, p = softmax(z), q the other model's, H the entropy and R = KL(p || q):
    d logprob / dz = onehot - p;  d logsumexp / dz = p;  dH / dz = -p (log p + H);  dR / dz = p (log p - log q - R);
    d KL(q || p) / dz = p - q;  and dz / d logits = 1 / temperature, 0 where a token is masked.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, told: Swept) -> tuple[Tensor, ...]:
        wide = torch.promote_types(logits.dtype, torch.float32)
        out = torch.zeros(5 if told.other is not None else 3, len(logits), dtype=wide, device=logits.device)
        for part in _blocks(logits):
            z, other = _adjusted(logits, told, part)
            for row, x in zip(out, _fused(_statistics, z, other, told.ids[part], told.masks), strict=True):
                row[part] = x
        ctx.told = told
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, out)
        return out.unbind(0)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor, None]:
        (logits, out), told = ctx.saved_tensors, ctx.told
        grad = torch.empty_like(logits)
        for part in _blocks(logits):
            z, other = _adjusted(logits, told, part)
            weights = [None if w is None else w[part, None] for w in slopes]
            slope = _fused(_slope, z, other, told.ids[part], out[:, part, None], weights, told.masks)
            grad[part] = slope / told.sampling.temperature if told.sampling.temperature != 1 else slope
        return grad, None


def _blocks(logits: Tensor) -> list[slice]:
    """All rows at once on a GPU, whose kernels want many; a cache's worth on a processor."""
    rows = max(1, BLOCK // logits.shape[-1] if logits.device.type == "cpu" else len(logits))
    return [slice(a, min(a + rows, len(logits))) for a in range(0, len(logits), rows)]


def _adjusted(logits: Tensor, told: Swept, part: slice) -> tuple[Tensor, Tensor | None]:
    adjust, places = told.sampling.adjust, told.places[part]
    return adjust(logits[part], places), None if told.other is None else adjust(told.other[part], places)


def _fused(function: Callable[..., Any], z: Tensor, *arguments: Any) -> Any:
    """The function; on a GPU compiled to few kernels, each of which reads the logits once."""
    if z.device.type != "cuda" or function in _UNFUSED:
        return function(z, *arguments)
    try:
        return compiled(function)(z, *arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the compiler may raise: the plain function is right, only slower
        _UNFUSED.add(function)
        warnings.warn(f"{function.__name__} runs uncompiled: {type(error).__name__}: {error}"[:300], stacklevel=2)
        return function(z, *arguments)


_UNFUSED: set[Callable[..., Any]] = set()


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One compilation for any number of rows."""
    return torch.compile(function, dynamic=True)


def _statistics(z: Tensor, other: Tensor | None, ids: Tensor, masks: bool) -> tuple[Tensor, ...]:
    """In the order of `NAMES`, each [n]; a token that is masked (-inf) counts 0."""
    top = z.amax(-1, keepdim=True)
    shifted = z - top
    weights = shifted.exp()
    mass = weights.sum(-1)
    log_mass = mass.log()
    chosen = shifted.gather(-1, ids[:, None]).squeeze(-1) - log_mass
    spread = log_mass - torch.linalg.vecdot(weights, _finite(shifted, masks)) / mass
    told = (chosen, log_mass + top.squeeze(-1), spread)
    if other is None:
        return told
    mine, theirs = shifted - log_mass[:, None], other.log_softmax(-1)
    return (*told, divergence(mine, theirs), divergence(theirs, mine))


def _slope(
    z: Tensor, other: Tensor | None, ids: Tensor, out: Tensor, weights: Sequence[Tensor | None], masks: bool
) -> Tensor:
    """[n, V] the gradient with respect to the adjusted logits z; `weights` [n, 1] are those of the numbers `out`."""
    chosen, normaliser, spread, reverse, forward = [*weights, None, None][:5]
    mine = z - out[1]
    p = mine.exp()
    factor: Tensor | float = 0.0
    if chosen is not None:
        factor = factor - chosen
    if normaliser is not None:
        factor = factor + normaliser
    if spread is not None:
        factor = factor - spread * (_finite(mine, masks) + out[2])
    theirs = None
    if other is not None and (reverse is not None or forward is not None):
        theirs = other.log_softmax(-1)
        if reverse is not None:
            factor = factor + reverse * (_finite(mine, masks) - _finite(theirs, masks) - out[3])
        if forward is not None:
            factor = factor + forward
    grad = p.mul_(factor)
    if theirs is not None and forward is not None:
        grad = grad - forward * theirs.exp()
    return grad if chosen is None else grad.scatter_add_(-1, ids[:, None], chosen)


def _finite(z: Tensor, masks: bool) -> Tensor:
    """Masked tokens as 0: their probability is 0, and 0 times infinity is no number."""
    return torch.nan_to_num(z, nan=0.0, neginf=0.0) if masks else z


def score(
    head: Head,
    states: Tensor,
    ids: Tensor,
    places: Tensor,
    sampling: Sampling,
    *,
    vocabulary: int,
    allowed: tuple[Tensor, Tensor] | None = None,
    against: tuple[Head, Tensor] | None = None,
    budget: int = BUDGET,
) -> dict[str, Tensor]:
    """What is known of chosen tokens `ids` [N] in `states` [N, D]: named tensors [N], float32 at least.

    `places` [N]: index of each token in its reply. `allowed`: ragged ids and offsets [N + 1] of the tokens
    that could be drawn. `against`: the head and states of another model, for the exact divergences.
    """
    size = max(1, budget // vocabulary)
    pieces = []
    for start in range(0, len(ids), size):
        part = slice(start, start + size)
        other = None if against is None else against[0](against[1][part]).detach()
        told = Swept(ids[part], places[part], sampling, other)
        if len(ids) > size and torch.is_grad_enabled():
            pieces.append(checkpoint(_score, head, states[part], told, _cut(allowed, part), use_reentrant=False))
        else:
            pieces.append(_score(head, states[part], told, _cut(allowed, part)))
    if not pieces:
        names = ["raw_logprobs", *NAMES[: 5 if against else 3]]
        return dict.fromkeys(names, states.new_zeros(0, dtype=torch.promote_types(states.dtype, torch.float32)))
    return {name: torch.cat([p[name] for p in pieces]) for name in pieces[0]}


def _score(head: Head, states: Tensor, told: Swept, allowed: Sequence[Tensor] | None) -> dict[str, Tensor]:
    logits = head(states)
    out: dict[str, Tensor] = dict(zip(NAMES, Sweep.apply(logits, told), strict=False))
    out["raw_logprobs"] = out["logprobs"]
    if allowed is not None:  # the chosen token's share of what could be drawn
        among = _among(told.sampling.adjust(logits, told.places), allowed)
        out["logprobs"] = out["raw_logprobs"] + out["logsumexp"] - among
    return out


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of log-probabilities [N, V] -> [N]; tokens that p masks count 0."""
    gap = torch.where(p == -torch.inf, 0.0, p - q)
    return (p.exp() * gap).sum(-1)


def _among(logits: Tensor, allowed: Sequence[Tensor]) -> Tensor:
    mask = torch.zeros_like(logits, dtype=torch.bool)
    for row, ids in enumerate(allowed):
        mask[row, ids] = True
    return logits.masked_fill(~mask, -torch.inf).logsumexp(-1)


def _cut(allowed: tuple[Tensor, Tensor] | None, part: slice) -> list[Tensor] | None:
    if allowed is None:
        return None
    ids, offsets = allowed
    edges = offsets[part.start : part.stop + 1].tolist()
    return [ids[a:b] for a, b in pairwise(edges)]
