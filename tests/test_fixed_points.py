"""Where every row of the table ends, with KL present: one prompt and six tokens, real samples, a real model.

PPO and RLOO maximise E[reward] - price * KL, whose best policy is reference * exp(reward / price) / Z. GRPO divides by
the deviation of each group and takes KL into the loss, which ends elsewhere; where, is found here by enumerating all
groups and following the expected gradient in float64. Supervised training ends at the frequencies of the data.

A policy is held to its own end within a total variation of 0.02, as the mean over the second half of a run whose rate
falls to 0. The ends of the methods next to it lie farther away than that.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import combinations_with_replacement
from math import factorial, prod
from typing import Any

import pytest
import torch
from cases import slow_but
from torch import Tensor
from toys import lm

from operant import Learner, Task
from operant.algorithms import ALGORITHMS

V, PROMPT, GROUP = 6, [3, 4], 4
REPLIES, STEPS, RATE = 256, 64, 5e-3
PRICE, LOSS_PRICE, DEAR = 0.5, 0.8, 1.6
SHARP = 2.0
"""The range of rewards of soft Q-learning, whose policy is exp(SHARP * reward) over its sum, without a reference."""
REWARDS = torch.tensor([0.0, 1.0, 0.4, -0.6, 0.8, 0.2], dtype=torch.float64)
DATA = [v for v, count in enumerate([12, 24, 96, 60, 12, 36]) for _ in range(count)]
SHARES = torch.bincount(torch.tensor(DATA)).double() / len(DATA)
NEAR, OTHER = 0.02, 0.04


def spoken(model: Any, prompt: list[int] = PROMPT) -> Tensor:
    """[V] the model's own probabilities behind the prompt."""
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0, -1].double().softmax(0)


def begun() -> Any:
    return lm(vocab=V, spread=0.1)


REFERENCE = spoken(begun())


def apart(p: Tensor, q: Tensor) -> float:
    """Total variation."""
    return float((p - q).abs().sum() / 2)


# --- the ends ---------------------------------------------------------------------------------------------------------
def tilted(price: float) -> Tensor:
    """[V] the best policy at a price of a nat of KL(policy || reference)."""
    return (REFERENCE.log() + REWARDS / price).softmax(0)


def groups(size: int, *, scale: bool, fewer: int) -> tuple[Tensor, Tensor]:
    """Every group of `size` tokens: how often it holds each, [G, V], and how often it is drawn in another order, times
    what each token's advantages in it sum to, [G, V]."""
    counts = [[g.count(v) for v in range(V)] for g in combinations_with_replacement(range(V), size)]
    orders = torch.tensor([factorial(size) / prod(map(factorial, row)) for row in counts], dtype=torch.float64)
    n = torch.tensor(counts, dtype=torch.float64)
    centred = REWARDS - (n @ REWARDS / size)[:, None]
    spread = ((n * centred**2).sum(1, keepdim=True) / (size - fewer)).sqrt()
    advantages = torch.where(spread > 0, centred / (spread + 1e-6), 0.0) if scale else centred
    return n, orders[:, None] * n * advantages


@cache
def grpo_end(*, kl: str = "k3", scale: bool = True, fewer: int = 0, size: int = GROUP, gain: float = 1.0) -> Tensor:
    """[V] where the expected gradient by the logits is 0.

    Advantages sum to 0 over a group, so nothing is left of the softmax but the tokens themselves. KL has the gradient
    of KL(policy || reference), or for `plain_k3` of KL(reference || policy). gain: multiplies the advantages.
    """
    (n, weighted), logits = groups(size, scale=scale, fewer=fewer), REFERENCE.log()
    for _ in range(2000):
        p = logits.softmax(0)
        d = p.log() - REFERENCE.log()
        held = p * (d - (p * d).sum()) if kl == "k3" else p - REFERENCE
        change = gain * ((p**n).prod(1) @ weighted) / size - LOSS_PRICE * held
        if float(change.abs().max()) < 1e-11:
            return p
        logits = logits + 4.0 * change
    raise AssertionError("no end was found")


@cache
def whitened_end(gain: float = 1.0) -> Tensor:
    """[V] where the reward over its deviation under the policy itself, times `gain`, and KL hold each other.

    A policy that is surer has a smaller deviation, and so a larger gain: at a low price it ends at one token.
    """
    p = REFERENCE
    for _ in range(500):
        spread = (p @ REWARDS**2 - (p @ REWARDS) ** 2).sqrt()
        p = (p.log() + (REFERENCE.log() + gain * REWARDS / (DEAR * spread)).log_softmax(0)).div(2).softmax(0)
    return p


