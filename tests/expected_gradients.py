"""All that can be said by a vocabulary of six, how likely it is, and gradients of claims about it."""

from collections import Counter
from dataclasses import dataclass
from itertools import combinations_with_replacement, product
from math import factorial, prod

import pytest
import torch
from rigs import Caught, said
from torch import Tensor
from toys import lm

from operant import Learner, Policy, ValueOptions
from operant.algorithms import ALGORITHMS
from operant.training import update

V, PROMPT, T, BETA = 6, [3, 4], 0.8, 0.3
STOPS = (0, 1, 2, 5)
"""What ends a reply; behind the other two stands one token more."""
EXACT = 1e-9
Reply = tuple[int, ...]


def replies(shape: str) -> list[Reply]:
    """All that can be said: of one token, of two, or ragged."""
    match shape:
        case "one":
            return [(v,) for v in range(V)]
        case "two":
            return list(product(range(V), repeat=2))
    return [(v,) for v in STOPS] + [(v, w) for v in range(V) if v not in STOPS for w in range(V)]


def rewards(count: int) -> Tensor:
    """One a reply; two are equal, so that there are constant groups of different replies."""
    r = torch.randn(count, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    r[1] = r[0]
    return r


def small(seed: int):
    return lm(vocab=V, seed=seed, spread=0.35).double()


@dataclass
class Said:
    """A bare model's log-probs of every reply, [A] each, and what follows from them."""

    logprobs: list[Tensor]

    @staticmethod
    def by(model, said: list[Reply]) -> "Said":
        longest = max(map(len, said))
        rows = torch.tensor([[*PROMPT, *reply, *[0] * (longest - len(reply))] for reply in said])
        scores = (model(rows).logits[:, len(PROMPT) - 1 :] / T).log_softmax(-1)
        return Said([scores[i, range(len(reply)), list(reply)] for i, reply in enumerate(said)])

    @property
    def whole(self) -> Tensor:
        return torch.stack([x.sum() for x in self.logprobs])


def groups_of(said: list[Reply], size: int) -> list[tuple[int, ...]]:
    """Every group of replies, whatever their order; by number."""
    return list(combinations_with_replacement(range(len(said)), size))


def likely(group: tuple[int, ...], probabilities: Tensor) -> float:
    """How often independent draws make the group, in any order."""
    orders = factorial(len(group)) / prod(factorial(n) for n in Counter(group).values())
    return orders * float(probabilities[list(group)].prod())


def critic(init: str) -> Policy:
    """The policy, with a critic that always begins with the same numbers."""
    torch.manual_seed(3)
    return Policy(small(0), value=ValueOptions(init=init))


def flat(*modules) -> Tensor:
    held = [p for module in modules for p in module.parameters()]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in held])


def of(loss, shape: str) -> Tensor:
    """The gradient of a claim, `loss(policy, reference, rewards)`."""
    model, said = small(0), replies(shape)
    with torch.no_grad():
        reference = Said.by(small(1), said)
    loss(Said.by(model, said), reference, rewards(len(said))).backward()
    return flat(model)


def best_return(policy: Said, reference: Said, r: Tensor) -> Tensor:
    """-(E[reward] - BETA KL(policy || reference)), over whole replies."""
    p = policy.whole
    return -(p.exp() * (r - BETA * (p - reference.whole))).sum()


PLAIN = {"kl.coef": BETA, "advantage.lam": 1.0, "advantage.whiten_scope": "none", "loss.value_coef": 0.0}


def expected(name: str, shape: str, size: int, monkeypatch, *, stale=False, **options) -> Tensor:
    """The library's gradient of a group of `size` replies, averaged over all groups by the probabilities of the policy,
    or, if replies are `stale`, of another one that has said them."""
    spoken, r = replies(shape), rewards(len(replies(shape)))
    fixed = {"max_tokens": len(spoken[-1]), "stop_tokens": STOPS, "epochs": 1, "max_grad_norm": None, "watch_every": 0}
    fixed |= {"minibatch": size, "temperature": T, "reference": Policy(small(1))}
    policy = critic(options.pop("value", "zero")) if ALGORITHMS[name].needs.critic else Policy(small(0))
    learner = Learner(policy, algorithm=name, **fixed | options)
    learner.optimizer = Caught(learner.policy.parameters())
    groups, sampler = groups_of(spoken, size), Said.by(small(2 if stale else 0), spoken)
    pairs = [(g, y) for g, group in enumerate(groups) for y in group]
    queries, texts = [PROMPT] * len(pairs), [list(spoken[y]) for _, y in pairs]
    scores = [float(r[y]) for _, y in pairs]
    # A minibatch is a group: the units of an epoch come in the order in which they were given.
    monkeypatch.setattr(update, "counter", lambda seed, step, epoch, number: number)
    if stale:
        known = [{"group": g, "logprobs": sampler.logprobs[y].tolist()} for g, y in pairs]
        learner.learn([said(PROMPT, text, **turn) for text, turn in zip(texts, known, strict=True)], scores)
    else:
        learner.step(queries, texts, scores, **({"groups": [g for g, _ in pairs]} if size > 1 else {}))
    assert len(learner.optimizer.gradients) == len(groups)
    weights = [likely(group, sampler.whole.exp().detach()) for group in groups]
    assert sum(weights) == pytest.approx(1.0)
    return sum(w * g for w, g in zip(weights, learner.optimizer.gradients, strict=True))
