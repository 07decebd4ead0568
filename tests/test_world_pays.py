"""One total a rollout: what its world paid and what a reward added, the same number wherever it is asked for."""

import json
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from cases import cases
from toys import letters, lm
from worlds import Turns

from operant import Learner, OperantError, Rollout, Step, Task, Turn, diagnose, train
from operant.rewards import judge
from operant.rewards.shaping import RunningMoments, ScoreOptions, processed
from operant.rollouts.collate import collate
from operant.types import totals

TASKS = ["ab", "cde", "the end", "h"]
SMALL = {"steps": 2, "batch": 4, "sampling.max_tokens": 4, "watch_every": 0, "probes": 2, "probe_every": 1, "epochs": 1}


class Pays(Turns):
    """Two turns: 2.0 for the first, 3.0 for the second."""

    def answer(self, slot, reply):
        return Step("en", reward=2.0) if self.turn[slot] == 1 else Step(reward=3.0, terminated=True)


def started(out, reward=None, **more):
    given = {"tokenizer": letters(), "env": Pays(), "evaluate": TASKS[:2], "evaluate_every": 1} | SMALL | more
    return train(lm(vocab=40, spread=0.1), TASKS, reward, out=out, **given)


def half(rollouts):
    return [0.5] * len(rollouts)


def test_a_world_may_be_the_only_payer_and_every_number_says_so(tmp_path):
    run = started(tmp_path / "run", best="reward/mean")
    last = run.metrics[-1]
    for name in ("reward/mean", "reward/max", "reward/scaled_mean", "evaluate/reward", "probe/reward"):
        assert last[name] == 5.0, name
    assert run.before.mean == run.after.mean == run.best["value"] == 5.0
    assert last["reward/return"] == pytest.approx(5.0 - last["reward/kl_penalty"], abs=1e-5)
    held = json.loads((run.path / "evaluation.json").read_text(encoding="utf-8"))
    assert held["after"]["mean"] == 5.0 and {r["score"] for r in held["after"]["replies"]} == {5.0}
    rows = pq.read_table(run.path / "rollouts" / "step-00002.parquet").to_pylist()
    assert [r["reward"] for r in rows] == [None, 5.0] * 4 and [r["paid"] for r in rows] == [2.0, 3.0] * 4
    assert rows[1]["reward/world"] == 5.0
    assert "scores 5, so there is nothing" in next(f.message for f in diagnose(run) if f.name == "constant")


def test_what_a_reward_adds_comes_on_top_and_both_are_named(tmp_path):
    run = started(tmp_path / "run", half)
    last = run.metrics[-1]
    assert last["reward/mean"] == last["evaluate/reward"] == last["probe/reward"] == 5.5
    assert (last["reward/world/mean"], last["reward/half/mean"]) == (5.0, 0.5)
    rows = pq.read_table(run.path / "rollouts" / "step-00002.parquet").to_pylist()
    assert (rows[1]["reward"], rows[1]["reward/world"], rows[1]["reward/half"]) == (5.5, 5.0, 0.5)
    # A score is paid on the last action of the episode, what the world pays on each turn's.
    batch = run.learner.last_step.batch
    paid = (batch.rewards + 0.1 * batch.kl) * batch.actions
    assert sorted(x for x in paid[0].tolist() if abs(x) > 0.1) == pytest.approx([2.0, 3.5], abs=1e-5)


@cases(
    ("ppo", [5.0, 0.0], "a turn of episode 0 that is not its last has 5"),
    ("ppo", [0.0, float("nan")], "the next value of turn 1 is nan"),
    ("grpo", [0.0, 5.0], "algorithm grpo has no critic to use them"),
)
def test_a_next_value_that_nothing_would_read_is_refused(algorithm, ahead, message):
    learner = Learner(lm(vocab=40), algorithm=algorithm)
    with pytest.raises(OperantError, match=message):
        learner.step([[3], [3, 4, 5]], [[4], [6]], [1.0, 0.0], episodes=[0, 0], next_values=ahead)
    assert learner.progress.step == 0


