"""GRPO's relatives by hand, by enumeration and by autograd in float64: their losses, advantages and refusals."""

from itertools import product
from math import exp, log, prod

import pytest
import torch
from torch import Tensor
from toys import lm

from operant import Learner
from operant.algorithms import ALGORITHMS
from operant.objectives import advantages, group_baselines, ratios, value_augmented
from operant.objectives.groups import with_groups
from operant.rollouts.collate import nothing, played
from operant.types import Batch, OperantError, Outputs

NOW = [[-0.9, -1.2, -0.4, 0.0], [-2.0, -0.1, -0.7, -1.5], [-0.3, 0.0, 0.0, 0.0]]
THEN = [[-1.0, -0.5, -0.6, 0.0], [-0.3, -0.9, -2.9, -1.5], [-2.4, 0.0, 0.0, 0.0]]
GAINS = [1.5, -0.8, 0.6]
LENGTHS = [3, 4, 1]
"""Three replies: log-probs now and when they were drawn, an advantage each, and their lengths."""


def rows() -> tuple[Outputs, Batch]:
    batch = Batch.given([[1]] * 3, [[2] * n for n in LENGTHS])

    def placed(x: list[list[float]]) -> Tensor:
        return torch.cat([torch.zeros(3, 1).double(), torch.tensor(x, dtype=torch.float64)], 1)

    gains = torch.tensor(GAINS, dtype=torch.float64)[:, None] * batch.actions
    batch = batch.with_(logprobs=placed(THEN), advantages=gains)
    return Outputs(placed(NOW).requires_grad_(), placed(NOW)), batch


def by_token(rule) -> list[list[tuple[float, float]]]:
    """`rule(now, then, gain, whole)` at every token: its loss and its derivative by the token's log-prob. `whole`: the
    mean of the log-ratios of the reply."""
    found = []
    for now, then, gain, n in zip(NOW, THEN, GAINS, LENGTHS, strict=True):
        whole = sum(p - q for p, q in zip(now[:n], then[:n], strict=True)) / n
        found.append([rule(now[t], then[t], gain, whole) for t in range(n)])
    return found


def cut(gain: float, ratio: float, low: float, high: float) -> tuple[float, float]:
    """The clipped surrogate and its derivative by the log of the ratio."""
    kept = not (gain > 0 and ratio > 1 + high) and not (gain < 0 and ratio < 1 - low)
    return (-gain * ratio, -gain * ratio) if kept else (-gain * min(max(ratio, 1 - low), 1 + high), 0.0)


def gated(now: float, then: float, gain: float, _: float) -> tuple[float, float]:
    t, r = (1.0 if gain > 0 else 1.05), exp(now - then)
    gate = 1 / (1 + exp(-t * (r - 1)))
    return -gain * gate * 4 / t, -gain * 4 * gate * (1 - gate) * r


def masked(now: float, then: float, gain: float, distance: float, most: float, cap: float) -> tuple[float, float]:
    r = exp(now - then)
    outward = (gain > 0 and r > 1) or (gain < 0 and r < 1)
    return -gain * min(r, cap), 0.0 if outward and distance > most else -gain * min(r, cap)


def two_outcomes(now: float, then: float) -> float:
    p, q = exp(now), exp(then)
    return q * log(q / p) + (1 - q) * log((1 - q) / (1 - p))


