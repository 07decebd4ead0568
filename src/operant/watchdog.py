"""Says what a slow run is at, and ends one that hangs.

    with Watchdog(clock, say=folder.say, log=folder.log_path, silence=3600) as dog:
        dog.item = "step 12"
        with clock.timing("reward"): ...

A phase that takes a minute, and three times what it usually does, is told in the log, with item and age, and again each
time its age has doubled. A run is
silent while no phase begins or ends and nobody calls `beat`: decoding does for every token, an update for every
micro-batch. After `silence` seconds of it the stacks of all threads go to the log and the process ends with exit code
1: its checkpoints are whole, its lock is recognised as a dead one's, `--resume` goes on. That part needs no Python: it
works where a reward loops in C and lets nothing else run.
"""

import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from operant.machine import Clock

SLOW = 60.0
"""Seconds after which a phase is told."""
LOOKS = 20
"""How often a silence is looked at before it is over."""

_beats = 0


def beat() -> None:
    """Something has come a little further."""
    global _beats
    _beats += 1


class Watchdog:
    """Looks at a clock from a thread of its own. `silence`: seconds; 0: it only tells. `usual`: seconds by phase.

    `log`: where stacks go; None: to standard error.
    """

    def __init__(
        self,
        clock: Clock,
        say: Callable[[str], Any],
        log: Path | None,
        silence: float = 0.0,
        slow: float = SLOW,
        usual: Mapping[str, float] | None = None,
    ):
        self.clock, self.say, self.log, self.silence, self.slow = clock, say, log, silence, slow
        self.usual = usual or {}
        self.item = "the start"
        """What the phases belong to."""
        self._told: tuple[tuple[str, float] | None, float] = None, slow
        self._over = threading.Event()
        self._file: TextIO | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Watchdog":
        if self.silence and self.log is not None:
            with suppress(OSError):  # else the stacks go to standard error
                self._file = open(self.log, "a", encoding="utf-8")
        if self.silence:
            self._arm()
        self._thread = threading.Thread(target=self._look, name="watchdog", daemon=True)
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

    def _look(self) -> None:
        every = min([self.slow / 4] + [self.silence / LOOKS] * bool(self.silence))
        seen: Any = None
        while not self._over.wait(every):
            sign = _beats, self.item, tuple(self.clock.under_way), sum(list(self.clock.seconds.values()))
            if sign != seen and self.silence:
                self._arm()
            seen = sign
            self._tell()

    def _tell(self) -> None:
        """The phase that is under way, where it is slow."""
        under_way = list(self.clock.under_way)
        phase = under_way[-1] if under_way else None
        told, due = self._told
        if phase != told:
            told, due = phase, max(self.slow, 3 * self.usual.get(phase[0] if phase else "", 0.0))
        if phase is not None and (age := time.perf_counter() - phase[1]) >= due:
            self.say(f"{self.item}: {phase[0]} for {age:.0f} s")
            due = 2 * age
        self._told = told, due
