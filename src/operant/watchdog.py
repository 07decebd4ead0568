"""Logs the phase that a slow run is in, and ends a run that hangs.

    with Watchdog(clock, say=folder.log_message, log=folder.log_path, silence=3600) as dog:
        dog.item = "step 12"
        with clock.timing("reward"): ...

A phase that takes a minute, and three times as long as usual, is logged with its item and duration, and again whenever
the duration has doubled. A run is silent while no phase begins or ends and `beat` is not called: decoding calls it for
every token, an update for every micro-batch. After `silence` seconds without a sign of progress, the stacks of all
threads are written to the log and the process ends with exit code 1. The run can then be resumed: its checkpoints are
complete, and its lock is recognised as that of a dead process. Ending the process needs no Python code to run, so it
also works if a reward loops inside C code.
"""

import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from operant import machine
from operant.machine import Clock

SLOW = 60.0
"""Seconds after which a phase is logged."""
CHECKS = 20
"""How often progress is checked within `silence` seconds."""


class Watchdog:
    """Checks the phases of a clock in a thread of its own.

    silence: seconds without progress that end the process; 0: never. slow: seconds after which a phase is logged.
    usual: seconds of each phase. log: the file for stacks; None: standard error.
    """

    def __init__(
        self,
        clock: Clock,
        say: Callable[[str], object],
        log: Path | None,
        silence: float = 0.0,
        slow: float = SLOW,
        usual: Mapping[str, float] | None = None,
    ):
        self.clock, self.say, self.log, self.silence, self.slow = clock, say, log, silence, slow
        self.usual = usual or {}
        self.item = "the start"
        """The item that the phases belong to, for the log."""
        self._phase: tuple[str, float] | None = None
        """Name and beginning of the phase that was checked last."""
        self._next_report = slow
        """Duration at which that phase is logged next, in seconds."""
        self._over = threading.Event()
        self._file: TextIO | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Watchdog":
        if self.silence and self.log is not None:
            with suppress(OSError):  # else the stacks go to standard error
                self._file = open(self.log, "a", encoding="utf-8")
        if self.silence:
            self._arm()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self.silence:
            faulthandler.cancel_dump_traceback_later()
        if self._file is not None:
            self._file.close()

    def _arm(self) -> None:
        faulthandler.dump_traceback_later(self.silence, exit=True, file=self._file or sys.stderr)

    def _watch(self) -> None:
        every, last = min([self.slow / 4] + [self.silence / CHECKS] * bool(self.silence)), None
        while not self._over.wait(every):
            progress = machine.beats, self.item, tuple(self.clock.under_way), sum(list(self.clock.seconds.values()))
            if progress != last and self.silence:
                self._arm()
            last = progress
            if under_way := list(self.clock.under_way):
                name, begun = phase = under_way[-1]
                if phase != self._phase:
                    self._phase, self._next_report = phase, max(self.slow, 3 * self.usual.get(name, 0.0))
                duration = time.perf_counter() - begun
                if duration >= self._next_report:
                    self.say(f"{self.item}: {name} for {duration:.0f} s")
                    self._next_report = 2 * duration
