"""Runs that are killed, torn and damaged: the comparison finds every loss, and nothing is lost."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import toys  # noqa: F401  one thread
from benchmarks.harm.breakage import Unsynced
from benchmarks.harm.damage import damages
from benchmarks.harm.equal import differences
from benchmarks.harm.ground import Ground
from benchmarks.harm.order import available, disorder, traced
from benchmarks.harm.trials import job_of, play, playing, prepare
from cases import cases

from operant.storage import atomic_io
from operant.storage.checkpoint import RunState

ROOT = Path(__file__).parents[2]

STEPS, HALF = 3, 1


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    """An undisturbed run, and one that was stopped after two of its three steps."""
    folder = tmp_path_factory.mktemp("chaos")
    prepare(folder / "inputs")
    job = job_of(folder / "inputs", STEPS)
    whole, half = folder / "whole/run", folder / "half/run"
    play(job, whole)
    leave(job, half)
    return Ground(folder, job, whole, half, 1.0)


def leave(job, out):
    for run in playing(job, out):
        if len(run.metrics) == HALF + 1:  # yielded once the checkpoint of its last step is written
            break


def resumed(ground, out):
    play(ground.job, out)
    return differences(ground.whole, out)


def without(part, method):
    """The method of a `RunState` without the registered part."""

    def call(self, *args, **more):
        parts, self.parts = self.parts, {name: thing for name, thing in self.parts.items() if name != part}
        try:
            return method(self, *args, **more)
        finally:
            self.parts = parts

    return call


def test_a_part_missing_from_checkpoints_is_noticed(ground, monkeypatch):
    """The comparison can fail: the numbers after the resume differ, not only the contents of the checkpoint."""
    for name in ("save", "load"):
        monkeypatch.setattr(RunState, name, without("optimizer", getattr(RunState, name)))
    out = ground.place("forgot")
    leave(ground.job, out)
    wrong = resumed(ground, out)
    assert any(text.startswith(f"metrics.jsonl, step {HALF + 2}") for text in wrong), wrong
    assert any(text.startswith("export/model.safetensors") for text in wrong), wrong


def last_digit(path):
    *lines, last = path.read_text(encoding="utf-8").splitlines()
    record = json.loads(last)
    record["reward/mean"] += 1e-12
    path.write_text("\n".join([*lines, json.dumps(record)]) + "\n", encoding="utf-8")


def one_bit(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@cases(
    ("metrics.jsonl", last_digit, "step 3: reward/mean of 1 differ"),
    ("metrics.jsonl", lambda path: path.write_text("", encoding="utf-8"), "has the steps []"),
    ("rollouts/step-00003.parquet", one_bit, "differs"),
    (f"checkpoints/step-0000{STEPS}/tensors.safetensors", one_bit, "differs"),
    (f"checkpoints/step-0000{STEPS}/state.json", lambda path: path.write_text("{}", encoding="utf-8"), "differs"),
    ("export/model.safetensors", lambda path: path.write_bytes(b"torn"), "header"),
    ("evaluation.json", Path.unlink, "is missing"),
    (".metrics.jsonl.712.tmp", lambda path: path.write_text("", encoding="utf-8"), "is left over"),
)
def test_every_difference_is_reported(name, change, message, ground):
    out = ground.place("changed", ground.whole)
    assert differences(ground.whole, out) == []
    change(out / name)
    (difference,) = differences(ground.whole, out)
    assert name in difference and message in difference


def test_a_damaged_checkpoint_costs_a_step_and_no_bit(ground):
    out = ground.place("damaged", ground.half)
    newest = sorted((out / "checkpoints").glob("step-*"))[-1]
    next(damages(ground.half, "resume", seed=0))[-1](newest)
    assert resumed(ground, out) == []
    log = (out / "log.txt").read_text(encoding="utf-8")
    assert f"skipping the damaged checkpoint {newest}" in log and f"going on after step {HALF}" in log


def test_only_unsynced_bytes_are_torn(tmp_path):
    power = Unsynced("1")
    safe, torn, grown, renamed = (tmp_path / name for name in ("safe", "torn", "grown", "renamed"))
    grown.write_bytes(bytes(10))
    for path, operation in ((safe, "write"), (torn, "write"), (grown, "append")):
        power("before", operation, path)
        path.write_bytes(bytes(20))
        power("after", operation, path)
    power("after", "fsync", safe)
    os.replace(torn, renamed)
    power("after", "rename", renamed)
    power.tear()
    assert safe.stat().st_size == 20 and renamed.stat().st_size < 20 and 10 <= grown.stat().st_size <= 20


class Auditor:
    """Audits every file that Python opens to write, renames or deletes, and whether `atomic_io.seam` was called."""

    EVENTS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link")

    def __init__(self, folder):
        self.folder, self.inside, self.unknown, self.count, self.on = str(folder), 0, [], 0, True
        sys.addaudithook(self.audit)  # cannot be removed: it does nothing once `on` is false

    def seam(self, when, operation, path):
        self.inside += 1 if when == "before" else -1

    def audit(self, event, arguments):
        if not self.on or not arguments or not str(arguments[0]).startswith(self.folder):
            return
        if event in self.EVENTS or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            self.count += 1
            if self.inside <= 0:
                self.unknown.append((event, arguments[0]))


def test_every_disk_operation_of_a_run_passes_the_seam(ground, monkeypatch):
    """So the enumeration of its operations is complete. The watchdog's open handle on the log writes nothing."""
    out = ground.place("audited")
    auditor = Auditor(out)
    monkeypatch.setattr(atomic_io, "seam", auditor.seam)
    play(ground.job, out)
    auditor.on = False
    assert auditor.count > 100 and auditor.inside == 0
    assert [(event, path) for event, path in auditor.unknown if not str(path).endswith("log.txt")] == []


