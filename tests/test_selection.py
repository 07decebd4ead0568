"""Rejection sampling: which replies stay is counted by hand, on one rank and on two, and only they move the weights."""

from dataclasses import replace

import pytest
import torch
from rigs import gap, on_ranks, said
from toys import bare_logprobs, lm

from operant import Learner, OperantError, Policy, Rollout, Task, Turn, diagnose
from operant.rollouts.collate import collate, nothing
from operant.runs.config import configure
from operant.training.rare_stages import best, only
from operant.training.select import parse

GIVEN = {"tasks": ["a"], "reward": "letters:e", "batch": 32}

SCORES = [0.5, 2.0, -1.0, 2.0, 0.5, 0.5, 3.0]
"""In order: 3.0 (place 6), 2.0 (1, 3), 0.5 (0, 4, 5), -1.0 (2)."""
REPLIES = [([5, 6], [7, 9]), ([4], [8, 2]), ([9, 9], [10]), ([5], [6]), ([7, 3], [3, 5]), ([6], [4, 4]), ([5], [9, 8])]
KEPT = {
    "top:3": [1, 3, 6],
    "top:4": [0, 1, 3, 6],  # of three equal scores, the first stays
    "top:99": [0, 1, 2, 3, 4, 5, 6],
    "top:50%": [1, 3, 6],  # of 7, rounded down
    "top:0.1%": [6],  # at least one
    "top:100%": [0, 1, 2, 3, 4, 5, 6],
    "group:1": [0, 1, 2, 3, 4, 5, 6],  # each is a group of its own
    "above:0.5": [1, 3, 6],
    "above:3": [],
    "above:-1.5": [0, 1, 2, 3, 4, 5, 6],
}


def placed(which=range(7)) -> list[Rollout]:
    return [replace(said(*REPLIES[i], group=i), place=i) for i in which]


def kept_places(which, select: str) -> tuple[list[int], dict[str, float]]:
    batch = collate(placed(which), [SCORES[i] for i in which]) if which else nothing()
    places = list(which) or [None]
    kept, tally = best(batch, select, "episode", places, discount=1.0, kl_coef=0.1)
    assert not (kept & ~batch.actions).any() and only(batch, kept).actions.sum() == kept.sum()
    assert torch.equal(kept, kept.any(1, keepdim=True) & batch.actions), "an episode stays whole or not at all"
    return [places[row] for row in kept.any(1).nonzero()[:, 0].tolist()], tally.result()


@pytest.mark.parametrize("select", KEPT)
def test_the_best_replies_stay_and_of_equal_ones_the_first(select):
    kept, metrics = kept_places([3, 0, 6, 1, 5, 2, 4], select)  # in any order in the batch
    assert sorted(kept) == KEPT[select] and metrics["select/share"] == len(kept) / 7
    if kept:
        assert metrics["select/threshold"] == min(SCORES[i] for i in kept)
        assert metrics["select/score"] == pytest.approx(sum(SCORES[i] for i in kept) / len(kept))


def test_the_best_of_each_prompt_stay():
    groups = [0, 0, 0, 1, 1, 2, 2]  # scores 0.5 2 -1 | 2 0.5 | 0.5 3
    rollouts = [replace(rollout, group=group) for rollout, group in zip(placed(), groups, strict=True)]

    def kept(number: int) -> list[int]:
        batch = collate(rollouts, SCORES)
        chosen, tally = best(batch, f"group:{number}", "episode", list(range(7)), discount=1.0, kl_coef=0.0)
        assert tally.result()["select/threshold"] == min(SCORES[i] for i in chosen.any(1).nonzero()[:, 0])
        return chosen.any(1).nonzero()[:, 0].tolist()

    assert kept(1) == [1, 3, 6] and kept(2) == [0, 1, 3, 4, 5, 6]


def learnt(which, rollouts=None, **more):
    """How far one step moves the weights, as the gradient says, and its metrics."""
    options = {"epochs": 1, "max_tokens": 3, "optimizer.eps": 1.0, "watch_every": 0, "max_grad_norm": None}
    learner = Learner(lm().double(), algorithm="rejection", reference=Policy(lm(seed=1).double()), **options | more)
    before = [p.detach().clone() for p in learner.policy.trainable()]
    metrics = learner.learn(rollouts or placed(which), [0.0] if rollouts else [SCORES[i] for i in which])
    moved = [(a.detach() - b).flatten() for a, b in zip(learner.policy.trainable(), before, strict=True)]
    return torch.cat(moved), {name: x for name, x in metrics.items() if not name.startswith("time/")}


TRAINED = {
    "top:3": {},
    "top:1": {"kl.loss_coef": 0.1, "epochs": 2},  # one of the ranks has none
    "top:4": {"minibatch": 1},
    "above:9": {},  # no rank has any
}