def test_totals_by_hand():
    rollout = Rollout(Task("a", "x"), 0, [Turn([1], [2, 3], reward=0.5), Turn([4], [5], reward=-2.0)], ["", ""])
    assert totals([1.0, [0.1, 0.2, 0.3], None], [rollout] * 3) == [-0.5, pytest.approx(-0.9), None]
    judged = judge(None, [rollout], pays=True)
    assert judged.scores == [0.0] and judged.parts == {"world": [-1.5]}
    assert judge(None, [rollout]).scores == [None]


SHAPED = {  # what is paid for each action of two rollouts, of two turns with two actions
    # Totals of 2.5 and 6.5: a mean of 4.5 and an unbiased deviation of sqrt(8).
    "centre": ({"centre": True}, [[0, 2, 0, 0.5 - 4.5], [0, 3, 0, 3.5 - 4.5]]),
    "scale": ({"scale": True}, [[0, 2 / 8**0.5, 0, 0.5 / 8**0.5], [0, 3 / 8**0.5, 0, 3.5 / 8**0.5]]),
    "normalise": ({"normalise": True}, [[0, 2 / 8**0.5, 0, -4 / 8**0.5], [0, 3 / 8**0.5, 0, -1 / 8**0.5]]),
    "clip": ({"clip": 4.0}, [[0, 2, 0, 0.5], [0, 3, 0, 1.0]]),
    "replaced": ({"missing_stop": -1.0}, [[0, 0, 0, -1.0], [0, 0, 0, -1.0]]),
    "added": ({"missing_stop": -1.0, "missing_stop_mode": "add"}, [[0, 2, 0, -0.5], [0, 3, 0, 2.5]]),
    "none": ({}, [[0, 2, 0, 0.5], [0, 3, 0, 3.5]]),
}


@pytest.mark.parametrize("name", SHAPED)
def test_score_options_shape_the_one_total_of_world_and_reward(name):
    options, right = SHAPED[name]
    turns = [
        [Turn([1], [2, 3], reward=one), Turn([4], [5, 6], reward=two, end="length")]
        for one, two in ((2.0, 0.0), (3.0, 3.0))
    ]
    rollouts = [Rollout(Task("a", "x"), 0, each, ["", ""]) for each in turns]
    scores, rollouts = processed([0.5, 0.5], rollouts, ScoreOptions(**options), RunningMoments(), None)
    batch = collate(rollouts, scores)
    assert batch.rewards[batch.actions].tolist() == pytest.approx([x for row in right for x in row], abs=1e-6)


def test_per_token_scores_are_clipped_with_the_pay_of_the_world():
    rollout = Rollout(Task("a", "x"), 0, [Turn([1], [2, 3], reward=2.0), Turn([4], [5], reward=-3.0)], ["", ""])
    [score], [same] = processed([[0.5, 0.5, 0.5]], [rollout], ScoreOptions(clip=1.0), RunningMoments(), None)
    assert same is rollout and collate([same], [score]).rewards.sum().item() == pytest.approx(0.5 + 1.0 - 1.0)


@cases(None, [0, 1])
def test_reinforces_baseline_is_also_that_of_a_constant_world(episodes):
    moved = []
    for pay in ([1.0, 1.0], [1.0, 0.0]):
        learner = Learner(lm(vocab=40), algorithm="reinforce", **{"optimizer.lr": 1e-2, "kl.coef": 0.0})
        before = [p.detach().clone() for p in learner.policy.trainable()]
        for _ in range(2):
            replies = learner.generate([[3, 4], [5, 6, 7]], max_new_tokens=4)
            turns = [r.turns[0] for r in replies]
            if episodes is None:
                paid = [replace(r, turns=[replace(t, reward=x)]) for r, t, x in zip(replies, turns, pay, strict=True)]
                learner.step(paid, [0.0, 0.0])
            else:
                learner.step([t.prompt for t in turns], [t.action for t in turns], pay, episodes=episodes)
        moved.append(max(float((a - b).abs().max()) for a, b in zip(learner.policy.trainable(), before, strict=True)))
    assert moved[0] == 0.0 and moved[1] > 1e-3
