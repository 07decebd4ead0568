"""Credit by turns: one action a turn (PPO), turns of the same state (GiGPO), groups of games (GRPO, RLOO).

Numbers are worked out by hand, and by a slow copy of the definition.
"""

from dataclasses import replace
from random import Random

import pytest
import torch
from cases import cases
from rigs import said
from toys import lm

from operant import Batch, Learner, OperantError, Rollout, Task, Turn
from operant.algorithms.gigpo import with_anchors
from operant.objectives.advantages import with_gae
from operant.objectives.turn_returns import turn_returns, with_states, with_turn_returns
from operant.rollouts.branches import branches
from operant.rollouts.collate import collate, token_weights


def game(turns, *, end="world", group=0, fresh=False, keys=(), after=0.0) -> Rollout:
    """An episode of turns (reward, values): with `fresh` prompts many rows, otherwise one. values None: untrained."""
    made, seen = [], [3]
    for k, (reward, values) in enumerate(turns):
        action = list(range(10, 10 + len(values or [0, 0])))
        prompt = [3, 4 + k] if fresh else list(seen)
        known = {"values": values, "logprobs": [0.0] * len(values)} if values else {"trained": False}
        key = {"key": keys[k]} if keys else {}
        made.append(Turn(prompt, action, reward=reward, next_value=after, **known, **key))
        seen += [*action, 5]
    return Rollout(Task(f"game/{group}", "x"), group, made, [""] * len(made), end)


def by_turn(batch: Batch, x: torch.Tensor, episode: int = 0) -> list[list[float]]:
    rows = (batch.episodes == episode).nonzero().flatten()
    found = [(int(t), float(v)) for row in rows for t, v in zip(batch.turns[row], x[row], strict=True) if t >= 0]
    return [[v for t, v in found if t == turn] for turn in sorted({t for t, _ in found})]


RATES = {"gamma": 0.5, "turn_gamma": 0.6, "lam": 0.9, "turn_lam": 0.5, "whiten_scope": "none"}


def by_definition(rollout: Rollout, level: str, rates, after: float) -> tuple[list[float], list[float]]:
    """Advantages and returns of each trained turn, or each of its tokens, in plain Python: sums of all later deltas."""
    gamma, between = rates["gamma"], rates["gamma"] * rates["turn_gamma"]
    rewards, values, discounts, decays = [], [], [], []
    for turn in rollout.turns:
        if turn.trained:
            n = len(turn.action) - 1
            shared, skipped = 1.0 if level == "token" else gamma**n, 0
            by_level = {"turn_first": turn.values[:1], "turn_mean": [sum(turn.values) / (n + 1)]}
            new = by_level.get(level, turn.values)
            values += new
            rewards += [0.0] * (len(new) - 1) + [turn.reward * shared]
            discounts += [gamma] * (len(new) - 1) + [between]
            decays += [gamma * rates["lam"]] * (len(new) - 1) + [between * rates["turn_lam"]]
        elif rewards:
            skipped += 1
            rewards[-1] += turn.reward * between**skipped * shared
            discounts[-1], decays[-1] = discounts[-1] * between, decays[-1] * between
    deltas = [r + d * v1 - v for r, d, v1, v in zip(rewards, discounts, [*values[1:], after], values, strict=True)]
    out = []
    for k in range(len(deltas)):
        weight, total = 1.0, 0.0
        for j in range(k, len(deltas)):
            total, weight = total + weight * deltas[j], weight * decays[j]
        out.append(total)
    return out, [a + v for a, v in zip(out, values, strict=True)]


def drawn_games(seed: int) -> list[Rollout]:
    """Five episodes of one to six turns of one to four tokens, a third of which are untrained, and a trained one."""
    draw, games = Random(seed), []
    for i in range(5):
        turns = [(draw.gauss(), [draw.gauss() for _ in range(draw.randint(1, 4))]) for _ in range(draw.randint(1, 6))]
        turns = [(pay, None if draw.random() < 1 / 3 else values) for pay, values in turns]
        turns.insert(draw.randint(0, len(turns)), (draw.gauss(), [draw.gauss()]))
        games.append(game(turns, group=i, after=0.7 * (i % 2), end="cut" if i % 2 else "world"))
    return games


