"""Full, read-only and recovering disks, clocks that jump, failing reports: training continues and reports it."""

import errno
import json
import os
import time

import pytest
from disks import on
from small_runs import SMALL, TASKS, count_a, model, same, told
from toys import letters

from operant import OperantError, train
from operant.api import runs
from operant.runs.folder import Journal, RunFolder, state
from operant.storage import atomic_io
from operant.storage.checkpoint_store import newest_whole


class Disk:
    """Fails, as a full disk does, for operations with `refuses(operation, path)`, while the step is one of `steps`."""

    def __init__(self, refuses, steps=range(2, 4), code=errno.ENOSPC):
        self.refuses, self.steps, self.code, self.step, self.refused = refuses, steps, code, 0, []

    def __call__(self, when, operation, path):
        if when == "before" and self.step in self.steps and self.refuses(operation, path):
            self.refused.append((operation, path.name))
            raise OSError(self.code, os.strerror(self.code))

    def reward(self, rollouts):
        self.step += 1
        return count_a(rollouts)

    reward.__name__ = "count_a"


def anything(operation, path):
    return operation in ("write", "append", "mkdir", "rename", "truncate")


def run_on(disk, out, **more):
    with on(disk):
        return train(model(), TASKS, disk.reward, out=out, tokenizer=letters(), **SMALL, **more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return train(model(), TASKS, count_a, out=tmp_path_factory.mktemp("whole"), tokenizer=letters(), **SMALL)


def test_a_disk_that_fails_for_a_while_loses_no_metrics(tmp_path, capsys, whole):
    """The disk takes nothing in steps 2 and 3 of 4; afterwards the log of the whole run is complete."""
    disk = Disk(anything, code=errno.EROFS)
    run = run_on(disk, tmp_path / "full", best="reward/mean", probe_every=1)
    assert {name for _, name in disk.refused} >= {"metrics.jsonl", "log.txt", "distributions.jsonl"}
    assert told(run) == told(whole) and same(run, whole)
    lines = [json.loads(x)["step"] for x in (run.path / "distributions.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines == [1, 2, 3, 4]
    names = sorted(path.name for path in run.folder.rollouts_path.iterdir())
    assert names == ["step-00001.parquet", "step-00004.parquet"]
    log, seen = (run.path / "log.txt").read_text(encoding="utf-8"), capsys.readouterr().err
    for text in ("metrics are kept in memory", "replies are left out", "checkpoint is tried again", "can be written"):
        assert text in log and text in seen, text
    assert os.strerror(errno.EROFS).lower() in seen and "Traceback" not in seen
    assert atomic_io.step_of(newest_whole(run.folder.checkpoints)) == 4


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(tmp_path, whole):
    disk = Disk(lambda operation, path: "checkpoints" in str(path), steps=range(2, 9))
    with pytest.raises(OperantError, match=r"cannot save the checkpoint .*no space left on device"):
        run_on(disk, tmp_path / "run")
    assert atomic_io.step_of(newest_whole(tmp_path / "run/checkpoints")) == 1
    assert [m["step"] for m in atomic_io.records(tmp_path / "run/metrics.jsonl")] == [1, 2, 3, 4]
    assert (tmp_path / "run/export/config.json").exists() and (tmp_path / "run/report.html").exists()
    assert not (tmp_path / "run/lock").exists()
    assert told(train(model(), TASKS, count_a, out=tmp_path / "run", resume=True, tokenizer=letters())) == told(whole)


def test_a_failing_reward_is_reported_before_the_disk(tmp_path, capsys):
    def fails(rollouts):
        disk.step = 2
        raise RuntimeError("the judge is out")

    disk = Disk(anything)
    with on(disk), pytest.raises(OperantError, match="the judge is out"):
        train(model(), TASKS, fails, out=tmp_path / "run", tokenizer=letters(), **SMALL)
    assert "the state from before the step could not be saved either" in capsys.readouterr().err


def test_a_failed_export_is_an_error_after_the_checkpoint(tmp_path):
    disk = Disk(lambda operation, path: path.name in ("export", ".export.tmp"), steps=range(9))
    with pytest.raises(OperantError, match="export: no space left"):
        run_on(disk, tmp_path / "run")
    assert atomic_io.step_of(newest_whole(tmp_path / "run/checkpoints")) == 4
    assert not (tmp_path / "run/export").exists(), "whole or not at all"


def test_a_clock_that_jumps_is_never_read(tmp_path, monkeypatch, whole):
    days = iter(range(10**9, -(10**9), -86400))
    monkeypatch.setattr(time, "time", lambda: float(next(days)))
    run = train(model(), TASKS, count_a, out=tmp_path / "run", tokenizer=letters(), **SMALL)
    assert told(run) == told(whole) and all(line["time/step"] >= 0 for line in run.metrics)


def test_a_failing_report_tracker_or_diagnosis_stops_nothing(tmp_path, monkeypatch):
    class Broken:
        def __getattr__(self, name):
            raise ConnectionError("no route")

    def broken(*_):
        raise ZeroDivisionError("of course")

    monkeypatch.setattr("operant.tools.report.observers.write_report", broken)
    monkeypatch.setattr("operant.tools.report.observers.diagnose", broken)
    given = {"policy": model(), "tasks": TASKS, "reward": count_a, "tokenizer": letters()}
    *_, run = runs(tmp_path / "run", **given, show=[Broken()], **SMALL)
    assert len(told(run)) == 4
    log = (run.path / "log.txt").read_text(encoding="utf-8")
    for text in ("the report failed: ZeroDivisionError", "the diagnosis failed", "tracker Broken failed"):
        assert text in log, text


# --- lines that wait --------------------------------------------------------------------------------------------------
def test_lines_are_whole_and_in_order_whatever_was_half_written(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "lines")
    journal.add("one\n")

    def half(path, text):
        with open(path, "a", encoding="utf-8") as file:
            file.write(text[: len(text) // 2])
        raise OperantError("the disk is full")

    monkeypatch.setattr(atomic_io, "append_text", half)
    for line in ("two\n", "three\n"):
        with pytest.raises(OperantError):
            journal.add(line)
    monkeypatch.undo()
    journal.add("four\n")
    assert (tmp_path / "lines").read_text(encoding="utf-8") == "one\ntwo\nthree\nfour\n" and journal.waiting == []


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_line_that_a_signal_adds_while_another_is_written_stands_once(tmp_path, monkeypatch, moment):
    journal, more = Journal(tmp_path / "lines"), ["signal\n"]
    monkeypatch.setattr(atomic_io, "seam", lambda when, *_: when == moment and more and journal.add(more.pop()))
    journal.add("one\n")
    assert (tmp_path / "lines").read_text(encoding="utf-8").split() == ["one", "signal"]


def test_what_waits_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("operant.runs.folder.MOST_WAITING", 20)
    journal = Journal(tmp_path / "no-such-folder" / "lines")
    for number in range(100):
        with pytest.raises(OperantError):
            journal.add(f"line {number}\n")
    assert journal.waiting == ["line 98\n", "line 99\n"]


def test_a_log_that_cannot_be_written_waits_until_the_end(tmp_path):
    folder = RunFolder.create(tmp_path / "x", {})
    with on(Disk(lambda operation, path: path.name == "log.txt", steps=[0])):
        folder.log_message("first\n2026-01-01 00:00:00 the run failed: forged\x85\x1b[2J second")
        folder.log_message("of 'the run failed: x' second")
    folder.close()
    lines = folder.log_path.read_text(encoding="utf-8").splitlines()
    assert [line[0] == " " or line.split()[-1] for line in lines] == ["first", True, "second"]
    assert state(folder.path, 1, 2) == "interrupted" and "\x1b" not in lines[1]
