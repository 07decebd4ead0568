"""One total a rollout: what its world paid and what a reward added, the same number wherever it is asked for."""

import json

import pyarrow.parquet as pq
import pytest
from toys import letters, lm

from operant import OperantError, diagnose, train
from operant.rewards import judge, totals
from operant.types import Rollout, Step, Task, Turn

TASKS = ["ab", "cde", "the end", "h"]
SMALL = {"steps": 2, "batch": 4, "sampling.max_tokens": 4, "watch_every": 0, "probes": 2, "probe_every": 1}


class Pays:
    """Two turns: 2.0 for the first, 3.0 for the second."""

    def reset(self, tasks):
        self.turn = dict.fromkeys(tasks, 0)
        return {slot: Step(fresh=True) for slot in tasks}

    def step(self, replies):
        return {slot: self._answer(slot) for slot in replies}

    def _answer(self, slot):
        self.turn[slot] += 1
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


def test_a_reward_that_abstains_leaves_the_rollout_out_whatever_the_world_paid(tmp_path):
    run = started(tmp_path / "run", lambda rollouts: [None if r.query == "h" else 1.0 for r in rollouts])
    assert 0 < run.metrics[0]["reward/abstained"] < 1 and run.metrics[0]["reward/mean"] == 6.0


def test_a_run_without_reward_and_without_a_paying_world_is_refused(tmp_path):
    with pytest.raises(OperantError, match="reward is missing"):
        train(lm(vocab=40), TASKS, tokenizer=letters(), out=tmp_path / "run", **SMALL)


def test_a_world_run_resumes(tmp_path):
    whole = started(tmp_path / "whole", steps=4)
    started(tmp_path / "cut", steps=2)
    again = started(tmp_path / "cut", steps=4, resume=True)

    def told(run):
        return [{k: v for k, v in m.items() if not k.startswith(("time/", "memory/", "tokens/"))} for m in run.metrics]

    for mine, right in zip(told(again)[2:], told(whole)[2:], strict=True):
        assert {k: (mine.get(k), v) for k, v in right.items() if mine.get(k) != v} == {}


def test_totals_by_hand():
    turns = [Turn([1], [2, 3], reward=0.5), Turn([4], [5], reward=-2.0)]
    rollout = Rollout(Task("a", "x"), 0, turns, ["", ""])
    assert totals([1.0, [0.1, 0.2, 0.3], None], [rollout] * 3) == [-0.5, pytest.approx(-0.9), None]
    judged = judge(None, [rollout], pays=True)
    assert judged.scores == [0.0] and judged.parts == {"world": [-1.5]}
    assert judge(None, [rollout]).scores == [None]