def in_rows(rollout: Rollout) -> Rollout:
    return replace(rollout, turns=[replace(turn, prompt=[3, 4 + k]) for k, turn in enumerate(rollout.turns)])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("level", ["token", "turn_first", "turn_mean"])
def test_advantages_are_those_of_the_definition(level, seed):
    games, discount = drawn_games(seed), RATES["gamma"] * RATES["turn_gamma"]
    done, rows = (
        with_gae(collate(rollouts, [0.0] * 5, turn_discount=discount), level=level, **RATES)
        for rollouts in (games, [in_rows(g) for g in games])
    )
    assert len(rows) > len(done) == 5
    for episode, rollout in enumerate(games):
        trained = [turn for turn in rollout.turns if turn.trained]
        truth = by_definition(rollout, level, RATES, 0.7 * (episode % 2))
        for name, each in zip(("advantages", "returns"), truth, strict=True):
            mine, left = by_turn(done, getattr(done, name), episode), iter(each)
            assert by_turn(rows, getattr(rows, name), episode) == [pytest.approx(turn, abs=1e-6) for turn in mine]
            if level != "token":
                left = iter([x for turn, x in zip(trained, each, strict=True) for _ in turn.action])
            assert mine == [pytest.approx([next(left) for _ in turn.action], abs=1e-5) for turn in trained]
        # A later turn sees the untrained one: the row is its prompt and its reply.
        assert done.tokens[episode][done.mask[episode]].tolist() == trained[-1].prompt + trained[-1].action
        assert done.tokens[episode][done.actions[episode]].tolist() == [x for turn in trained for x in turn.action]


def test_the_gradient_of_a_kl_charge_is_discounted():
    batch = collate([game([(1.0, [0.5, 0.25]), (2.0, [-0.5, 1.0])])], [0.0])
    batch = batch.with_(price=0.2 * batch.actions)
    done = with_gae(batch, level="turn_first", **RATES)
    assert by_turn(done, done.price) == [pytest.approx([0.2, 0.1])] * 2


ONE = [0.0]
MAZE = [
    # From the start to a, where the right reply wins 1; and from the start to b, from there to a, where it loses 1.
    game([(0.0, ONE), (1.0, [0.0, 0.0])], keys=("", "a")),
    game([(0.0, ONE), (0.0, ONE), (-1.0, ONE)], keys=("", "b", "a")),
    # Another task, whose state is called a as well.
    game([(0.0, ONE), (3.0, ONE)], keys=("", "a"), group=1),
]


@pytest.mark.parametrize("fresh", [False, True], ids=["one row", "many rows"])
@cases(
    # Returns at 0.5: 0.5, 1 | -0.25, -0.5, -1. Episodes: 1 and -1, so +-1. Start: +-0.375; a: +-1; b: alone.
    ({"scale": False, "omega": 2.0}, [[1.75, 3.0], [-1.75, -1.0, -3.0], [0.0, 0.0]]),
    # Divided by the deviation, each of two is +-1.
    ({"omega": 0.5}, [[1.5, 1.5], [-1.5, -1.0, -1.5], [0.0, 0.0]]),
    ({"omega": 0.0}, [[1.0, 1.0], [-1.0, -1.0, -1.0], [0.0, 0.0]]),
)
def test_gigpo_by_hand(options, expected, fresh):
    rollouts = [in_rows(g) for g in MAZE] if fresh else MAZE
    batch = with_anchors(collate(rollouts, [0.0] * 3, turn_discount=0.5), rollouts)
    done = with_states(batch, turn_gamma=0.5, **options)
    for episode, turns in enumerate(expected):
        found = by_turn(done, done.advantages, episode)
        assert [turn[0] for turn in found] == pytest.approx(turns, abs=1e-5)
        assert all(len(set(turn)) == 1 for turn in found), "all tokens of a turn have its advantage"
    assert not done.advantages[~batch.actions].any()


