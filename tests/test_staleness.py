"""Turns of earlier weights: their age, what looks past them, the bound, and importance weights for them."""

from dataclasses import replace
from math import exp, log

import pytest
import torch
from cases import cases, slow
from expected_gradients import BETA, EXACT, PLAIN, best_return, expected, of, replies
from rigs import gap, said
from toys import bare_logprobs, lm

from operant import Learner, OperantError, Rollout, Task, Turn, diagnose
from operant.rollouts.collate import collate, token_weights
from operant.training import update
from operant.training.objective import Objective
from operant.training.options import LearnerOptions
from operant.training.rare_stages import with_importance
from operant.training.select import with_staleness


# --- hand calculation -------------------------------------------------------------------------------------------------
def two_episodes() -> list[Rollout]:
    """Two turns in two rows and a current one; the versions are 3, 5 and 7."""
    first = [Turn([1], [2, 3], [-1.0, -2.0], version=3), Turn([9], [4], [-0.5], version=5)]
    now = said([6, 7], [8, 5], group=1, logprobs=[-0.25, -0.75], version=7)
    return [Rollout(Task("a", [1]), 0, first, ["", ""]), now]


def test_every_action_has_the_age_of_its_turn():
    """Current turns have none, and neither have replies from elsewhere."""
    batch = with_staleness(collate(two_episodes(), [0.0, 0.0]), two_episodes(), 7)
    assert batch.staleness.tolist() == [[0, 4, 4, 0], [0, 2, 0, 0], [0, 0, 0, 0]]
    assert batch.rows(torch.tensor([1])).staleness.tolist() == [[0, 2]]
    current = [said([1], [2], logprobs=[-1.0], version=7), said([1], [2], group=1)]
    assert with_staleness(collate(current, [0.0, 0.0]), current, 7).staleness is None


@cases(
    ("token", None, 0.0, [[exp(0.5), exp(1.0)], [exp(-0.3)], [exp(0.0), exp(-0.25)]]),
    ("token", 1.5, 0.0, [[1.5, 1.5], [exp(-0.3)], [1.0, exp(-0.25)]]),
    ("token", None, 0.76, [[exp(0.5), exp(1.0)], [0.76], [exp(0.0), exp(-0.25)]]),
    ("token", 1.5, 0.9, [[1.5, 1.5], [0.9], [1.0, 0.9]]),
    ("sequence", None, 0.0, [[exp(1.2)] * 2, [exp(1.2)], [exp(-0.25)] * 2]),
    ("sequence", 2.0, 0.8, [[2.0] * 2, [2.0], [0.8] * 2]),
)
def test_importance_weights_by_hand(kind, cap, floor, expected):
    """The policy's log-probs are -0.5, -1; -0.8; -0.25, -1. A weight multiplies that of its token in the mean."""
    batch = collate(two_episodes(), [0.0, 0.0])
    sampled, now = batch.logprobs, batch.logprobs.clone()
    now[batch.actions] = torch.tensor([-0.5, -1.0, -0.8, -0.25, -1.0])
    how = {"importance": kind, "importance_cap": cap, "importance_floor": floor}
    found = with_importance(batch.with_(logprobs=now), sampled, LearnerOptions(**how))
    flat = torch.tensor([w for row in expected for w in row])
    torch.testing.assert_close(found.importance[batch.actions], flat)
    masking = LearnerOptions(**how, importance_mask=cap is not None or floor > 0)
    masked = with_importance(batch.with_(logprobs=now), sampled, masking).importance[batch.actions]
    torch.testing.assert_close(masked, torch.where((flat == cap) | (flat == floor), 0.0, flat))
    weights = update.weighted(found, [0, 1, 2], Objective(loss=lambda out, batch: {})).weights
    torch.testing.assert_close(weights[batch.actions], flat / 5)
    assert torch.equal(token_weights(found)[batch.actions], torch.full((5,), 0.2))


# --- enumeration ------------------------------------------------------------------------------------------------------
OF_PPO = PLAIN | {"importance_cap": None}
OF_RLOO = {"kl.coef": BETA, "importance_cap": None}


@cases(
    ("ppo", "two", 1, "sequence", OF_PPO),
    slow("rloo", "one", 2, "token", OF_RLOO),
    slow("rloo", "ragged", 2, "sequence", OF_RLOO),
)
def test_with_exact_weights_the_gradient_is_that_on_policy(name, shape, size, importance, options, monkeypatch):
    """The truth is the gradient of E[reward] - BETA KL by autograd on a bare model; a mean over two tokens is half."""
    truth = of(best_return, shape) / (len(replies(shape)[-1]) if name == "ppo" else 1)
    mine = expected(name, shape, size, monkeypatch, stale=True, importance=importance, **options)
    without = expected(name, shape, size, monkeypatch, stale=True, **options)
    assert gap(mine[: len(truth)], truth) < EXACT and gap(without[: len(truth)], truth) > 0.01


# --- through the learner ----------------------------------------------------------------------------------------------
QUERIES = [[3, 4], [5], [6, 7], [8]]
LARGE = {"optimizer.lr": 0.02, "epochs": 1, "max_tokens": 6, "kl.coef": 0.0, "watch_every": 0, "score.scale": False}


def by_length(rollouts: list[Rollout]) -> list[float]:
    return [float(sum(r.ids)) for r in rollouts]


def two_steps_later(**options) -> tuple[Learner, list[Rollout]]:
    learner = Learner(lm(), **LARGE | options)
    old = learner.generate(QUERIES)
    for _ in range(2):
        fresh = learner.generate(QUERIES)
        learner.step(fresh, by_length(fresh))
    return learner, old