NEW = "/x/.step-00012.tmp"
TENSORS = f"{NEW}/tensors.safetensors"
GOOD = [("write", f"{NEW}/.a"), ("rename", f"{NEW}/.a -> {TENSORS}"), ("fsync", TENSORS)]
GOOD += [(operation, f"{NEW}/{name}.json") for name in ("state", "manifest") for operation in ("write", "fsync")]
GOOD += [("fsync", NEW), ("rename", f"{NEW} -> /x/step-00012"), ("fsync", "/x")]


def test_an_order_that_loses_something_is_reported():
    assert disorder(GOOD) == []
    for i in (0, 2, 3, 4, 5, 6, 7, 8, 9):
        assert len(disorder(GOOD[:i] + GOOD[i + 1 :])) == 1, GOOD[i]
    assert disorder([*GOOD[:4], GOOD[5], GOOD[6], GOOD[7], GOOD[8], GOOD[4], GOOD[9]])  # synced too late
    assert disorder([*GOOD[:8], GOOD[9], GOOD[8]])


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="strace is not here, or may not look at processes")
@cases(
    ("", None),
    ("atomic_io.sync = lambda path: None", "not synced"),
    ("atomic_io.sync_folder = lambda path: None", "folder"),
)
def test_the_system_calls_of_a_checkpoint_stand_in_order(before, message, tmp_path):
    """write, fsync of every file, rename, fsync of the folder; two planted faults are found."""
    problems = disorder(traced(tmp_path, before))
    assert problems == [] if message is None else problems and all(message in text for text in problems)


PLANTED = """
import sys
from pathlib import Path
from operant.storage import atomic_io
atomic_io.sync = lambda path: None
from benchmarks.harm import breakage, ground
made = ground.make_ground(Path(sys.argv[1]))
named = [o for o in ground.operations(made) if o[3] == ["after", "rename", "step-00004"] and "step" in o[0]]
print(breakage.power(made, *named[0][1:]).wrong)
"""


@pytest.mark.slow
def test_power_that_goes_finds_a_missing_fsync(tmp_path):
    done = subprocess.run([sys.executable, "-c", PLANTED, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert "there was a checkpoint of step 4, but it resumed after 3" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_ten_kills_and_a_tenth_of_everything_else(tmp_path):
    command = [sys.executable, "-m", "benchmarks.chaos", "--kills", "10", "--results", str(tmp_path / "chaos.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "10 of 10"
    rows = json.loads((tmp_path / "chaos.json").read_text(encoding="utf-8"))["rows"]
    assert all(row["equal"] == row["trials"] > 0 for row in rows) and len(rows) >= 9


def test_a_kill_before_the_first_checkpoint_is_a_fresh_start(ground):
    out = ground.place("early", ground.half)
    shutil.rmtree(out / "checkpoints")
    assert resumed(ground, out) == []
    assert "going on after step 0" in (out / "log.txt").read_text(encoding="utf-8")


def test_a_kill_between_both_kinds_of_checkpoint_loses_neither(ground, monkeypatch):
    """The resume writes the missing kind."""

    def kill(when, operation, path):
        if (when, operation, path.name) == ("before", "mkdir", ".light-00002.tmp"):
            raise KeyboardInterrupt

    out = ground.place("between")
    with monkeypatch.context() as during, pytest.raises(KeyboardInterrupt):
        during.setattr(atomic_io, "seam", kill)
        play(ground.job, out)
    assert resumed(ground, out) == []


def test_a_full_disk_under_a_foreign_writer_is_recognised(tmp_path):
    """safetensors and tokenizers raise errors of their own, with the system's number in the text."""
    with pytest.raises(OSError, match="No space left") as raised, atomic_io.operation("write", tmp_path / "x"):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert raised.value.errno == errno.ENOSPC
    with pytest.raises(RuntimeError, match="else"), atomic_io.operation("write", tmp_path / "x"):
        raise RuntimeError("something else")
