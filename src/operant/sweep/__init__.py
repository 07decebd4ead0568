"""Many runs of one recipe: a grid or a random search, a process a run, resumable.

    sweep({"kl.coef": "0,0.02,0.1,0.5,2", "seed": "1,2,3"}, "letters", SweepOptions(at_once=2))

`points.py` says which runs there are, `keeping.py` what is done of them, `children.py` runs the rest.
"""

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from operant.report.compare import comparison, write_comparison
from operant.report.outcomes import brief, table
from operant.sweep.processes import Ended, Job, run_all
from operant.sweep.state import Plan, make_plan, progress, remember, steps_done
from operant.types import OperantError

_STATUS_SECONDS = 1.0


@dataclass(frozen=True)
class SweepOptions:
    """Which runs are made, where, and how many at once."""

    out: str | None = None
    """Folder of the sweep; runs/RECIPE-sweep unless given."""
    at_once: int = 1
    """Runs at a time; each gets its share of the cores."""
    random: int = 0
    """Draw so many combinations instead of making all; then an axis may be a range, 1e-5..1e-3."""
    sweep_seed: int = 0
    """Of the draws."""

    def __post_init__(self) -> None:
        for name, least in {"at_once": 1, "random": 0}.items():
            if getattr(self, name) < least:
                raise OperantError(f"{name}={getattr(self, name)}: it must be at least {least}")


def sweep(given: Mapping[str, Any], recipe: str | None = None, options: SweepOptions | None = None) -> int:
    """Make every run that is missing and the comparison of all; returns 1 where one failed.

    given: options as they were typed, several values separated by commas.
    Raises: OperantError before anything starts, for options that no run would accept.
    """
    options = options or SweepOptions()
    plan = make_plan(given, recipe, options.random, options.sweep_seed)
    folder = Path(options.out or f"runs/{Path(recipe).stem if recipe else 'run'}-sweep")
    remember(folder, plan)
    states = {point.name: progress(folder / point.name) for point in plan.points}
    jobs = [_job(folder, plan, i, states) for i, point in enumerate(plan.points) if states[point.name] != "done"]
    told = Telling(len(plan.points), len(plan.points) - len(jobs))
    print(_head(folder, plan, Counter(states.values()), options.at_once), flush=True)
    ended, stopped = run_all(jobs, options.at_once, folder / "logs", told) if jobs else ({}, False)
    _compare(folder)
    if stopped:
        print(f"stopped with {told.done} of {told.total} runs done; go on with the same command")
        return 0
    failed = [name for name in ended if progress(folder / name) != "done"]
    if failed:
        print(f"{len(failed)} of {told.total} runs failed: {'; '.join(failed[:5])}; the same command tries them again")
    return 1 if failed else 0


def _job(folder: Path, plan: Plan, number: int, states: Mapping[str, str]) -> Job:
    point = plan.points[number]
    place = folder / point.name
    if states[point.name] == "begun":
        return Job(point.name, place, ["--resume", str(place)])
    words = [f"--{name}={text}" for name, text in {**plan.fixed, **point.values}.items()]
    return Job(point.name, place, [*([plan.recipe] if plan.recipe else []), *words, "--out", str(place)])


def _head(folder: Path, plan: Plan, states: Counter[str], at_once: int) -> str:
    said = [f"{states['done']} done", f"{states['begun']} to go on with", f"{states['missing']} to begin"]
    known = ", ".join(text for text in said if not text.startswith("0 "))
    if states["done"] == len(plan.points):
        return f"{folder}: {len(plan.points)} runs, all done"
    together = f", {at_once} at a time" if at_once > 1 else ""
    return f"{folder}: {len(plan.points)} runs{together}: {known}; Ctrl-C ends after the step and saves"


def _compare(folder: Path) -> None:
    """The table and the page, of whatever there is by now."""
    if not any(folder.glob("*/config.yaml")):
        return
    print(f"\n{table(comparison([folder]))}\n")
    print(f"comparison: {write_comparison([folder])}", flush=True)


class Telling:
    """Says what happens: a line a run, and at a terminal one that moves while runs go on."""

    def __init__(self, total: int, done: int, output: TextIO | None = None) -> None:
        self.total, self.done = total, done
        self._output: TextIO = output or sys.stdout
        self._started: dict[str, float] = {}
        self._status_at, self._shown = 0.0, False

    def begun(self, job: Job) -> None:
        """Note the time; a terminal shows the run anyway."""
        self._started[job.name] = time.monotonic()

    def ended(self, job: Job, how: Ended, stopping: bool) -> None:
        """The line of one run."""
        finished = how.code == 0 and progress(job.folder) == "done"
        self.done += finished
        seconds = time.monotonic() - self._started[job.name]
        if finished:
            self._print(f"{self.done}/{self.total} {job.name}: {brief(job.folder)}, {seconds:.0f} s")
        elif stopping:
            self._print(f"{job.name}: stopped after step {steps_done(job.folder)}")
        else:
            why = how.why if how.code else f"it stopped after step {steps_done(job.folder)}"
            self._print(f"{job.name} failed: {why}; its last lines:\n" + _indented(how.said))

    def waiting(self, running: Sequence[Job]) -> None:
        """The moving line."""
        now = time.monotonic()
        if not self._output.isatty() or now - self._status_at < _STATUS_SECONDS:
            return
        self._status_at, self._shown = now, True
        each = ", ".join(f"{job.name} step {steps_done(job.folder)}" for job in running)
        self._output.write(f"\r\x1b[K{self.done}/{self.total} done; {each}"[: _width()])
        self._output.flush()

    def _print(self, text: str) -> None:
        if self._shown:
            self._output.write("\r\x1b[K")
        print(text, file=self._output, flush=True)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in (text or "(it said nothing)").splitlines())


def _width() -> int:
    import shutil

    return shutil.get_terminal_size().columns + 3  # the two signs that clear the line take no room
