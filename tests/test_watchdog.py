"""The watchdog: slow phases are logged, a hanging run is ended with all stacks in the log and can be resumed."""

import ctypes
import json
import time

import pytest
from processes import Child
from toys import letters, lm

from operant import machine, train
from operant.machine import Clock, beat
from operant.watchdog import Watchdog


def test_a_slow_phase_is_logged_with_item_and_duration_and_a_quick_one_is_not(tmp_path):
    said, clock = [], Clock()
    with Watchdog(clock, said.append, tmp_path / "log", slow=0.1, usual={"generate": 0.3}) as dog:
        dog.item = "step 3"
        for _ in range(20):
            with clock.timing("observe"):
                time.sleep(0.01)
        with clock.timing("generate"):
            time.sleep(0.4)  # less than three times as long as usual
        assert said == []
        with clock.timing("reward"):
            time.sleep(0.8)
    assert said[0].startswith("step 3: reward for ") and 2 <= len(said) <= 4, said


@pytest.mark.parametrize("holds", ["the interpreter", "nothing"])
def test_after_a_silence_every_stack_is_in_the_log_and_the_process_ends(tmp_path, holds):
    def hangs():
        clock = Clock()
        with Watchdog(clock, lambda text: None, tmp_path / "log", silence=0.4), clock.timing("reward"):
            ctypes.PyDLL(None).sleep(1000) if holds == "the interpreter" else time.sleep(1000)

    assert Child(hangs, output=str(tmp_path / "said")).ends(within=60) == 1
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert "Timeout" in log and "in hangs" in log and "in _watch" in log


def test_a_process_that_shows_progress_is_not_ended(tmp_path):
    def works():
        with Watchdog(Clock(), lambda text: None, tmp_path / "log", silence=0.5):
            for _ in range(6):
                time.sleep(0.1)
                beat()
        time.sleep(0.6)  # the timer is cancelled at the end

    assert Child(works).ends(within=60) == 0


def test_decoding_and_updates_record_progress(tmp_path, monkeypatch):
    before = machine.beats
    options = {"steps": 1, "probes": 0, "batch": 2, "max_tokens": 6, "update.micro_tokens": 8, "epochs": 1}
    train(lm("gpt2", vocab=len(letters())), ["ab"], "letters:a", out=tmp_path / "r", tokenizer=letters(), **options)
    assert machine.beats - before >= 6 + 2


@pytest.mark.slow
def test_a_run_that_hangs_is_ended_and_can_be_resumed(tmp_path):
    def judge(rollouts):
        if len(lines()) == 2 and not (tmp_path / "mended").exists():
            time.sleep(1000)
        return [1.0] * len(rollouts)

    def lines():
        path = tmp_path / "run/metrics.jsonl"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def work(resume=False):
        options = {"probes": 0, "batch": 2, "max_tokens": 4, "steps": 3, "silence_minutes": 5 / 60}
        options |= {"checkpoint_minutes": 0.0, "tokenizer": letters(), "resume": resume, "out": tmp_path / "run"}
        train(lm("gpt2", vocab=len(letters())), ["ab", "c"], judge, **options)

    assert Child(work, output=str(tmp_path / "said")).ends() == 1
    log = (tmp_path / "run/log.txt").read_text(encoding="utf-8")
    assert "Timeout" in log and "in judge" in log and (tmp_path / "run/lock").exists()
    (tmp_path / "mended").touch()
    assert Child(lambda: work(resume=True), output=str(tmp_path / "said")).ends() == 0
    assert [json.loads(x)["step"] for x in lines()] == [1, 2, 3]
