"""Advantages by hand, and NaN at tokens that are no actions. GAE of random episodes: test_turn_credit.py."""

from dataclasses import replace

import pytest
import torch
from cases import cases
from rigs import said, wider

from operant import Batch, Outputs, Rollout, Task, Turn
from operant.objectives import advantages, losses
from operant.objectives.groups import group_relative, leave_one_out, with_groups, with_leave_one_out
from operant.objectives.kl import estimate, loss_term
from operant.rollouts.collate import collate, token_weights
from operant.training.scoring import charge_kl

PLAIN = {"whiten_scope": "none"}


def valued(batch: Batch, values: list[list[float]]) -> Batch:
    full = torch.zeros(batch.tokens.shape)
    full[batch.actions] = torch.tensor([v for row in values for v in row])
    return batch.with_(values=full)


def at_actions(x: torch.Tensor, batch: Batch) -> list[list[float]]:
    return [x[row][batch.actions[row]].tolist() for row in range(len(batch))]


def near(expected) -> list:
    return [pytest.approx(row, abs=1e-6) for row in expected]


# --- golden numbers ---------------------------------------------------------------------------------------------------
def test_gae_of_three_tokens_by_hand():
    """With gamma 0.9 and lambda 0.8, the deltas are 1.4, -1.9 and 3, or 5.7 if a state of value 3 follows."""
    replies = [said([5], [6, 7, 8]), said([5], [6, 7, 8], end="cut", next_value=3.0)]
    batch = valued(collate(replies, [[1.0, 0.0, 2.0]] * 2), [[0.5, 1.0, -1.0]] * 2)
    done = advantages.with_gae(batch, gamma=0.9, lam=0.8, **PLAIN)
    # 0.26 = -1.9 + 0.72 * 3; 1.5872 = 1.4 + 0.72 * 0.26; 2.204 = -1.9 + 0.72 * 5.7; 2.98688 = 1.4 + 0.72 * 2.204
    assert at_actions(done.advantages, done) == near([[1.5872, 0.26, 3.0], [2.98688, 2.204, 5.7]])
    assert at_actions(done.returns, done) == near([[2.0872, 1.26, 2.0], [3.48688, 3.204, 4.7]])


TWO_TURNS = [Turn([5], [6, 7], reward=1.0), Turn([5, 6, 7, 8, 8], [9, 10], reward=2.0)]
VALUES = [0.5, 0.25, -0.5, 1.0]


def two_turns(end: str = "world", next_value: float = 0.0) -> Batch:
    turns = [TWO_TURNS[0], replace(TWO_TURNS[1], next_value=next_value)]
    batch = collate([Rollout(Task("t", [5]), 0, turns, ["", ""], end)], [0.0])
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 8, 9, 10]]
    return valued(batch, [VALUES])


@cases(
    # Deltas: 0.25 - 0.5 = -0.25; 1 + 0.6 * -0.5 - 0.25 = 0.45; 1 + 0.5 = 1.5; 2 - 1 = 1.
    # lambda 0.5 in a turn, 0 across: 2 = 1.5 + 0.5 * 1; 0.45; -0.025 = -0.25 + 0.5 * 0.45.
    ({"gamma": 1.0, "lam": 0.5, "turn_gamma": 0.6, "turn_lam": 0.0}, 0.0, [-0.025, 0.45, 2.0, 1.0]),
    # One lambda everywhere: 1.05 = 0.45 + 0.6 * 0.5 * 2, and not 1.35 by r + gamma * (next - value), as a fork once had
    # it; 0.275 = -0.25 + 0.5 * 1.05.
    ({"gamma": 1.0, "lam": 0.5, "turn_gamma": 0.6}, 0.0, [0.275, 1.05, 2.0, 1.0]),
    # A cut episode's next state stands behind a turn: 1 + 0.6 * 5 = 4; 3.5; 1.5 = 0.45 + 0.3 * 3.5; 0.5.
    ({"gamma": 1.0, "lam": 0.5, "turn_gamma": 0.6}, 5.0, [0.5, 1.5, 3.5, 4.0]),
    # gamma 0.5 in a turn and 0.5 * 0.6 across, lambda 1: deltas -0.375, 0.6, 1, 1;
    # 1.5 = 1 + 0.5 * 1; 1.05 = 0.6 + 0.3 * 1.5; 0.15 = -0.375 + 0.5 * 1.05.
    ({"gamma": 0.5, "lam": 1.0, "turn_gamma": 0.6}, 0.0, [0.15, 1.05, 1.5, 1.0]),
)
def test_two_discounts_by_hand(rates, next_value, expected):
    done = advantages.with_gae(two_turns("cut" if next_value else "world", next_value), **rates, **PLAIN)
    assert at_actions(done.advantages, done) == near([expected])
    assert at_actions(done.returns, done) == near([[a + v for a, v in zip(expected, VALUES, strict=True)]])