def on_a_rank(rank: int, world: int) -> dict:
    dealt = [[0, 2, 4, 6], [1, 3, 5]]
    kept = {select: kept_places(dealt[rank], select) for select in KEPT}
    alone = {select: kept_places([list(range(7)), []][rank], select)[0] for select in KEPT}
    steps = {select: learnt(dealt[rank], **{"learner.select": select} | more) for select, more in TRAINED.items()}
    steps["alone"] = learnt([list(range(7)), []][rank], **{"learner.select": "top:3"})  # rank 1 has no replies
    return {"kept": kept, "alone": alone, "steps": steps}


@pytest.mark.slow
def test_two_ranks_keep_what_one_keeps_and_learn_the_same():
    """The fork's selection over ranks hung, and was switched off."""
    ranks = on_ranks(on_a_rank, 2)
    for select, expected in KEPT.items():
        assert sorted(ranks[0]["kept"][select][0] + ranks[1]["kept"][select][0]) == expected
        assert ranks[0]["alone"][select] == expected and ranks[1]["alone"][select] == []
    for select, more in (TRAINED | {"alone": {"learner.select": "top:3"}}).items():
        moved, metrics = learnt(range(7), **{"learner.select": select} | more)
        assert bool(moved.any()) == (select != "above:9")
        for rank in ranks:
            mine, told = rank["steps"][select]
            assert torch.allclose(mine, moved, atol=1e-12)
            for name in ("select/share", "select/threshold", "select/score", "loss/total", "update/steps"):
                assert told.get(name) == pytest.approx(metrics.get(name), nan_ok=True), (select, name)


def test_only_the_best_move_the_weights_and_metrics_are_of_all():
    moved, metrics = learnt(range(7), **{"learner.select": "top:3"})
    alone, _ = learnt(KEPT["top:3"], **{"learner.select": "top:100%"})
    assert torch.allclose(moved, alone, atol=1e-12)
    assert metrics["reward/mean"] == pytest.approx(sum(SCORES) / 7) and metrics["rollout/count"] == 7
    # The cross-entropy of the five tokens that stay, by the model itself.
    total = -sum(float(bare_logprobs(lm().double(), *REPLIES[i]).sum()) for i in KEPT["top:3"])
    assert metrics["policy/loss"] == metrics["loss/total"] == pytest.approx(total / 5, abs=1e-9)


@pytest.mark.parametrize("algorithm", ["rejection", "trpo"])
def test_a_step_with_none_above_the_threshold_changes_nothing(algorithm):
    learner = Learner(lm(), algorithm=algorithm, max_tokens=3, **{"learner.select": "above:2.5"})
    before = [p.detach().clone() for p in learner.policy.trainable()]
    metrics = learner.learn(placed(range(6)), SCORES[:6])
    assert metrics["select/share"] == metrics["update/steps"] == 0 and "loss/total" not in metrics
    assert all(torch.equal(a, b) for a, b in zip(learner.policy.trainable(), before, strict=True))
    assert learner.learn(placed(), SCORES)["update/steps"] == 1


def game(rewards, *, place, fresh=True) -> Rollout:
    """An episode of turns of two tokens each, in rows of their own or in one."""
    turns, seen = [], [3]
    for k, reward in enumerate(rewards):
        turns.append(Turn([3 + k] if fresh else list(seen), [10 + k, 11], reward=reward))
        seen += [10 + k, 11, 4]
    return Rollout(Task(f"game/{place}", "x"), place, turns, [""] * len(turns), "world", place=place)


@pytest.mark.parametrize("fresh", [True, False], ids=["many rows", "one row"])
def test_turns_are_kept_by_their_return_across_the_episode(fresh):
    """R = r + 0.5 R': (0, 0, 4) returns 1, 2, 4; (1, 0) returns 1, 0; an example between two turns discounts too."""
    games = [game([0.0, 0.0, 4.0], place=0, fresh=fresh), game([1.0, 0.0], place=1, fresh=fresh)]
    batch = collate(games, [0.0, 0.0], turn_discount=0.5)

    def turns(batch, select, **more):
        kept, _ = best(batch, select, "turn", [0, 1], **{"discount": 0.5, "kl_coef": 0.0} | more)
        places = {(int(batch.episodes[b]), int(batch.turns[b, t])) for b, t in kept.nonzero().tolist()}
        assert int(kept.sum()) == 2 * len(places), "a turn stays whole"
        return sorted(places)

    assert turns(batch, "top:2") == turns(batch, "top:40%") == [(0, 1), (0, 2)]
    assert turns(batch, "top:3") == [(0, 0), (0, 1), (0, 2)]  # 1 and 1: the first episode's stays
    assert turns(batch, "top:4") == turns(batch, "above:0.9") == [(0, 0), (0, 1), (0, 2), (1, 0)]
    # KL of 3 nats a token in the last turn of the first game, at 0.5 a nat: 4 - 3 = 1, and the other turns pay nothing.
    assert turns(batch.with_(kl=torch.where(batch.turns == 2, 3.0, 0.0)), "top:1", kl_coef=0.5) == [(0, 1)]
    # An untrained turn after the first: 4 is two turns away from it, then three.
    played = games[0].turns
    skipping = replace(games[0], turns=[played[0], replace(played[1], trained=False), played[2]])
    batch = collate([skipping, games[1]], [0.0, 0.0], turn_discount=0.5)
    assert turns(batch, "above:0.9") == [(0, 0), (0, 2), (1, 0)]  # 4 * 0.5 ** 2 = 1
    assert turns(batch, "above:1") == [(0, 2)]


