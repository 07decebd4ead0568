"""Run each run of a sweep in a process of its own, so that one that is killed does not end the others.

    commands = [RunCommand("seed=1", Path("runs/x/seed=1"), ["letters", "--seed=1"]), ...]
    ended, interrupted = run_all(commands, at_once=2, logs=Path("runs/x/logs"), on_exit=..., on_wait=...)

The first Ctrl-C makes every run finish its step and save; the second kills them. Each process has a session of its own,
so Ctrl-C in the terminal reaches it only through `RunProcess.poll`: a second signal, directly from the terminal, would
end the run in the middle of its step.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from operant.storage import atomic_io
from operant.types import cores

REFUSED = 2
"""Exit code of `operant train` for an error that it has a sentence for."""
_POLL = 0.1
_LAST_LINES = 5


@dataclass(frozen=True)
class RunCommand:
    """A run to start: its name in the sweep, its folder and the words after `operant train`."""

    name: str
    folder: Path
    words: Sequence[str]


@dataclass(frozen=True)
class Exit:
    """How the process of a run ended."""

    code: int
    """Exit code; negative for the signal that killed the process."""
    seconds: float
    last_lines: list[str]
    """The end of its output, without empty lines."""

    @property
    def sentence(self) -> str | None:
        """Why `operant train` refused the run or ended it, if it said so."""
        return self.last_lines[-1] if self.code == REFUSED and self.last_lines else None

    @property
    def reason(self) -> str:
        """The exit code in words."""
        if self.code == -signal.SIGKILL:
            return "it was killed, possibly because memory ran out; a smaller --at-once may help"
        return f"signal {-self.code} ended it" if self.code < 0 else f"it ended with exit code {self.code}"


@dataclass
class RunProcess:
    """The process of a run, and the file that its output goes to."""

    command: RunCommand
    process: subprocess.Popen
    log: Path
    started: float
    interrupted: bool = False

    def poll(self, interrupts: int) -> Exit | None:
        """Pass Ctrl-C on; returns how the process ended, or None while it runs.

        interrupts: how often Ctrl-C was pressed. The process gets only one SIGINT, as a second would end it at once.
        """
        if interrupts > 1:
            self.process.kill()
            self.process.wait()
        elif interrupts and not self.interrupted:
            self.interrupted = True
            self.process.send_signal(signal.SIGINT)
        code = self.process.poll()
        if code is None:
            return None
        text = self.log.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        return Exit(code, time.monotonic() - self.started, lines[-_LAST_LINES:])


def run_all(
    commands: Sequence[RunCommand],
    at_once: int,
    logs: Path,
    on_exit: Callable[[RunCommand, Exit, bool], bool],
    on_wait: Callable[[Sequence[RunCommand]], None],
) -> tuple[list[str], bool]:
    """Run the commands, `at_once` in parallel; returns the names of those that ended, and whether Ctrl-C was pressed.

    on_exit: called with each run that ends, and with whether that was after Ctrl-C; returns whether others may start.
    on_wait: called several times a second with the runs in progress.
    """
    waiting, running, ended = deque(commands), list[RunProcess](), list[str]()
    if waiting:
        with atomic_io.explained(logs):
            logs.mkdir(exist_ok=True)
    with _counted_interrupts() as interrupts:
        try:
            while running or (waiting and not interrupts):
                while waiting and len(running) < at_once and not interrupts:
                    command = waiting.popleft()
                    log = logs / f"{command.name}.txt"
                    with atomic_io.explained(log), open(log, "w", encoding="utf-8") as output:
                        files = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
                        words = [sys.executable, "-m", "operant", "train", *command.words]
                        process = subprocess.Popen(words, **files, env=environment(at_once), start_new_session=True)
                    running.append(RunProcess(command, process, log, time.monotonic()))
                time.sleep(_POLL)
                for run in [*running]:
                    if (end := run.poll(len(interrupts))) is not None:
                        running.remove(run)
                        ended.append(run.command.name)
                        if not on_exit(run.command, end, bool(interrupts)):
                            waiting.clear()
                on_wait([run.command for run in running])
        finally:
            for run in running:
                run.process.kill()
    return ended, bool(interrupts)


def environment(at_once: int) -> dict[str, str]:
    """The environment of each process: an equal share of the cores, unless OMP_NUM_THREADS is already set."""
    return {"OMP_NUM_THREADS": str(max(1, cores() // at_once))} | os.environ | {"PYTHONIOENCODING": "utf-8"}


@contextmanager
def _counted_interrupts() -> Iterator[list[int]]:
    """Collect the SIGINT and SIGTERM signals that arrive during the block instead of acting on them."""
    interrupts: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    old = {number: signal.signal(number, lambda number, frame: interrupts.append(number)) for number in numbers}
    try:
        yield interrupts
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
