"""SIGINT and SIGTERM in real processes: the first ends the run after the step and saves, the second immediately."""

import json
import os
import platform
import signal
import time
from collections import deque
from itertools import repeat

import pytest
from cases import cases, slow
from disks import on
from processes import Child, until
from small_runs import TASKS, count_a
from toys import letters, lm

from operant import train
from operant.runs.signals import stop_on_signal
from operant.storage import atomic_io
from operant.storage.checkpoint_store import newest_whole

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
SMALL = {"probes": 0, "batch": 4, "max_tokens": 6, "minibatch": 4, "steps": 3000, "epochs": 1}


def training(out, reward=count_a, **more):
    """A child process that trains until it is stopped; exits with 0 if the run was interrupted and saved."""
    policy = lm("gpt2", vocab=len(letters()), spread=0.02)  # here, so that no child has to import it

    def work():
        return 0 if train(policy, TASKS, reward, out=out, tokenizer=letters(), **(SMALL | more)).interrupted else 5

    return Child(work, output=str(out) + ".said")


def steps(out):
    path = out / "metrics.jsonl"
    return [json.loads(x)["step"] for x in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def saved(out):
    path = newest_whole(out / "checkpoints", lambda text: None)
    return path and atomic_io.step_of(path)


@cases(signal.SIGINT, signal.SIGTERM)
def test_the_first_signal_finishes_the_step_saves_and_reports_it(number, tmp_path):
    out = tmp_path / "run"
    child = training(out)
    until(lambda: len(steps(out)) >= 2)
    child.kill(number)
    assert child.ends() == 0 and saved(out) == steps(out)[-1] < 3000
    said = (tmp_path / "run.said").read_text(encoding="utf-8")
    assert f"signal {number.name}: the run ends after this step" in said and "Traceback" not in said
    assert f"signal {number.name}" in (out / "log.txt").read_text(encoding="utf-8") and not (out / "lock").exists()


@cases(("SIGTERM", "SIGINT"), slow("SIGINT", "SIGTERM"))
def test_the_second_ends_a_reward_that_never_returns(first, second, tmp_path):
    out = tmp_path / "run"

    def endless(rollouts):
        if len(steps(out)) >= 2:
            (tmp_path / "asked").touch()
            time.sleep(1000)
        return count_a(rollouts)

    child = training(out, endless, checkpoint_minutes=0.0)
    until((tmp_path / "asked").exists)
    child.kill(signal.Signals[first])
    until(lambda: "SIG" in (tmp_path / "run.said").read_text(encoding="utf-8"))
    assert child.running()
    child.kill(signal.Signals[second])
    assert child.ends(within=10) == -signal.Signals[second]
    assert saved(out) == 2, "the last checkpoint is whole"
    assert training(out, endless, resume=True, steps=2).ends() == 5  # and the lock is a dead one's


def test_under_torchrun_ctrl_c_and_what_it_hands_on_are_one(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("operant.runs.signals.PAIR", 0.5)
    (tmp_path / "heard").mkdir()

    def work():
        with stop_on_signal() as stop:
            stop.on_request = lambda text: (tmp_path / "heard" / text.split()[1]).touch()
            (tmp_path / "begun").touch()
            until((tmp_path / "over").exists)
        return stop.by

    for last, ends in ((None, signal.SIGINT), (signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, -signal.SIGTERM)):
        for name in ("begun", "over", "heard/SIGINT:"):
            (tmp_path / name).unlink(missing_ok=True)
        child = Child(work, output=str(tmp_path / "said"))
        until((tmp_path / "begun").exists)
        child.kill(signal.SIGINT)
        until((tmp_path / "heard/SIGINT:").exists)
        child.kill(signal.SIGTERM)
        child.kill(signal.SIGINT)  # as of a service that signals the whole group
        time.sleep(0.6)
        assert child.running()
        child.kill(last) if last else (tmp_path / "over").touch()
        assert child.ends(within=10) == ends


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc can forget a handler after one signal")
@cases(signal.SIGINT, signal.SIGTERM)
def test_the_second_needs_no_python(number, tmp_path):
    """A loop in C that holds the interpreter lock, so that no Python handler runs."""

    def work():
        with stop_on_signal():
            (tmp_path / "begun").touch()
            deque(repeat(None), maxlen=0)  # for ever

    child = Child(work)
    until((tmp_path / "begun").exists)
    time.sleep(0.1)
    child.kill(number)
    time.sleep(0.05)
    child.kill(number)
    assert child.ends(within=10) == -number


def test_the_second_ends_a_checkpoint_that_is_being_written(tmp_path):
    out = tmp_path / "run"

    def slow(when, operation, path):
        if ".step-00003.tmp" in str(path) and operation == "fsync" and when == "before":
            (tmp_path / "writing").touch()
            while True:
                time.sleep(0.01)

    with on(slow):
        child = training(out, checkpoint_minutes=0.0)
    until((tmp_path / "writing").exists)
    child.kill(signal.SIGINT)
    until(lambda: "SIGINT" in (tmp_path / "run.said").read_text(encoding="utf-8"))
    child.kill(signal.SIGINT)
    assert child.ends(within=10) == -signal.SIGINT and saved(out) == 2


@cases("loading", "first looks")
def test_a_signal_before_the_first_step_leaves_a_run(phase, tmp_path):
    out = tmp_path / "run"

    class Waits:
        """Waits at the start of a run until the signal has arrived."""

        def check(self):
            if phase == "loading":
                self.wait()

        def wait(self):
            (tmp_path / "begun").touch()
            until(lambda: "SIGTERM" in (tmp_path / "run.said").read_text(encoding="utf-8"))

        def __call__(self, rollouts):
            if not (tmp_path / "begun").exists():
                self.wait()
            return count_a(rollouts)

    child = training(out, Waits(), evaluate=TASKS)
    until((tmp_path / "begun").exists)
    child.kill(signal.SIGTERM)
    assert child.ends() == 0 and steps(out) == [] and saved(out) == 0
    if phase == "loading":
        assert training(out, count_a, resume=True, steps=1, evaluate=TASKS).ends() == 5 and steps(out) == [1]


def test_an_interactive_session_survives_the_second(monkeypatch):
    monkeypatch.setattr("operant.runs.signals.interactive", lambda: True)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stop_on_signal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.by == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_afterwards_signals_are_whose_they_were():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with stop_on_signal() as stop:
        assert not stop
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
