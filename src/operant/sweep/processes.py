"""Runs as processes of their own: what kills one of them does not end the others.

    jobs = [Job("seed=1", Path("runs/x/seed=1"), ["letters", "--seed=1"]), ...]
    ended = run_all(jobs, at_once=2, logs=Path("runs/x/logs"), watcher=...)    # {"seed=1": Ended(0, "...")}

The first Ctrl-C lets every run end its step and save, the second kills. Children stand in sessions of their own, so the
terminal's Ctrl-C reaches them through here alone: two of them would end a run in the middle of its step.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from operant.storage import atomic_io

_POLL = 0.1
_LAST_LINES = 5


@dataclass(frozen=True)
class Job:
    """One run to make: its name, its folder and the words after `operant train`."""

    name: str
    folder: Path
    words: Sequence[str]


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (negative: the signal that killed it) and its last lines."""

    code: int
    said: str

    @property
    def why(self) -> str:
        """In words."""
        if self.code == -signal.SIGKILL:
            return "it was killed, as a system does that is out of memory; fewer at once may help"
        return f"signal {-self.code} ended it" if self.code < 0 else f"it ended with exit code {self.code}"


class Watcher(Protocol):
    """Who is told what happens."""

    def begun(self, job: Job) -> None: ...

    def ended(self, job: Job, how: Ended, stopping: bool) -> None: ...

    def waiting(self, running: Sequence[Job]) -> None:
        """Some times a second."""
        ...


@dataclass
class Child:
    """A run that goes on."""

    job: Job
    process: subprocess.Popen
    log: Path
    told: bool = field(default=False)

    def ask_to_stop(self) -> None:
        """Let it end its step and save; asking again would end it at once."""
        if not self.told:
            self.told = True
            self.process.send_signal(signal.SIGINT)

    def last_lines(self) -> str:
        """What it said at the end."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join([line for line in text.splitlines() if line.strip()][-_LAST_LINES:])


def run_all(jobs: Sequence[Job], at_once: int, logs: Path, watcher: Watcher) -> tuple[dict[str, Ended], bool]:
    """Run them, `at_once` at a time. Returns how each that was begun has ended, and whether Ctrl-C was pressed."""
    waiting, running, ended = deque(jobs), list[Child](), dict[str, Ended]()
    with atomic_io.explained(logs):
        logs.mkdir(exist_ok=True)
    with _interrupts() as asked:
        try:
            while running or (waiting and not asked):
                while waiting and len(running) < at_once and not asked:
                    running.append(_start(waiting.popleft(), at_once, logs))
                    watcher.begun(running[-1].job)
                time.sleep(_POLL)
                running = [child for child in running if not _gone(child, asked, ended, watcher)]
                watcher.waiting([child.job for child in running])
        finally:
            for child in running:
                child.process.kill()
    return ended, bool(asked)


def _start(job: Job, at_once: int, logs: Path) -> Child:
    log = logs / f"{job.name}.txt"
    words = [sys.executable, "-m", "operant", "train", *job.words]
    with atomic_io.explained(log), open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(at_once),
            start_new_session=True,
        )
    return Child(job, process, log)


def environment(at_once: int) -> dict[str, str]:
    """Of each child: its share of the cores, unless the caller has said how many threads there shall be."""
    threads = max(1, _cores() // at_once)
    return {"OMP_NUM_THREADS": str(threads)} | os.environ | {"PYTHONIOENCODING": "utf-8"}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gone(child: Child, asked: Sequence[int], ended: dict[str, Ended], watcher: Watcher) -> bool:
    """Whether it has ended; until then it hears of each Ctrl-C."""
    if len(asked) > 1:
        child.process.kill()
        child.process.wait()
    elif asked:
        child.ask_to_stop()
    code = child.process.poll()
    if code is None:
        return False
    ended[child.job.name] = how = Ended(code, child.last_lines())
    watcher.ended(child.job, how, bool(asked))
    return True


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """The signals that came, SIGINT and SIGTERM, while the block runs."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    old = {number: signal.signal(number, lambda number, frame: asked.append(number)) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
