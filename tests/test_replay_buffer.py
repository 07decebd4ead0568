"""Replies of earlier steps in soft Q-learning: the optimum of a bandit, what a step draws, and resuming.

The truth: the optimum exp(r) / Z by enumeration, and a learner without a buffer that is given the drawn replies.
"""

from dataclasses import replace

import pytest
import torch
from cases import cases, slow
from toys import lm

from operant import Batch, Learner, OperantError, load_policy
from operant.models.adapters import OutputMlpOptions


def learner(seed=2, vocab=8, **options):
    policy = load_policy(lm("gpt2", vocab), mlp=OutputMlpOptions(width=64, gain=1.0), seed=seed).double()
    fixed = {"max_grad_norm": None, "max_tokens": 2, "stop_tokens": -1, "reference": None}
    return Learner(policy, algorithm="soft_q", **fixed | {"lr": 0.0} | options)


def learnt_from(one):
    batch = one.last_step.batch
    return [row.tolist() for row in batch.tokens[:, 1:]], batch.rewards.sum(1).tolist()


@cases(0.5, slow(1.0))
def test_replies_of_another_sampler_lead_to_the_optimum(share):
    """Two tokens of four letters: p(x, y) = exp(r(x, y)) / Z, whoever has written the replies of the buffer."""
    chance = torch.Generator().manual_seed(3)
    rewards = 2 * torch.rand(16, generator=chance, dtype=torch.float64)
    sampler = torch.rand(16, generator=chance) ** 2 + 0.05  # 21 times as likely at most, whatever is paid
    one = learner(vocab=4, lr=1e-2, **{"target.rate": 0.3, "replay.share": share, "replay.capacity": 300})
    every = [[x, y] for x in range(4) for y in range(4)]

    @torch.no_grad()
    def distance():
        logprobs = one.policy.forward(Batch.given([[3]] * 16, every)).logprobs.sum(1)
        best = rewards.log_softmax(0)
        return float((best.exp() * (best - logprobs)).sum())

    assert distance() > 0.1
    for _ in range(100):
        drawn = torch.multinomial(sampler, 32, replacement=True, generator=chance).tolist()
        metrics = one.step([[3]] * 32, [every[i] for i in drawn], [float(rewards[i]) for i in drawn])
    assert distance() < 1e-3
    assert metrics["replay/size"] == 300 and 0 < metrics["rollout/staleness"] < metrics["rollout/staleness_max"] <= 9


def test_a_step_learns_from_the_newest_replies_in_the_share():
    one, twin = learner(**{"replay.share": 0.75, "replay.capacity": 24}), learner()
    paid, drawn = {}, []
    for step in range(12):
        replies = [[step % 8, i] for i in range(8)]
        paid |= {tuple(reply): float(10 * step + i) for i, reply in enumerate(replies)}
        metrics = one.step([[3]] * 8, replies, [paid[tuple(reply)] for reply in replies])
        found, scores = learnt_from(one)
        assert scores == [paid[tuple(reply)] for reply in found]
        assert found[:2] == sorted(found[:2]) and all(reply in replies for reply in found[:2])
        assert metrics["loss/total"] == pytest.approx(twin.step([[3]] * 8, found, scores)["loss/total"], abs=1e-9)
        drawn += [int(step * 10 - paid[tuple(reply)] // 10 * 10) // 10 for reply in found[2:]]
        assert metrics["replay/size"] == min(8 * (step + 1), 24)
    late = drawn[12:]  # as soon as the buffer is full, it holds three steps, and each is drawn equally often
    assert set(late) == {0, 1, 2} and len(late) == 60
    assert sum((late.count(age) - 20) ** 2 / 20 for age in range(3)) < 9.2  # chi-square, 2 degrees, one in a hundred


def test_a_loaded_learner_draws_what_it_would_have_drawn(tmp_path):
    chance = torch.Generator().manual_seed(1)
    steps = [torch.randint(8, (6, 2), generator=chance).tolist() for _ in range(5)]
    options = {"lr": 1e-2, "replay.share": 0.5, "replay.capacity": 10, "max_staleness": 2}
    one = learner(**options)
    for replies in steps[:3]:
        one.step([[3]] * 6, replies, [float(sum(reply)) for reply in replies])
    one.save(tmp_path / "saved")
    again = Learner.load(tmp_path / "saved", policy=learner(**options).policy)
    for replies in steps[3:]:
        both = [x.step([[3]] * 6, replies, [float(sum(reply)) for reply in replies]) for x in (one, again)]
        assert both[0]["loss/total"] == both[1]["loss/total"] and learnt_from(one) == learnt_from(again)
        assert both[0]["rollout/staleness_max"] <= 2
    for mine, other in zip(one.policy.parameters(), again.policy.parameters(), strict=True):
        assert torch.equal(mine, other)
    size = len(one.buffer)
    next(iter(one.policy.trainable())).data.fill_(float("nan"))
    with pytest.warns(UserWarning, match="a step was refused"):
        one.step([[3]], [[1, 2]], [1.0])
    assert len(one.buffer) == size


@cases("k2", "plain_k3", "reverse", "forward")
def test_kl_of_given_replies_is_not_estimated(kind):
    learner = Learner(lm(), algorithm="soft_q", kl={"loss_coef": 0.1, "loss_kind": kind}, max_tokens=2)
    drawn = learner.generate([[3], [4]])
    assert learner.step(drawn, [1.0, 0.0])["update/steps"] == 1
    bare = [replace(drawn[0], turns=[replace(drawn[0].turns[0], logprobs=None)]), drawn[1]]
    for given in ((bare, [1.0, 0.0]), ([[3]], [[1, 2]], [1.0])):
        if kind in ("reverse", "forward"):
            assert learner.step(*given)["update/steps"] == 1
            continue
        with pytest.raises(OperantError, match=f"kl.loss_kind={kind} is estimated .* use kl.loss_kind=reverse"):
            learner.step(*given)