@cache
def climbed(objective: Callable[[Tensor], Tensor]) -> Tensor:
    """[V] the policy with the largest `objective(p)` - price * KL(p || reference), by its gradient from autograd."""
    logits = REFERENCE.log().requires_grad_()
    for _ in range(4000):
        logp = logits.log_softmax(0)
        goal = objective(logp.exp()) - LOSS_PRICE * (logp.exp() * (logp - REFERENCE.log())).sum()
        (slope,) = torch.autograd.grad(goal, logits)
        if float(slope.abs().max()) < 1e-10:
            break
        logits = (logits + slope).detach().requires_grad_()
    return logits.detach().softmax(0)


def best_of_two(p: Tensor) -> Tensor:
    return (p[:, None] * p[None, :] * torch.maximum(REWARDS[:, None], REWARDS[None, :])).sum()


def likelihood_of_right(p: Tensor) -> Tensor:
    """Of log P(right), the terms that groups of four replies can estimate."""
    wrong = 1 - p[REWARDS > 0.5].sum()
    return -sum(wrong**k / k for k in range(1, GROUP))


@cache
def rejection_end(share: float) -> Tensor:
    """[V] where imitating the best `share` of many replies and KL(policy || reference) hold each other.

    The best of a distribution: its tokens in order of reward, up to a mass of `share`.
    """
    order, logits = REWARDS.argsort(descending=True), REFERENCE.log()
    for _ in range(20000):
        p = logits.softmax(0)
        mass = p[order].cumsum(0).clamp(max=share).diff(prepend=torch.zeros(1, dtype=p.dtype))
        kept = torch.zeros_like(p).scatter(0, order, mass / share)
        d = p.log() - REFERENCE.log()
        change = kept - p - DEAR * p * (d - (p * d).sum())
        if float(change.abs().max()) < 1e-9:
            return p
        logits = logits + 0.2 * change
    raise AssertionError("no end was found")


