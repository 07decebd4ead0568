"""Log-probability, entropy, logsumexp and exact KL of chosen tokens.

No other file scores over the vocabulary. Logits exist at action positions only, and in chunks. One sweep over a chunk,
in blocks that fit into a core's cache, computes every number; a second one, in the backward pass, computes
the gradient with respect to the logits. If there are several chunks, the backward pass computes their logits again
instead of storing them. The second sweep is written by hand and has no gradient of its own; with `double_backward`,
torch's own operations compute the same numbers, and can be differentiated twice.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from operant.sampling import Sampling
from operant.types import OperantError

BUDGET = 48_000_000
"""Most logits in memory at a time, as a count of numbers: the size of a chunk."""

BLOCK = 1 << 20
"""Logits of a block on a CPU, as a count of numbers: few enough to stay in a core's cache between passes."""

Head = Callable[[Tensor], Tensor]
"""[N, D] -> [N, V]."""

NAMES = ("logprobs", "logsumexp", "entropy")
DIVERGENCES = ("reverse", "forward")
"""The exact divergences where nobody asks for others; `divergence` has them all."""


@dataclass(frozen=True)
class SweepInput:
    ids: Tensor
    """[N] the chosen tokens."""
    places: Tensor
    """[N] position of each chosen token in its reply."""
    sampling: Sampling
    other: Tensor | None = None
    """[N, V] logits of another model, for the exact divergences."""
    divergences: tuple[str, ...] = DIVERGENCES
    """Which of them to compute."""
    likeliest: int | None = None
    """Compare the k likeliest tokens and all others as one outcome; None: the whole vocabulary."""
    entropy_gradient: bool = False
    """Whether the entropy is part of the loss."""
    double_backward: bool = False
    """Whether gradients of gradients are wanted."""

    @property
    def compared(self) -> tuple[str, ...]:
        return () if self.other is None else self.divergences

    @property
    def how(self) -> "How":
        masks = bool(self.sampling.banned or (self.sampling.min_tokens and self.sampling.stops))
        return masks, self.compared, self.likeliest


How = tuple[bool, Sequence[str], int | None]
"""Whether tokens are masked, which divergences are computed, and of how many likeliest tokens."""


