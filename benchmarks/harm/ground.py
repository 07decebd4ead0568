"""Where trials are made: a run, what it leaves undisturbed, and its operations on the disk by number.

ground = make_ground(folder)          plays the undisturbed run, and one that is killed half way
operations(ground)                    every operation on the disk of its start, a resume, a step, and its end
finish(ground, out, outcome)          go on to the end after some harm, and compare
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
"""Files that are written when it is time, not when it is their turn: no operation of theirs has a number."""
HALF = 3
"""The step that the resumes begin after."""

Told = tuple[str, str, str]
"""before or after, the operation, the path below the run folder."""


@dataclass
class Outcome:
    """One trial: what was done, and what the run that went on after it lacks."""

    kind: str
    what: str
    kills: int = 0
    resumed: list[int] = field(default_factory=list)
    """The step after which each resume went on; 0 is a fresh start."""
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Ground:
    """Where the trials are made: the run, its undisturbed folder, and one that was killed half way."""

    folder: Path
    job: Job
    whole: Path
    half: Path
    seconds: float
    """Of the undisturbed run, from the fork to its end."""
    lane: int = 0
    """Of several processes that make trials at the same time, which one."""

    @property
    def own(self) -> Path:
        """The folder of this lane."""
        folder = self.folder / f"lane-{self.lane}"
        folder.mkdir(exist_ok=True)
        return folder

    def place(self, name: str, start: Path | None = None) -> Path:
        """Where a trial's run goes: nothing yet, or a copy of `start`."""
        out = self.own / name / "run"
        shutil.rmtree(out.parent, ignore_errors=True)
        out.parent.mkdir()
        if start is not None:
            shutil.copytree(start, out)
        return out

    def log(self, out: Path) -> Path:
        """What a trial's processes print."""
        return out.parent / "printed.txt"


class Seam:
    """Numbers the operations of a run on the disk, and does something at one of them, or from it on."""

    def __init__(self, act: Callable[[str, Path], None] | None = None, at: int = -1):
        self.act, self.at = act, at
        self.seen: list[Told] = []
        self.marks: list[int] = []
        """How many there were when the run was handed out: before its first step, after each, at the end."""

    def __call__(self, when: str, operation: str, path: Path) -> None:
        if any(name in path.name for name in UNCOUNTED):
            return
        self.seen.append((when, operation, path.name))
        if self.act is not None and len(self.seen) - 1 == self.at:
            self.act(operation, path)


def die(operation: str, path: Path) -> None:
    """As a kill from outside would."""
    os.kill(os.getpid(), signal.SIGKILL)


def watched(job: Job, out: Path, seam: Seam) -> None:
    """The run, with every operation on the disk told to `seam`."""
    from operant.storage import atomic_io

    atomic_io.seam = seam
    for _ in playing(job, out):
        seam.marks.append(len(seam.seen))


def recorded(ground: Ground, start: Path | None) -> Seam:
    """The operations of a run that nobody disturbs."""
    out = ground.place("recorded", start)

    def work() -> None:
        seam = Seam()
        watched(ground.job, out, seam)
        (out.parent / "seen.json").write_text(json.dumps([seam.seen, seam.marks]), encoding="utf-8")

    _must(wait(fork(work, ground.log(out))), ground.log(out))
    seam = Seam()
    seam.seen, seam.marks = json.loads((out.parent / "seen.json").read_text(encoding="utf-8"))
    return seam


def operations(ground: Ground) -> list[tuple[str, Path | None, int, Told]]:
    """Every operation of the start, of a resume, of the step after it with its checkpoint, and of the end."""
    fresh, again = recorded(ground, None), recorded(ground, ground.half)
    parts = [
        ("an operation of the start", None, fresh, 0, fresh.marks[0]),
        ("an operation of a resume", ground.half, again, 0, again.marks[0]),
        ("an operation of a step and its checkpoint", ground.half, again, again.marks[0], again.marks[1]),
        ("an operation of the end", ground.half, again, again.marks[-2], again.marks[-1]),
    ]
    return [
        (kind, start, number, seam.seen[number])
        for kind, start, seam, first, last in parts
        for number in range(first, last)
    ]


# --- making it -------------------------------------------------------------------------------------------------------


def make_ground(folder: Path) -> Ground:
    """Imports what a run imports, makes the model, plays the undisturbed run, and one that is killed half way."""
    given, log = folder / "given", folder / "printed.txt"
    folder.mkdir(parents=True, exist_ok=True)
    _must(wait(fork(partial(trials.prepare, given), log)), log)
    job = trials.job_of(given)
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
    """Of the step after HALF: its rollouts and metrics are written by then, and have to be cut back."""
    after = range(seam.marks[HALF], len(seam.seen))
    return next(
        i for i in after if seam.seen[i][2].startswith((".step-", ".light-")) and "parquet" not in seam.seen[i][2]
    )


def _one_thread() -> None:
    """Two threads at a fork are one too many, and more than one would decide over bits."""
    import torch

    torch.set_num_threads(1)


def _must(status: int, log: Path) -> None:
    if status:
        raise RuntimeError(f"the undisturbed run ended with {status}: {log.read_text(encoding='utf-8')[-2000:]}")


# --- going on ---------------------------------------------------------------------------------------------------------


def finish(ground: Ground, out: Path, outcome: Outcome, damaged: bool = False) -> Outcome:
    """Go on to the end, and compare. Unless it was `damaged`, a checkpoint that has its name must be whole."""
    begun, named = run_in(out), _newest_named(out)
    status = wait(fork(partial(play, ground.job, out), ground.log(out)))
    if begun is None:
        outcome.resumed.append(0)
    outcome.resumed += trials.resumed_from(out)
    if status:
        said = ground.log(out).read_text(encoding="utf-8").strip().splitlines()[-1:]
        outcome.wrong.append(f"going on ended with {status}: {''.join(said)}")
    else:
        outcome.wrong += differences(ground.whole, run_in(out) or out)
        if outcome.resumed[-1] < named and not damaged:
            outcome.wrong.append(f"there was a checkpoint of step {named}, and it went on after {outcome.resumed[-1]}")
    return outcome


def _newest_named(out: Path) -> int:
    """The step of the newest checkpoint there is by its name; 0 where there is none."""
    made = ((run_in(out) or out) / "checkpoints").glob("step-*")
    return max((int(path.name[5:]) for path in made if path.name[5:].isdigit()), default=0)
