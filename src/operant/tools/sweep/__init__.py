"""Run a recipe many times, over a grid or a random sample of option values: one process per run, resumable.

    sweep({"kl.coef": "0,0.02,0.1,0.5,2", "seed": "1,2,3"}, "letters", SweepOptions(at_once=2))

`grid.py` lists the combinations, `state.py` reads which runs are done, and `processes.py` starts the others.
"""

import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from operant.bounds import bounded, check_bounds
from operant.tools.report.compare import write_comparison
from operant.tools.report.summary import brief
from operant.tools.sweep.processes import Exit, RunCommand, run_all
from operant.tools.sweep.state import make_plan, progress, remember, steps_done

_STATUS_SECONDS = 1.0


@dataclass(frozen=True)
class SweepOptions:
    """Which runs a sweep makes, where, and how many in parallel."""

    out: str | None = None
    """Folder of the sweep; by default runs/RECIPE-sweep."""
    at_once: int = bounded(1, at_least=1)
    """Number of runs in parallel; each gets an equal share of the cores."""
    random: int = bounded(0, at_least=0)
    """Draw this many combinations instead of running all; an option may then be a range, 1e-5..1e-3."""
    sweep_seed: int = 0
    """Random seed of the draws."""

    def __post_init__(self) -> None:
        check_bounds(self)


def sweep(run_options: Mapping[str, object], recipe: str | None = None, options: SweepOptions | None = None) -> int:
    """Make every run that is missing, then compare all runs; returns 1 if a run failed, else 0.

    The first and the last combination run first: in a grid they share no swept value. If both are refused before they
    begin, and with the same sentence, no other run is started.

    run_options: options of the runs as text, several values separated by commas.
    Raises: OperantError, before any run starts, for options that a run would refuse.
    """
    options = options or SweepOptions()
    plan = make_plan(run_options, recipe, options.random, options.sweep_seed)
    remember(folder := Path(options.out or f"runs/{Path(recipe).stem if recipe else 'run'}-sweep"), plan)
    states = {point.name: progress(folder / point.name) for point in plan.points}
    unfinished = [point for point in plan.points if states[point.name] != "done"]
    unfinished = [*unfinished[:1], *unfinished[1:][-1:], *unfinished[1:-1]]
    commands, light = [], plan.fixed.get("checkpoint") == "light"  # which holds no optimizer
    for point in unfinished:
        place = folder / point.name
        words = [f"--{name}={text}" for name, text in {**plan.fixed, **point.values}.items()]
        words = [*([plan.recipe] if plan.recipe else []), *words, "--out", str(place)]
        if states[point.name] == "begun":
            words = ["--resume", str(place), *(["--fresh-optimizer"] if light else [])]
        commands.append(RunCommand(point.name, place, words))
    printer = ProgressPrinter(len(plan.points), len(plan.points) - len(commands), {c.name for c in commands[:2]})
    count = Counter(states.values())
    kinds = {"done": "done", "begun": "to resume" + " with a new optimizer" * light, "missing": "to start"}
    listed = ", ".join(f"{count[kind]} {what}" for kind, what in kinds.items() if count[kind])
    parallel = f", {options.at_once} in parallel" if options.at_once > 1 else ""
    known = f"{parallel}: {listed}; Ctrl-C stops after the current step of each and saves" if commands else ", all done"
    print(f"{folder}: {count.total()} runs{known}", flush=True)
    ended, interrupted = run_all(commands, options.at_once, folder / "logs", printer.ended, printer.waiting)
    if any(folder.glob("*/config.yaml")):
        path = write_comparison([folder], say=lambda text: print(f"\n{text}\n"))
        print(f"comparison: {path}", flush=True)
    if interrupted:
        print(f"stopped with {printer.done} of {printer.total} runs done; the same command resumes the sweep")
        return 0
    failed = [name for name in ended if progress(folder / name) != "done"]
    if failed:
        names = "; ".join(failed[:5])
        print(f"{len(failed)} of {printer.total} runs failed: {names}; the same command tries them again")
    if left := len(commands) - len(ended):
        print(f"the first two were refused with the same sentence, so the other {left} were not started")
    return 1 if failed else 0


class ProgressPrinter:
    """Prints a line for each run that ends, and on a terminal a status line while runs are in progress."""

    def __init__(self, total: int, done: int, first: set[str]) -> None:
        self.total, self.done, self.first = total, done, first
        self._status_at, self._shown = 0.0, False
        self._refusals: list[str | None] = []
        """Why each of the first two runs was refused before it began, if it has ended; None: it was not."""

    def ended(self, command: RunCommand, end: Exit, interrupted: bool) -> bool:
        """Print how a run ended: its result, or its last step, or why it failed; returns whether others may start."""
        finished = end.code == 0 and progress(command.folder) == "done"
        self.done += finished
        if finished:
            text = f"{self.done}/{self.total} {command.name}: {brief(command.folder)}, {end.seconds:.0f} s"
        elif interrupted:
            text = f"{command.name}: stopped after step {steps_done(command.folder)}"
        else:
            reason = end.reason if end.code else f"it stopped after step {steps_done(command.folder)}"
            lines = "\n".join(f"    {line}" for line in end.last_lines or ["(no output)"])
            text = f"{command.name} failed: {reason}; its last lines:\n{lines}"
        print(f"\r\x1b[K{text}" if self._shown else text, flush=True)
        if command.name in self.first:
            self._refusals.append(None if (command.folder / "config.yaml").is_file() else end.sentence)
        return len(self._refusals) < 2 or self._refusals[0] is None or self._refusals[0] != self._refusals[1]

    def waiting(self, running: Sequence[RunCommand]) -> None:
        """Update the status line of a terminal, at most once a second."""
        now = time.monotonic()
        if not sys.stdout.isatty() or now - self._status_at < _STATUS_SECONDS:
            return
        self._status_at, self._shown = now, True
        each = ", ".join(f"{command.name} step {steps_done(command.folder)}" for command in running)
        width = shutil.get_terminal_size().columns + 3  # the codes that clear the line have no width of their own
        print(f"\r\x1b[K{self.done}/{self.total} done; {each}"[:width], end="", flush=True)
