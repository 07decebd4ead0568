"""What every side of a benchmark speaks: JSON lines over its standard input and output. Standard library only.

    pipe = Pipe()                    # after the imports: what is resident now is what imports cost
    model = build(pipe.spec)
    command = pipe.next(trained=...)             # ready; sleeps until the first step is asked for
    while True:
        ...                                      # one step
        command = pipe.next(tokens=..., ...)     # answers, and sleeps until the next

A side computes only between a command and its answer, so sides that take turns never run at the same time.
"""

import ctypes
import json
import os
import random
import sys
import time


def queries(spec: dict, step: int) -> list[list[int]]:
    """The token ids of a step's prompts, the same on every side, all different. Ids 0 and the last are kept free."""
    draw = random.Random(1_000_003 * spec["seed"] + step)
    return [
        [draw.randrange(1, spec["shape"]["vocab_size"] - 1) for _ in range(spec["query"])]
        for _ in range(spec["queries"])
    ]


def rewards(spec: dict, step: int, count: int) -> list[float]:
    """Scores that cost nothing, the same on every side."""
    draw = random.Random(7_000_003 * spec["seed"] + step)
    return [draw.gauss(0.0, 1.0) for _ in range(count)]


class Steps:
    """Counts what an optimizer really did, whoever calls it."""

    def __init__(self, optimizer):
        self.count = 0
        optimizer = getattr(optimizer, "optimizer", optimizer)  # inside accelerate's
        optimizer.register_step_post_hook(self._stepped)

    def _stepped(self, *ignored) -> None:
        self.count += 1

    def take(self) -> int:
        taken, self.count = self.count, 0
        return taken


class Pipe:
    """The side's end of the line. Whatever a library prints goes to standard error."""

    def __init__(self):
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self.imported = memory("VmRSS")
        self._tell(imported_mb=self.imported)
        self.spec = self._read()
        self._ready = False

    def next(self, **told) -> dict:
        """Answer the last command with what was done; the next command. The process ends where there is none."""
        told["seconds"] = time.perf_counter() - self._started
        told["peak_mb"] = memory("VmHWM") - self.imported
        told["resident_mb"] = memory("VmRSS") - self.imported
        if not self._ready:  # what building left behind is nobody's peak
            self._ready = True
            forget_peak()
        self._tell(**told)
        return self._read()

    def _tell(self, **told) -> None:
        self._out.write(json.dumps(told) + "\n")
        self._out.flush()

    def _read(self) -> dict:
        line = sys.stdin.readline()
        if not line:
            self._out.close()
            os._exit(0)  # also from inside a trainer's own loop
        self._started = time.perf_counter()
        return json.loads(line)


def memory(kind: str) -> float:
    """MB of this process: `VmRSS` now, `VmHWM` at most. 0 where the system does not tell."""
    try:
        with open("/proc/self/status", encoding="utf-8") as status:
            return next(int(line.split()[1]) / 1024 for line in status if line.startswith(kind))
    except (OSError, StopIteration):
        return 0.0


def forget_peak() -> None:
    """Give freed memory back, and count the peak from here on."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
            file.write("5")
    except OSError:
        pass