# --- the runs ---------------------------------------------------------------------------------------------------------
@dataclass
class Case:
    """A method under its options, where it ends, and where it would with a fault or as another."""

    name: str
    end: Callable[[], Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    others: list[Callable[[], Tensor]] = field(default_factory=list)
    steps: int = STEPS
    rewards: Tensor = REWARDS


IN_LOSS = {"kl.loss_coef": LOSS_PRICE}
UNSCALED, PLAIN_K3 = partial(grpo_end, scale=False), partial(grpo_end, kl="plain_k3")
AT_PRICE, HELD, DEARLY = (partial(tilted, price) for price in (PRICE, LOSS_PRICE, DEAR))
CASES = {
    "ppo": Case("ppo", AT_PRICE, {"kl.coef": PRICE}, [partial(tilted, 2 * PRICE)], steps=40),
    "a2c": Case("a2c", AT_PRICE, {"kl.coef": PRICE, "optimizer.kind": "adamw"}, steps=40),
    "reinforce": Case("reinforce", AT_PRICE, {"kl.coef": PRICE}, steps=48),
    "coderl": Case("coderl", AT_PRICE, {"kl.coef": PRICE, "score.centre": True}, steps=48),
    "nlpo": Case("nlpo", AT_PRICE, {"kl.coef": PRICE, "top_p": 1.0, "top_k": V}, steps=40),
    "trpo": Case("trpo", AT_PRICE, {"kl.coef": PRICE, "update.target_kl": 0.003}, steps=64),
    "rloo": Case("rloo", AT_PRICE, {"kl.coef": PRICE}, [partial(tilted, 2 * PRICE)], steps=48),
    "grpo, plain_k3": Case("grpo", PLAIN_K3, IN_LOSS | {"kl.loss_kind": "plain_k3"}, [grpo_end, HELD]),
    "grpo, unscaled": Case("grpo", UNSCALED, IN_LOSS | {"advantage.scale": False}, [grpo_end, HELD]),
    "vapo": Case("vapo", whitened_end, {"kl.loss_coef": DEAR, "advantage.right": 9.0}, [DEARLY], steps=96),
    "reinforce++": Case("reinforce++", whitened_end, {"kl.loss_coef": DEAR}, [DEARLY]),
    "pass-at-k": Case("pass-at-k", partial(climbed, best_of_two), IN_LOSS | {"advantage.k": 2}, [HELD]),
    "gigpo": Case("gigpo", grpo_end, {"kl.loss_coef": 2 * LOSS_PRICE}, [partial(grpo_end, gain=0.5)]),
    "sft": Case("sft", lambda: SHARES, {"minibatch": 60}, [lambda: REFERENCE], steps=32),
}
CASES |= {name: Case(name, grpo_end, IN_LOSS, [UNSCALED]) for name in ("dapo", "gspo", "cispo", "sapo", "dppo")}
CASES |= {name: Case(name, UNSCALED, IN_LOSS, [grpo_end]) for name in ("dr-grpo", "opo")}
OTHERS = [PLAIN_K3, UNSCALED, partial(grpo_end, fewer=1), partial(grpo_end, size=8), HELD]
CASES["grpo"] = Case("grpo", grpo_end, IN_LOSS, OTHERS)
OF_MEANS = partial(whitened_end, 0.75**0.5), {"kl.loss_coef": DEAR}, [DEARLY, whitened_end]
CASES["reinforce++-baseline"] = Case("reinforce++-baseline", *OF_MEANS)
OF_RIGHT = partial(climbed, likelihood_of_right), IN_LOSS, [grpo_end]
CASES["maxrl"] = Case("maxrl", *OF_RIGHT, rewards=(REWARDS > 0.5).double())
TOLD, BEHIND = (partial(spoken, begun(), prompt) for prompt in ([5, *PROMPT], [*PROMPT, 5]))
CASES["distill"] = Case("distill", TOLD, {"teacher.hint": lambda rollout: [5]}, [lambda: REFERENCE, BEHIND], steps=32)
BEST = {"kl.loss_coef": DEAR, "learner.select": "top:75%"}
CASES["rejection"] = Case("rejection", partial(rejection_end, 0.75), BEST, [partial(rejection_end, 0.5), DEARLY, HELD])
SOFT = {"advantage.shape": (0.0, 1.0, 0.0, SHARP), "target.rate": 0.2}
FREE, TWICE = ((sharp * REWARDS).softmax(0) for sharp in (SHARP, 2 * SHARP))
NEAR_REFERENCE = partial(tilted, 1 / SHARP)
CASES["soft_q"] = Case("soft_q", lambda: FREE, SOFT | {"reference": None}, [lambda: TWICE, NEAR_REFERENCE], steps=96)
CASES["soft_q, reference"] = Case("soft_q", NEAR_REFERENCE, SOFT, [lambda: FREE], steps=96)


def reached(case: Case) -> Tensor:
    """[V] the mean policy of the second half of a run."""
    fixed = {"lr": RATE, "max_tokens": 1, "fixed_length": True, "watch_every": 0, "optimizer.schedule": "linear"}
    learner = Learner(begun(), algorithm=case.name, total_steps=case.steps, **fixed | case.options)
    asked = [Task(f"group {i // GROUP}", PROMPT) for i in range(REPLIES)]
    policies = []
    for _ in range(case.steps):
        if learner.algorithm.source == "data":
            learner.step([PROMPT] * len(DATA), [[v] for v in DATA])
        else:
            replies = learner.generate(asked)
            learner.step(replies, [float(case.rewards[r.ids[0]]) for r in replies])
        policies.append(spoken(learner.policy.model))
    return torch.stack(policies[case.steps // 2 :]).mean(0)


DAILY = ("rloo", "sft")
"""Each for a kind of update. The gradients of all are held to their claims every day, in test_expected_gradients.py and
test_group_methods.py."""


@pytest.mark.parametrize("name", slow_but(DAILY, CASES))
def test_a_method_ends_where_it_says(name):
    case = CASES[name]
    end = case.end()
    assert apart(end, REFERENCE) > 0.1 and all(apart(end, other()) > OTHER for other in case.others)
    assert apart(reached(case), end) < NEAR


def test_every_row_of_the_table_has_an_end():
    assert {case.name for case in CASES.values()} == set(ALGORITHMS) - WITHOUT


WITHOUT = {"decision", "ilql", "dpo", "online-dpo", "kto", "reward-model", "outcome-critic"}
"""They imitate what is asked of them or what a player said, or follow labels: where they end depends on the replies."""
