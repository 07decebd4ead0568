"""A reward can pay every token: each float is paid on its own token and reaches the returns."""

import pytest
import torch
from toys import lm

from operant import Learner, OperantError, Rollout, Task, Turn
from operant.objectives.advantages import with_gae
from operant.rewards.evaluate import judge
from operant.rollouts.collate import collate


def attempt(name, turns, values):
    played = [Turn(p, a, [-1.0] * len(a), v, reward=r) for (p, a, r), v in zip(turns, values, strict=True)]
    return Rollout(Task(name, played[0].prompt), 0, played, [""] * len(played))


PLAIN = attempt("plain", [([5, 6, 7], [8, 9, 2], 0.0)], [[0.5, 0.25, 1.0]])
TWO = attempt("two", [([4], [7], 10.0), ([4, 7, 11, 12], [3, 2], 0.5)], [[2.0], [1.0, 3.0]])


def per_token(rollouts):
    """One float per token of the attempt: 1 for every id 8, otherwise 0.1 times its index."""
    actions = [[i for turn in r.turns for i in turn.action] for r in rollouts]
    return [[1.0 if i == 8 else 0.1 * place for place, i in enumerate(ids)] for ids in actions]


def test_every_float_lands_on_its_token_and_reaches_the_returns():
    batch = collate([PLAIN, TWO], judge(per_token, [PLAIN, TWO]).scores)
    expected = torch.zeros(2, 6)
    expected[0, 3:6] = torch.tensor([1.0, 0.1, 0.2])
    expected[1, 1] = 10.0  # the world pays the last token of its turn, and the score comes on top
    expected[1, 4:6] = torch.tensor([0.1, 0.2 + 0.5])
    assert torch.allclose(batch.rewards, expected)

    credited = with_gae(batch, gamma=0.9, lam=0.5, whiten_scope="none")
    # By hand, from the end: delta = r + 0.9 v' - v, A = delta + 0.45 A'; behind the world's words is the next action.
    for row, rewards, values in ((0, [1.0, 0.1, 0.2], [0.5, 0.25, 1.0]), (1, [10.0, 0.1, 0.7], [2.0, 1.0, 3.0])):
        third = rewards[2] - values[2]
        second = rewards[1] + 0.9 * values[2] - values[1] + 0.45 * third
        first = rewards[0] + 0.9 * values[1] - values[0] + 0.45 * second
        right = [first + values[0], second + values[1], third + values[2]]
        assert credited.returns[row][batch.actions[row]].tolist() == pytest.approx(right, abs=1e-6)


def test_token_rewards_reach_the_learner_whole():
    learner = Learner(lm(), max_tokens=3, fixed_length=True, **{"kl.coef": 0.0, "optimizer.lr": 1e-2})
    before = [p.clone() for p in learner.policy.parameters()]
    replies = learner.generate([[5, 6, 7], [4]])
    with pytest.raises(OperantError, match=r"2 rewards for 3 actions.*one float for each token"):
        learner.step(replies, [[1.0, 2.0], [0.0, 0.0, 0.0]])
    with pytest.raises(OperantError):
        judge(lambda rollouts: [[1.0, 2.0]] * len(rollouts), replies)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.policy.parameters(), strict=True))
    metrics = learner.step(replies, [[1.0, 2.0, 3.0], [0.5, 0.0, -0.5]])
    assert metrics["reward/return"] == pytest.approx((6.0 + 0.0) / 2)
    # Zero-initialised values, gamma 1: the return of a token is lambda-discounted surprise alone.
    expected = [1 + 0.95 * (2 + 0.95 * 3), 2 + 0.95 * 3, 3, 0.5 + 0.95 * 0.95 * -0.5, 0.95 * -0.5, -0.5]
    assert metrics["returns/mean"] == pytest.approx(sum(expected) / 6, abs=1e-5)