@cases(("token", 1.25, True), ("sequence", None, False))
def test_a_step_on_replies_from_two_steps_ago(importance, cap, mask):
    learner, old = two_steps_later(importance=importance, importance_cap=cap, importance_mask=mask)
    now = [bare_logprobs(learner.policy.model, r.turns[0].prompt, r.ids) for r in old]
    ratios = [n - torch.tensor(r.turns[0].logprobs) for n, r in zip(now, old, strict=True)]
    ratios = [x.sum().expand(len(x)) for x in ratios] if importance == "sequence" else ratios
    weights, metrics = torch.cat(ratios).exp(), learner.step(old, by_length(old))
    assert metrics["rollout/staleness"] == metrics["rollout/staleness_max"] == 2
    kept = torch.where(weights > cap, 0.0, weights) if mask else weights.clamp(max=cap or torch.inf)
    assert metrics["rollout/importance_mean"] == pytest.approx(float(kept.mean()), rel=1e-4)
    if cap is not None:
        share = float((weights > cap).double().mean())
        assert metrics["rollout/importance_clipped"] == pytest.approx(share) and share > 0
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-5)  # to the policy before the update
    assert not {"rollout/logprob_gap", "rollout/likelihood_gap"} & metrics.keys()


@pytest.mark.parametrize("charge", ["k1", "reverse"])
def test_a_kl_in_the_loss_is_weighed_by_the_sampler(charge):
    """An exact charge needs a pass of the policy, and the log-probs of the sampler stay those that are stored."""
    learner, old = two_steps_later(**{"kl.coef": 0.01, "kl.kind": charge, "kl.loss_coef": 0.01, "kl.loss_kind": "k2"})
    right = []
    for r in old:
        now, then = (bare_logprobs(m, r.turns[0].prompt, r.ids) for m in (learner.policy.model, lm()))
        right += ((now - torch.tensor(r.turns[0].logprobs)).exp() * (now - then) ** 2 / 2).tolist()
    assert learner.step(old, by_length(old))["kl/in_loss"] == pytest.approx(sum(right) / len(right), rel=1e-4)


def test_the_alarms_look_at_current_turns_alone():
    """Of a batch with stale turns; the same replies as if they were current raise them."""
    learner, old = two_steps_later()
    for _ in range(3):
        current = learner.generate(QUERIES)
        metrics = learner.step([*current, *old], by_length([*current, *old]))
        assert metrics["rollout/logprob_gap"] < 1e-4 and metrics["policy/ratio_max"] > 1.01
    assert 0 < metrics["rollout/staleness"] < metrics["rollout/staleness_max"] == 4
    assert not {"scoring", "other_sampler", "negative_kl"} & {finding.name for finding in diagnose(learner)}
    lying = [replace(r, turns=[replace(turn, version=learner.policy.version) for turn in r.turns]) for r in old]
    assert learner.step(lying, by_length(lying))["rollout/logprob_gap"] > 0.01
    assert "scoring" in {finding.name for finding in diagnose(learner)}


def test_replies_above_the_bound_are_left_out_and_counted():
    learner, old = two_steps_later(max_staleness=1)
    current = learner.generate(QUERIES[:2])
    metrics = learner.step([*current, *old], by_length([*current, *old]))
    assert metrics["rollout/too_stale"] == pytest.approx(4 / 6) and metrics["rollout/count"] == 2
    assert metrics["rollout/staleness_max"] == 0 and metrics["rollout/dropped"] == 0
    step = learner.progress.step
    with pytest.raises(OperantError, match=r"learner\.max_staleness"):
        learner.step(old, by_length(old))
    assert learner.progress.step == step
    learner, at_bound = two_steps_later(max_staleness=2)
    assert learner.step(at_bound, by_length(at_bound))["rollout/too_stale"] == 0


def test_ages_are_counted_in_the_steps_of_this_learner():
    """Of a policy that another learner has trained, and goes on training."""
    first = two_steps_later()[0]
    learner = Learner(first.policy, **LARGE, importance="token", max_staleness=1)
    old = learner.generate(QUERIES)
    for one in (learner, first, first, learner):
        replies = one.generate(QUERIES)
        assert one.step(replies, by_length(replies))["rollout/staleness_max"] == 0
    with pytest.raises(OperantError, match=r"learner\.max_staleness"):
        learner.step(old, by_length(old))
    assert Learner(first.policy, **LARGE, engine=first.engine).generate(QUERIES)[0].turns[0].version == 0


def test_without_replies_of_a_sampler_there_are_no_weights():
    learner = Learner(lm(), **LARGE, importance="token")
    given = said([3, 4], [5, 6], group=9)  # as a weight, its own probability would be 0
    for made in ([given], [*learner.generate(QUERIES), given]):
        with pytest.raises(OperantError, match=r"log-probs under the sampler.*learner.importance=none"):
            learner.step(made, by_length(made))


def test_a_current_sampler_has_weights_of_one():
    """The native engine samples from the policy itself: the weights change nothing."""
    runs = []
    for importance in ("none", "token"):
        learner = Learner(lm().double(), **LARGE, importance=importance)
        replies = learner.generate(QUERIES)
        metrics = learner.step(replies, by_length(replies))
        runs.append(torch.cat([p.detach().flatten() for p in learner.policy.model.parameters()]))
    assert metrics["rollout/importance_mean"] == pytest.approx(1.0, abs=1e-12) and log(metrics["update/steps"]) == 0
    assert gap(runs[1], runs[0]) < 1e-12
