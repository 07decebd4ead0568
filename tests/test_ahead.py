"""Rollouts ahead: which weights play which step, that timing changes nothing, resuming, learning, and refusals."""

import threading
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest
from canaries import end_of_run
from cases import cases
from small_runs import SMALL, TASKS, count_a, cut, model, options, same, stopped_and_whole, told
from toys import letters
from worlds import Turns

from operant import OperantError, Step, train
from operant.api import runs
from operant.engines.native.engine import NativeEngine
from operant.runs.checkpoints import snapshot
from operant.runs.config import configure


class Seen(NativeEngine):
    """Records the thread, the version and the first weight of each call."""

    calls: ClassVar = []

    def generate(self, prompts, sampling, keys):
        first = next(self.policy.parameters()).flatten()[5].item()
        self.calls.append((threading.current_thread().name.startswith("ahead"), self.version, first))
        return super().generate(prompts, sampling, keys)


class Slowly(NativeEngine):
    """An engine that is slow at some steps, so that the thread is now before, now behind the update."""

    def generate(self, prompts, sampling, keys):
        time.sleep(0.05 if self.version % 2 else 0.0)
        return super().generate(prompts, sampling, keys)


def test_every_step_is_played_by_the_promised_weights(tmp_path, monkeypatch):
    """Step s reads the weights from before step s - 2; the first three steps the initial ones."""
    monkeypatch.setattr(Seen, "calls", [])
    before = []
    for run in _runs(tmp_path / "run", rollouts_ahead=2, engine=Seen):
        before.append(next(run.policy.parameters()).flatten()[5].item())
    expected = [max(0, s - 2) for s in range(SMALL["steps"])]
    assert Seen.calls == [(True, version, before[version]) for version in expected]
    for name in ("rollout/staleness", "rollout/staleness_max"):
        assert [m[name] for m in told(run)] == [s - v for s, v in enumerate(expected)]
    assert all(m["time/ahead"] > 0 and m["time/generate"] < m["time/step"] for m in run.metrics)


def _runs(out, **more):
    yield from runs(out, policy=model(), tasks=TASKS, reward=count_a, **options(**more))


def trained(out, **more):
    return train(model(), TASKS, count_a, out=out, **more)


def resumed(out, **more):
    return trained(out, resume=True, tokenizer=letters(), **more)


def test_timing_changes_nothing_nor_does_a_pause(tmp_path):
    whole = trained(tmp_path / "whole", **options(rollouts_ahead=1))
    assert told(whole) == told(trained(tmp_path / "slow", **options(rollouts_ahead=1, engine=Slowly)))
    trained(tmp_path / "two", **options(rollouts_ahead=1, steps=2))
    assert told(whole) == told(resumed(tmp_path / "two", steps=4))
    with pytest.raises(OperantError, match="rollouts_ahead=0 with --resume"):
        resumed(tmp_path / "two", rollouts_ahead=0, steps=5)


def test_the_first_step_is_that_of_a_run_in_turn(tmp_path):
    """Only later steps have other weights; without importance weights, all of the first step is the same."""
    given = options(steps=1, **{"learner.importance": "none"})
    ahead, turn = (trained(tmp_path / str(n), **given, rollouts_ahead=n) for n in (2, 0))
    assert told(ahead) == told(turn) and same(ahead, turn)


@pytest.mark.parametrize(("n", "after"), [(1, 1), (1, 3), (2, 2)])
@pytest.mark.slow
def test_a_killed_run_resumes_bit_identically(n, after, tmp_path):
    assert same(*stopped_and_whole(tmp_path, after, rollouts_ahead=n))


def test_an_error_in_the_thread_ends_the_run_and_the_thread(tmp_path):
    class Broken(NativeEngine):
        def generate(self, prompts, sampling, keys):
            raise OperantError("the engine is out of paper")

    with pytest.raises(OperantError, match="out of paper"):
        trained(tmp_path / "run", **options(rollouts_ahead=1, engine=Broken))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]


def test_evaluations_have_the_weights_of_their_step(tmp_path, monkeypatch):
    """The held-out tasks and probes of each step are answered by its own weights, as in a run in turn."""
    monkeypatch.setattr(Seen, "calls", [])
    more = {"evaluate": ["ba"], "evaluate_every": 1, "probes": 2, "probe_every": 1, "engine": Seen}
    assert len(list(_runs(tmp_path / "run", rollouts_ahead=1, **more))) == SMALL["steps"] + 2
    here = [version for in_thread, version, _ in Seen.calls if not in_thread]
    assert sorted(set(here)) == list(range(SMALL["steps"] + 1))
    assert len([call for call in Seen.calls if call[0]]) == SMALL["steps"]


def test_a_light_checkpoint_plays_by_its_own_weights(tmp_path):
    """It holds which tasks are planned, and not the weights of the versions before it."""
    cut(tmp_path / "run", 2, rollouts_ahead=1, checkpoint="light")
    assert [m["rollout/staleness"] for m in told(resumed(tmp_path / "run", fresh_optimizer=True))] == [0, 1, 0, 1]


def test_a_checkpoint_holds_weights_of_planned_steps_alone(tmp_path):
    state = snapshot(trained(tmp_path / "run", **options(rollouts_ahead=2)).state, ("ahead", "shadow/ahead"))
    assert [p["step"] for p in state["ahead"]["planned"]] == [4, 5] and sorted(state["shadow/ahead"]) == ["2", "3"]


# --- refusals ---------------------------------------------------------------------------------------------------------
@cases(
    ({}, "token"),
    ({"learner.importance": "none"}, "none"),
    ({"rollouts_ahead": 0}, "none"),
    ({"algorithm": "ilql"}, "none"),  # it has none
    ({"algorithm": "ilql", "rollouts_ahead": 0, "partial_rollout_tokens": 1}, "none"),
)
def test_importance_weights_are_those_that_are_given(more, found):
    given = {"tasks": TASKS, "reward": count_a, "rollouts_ahead": 1} | more
    assert configure(given).learner["learner"].importance == found


class Twice(Turns):
    pays = True

    def answer(self, slot, reply):
        return Step(" b", terminated=self.turn[slot] == 2, reward=1.0)


class Counting(Twice):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_a_server_of_several_ranks_is_refused_ahead(tmp_path, monkeypatch):
    monkeypatch.setattr("operant.runs.ahead.distributed", SimpleNamespace(world=lambda: 2), raising=False)
    monkeypatch.setattr(Seen, "own_numbers", True, raising=False)
    with pytest.raises(OperantError, match="on several ranks with the engine Seen: they share a server"):
        trained(tmp_path / "run", **options(rollouts_ahead=1, engine=Seen))


def test_a_world_with_a_state_is_refused_ahead(tmp_path):
    with pytest.raises(OperantError, match="the world Counting, which has a state"):
        train(model(), TASKS, None, out=tmp_path / "run", **options(rollouts_ahead=1, env=Counting()))
    assert not (tmp_path / "run").exists()
    run = train(model(), TASKS, None, out=tmp_path / "run", **options(rollouts_ahead=1, env=Twice()))
    assert [m["rollout/staleness"] for m in told(run)] == [0, 1, 1, 1]
    assert all(m["rollout/turns"] == 2 for m in told(run))


@pytest.mark.slow
def test_a_policy_finds_the_optimum_one_step_behind(tmp_path):
    assert end_of_run(tmp_path / "run", seed=0, rollouts_ahead=1) > 0.9