def random_episodes(count: int = 7) -> list[Rollout]:
    """Episodes of one to three turns. Some prompts continue after the reply, some are fresh; some episodes are cut."""
    draw = torch.Generator().manual_seed(1)

    def some(n: int, least: int = 1) -> int:
        return int(torch.randint(least, n, (1,), generator=draw))

    rollouts = []
    for e in range(count):
        turns, prompt = [], [5] * some(4)
        for _ in range(some(4)):
            n = some(6)
            action, values = [6 + some(9) for _ in range(n)], torch.randn(n, generator=draw).tolist()
            turns.append(Turn(prompt, action, values=values, reward=float(torch.randn(1, generator=draw))))
            prompt = [9] * some(5) if e % 2 else prompt + action + [7] * some(4, 0)
        turns[-1] = replace(turns[-1], next_value=0.0 if e % 3 else 1.5)
        rollouts.append(Rollout(Task(str(e), [5]), e, turns, [""] * len(turns), "world" if e % 3 else "cut"))
    return rollouts


# --- poison (test 7) --------------------------------------------------------------------------------------------------
def filled_batch() -> Batch:
    rollouts = random_episodes()
    batch = collate(rollouts, [0.5] * len(rollouts))
    assert len(batch) > len(rollouts)  # fresh prompts opened rows of their own
    draw = torch.Generator().manual_seed(2)
    rand = lambda scale: torch.randn(batch.tokens.shape, generator=draw) * scale * batch.actions  # noqa: E731
    return batch.with_(logprobs=rand(1.0) - 2, raw_logprobs=rand(1.0) - 2, ref_logprobs=rand(1.0) - 2)


def numbers(batch: Batch) -> dict[str, torch.Tensor]:
    """All numbers between a batch and its loss at actions, and the loss's gradient by log-probs and values."""
    batch = batch.with_(kl=estimate("k1", batch.raw_logprobs, batch.ref_logprobs))
    batch = advantages.with_gae(charge_kl(batch, 0.2), gamma=0.99, lam=0.95, whiten_rewards=True)
    batch = batch.with_(weights=token_weights(batch))
    now = torch.full(batch.tokens.shape, -1.5)
    now = torch.where(batch.actions, now, 0.0).requires_grad_()
    seen = torch.zeros(batch.tokens.shape).requires_grad_()
    out = Outputs(now, now, entropy=now, values=seen)
    loss = losses.ppo(out, batch, entropy_coef=0.01, dual_clip=3.0)["loss"]
    charged = loss_term("k3", out.raw_logprobs, batch.raw_logprobs, batch.ref_logprobs)
    total = losses.total(loss + 0.1 * charged, batch)
    total.backward()
    at = batch.actions
    found = {name: getattr(batch, name)[at] for name in ("advantages", "returns", "kl", "rewards")}
    found |= {"loss": total.detach(), "kl loss": charged[at].detach()}
    return found | {"gradient": now.grad[at], "value gradient": seen.grad[at], "off": seen.grad[~at].abs().sum()}


@pytest.mark.parametrize("junk", [7.0, 1e6, float("nan")])
def test_padding_and_the_words_of_others_change_no_number(junk):
    plain, poisoned = numbers(filled_batch()), numbers(wider(filled_batch(), 11, 7, junk))
    for name, truth in plain.items():
        assert torch.equal(poisoned[name], truth), name
    assert plain["off"] == 0