def test_the_other_turns_of_a_kept_one_are_only_read():
    """The gradient of a kept turn is that of the same turn as a demonstration behind the same prompt."""
    turn = {"learner.select": "top:1", "learner.select_unit": "turn", "advantage.turn_gamma": 0.0}
    kept, _ = learnt([0], [game([0.0, 5.0, 1.0], place=0, fresh=False)], **turn)
    alone, _ = learnt([0], [said([3, 10, 11, 4], [11, 11], reward=5.0)], **{"learner.select": "top:1"})
    assert gap(kept, alone) < 1e-9


def test_kept_turns_keep_their_own_sets_of_tokens():
    sets = [[[1, 7], [7]], [[2, 3, 9]], [[9]]]
    said_before = zip(([5], [5, 7, 7, 4], [6]), ([7, 7], [9], [9]), sets, strict=True)
    turns = [Turn(prompt, action, allowed=own) for prompt, action, own in said_before]
    batch = collate([replace(said([5], [7]), turns=turns, texts=["", "", ""])], [0.0])
    part = only(batch, batch.actions & (batch.turns == 1))
    ids, ends = part.allowed  # `Policy.forward` takes the ids as those of the actions alone
    assert ids.tolist() == sets[1][0] and ends.diff()[part.actions.flatten()].tolist() == [3]


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "rloo", "gigpo"])
def test_another_method_credits_all_and_trains_on_the_best(algorithm):
    """The advantages of a group are those of all its replies: with the better half, all that are left are positive."""
    credit = {"advantage.whiten_scope": "none"} if algorithm == "ppo" else {}
    credit |= {"learner.select": "top:2", "kl.coef": 0.0, "kl.loss_coef": 0.0}
    learner = Learner(lm(), algorithm=algorithm, max_tokens=3, **credit)
    metrics = learner.learn([replace(said([5], [6 + i, 7], group=0), place=i) for i in range(4)], [1.0, 2.0, 3.0, 6.0])
    if algorithm != "ppo":  # by hand; the population's deviation is sqrt(3.5); GiGPO adds the same once more
        centred = {"rloo": [0.0, 4.0]}.get(algorithm, [0.0, 3.0 / 3.5**0.5 * (1 + (algorithm == "gigpo"))])
        assert metrics["policy/advantage_mean"] == pytest.approx(sum(centred) / 2, abs=1e-4)
    assert metrics["select/score"] == 4.5 and metrics["reward/mean"] == 3.0
    on_cpu = learner.last_step.batch
    assert len(on_cpu) == 4 and bool(on_cpu.advantages[0].any()), "the table of replies still has all of them"


def test_a_selection_among_replies_without_scores_is_refused():
    learner = Learner(lm(), algorithm="distill", **{"teacher.hint": lambda rollout: [12], "learner.select": "top:50%"})
    with pytest.raises(OperantError, match="without a reward: replies have no score"):
        learner.learn(placed(range(2)), [None, None])
    assert learner.learn(placed(range(2)), [0.0, 1.0])["select/threshold"] == 1.0


def test_what_is_imitated_has_no_advantage():
    """Scores of 0 are returns of 0; the cross-entropy of the replies that stay is none the less trained on."""
    learner = Learner(lm(), algorithm="rejection", max_tokens=3)
    metrics = learner.learn(placed(), [0.0] * 6 + [1.0])
    assert metrics["returns/mean"] < 1 and not [name for name in metrics if name.startswith("policy/advantage")]
    assert "no_advantage" not in [finding.name for finding in diagnose(learner)]


def test_what_can_be_is_not_refused():
    assert parse("above:-1.5e-3") == ("above", -0.0015) and parse("top:33.3%") == ("percent", 33.3)
    for select in ("top:32", "top:50%", None):
        assert configure(GIVEN | {"select": select}).learner["learner"].select == select
    turns = configure(GIVEN | {"select": "top:64", "select_unit": "turn", "algorithm": "rejection"})  # of many turns
    assert turns.learner["learner"].select == "top:64"