class Sweep(torch.autograd.Function):
    """Log-prob of the chosen ids, logsumexp, entropy and the divergences of logits [N, V], each [N].

    With z = adjusted logits, p = softmax(z), q the other model's, m = (p + q) / 2, H the entropy, R = KL(p || q) and
    J = (KL(p || m) + KL(q || m)) / 2:
    d logprob / dz = onehot - p;  d logsumexp / dz = p;  dH / dz = -p (log p + H);  dR / dz = p (log p - log q - R);
    d KL(q || p) / dz = p - q;  dJ / dz = p (log p - log m - KL(p || m)) / 2;  and dz / d logits = 1 / temperature, 0
    where a token is masked.
    The saved probabilities are constants to autograd, so a gradient of this gradient would lack terms: it is refused.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, inputs: SweepInput) -> tuple[Tensor, ...]:
        wide = torch.promote_types(logits.dtype, torch.float32)
        out = torch.zeros(3 + len(inputs.compared), len(logits), dtype=wide, device=logits.device)
        probs = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        for part in _blocks(logits):
            z, other = _adjusted(logits, inputs, part)
            *numbers, p = _fused(_statistics, z, other, inputs.ids[part], inputs.how)
            for row, x in zip(out, numbers, strict=True):
                row[part] = x
            if probs is not None:
                probs[part] = p
        ctx.inputs = inputs
        ctx.set_materialize_grads(False)
        # The backward pass needs the logits only for the gradient of the entropy or of a divergence.
        spreads = inputs.entropy_gradient or inputs.other is not None
        ctx.save_for_backward(probs, logits if spreads else None, out)
        return out.unbind(0)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():  # only where the backward pass has create_graph=True
            raise OperantError(
                "a gradient of the gradient of log-probs was asked for (create_graph=True): compute them with "
                "policy(batch, ...) inside `with policy.double_backward():`, which allows it"
            )
        (probs, logits, out), inputs = ctx.saved_tensors, ctx.inputs
        weights = [None if w is None else w[:, None] for w in slopes]
        chosen, normaliser = (torch.zeros(()) if w is None else w for w in weights[:2])
        grad = probs * (normaliser - chosen).to(probs.dtype)
        if logits is not None and any(w is not None for w in weights[2:]):
            for part in _blocks(logits):
                z, other = _adjusted(logits, inputs, part)
                some = [None if w is None else w[part] for w in weights[2:]]
                grad[part] += _fused(_spread, z, other, out[2:, part, None], some, inputs.how).to(grad.dtype)
        if weights[0] is not None:
            grad.scatter_add_(-1, inputs.ids[:, None], chosen.to(grad.dtype))
        return (grad if inputs.sampling.temperature == 1 else grad.div_(inputs.sampling.temperature)), None


def _blocks(logits: Tensor) -> list[slice]:
    """The rows of each block: on a GPU one block of all rows, on a CPU blocks that fit into the cache."""
    rows = max(1, BLOCK // logits.shape[-1] if logits.device.type == "cpu" else len(logits))
    return [slice(a, min(a + rows, len(logits))) for a in range(0, len(logits), rows)]


def _adjusted(logits: Tensor, inputs: SweepInput, part: slice) -> tuple[Tensor, Tensor | None]:
    """The logits of a block as `Sampling.adjust` scales and masks them, and those of the other model."""
    adjust, places = inputs.sampling.adjust, inputs.places[part]
    return adjust(logits[part], places), None if inputs.other is None else adjust(inputs.other[part], places)


def _fused(function: Callable[..., Any], z: Tensor, *arguments: object) -> Any:
    """Call the function; on a GPU, compile it to few kernels, each of which reads the logits once."""
    if z.device.type != "cuda" or function in _UNFUSED:
        return function(z, *arguments)
    try:
        return compiled(function)(z, *arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the compiler may raise anything; the plain function is correct, only slower
        _UNFUSED.add(function)
        warnings.warn(f"{function.__name__} runs uncompiled: {type(error).__name__}: {error}"[:300], stacklevel=2)
        return function(z, *arguments)


_UNFUSED: set[Callable[..., Any]] = set()
compiled = cache(partial(torch.compile, dynamic=True))


def _statistics(z: Tensor, other: Tensor | None, ids: Tensor, how: How) -> tuple[Tensor, ...]:
    """The numbers of `NAMES` and the divergences, each [n], and the probabilities [n, V]. A masked token counts 0."""
    masks, compared, likeliest = how
    mine = z.log_softmax(-1)
    chosen = mine.gather(-1, ids[:, None])
    normaliser = (z.gather(-1, ids[:, None]) - chosen).squeeze(-1)
    if masks:  # the chosen token itself may be masked, in a row that is not used
        normaliser = torch.where(normaliser.isfinite(), normaliser, z.logsumexp(-1))
    p = mine.exp()
    spread = -torch.linalg.vecdot(p, _finite(mine, masks))
    theirs = mine if other is None else _pooled(mine, other.log_softmax(-1), likeliest)
    return chosen.squeeze(-1), normaliser, spread, *(divergence(mine, theirs, kind) for kind in compared), p


def _spread(z: Tensor, other: Tensor | None, out: Tensor, weights: Sequence[Tensor | None], how: How) -> Tensor:
    """[n, V] the part of the gradient by z that comes from entropy and divergences.

    `out`: their values. `weights` [n, 1]: the gradients of the loss by them.
    """
    (masks, compared, likeliest), (spread, *of_divergences) = how, weights
    mine = z.log_softmax(-1)
    p, known = mine.exp(), _finite(mine, masks)
    grad = torch.zeros_like(p)
    if spread is not None:
        grad = grad - p * spread * (known + out[0])
    if other is not None:
        theirs = _pooled(mine, other.log_softmax(-1), likeliest)
        for kind, weight, value in zip(compared, of_divergences, out[1:], strict=True):
            if weight is None:
                continue
            if kind == "forward":
                grad = grad + weight * (p - theirs.exp())
            elif kind == "reverse":
                grad = grad + p * weight * (known - _finite(theirs, masks) - value)
            else:
                gap = torch.where(p == 0, 0.0, mine - _between(mine, theirs))
                grad = grad + p * weight * (gap - torch.linalg.vecdot(p, gap)[:, None]) / 2
    return grad


def _pooled(mine: Tensor, theirs: Tensor, likeliest: int | None) -> Tensor:
    """`theirs` [n, V], where the sum of all tokens but the k likeliest of `mine` is shared out as it is in `mine`.

    With it, a divergence and its gradient are those of k + 1 outcomes: each of the k tokens, and all others together.
    """
    if likeliest is None:
        return theirs
    top = mine.topk(min(likeliest, mine.shape[-1])).indices
    low = torch.finfo(mine.dtype).min / 2  # as good as -inf, and its gradient is a number where all others are masked
    mine_rest, their_rest = (x.clamp(min=low).scatter(-1, top, low).logsumexp(-1, keepdim=True) for x in (mine, theirs))
    return (mine + (their_rest - mine_rest)).scatter(-1, top, theirs.gather(-1, top))


def _finite(z: Tensor, masks: bool) -> Tensor:
    """Replace the -inf of masked tokens by 0: their probability is 0, and 0 times infinity would be NaN."""
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
    divergences: tuple[str, ...] = DIVERGENCES,
    likeliest: int | None = None,
    entropy_gradient: bool = False,
    double_backward: bool = False,
) -> dict[str, Tensor]:
    """Score the chosen tokens `ids` [N] in the hidden states before them, `states` [N, D].

    `places` [N]: index of each token in its reply. `allowed`: ragged ids and offsets [N + 1] of the tokens
    that could be drawn. `against`: the head and states of another model, for the exact `divergences`,
    of so many `likeliest` tokens and all others as one outcome, or (None) of the whole vocabulary.
    `double_backward`: the results can be differentiated twice; it takes several times the memory of a chunk.
    Returns the tensors of `NAMES`, `raw_logprobs` and those of `divergences`, each [N], in float32 or wider.
    """
    size, pieces = max(1, BUDGET // vocabulary), []
    call = partial(checkpoint, _score, use_reentrant=False) if len(ids) > size and torch.is_grad_enabled() else _score
    for start in range(0, len(ids), size):
        part = slice(start, start + size)
        other = None if against is None else against[0](against[1][part]).detach()
        how = entropy_gradient, double_backward
        inputs = SweepInput(ids[part], places[part], sampling, other, divergences, likeliest, *how)
        pieces.append(call(head, states[part], inputs, _cut(allowed, part)))
    if not pieces:
        names = ["raw_logprobs", *NAMES, *(divergences if against else ())]
        return dict.fromkeys(names, states.new_zeros(0, dtype=torch.promote_types(states.dtype, torch.float32)))
    return {name: torch.cat([p[name] for p in pieces]) for name in pieces[0]}


def _score(head: Head, states: Tensor, inputs: SweepInput, allowed: tuple[Tensor, Tensor] | None) -> dict[str, Tensor]:
    logits = head(states)
    if inputs.double_backward:  # the same numbers, with gradients by autograd
        z, other = _adjusted(logits, inputs, slice(None))
        numbers = _statistics(z, other, inputs.ids, inputs.how)[:-1]
    else:
        numbers = Sweep.apply(logits, inputs)
    out: dict[str, Tensor] = dict(zip((*NAMES, *inputs.compared), numbers, strict=True))
    out["raw_logprobs"] = out["logprobs"]
    if not inputs.entropy_gradient:
        out["entropy"] = out["entropy"].detach()
    if allowed is not None:  # divide by the probability of all tokens that could be drawn
        adjusted = inputs.sampling.adjust(logits, inputs.places)
        mask = torch.zeros_like(adjusted, dtype=torch.bool)
        ids, counts = (x.to(mask.device) for x in allowed)
        mask[torch.arange(len(mask), device=mask.device).repeat_interleave(counts), ids] = True
        mask[counts == 0] = True  # of a demonstration: any token could stand there
        among = adjusted.masked_fill(~mask, -torch.inf).logsumexp(-1)
        out["logprobs"] = out["raw_logprobs"] + out["logsumexp"] - among
    return out


def divergence(p: Tensor, q: Tensor, kind: str = "reverse") -> Tensor:
    """The divergence of log-probabilities p and q, [N, V] -> [N].

    reverse: KL(p || q); forward: KL(q || p); jensen_shannon: the mean of KL(p || m) and KL(q || m), m = (p + q) / 2.
    """
    if kind == "reverse":
        gap = torch.where(p == -torch.inf, 0.0, p - q)  # a masked token counts 0
        return (p.exp() * gap).sum(-1)
    if kind == "forward":
        return divergence(q, p)
    middle = _between(p, q)
    return (divergence(p, middle) + divergence(q, middle)) / 2


def _between(p: Tensor, q: Tensor) -> Tensor:
    return torch.logaddexp(p, q) - math.log(2)


def _cut(allowed: tuple[Tensor, Tensor] | None, part: slice) -> tuple[Tensor, Tensor] | None:
    """The allowed ids of the tokens of a chunk, one after the other, and how many each token has."""
    if allowed is None:
        return None
    ids, offsets = allowed
    edges = offsets[part.start : part.stop + 1]
    return ids[int(edges[0]) : int(edges[-1])], edges.diff()