def test_whitening_by_hand():
    """1, 2, 3, 6 have mean 3 and variance 14 / 4, or 14 / 3. Other numbers of the tensor do not count."""
    x = torch.tensor([[1.0, 2.0, 1e6], [3.0, float("nan"), 6.0]])
    where = torch.tensor([[True, True, False], [True, False, True]])
    for unbiased, variance in ((False, 14 / 4), (True, 14 / 3)):
        expected = [(v - 3) / (variance + 1e-8) ** 0.5 for v in (1, 2, 3, 6)]
        assert advantages.whiten(x, where, unbiased=unbiased)[where].tolist() == pytest.approx(expected, abs=1e-6)
        shifted = advantages.whiten(x, where, unbiased=unbiased, shift_mean=False)[where].tolist()
        assert shifted == pytest.approx([e + 3 for e in expected], abs=1e-6)
        assert not advantages.whiten(x, where)[~where].any()


# --- groups (test 9) --------------------------------------------------------------------------------------------------
RETURNS = [1.0, 2.0, 3.0, 6.0, 0.0, 1.0, 2.0, 4.0, 4.0, 4.0, 8.0, 7.0] + [0.1] * 3
GROUPS = [3, 3, 3, 3, 9, 9, 9, 1, 1, 1, 1, 5] + [2] * 3
"""Groups of 4, 3 and 4, a group of one, and a constant group whose float32 mean is not 0.1."""


def grouped(returns, groups, **how) -> list[float]:
    return group_relative(torch.tensor(returns), torch.tensor(groups), **how).tolist()


def test_groups_by_hand():
    # Means 3, 1, 5; variances 14 / 4, 2 / 3, 3; a group of one and a constant group are exactly 0.
    centred = [-2, -1, 0, 3, -1, 0, 1, -1, -1, -1, 3, 0, 0, 0, 0]
    stds = [3.5**0.5] * 4 + [(2 / 3) ** 0.5] * 3 + [3**0.5] * 4 + [1.0] * 4
    assert grouped(RETURNS, GROUPS, scale=False) == pytest.approx(centred, abs=1e-6)
    assert grouped(RETURNS, GROUPS) == pytest.approx([c / s for c, s in zip(centred, stds, strict=True)], abs=1e-4)
    assert grouped(RETURNS, GROUPS)[11:] == [0.0] * 4


def test_groups_go_by_name_and_not_by_position():
    order = torch.randperm(len(RETURNS), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled, plain = grouped([RETURNS[i] for i in order], [GROUPS[i] for i in order]), grouped(RETURNS, GROUPS)
    assert shuffled == pytest.approx([plain[i] for i in order], abs=1e-6)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e8 + 1, -7.3])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 11])
def test_a_constant_group_has_no_advantage_at_all(value, size):
    """A constant group is 0 in float64 as well, where three times 0.1 has the mean 0.10000000000000002."""
    for dtype in (torch.float32, torch.float64):
        returns = torch.tensor([value] * size + [1.0, 2.0], dtype=dtype)
        assert group_relative(returns, torch.tensor([4] * size + [5, 5]))[:size].tolist() == [0.0] * size


def test_leave_one_out_by_hand():
    """Groups (1, 2, 6) and (5) give 1 - 4, 2 - 3.5, 6 - 1.5; and 0 for the group of one."""
    result = leave_one_out(torch.tensor([1.0, 5.0, 2.0, 6.0]), torch.tensor([7, 3, 7, 7]))
    assert result.tolist() == pytest.approx([-3.0, 0.0, -1.5, 4.5])


def test_group_advantages_stand_on_every_row_of_an_episode():
    """Episode 1 has two rows and is paid 1 + 3; its group's other attempt is paid 2."""
    batch = Batch.given([[1], [1], [1, 1]], [[2, 3], [4], [5, 6]])
    rewards = torch.tensor([[0.0, 0.0, 2.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 3.0]])
    batch = batch.with_(rewards=rewards, episodes=torch.tensor([0, 1, 1]), groups=torch.tensor([4, 4, 4]))
    right = [[0, -1, -1, 0], [0, 1, 0, 0], [0, 0, 1, 1]]
    assert torch.allclose(with_groups(batch).advantages, torch.tensor(right, dtype=torch.float32), atol=1e-5)
    assert with_groups(batch, scale=False).advantages.tolist() == right
    assert with_leave_one_out(batch).advantages.tolist() == [[2.0 * x for x in row] for row in right]