def test_a_state_visited_twice_is_compared_with_itself():
    rollout = game([(0.0, ONE), (1.0, ONE), (0.0, ONE), (4.0, ONE)], keys=("", "a", "b", "a"))
    done = with_states(with_anchors(collate([rollout], [0.0]), [rollout]), turn_gamma=1.0, scale=False)
    # Returns 5, 5, 4, 4: in a 5 and 4, whose mean is 4.5. The episode is alone in its group.
    assert by_turn(done, done.advantages) == [[0.0], [0.5], [0.0], [-0.5]]


def test_an_untrained_turn_is_not_compared_and_discounts():
    rollout = game([(1.0, ONE), (2.0, None), (4.0, ONE)], keys=("", "", "a"))
    batch = with_anchors(collate([rollout], [0.0], turn_discount=0.5), [rollout])
    _, _, returns = turn_returns(batch, 0.5)
    assert returns.tolist() == [[1.0 + 0.5 * 2.0 + 0.25 * 4.0, 4.0]]
    assert by_turn(batch, with_turn_returns(batch, turn_gamma=0.5).returns) == [[3.0], [4.0]]


def test_gigpo_compares_attempts_by_the_plain_sum_of_rewards():
    """By hand, at 0.5: attempts are worth 1 + 2 + 4 = 7 and 1; from the start on, 1 + 0.5 * 2 + 0.25 * 4 = 3 and 1."""
    attempts = [game([(1.0, ONE), (2.0, None), (4.0, ONE)], keys=("", "", "a")), game([(1.0, ONE)], keys=("",))]
    learner = Learner(lm(), algorithm="gigpo", **{"advantage.turn_gamma": 0.5, "advantage.scale": False})
    batch, _ = learner.preview(attempts, [0.0, 0.0])
    found = [by_turn(batch, batch.advantages, episode) for episode in (0, 1)]
    assert [[turn[0] for turn in turns] for turns in found] == [pytest.approx([3 + 1, 3]), pytest.approx([-3 - 1])]


def test_a_later_turn_without_a_key_is_refused_with_the_remedy():
    rollouts, learner = [game([(0.0, ONE), (1.0, ONE)])] * 2, Learner(lm(), algorithm="gigpo")
    why = r"turn 2 of task 'game/0' has no key: let the world's step return Step\(key=.*or use grpo"
    with pytest.raises(OperantError, match=why):
        learner.learn(rollouts, [0.0, 1.0])
    assert learner.learn([said([3], [4], group=0), said([3], [5], group=0)], [0.0, 1.0])["update/steps"] == 1


def test_turns_behind_a_branch_begin_in_a_state_of_their_own():
    """Two attempts, each with two replies to what the world says to their first: those are compared with each other."""
    turns = [Turn([3], [10]), *(Turn([3, 10, 5], [k], reward=float(k), parent=0) for k in (1, 2))]
    games = [Rollout(Task("t", "x"), 0, turns, [""] * 3, place=place) for place in (0, 1)]
    parts = [part for one in games for part, _ in branches(one, 0.0)]
    assert with_anchors(collate(parts, [0.0] * 6), parts).anchors.amax(1).tolist() == [0, 1, 1, 0, 2, 2]


def test_a_game_weighs_the_same_in_one_row_and_in_many():
    """Games of 1, 4, 1 and 2 tokens, the second in a row for each of its three turns."""
    long = game([(0.0, ONE), (0.0, [0.0, 0.0]), (-1.0, ONE)], fresh=True)
    games = [game([(1.0, ONE)]), long, game([(3.0, ONE)], group=1), game([(-1.0, [0.0, 0.0])], group=1)]
    batch = collate(games, [0.0] * 4)
    for per, weights in (("episode", [1 / 4, 1 / 16, 1 / 4, 1 / 8]), ("sequence", [1 / 4] * 4), ("token", [1 / 8] * 4)):
        found = token_weights(batch, per)
        for episode, weight in enumerate(weights):
            of_game = [v for turn in by_turn(batch, found, episode) for v in turn]
            assert of_game == pytest.approx([weight] * len(of_game))