WIDE = {"clip": 0.3, "clip_high": 0.4}
LOSSES = {
    "gspo": (ratios.sequence_ratio, WIDE, lambda p, q, a, s: cut(a, exp(s), 0.3, 0.4)),
    "gspo, its own bounds": (ratios.sequence_ratio, {}, lambda p, q, a, s: cut(a, exp(s), 3e-4, 4e-4)),
    "gspo, token": (ratios.sequence_ratio, {**WIDE, "ratio": "token"}, lambda p, q, a, s: cut(a, exp(s), 0.3, 0.4)),
    "cispo, 5": (ratios.clipped_weight, {}, lambda p, q, a, s: (-a * min(exp(p - q), 5) * p, -a * min(exp(p - q), 5))),
    "cispo, at most 1.2": (
        ratios.clipped_weight,
        {"high": 0.2, "bound": "excess", "low": 0.5},
        lambda p, q, a, s: (-a * min(max(exp(p - q), 0.5), 1.2) * p, -a * min(max(exp(p - q), 0.5), 1.2)),
    ),
    "sapo": (ratios.soft_gate, {}, gated),
    "dppo, tv": (ratios.divergence_mask, {}, lambda p, q, a, s: masked(p, q, a, abs(exp(p) - exp(q)), 0.15, 20)),
    "dppo, kl": (
        ratios.divergence_mask,
        {"distance": "kl", "max_distance": 0.05, "ratio_cap": 3.0},
        lambda p, q, a, s: masked(p, q, a, two_outcomes(p, q), 0.05, 3.0),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient_are_those_of_the_formula(name):
    loss, options, rule = LOSSES[name]
    out, batch = rows()
    terms, expected = loss(out, batch, **options), by_token(rule)
    for b, n in enumerate(LENGTHS):
        assert terms["loss"][b, 1 : 1 + n].tolist() == pytest.approx([x for x, _ in expected[b]], abs=1e-12)
    (terms["loss"] * batch.actions).sum().backward()
    for b, n in enumerate(LENGTHS):  # the ratio of a reply has the mean of its tokens' gradients, once for each of them
        assert out.logprobs.grad[b, 1 : 1 + n].tolist() == pytest.approx([slope for _, slope in expected[b]], abs=1e-12)
    share = terms["policy/clip_fraction"][batch.actions]
    assert (float(share.max()) == 1) == (name != "sapo")
    assert float(share.min()) == 0 or "bounds" in name


# --- advantages -------------------------------------------------------------------------------------------------------
def test_the_baseline_of_opo_is_weighted_by_length():
    returns, groups = torch.tensor([1.0, 0.0, 4.0, 2.0, 2.0]), torch.tensor([7, 3, 7, 3, 7])
    lengths = torch.tensor([1, 5, 3, 5, 2])
    seven, three = (1 * 1 + 3 * 4 + 2 * 2) / 6, (0 + 10) / 10
    expected = [1 - seven, 0 - three, 4 - seven, 2 - three, 2 - seven]
    assert group_baselines.by_length(returns, groups, lengths).tolist() == pytest.approx(expected)
    equal = group_baselines.by_length(torch.full((3,), 0.1), torch.zeros(3).long(), torch.tensor([1, 2, 9]))
    assert equal.tolist() == [0, 0, 0]


REPLIES = torch.tensor([0.0, 1.0, 0.0, 1.0, 3.0], dtype=torch.float64)
LOGITS = torch.tensor([0.3, -1.0, 0.9, 0.1, -0.6], dtype=torch.float64)


def expected_gradient(rule, values: Tensor, n: int) -> Tensor:
    """[V] the gradient by the logits that the mean over a group of A_i grad log p(i) has on average, by enumeration."""
    p = LOGITS.softmax(0)
    total = torch.zeros_like(p)
    for group in product(range(len(p)), repeat=n):
        weights, chance = rule(values[list(group)]), prod(float(p[i]) for i in group)
        for i, weight in zip(group, weights.tolist(), strict=True):
            total += chance * weight / n * (torch.eye(len(p), dtype=p.dtype)[i] - p)
    return total


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_climbs_the_expected_best_of_k(k):
    found = expected_gradient(lambda r: group_baselines.best_of(r, torch.zeros(4).long(), k), REPLIES, 4)
    logits = LOGITS.clone().requires_grad_()
    p = logits.softmax(0)
    groups = product(range(5), repeat=k)
    best = sum(torch.stack([p[i] for i in g]).prod() * max(float(REPLIES[i]) for i in g) for g in groups)
    best.backward()
    assert found.tolist() == pytest.approx(logits.grad.tolist(), abs=1e-12)


def test_maxrl_climbs_the_first_terms_of_the_log_likelihood():
    """log p = - sum over k of (1 - p)^k / k, and (1 - p)^k is 1 - pass@k. Of n replies, k goes to n - 1."""
    right = (REPLIES > 0).double()
    found = expected_gradient(lambda r: group_baselines.by_success(r, torch.zeros(4).long()), right, 4)
    logits = LOGITS.clone().requires_grad_()
    p = (logits.softmax(0) * right).sum()
    sum((1 - (1 - p) ** k) / k for k in range(1, 4)).backward()
    assert found.tolist() == pytest.approx(logits.grad.tolist(), abs=1e-12)


def test_the_deviation_of_the_step_replaces_the_groups():
    batch = Batch.given([[1]] * 4, [[2], [2, 2], [2, 2, 2], [2]])
    batch = batch.with_(groups=torch.tensor([0, 0, 1, 1]))
    scores, last = torch.tensor([1.0, 0.0, 5.0, 2.0]), batch.mask.sum(1) - 1
    batch = batch.with_(rewards=torch.zeros(batch.tokens.shape).scatter(1, last[:, None], scores[:, None]))
    centred = [0.5, *[-0.5] * 2, *[1.5] * 3, -1.5]
    mean = sum(centred) / 7
    spread = (sum((x - mean) ** 2 for x in centred) / 7 + 1e-8) ** 0.5
    made = group_baselines.with_group_mean(batch).advantages[batch.actions].tolist()
    assert made == pytest.approx([(x - mean) / spread for x in centred], abs=1e-6)


def test_vapo_has_a_lambda_for_each_length_and_another_for_the_critic():
    """Two replies of 2 and 4 tokens with alpha .4: lambdas of 0 (1 - 1/.8 is negative) and .375."""
    batch = Batch.given([[1]] * 2, [[2, 2], [2, 2, 2, 2]])
    values = torch.tensor([[0, 0.2, 0.4, 0, 0], [0, 0.1, 0.3, 0.5, 0.7]], dtype=torch.float64)
    rewards = torch.tensor([[0, 0, 0.5, 0, 0], [0, 0, 0, 0, 1.0]], dtype=torch.float64)
    batch = batch.with_(values=values, rewards=rewards, bootstrap=batch.bootstrap.double())
    made = value_augmented.with_two_lambdas(batch, alpha=0.4, whiten_scope="none", right=1.0)
    first = [0.4 - 0.2, 0.5 - 0.4]
    deltas, lam = [0.3 - 0.1, 0.5 - 0.3, 0.7 - 0.5, 1.0 - 0.7], 1 - 1 / 1.6
    second = [sum(lam ** (j - i) * deltas[j] for j in range(i, 4)) for i in range(4)]
    assert made.advantages[batch.actions].tolist() == pytest.approx([*first, *second], abs=1e-12)
    assert made.returns[batch.actions].tolist() == pytest.approx([0.5, 0.5, 1, 1, 1, 1], abs=1e-12)
    assert made.extra["right"][batch.actions].tolist() == pytest.approx([0, 0, *[6 / 4] * 4])
    out = Outputs(torch.full_like(values, -0.7).requires_grad_(), values, values=values)
    made = made.with_(logprobs=out.logprobs.detach())
    plain, more = (value_augmented.ppo_and_right_replies(out, made, right_coef=c)["loss"] for c in (0.0, 0.1))
    weights = batch.actions / 6
    assert float(((more - plain) * weights).detach().sum()) == pytest.approx(0.07)  # of the right reply alone


def test_a_row_without_actions_is_no_reply():
    """A rank without replies has one. The deviation of the step is that of four replies, the root of 1.25."""
    batch = Batch.given([[1]] * 4 + [[0, 0]], [[2]] * 4 + [[]]).with_(groups=torch.tensor([0, 0, 1, 1, 2]))
    rewards = torch.zeros(batch.tokens.shape)
    rewards[:4, 1] = torch.tensor([0.0, 1.0, 0.0, 3.0])
    for scale, spread in ((True, 1.25**0.5), (False, 1.0)):
        made = with_groups(batch.with_(rewards=rewards), scale=scale, deviation="batch").advantages
        assert made[batch.actions].tolist() == pytest.approx([x / spread for x in (-0.5, 0.5, -1.5, 1.5)])
        assert not made[4].any()


@pytest.mark.parametrize("name", "a2c reinforce grpo rloo opo maxrl pass-at-k vapo ilql soft_q".split())
def test_a_rank_without_replies_has_no_advantages(name):
    made = ALGORITHMS[name].advantage(nothing(), **({"k": 4} if name == "pass-at-k" else {}))
    assert made.advantages is None or not made.advantages.any()
    assert not advantages.episode_index(played(nothing().with_(demonstrated=torch.tensor([True])))[1]).numel()
    if name == "soft_q":
        none = torch.zeros(made.tokens.shape)
        made = made.with_(extra={"target_q": none, "target_v": none})
        assert not ALGORITHMS[name].loss(Outputs(none, none, logsumexp=none), made)["loss"].any()


# --- refusals ---------------------------------------------------------------------------------------------------------
def test_returns_below_0_have_no_rate_of_success():
    with pytest.raises(OperantError, match="a return of -1: maxrl divides by the mean return of a group"):
        group_baselines.by_success(torch.tensor([-1.0, 0.0, 0.0]), torch.zeros(3).long())


def test_a_group_that_has_lost_replies_is_the_best_of_all_that_are_left():
    assert Learner(lm(), algorithm="pass-at-k", **{"advantage.k": 4}).options["advantage"]["k"] == 4
    left = torch.tensor([0.0, 1.0, 3.0]), torch.zeros(3).long()
    assert group_baselines.best_of(*left, 4).tolist() == group_baselines.best_of(*left).tolist() == [0.0, 0.0, 6.0]


def test_every_relative_compares_in_groups_of_two_or_more():
    related = [n for n, one in ALGORITHMS.items() if one.advantage is not advantages.with_gae and one.needs.samples > 1]
    assert {"grpo", "dapo", "dr-grpo", "gspo", "cispo", "sapo", "dppo", "opo", "maxrl", "pass-at-k"} < set(related)
