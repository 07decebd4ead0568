"""Log-probability, entropy, logsumexp and exact KL of chosen tokens: the one place that sees the vocabulary.

Logits exist at action positions only, and in chunks: with gradients, a chunk is computed again in the backward pass
rather than kept, as soon as there is more than one.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from operant.sampling import Sampling

BUDGET = 48_000_000
"""Logits held at once, in numbers."""

BLOCK = 64
"""Rows of logits swept at once, few enough to stay in a core's cache between the passes over them."""

Head = Callable[[Tensor], Tensor]
"""[N, D] -> [N, V]."""


class Sweep(torch.autograd.Function):
    """Log-prob of the chosen ids, logsumexp and entropy of finite logits [N, V], in one sweep of cache-sized blocks.

    d logprob / d logits = onehot - p and d logsumexp / d logits = p; entropy has no gradient here.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keep = logits.requires_grad
        probs = torch.empty_like(logits) if keep else None
        out = torch.empty(3, len(ids), dtype=torch.float32, device=logits.device)
        for a in range(0, len(ids), BLOCK if logits.device.type == "cpu" else max(1, len(ids))):
            x = logits[a : a + BLOCK].float() if logits.device.type == "cpu" else logits.float()
            b = a + len(x)
            top = x.amax(-1, keepdim=True)
            shifted = x - top
            weights = shifted.exp()
            mass = weights.sum(-1)
            log_mass = mass.log()
            out[0, a:b] = shifted.gather(-1, ids[a:b, None]).squeeze(-1) - log_mass
            out[1, a:b] = log_mass + top.squeeze(-1)
            out[2, a:b] = log_mass - torch.linalg.vecdot(weights, shifted) / mass
            if probs is not None:
                probs[a:b] = weights.div_(mass[:, None])
        if probs is not None:
            ctx.save_for_backward(probs, ids)
        logprobs, normaliser, spread = out.unbind(0)
        ctx.mark_non_differentiable(spread)
        return logprobs, normaliser, spread

    @staticmethod
    def backward(ctx, d_logprobs: Tensor, d_normaliser: Tensor, _: Tensor) -> tuple[Tensor, None]:
        probs, ids = ctx.saved_tensors
        grad = probs.mul_((d_normaliser - d_logprobs)[:, None].to(probs.dtype))  # saved for this one use
        grad.scatter_add_(-1, ids[:, None], d_logprobs[:, None].to(grad.dtype))
        return grad, None


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
    entropy_gradient: bool = False,
    budget: int = BUDGET,
) -> dict[str, Tensor]:
    """What is known of chosen tokens `ids` [N] in `states` [N, D]: named tensors [N], float32.

    `places` [N]: index of each token in its reply. `allowed`: ragged ids and offsets [N + 1] of the tokens
    that could be drawn. `against`: the head and states of another model, for the exact divergences.
    """
    size = max(1, budget // vocabulary)
    pieces = []
    for start in range(0, len(ids), size):
        part = slice(start, start + size)
        other = None if against is None else against[0](against[1][part]).detach()
        arguments = (
            head,
            states[part],
            ids[part],
            places[part],
            sampling,
            _cut(allowed, part),
            other,
            entropy_gradient,
        )
        if len(ids) > size and torch.is_grad_enabled():
            pieces.append(checkpoint(_score, *arguments, use_reentrant=False))
        else:
            pieces.append(_score(*arguments))
    if not pieces:
        empty = states.new_zeros(0, dtype=torch.float32)
        names = ["logprobs", "raw_logprobs", "entropy", "logsumexp"] + (["reverse", "forward"] if against else [])
        return dict.fromkeys(names, empty)
    return {name: torch.cat([p[name] for p in pieces]) for name in pieces[0]}


def _score(
    head: Head,
    states: Tensor,
    ids: Tensor,
    places: Tensor,
    sampling: Sampling,
    allowed: Sequence[Tensor] | None,
    other: Tensor | None,
    entropy_gradient: bool,
) -> dict[str, Tensor]:
    plain = sampling.untouched and allowed is None and other is None and not entropy_gradient
    if plain:
        logprobs, normaliser, spread = Sweep.apply(head(states), ids)
        return {"logprobs": logprobs, "raw_logprobs": logprobs, "logsumexp": normaliser, "entropy": spread}
    logits = sampling.adjust(head(states), places)
    normaliser = logits.logsumexp(-1)
    chosen = logits.gather(-1, ids[:, None]).squeeze(-1)
    raw = chosen - normaliser
    kept = raw if allowed is None else chosen - _among(logits, allowed)
    out = {"logprobs": kept, "raw_logprobs": raw, "logsumexp": normaliser}
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        out["entropy"] = entropy(logits, normaliser)
    if other is not None:
        mine, theirs = logits.log_softmax(-1), sampling.adjust(other, places).log_softmax(-1)
        out |= {"reverse": divergence(mine, theirs), "forward": divergence(theirs, mine)}
    return out


def entropy(logits: Tensor, normaliser: Tensor) -> Tensor:
    """Of softmax(logits) [N, V] -> [N]; tokens that are masked (-inf) count 0."""
    probs = (logits - normaliser[:, None]).exp()
    return normaliser - (probs * logits.masked_fill(logits == -torch.inf, 0.0)).sum(-1)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of log-probabilities [N, V] -> [N]; tokens that both mask count 0."""
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
