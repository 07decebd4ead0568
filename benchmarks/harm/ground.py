"""The setting of the trials: a run, its undisturbed result, and its disk operations by number.

ground = make_ground(folder)          play the undisturbed run, and one that is killed half-way
operations(ground)                    the disk operations of its start, of a resume, of a step and of its end
finish(ground, out, outcome)          resume after some harm, play to the end and compare
"""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.harm import trials
from benchmarks.harm.equal import differences
from benchmarks.harm.trials import Job, fork, play, playing, run_in, wait

KILLED = -signal.SIGKILL
UNCOUNTED = ("log.txt", "report.html", "lock")
"""Files that are written depending on the clock: their operations are not numbered."""
HALF = 3
"""The resumes begin after this step."""

DiskOperation = tuple[str, str, str]
"""`before` or `after`, the operation, and the name of the file or folder."""


@dataclass
class Outcome:
    """The result of a trial: the harm that was done, and the differences of the resumed run."""

    kind: str
    what: str
    kills: int = 0
    resumed: list[int] = field(default_factory=list)
    """The step from which each resume continued; 0 is a fresh start."""
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Ground:
    """The setting of the trials: the run, its undisturbed folder, and one that was killed half-way."""

    folder: Path
    job: Job
    whole: Path
    half: Path
    seconds: float
    """Seconds of the undisturbed run, from the fork to its end."""
    lane: int = 0
    """The number of this process among those that make trials at the same time."""

    @property
    def own(self) -> Path:
        """The folder of this lane."""
        folder = self.folder / f"lane-{self.lane}"
        folder.mkdir(exist_ok=True)
        return folder

    def place(self, name: str, start: Path | None = None) -> Path:
        """The run folder of a trial: absent yet, or a copy of `start`."""
        out = self.own / name / "run"
        shutil.rmtree(out.parent, ignore_errors=True)
        out.parent.mkdir()
        if start is not None:
            shutil.copytree(start, out)
        return out

    def log(self, out: Path) -> Path:
        """The file for the output of a trial's processes."""
        return out.parent / "printed.txt"


class Seam:
    """Numbers the disk operations of a run and calls `act` at the one with number `at`."""

    def __init__(self, act: Callable[[str, Path], None] | None = None, at: int = -1):
        self.act, self.at = act, at
        self.seen: list[DiskOperation] = []
        self.marks: list[int] = []
        """The number of operations before the first step, after each step, and at the end."""

    def __call__(self, when: str, operation: str, path: Path) -> None:
        if any(name in path.name for name in UNCOUNTED):
            return
        self.seen.append((when, operation, path.name))
        if self.act is not None and len(self.seen) - 1 == self.at:
            self.act(operation, path)


def die(operation: str, path: Path) -> None:
    """Kill this process with signal 9, as from outside."""
    os.kill(os.getpid(), signal.SIGKILL)


def watched(job: Job, out: Path, seam: Seam) -> None:
    """Play the run and pass every disk operation to `seam`."""
    from operant.storage import atomic_io

    atomic_io.seam = seam
    for _ in playing(job, out):
        seam.marks.append(len(seam.seen))


def recorded(ground: Ground, start: Path | None) -> Seam:
    """The disk operations of an undisturbed run."""
    out = ground.place("recorded", start)

    def work() -> None:
        seam = Seam()
        watched(ground.job, out, seam)
        (out.parent / "seen.json").write_text(json.dumps([seam.seen, seam.marks]), encoding="utf-8")

    _must(wait(fork(work, ground.log(out))), ground.log(out))
    seam = Seam()
    seam.seen, seam.marks = json.loads((out.parent / "seen.json").read_text(encoding="utf-8"))
    return seam


def operations(ground: Ground) -> list[tuple[str, Path | None, int, DiskOperation]]:
    """The disk operations of the start, of a resume, of the step after it with its checkpoint, and of the end."""
    fresh, resumed = recorded(ground, None), recorded(ground, ground.half)
    parts = [
        ("an operation of the start", None, fresh, 0, fresh.marks[0]),
        ("an operation of a resume", ground.half, resumed, 0, resumed.marks[0]),
        ("an operation of a step and its checkpoint", ground.half, resumed, resumed.marks[0], resumed.marks[1]),
        ("an operation of the end", ground.half, resumed, resumed.marks[-2], resumed.marks[-1]),
    ]
    return [
        (kind, start, number, seam.seen[number])
        for kind, start, seam, first, last in parts
        for number in range(first, last)
    ]


# --- making it -------------------------------------------------------------------------------------------------------


def make_ground(folder: Path) -> Ground:
    """Preload the imports, create the model, play the undisturbed run, and one that is killed half-way."""
    inputs, log = folder / "inputs", folder / "printed.txt"
    folder.mkdir(parents=True, exist_ok=True)
    _must(wait(fork(partial(trials.prepare, inputs), log)), log)
    job = trials.job_of(inputs)
    trials.preload(lambda: play(job, folder / "first/run"), folder)
    _one_thread()
    whole = folder / "whole/run"
    whole.parent.mkdir()
    start = time.monotonic()
    _must(wait(fork(partial(play, job, whole), log)), log)
    ground = Ground(folder, job, whole, folder / "half/run", time.monotonic() - start)
    ground.half.parent.mkdir()
    seam = Seam(die, _first_of_a_checkpoint(recorded(ground, None)))
    assert wait(fork(partial(watched, job, ground.half, seam), log)) == KILLED
    return ground


def _first_of_a_checkpoint(seam: Seam) -> int:
    """The first operation of the checkpoint after step HALF: a resume must then cut the step's rollouts and metrics."""
    after = range(seam.marks[HALF], len(seam.seen))
    return next(
        i for i in after if seam.seen[i][2].startswith((".step-", ".light-")) and "parquet" not in seam.seen[i][2]
    )


def _one_thread() -> None:
    """Use one thread: a fork must not happen beside others, and their number would change the last bits of results."""
    import torch

    torch.set_num_threads(1)


def _must(status: int, log: Path) -> None:
    if status:
        raise RuntimeError(f"the undisturbed run ended with {status}: {log.read_text(encoding='utf-8')[-2000:]}")


# --- resuming ---------------------------------------------------------------------------------------------------------


def finish(ground: Ground, out: Path, outcome: Outcome, damaged: bool = False) -> Outcome:
    """Resume, play to the end and compare. Unless it was `damaged`, a checkpoint with its final name must be whole."""
    begun, named = run_in(out), _newest_named(out)
    status = wait(fork(partial(play, ground.job, out), ground.log(out)))
    if begun is None:
        outcome.resumed.append(0)
    outcome.resumed += trials.resumed_from(out)
    if status:
        last_line = ground.log(out).read_text(encoding="utf-8").strip().splitlines()[-1:]
        outcome.wrong.append(f"the resume ended with {status}: {''.join(last_line)}")
    else:
        outcome.wrong += differences(ground.whole, run_in(out) or out)
        if outcome.resumed[-1] < named and not damaged:
            outcome.wrong.append(f"there was a checkpoint of step {named}, but it resumed after {outcome.resumed[-1]}")
    return outcome


def _newest_named(out: Path) -> int:
    """The step of the newest checkpoint by name; 0 if there is none."""
    made = ((run_in(out) or out) / "checkpoints").glob("step-*")
    return max((int(path.name[5:]) for path in made if path.name[5:].isdigit()), default=0)
