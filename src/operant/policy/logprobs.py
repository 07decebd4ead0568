"""Log-probability, entropy, logsumexp and exact KL of chosen tokens: the one place that sees the vocabulary.

Logits exist at action positions only, and in chunks: with gradients, a chunk is computed again in the backward pass
rather than kept, as soon as there is more than one.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from operant.sampling import Sampling

BUDGET = 48_000_000
"""Logits held at once, in numbers."""

Head = Callable[[Tensor], Tensor]
"""[N, D] -> [N, V]."""


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

    `places` [N]: index of each token in its reply. `allowed`: ragged ids and offsets [N + 1] of the tokens that could be
    drawn. `against`: the head and states of another model, for the exact `reverse` and `forward` divergences.
    """
    size = max(1, budget // vocabulary)
    pieces = []
    for start in range(0, len(ids), size):
        part = slice(start, start + size)
        other = None if against is None else against[0](against[1][part]).detach()
        arguments = (head, states[part], ids[part], places[part], sampling, _cut(allowed, part), other, entropy_gradient)
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
    return [ids[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)]
