"""The protocol of every side: JSON lines over standard input and output. Uses only the standard library.

    pipe = Pipe()                    # after the imports: measures the memory that they take
    model = build(pipe.spec)
    command = pipe.next(trained=...)             # ready; waits for the first step
    while True:
        ...                                      # one step
        command = pipe.next(tokens=..., ...)     # answers, then waits for the next step

A side computes only between a command and its answer, so sides that take turns never run at the same time.
"""

import ctypes
import json
import os
import random
import sys
import time


def queries(spec: dict, step: int) -> list[list[int]]:
    """Token ids of a step's prompts, the same on every side, all different, without id 0 and the last id."""
    draw = random.Random(1_000_003 * spec["seed"] + step)
    return [
        [draw.randrange(1, spec["shape"]["vocab_size"] - 1) for _ in range(spec["query"])]
        for _ in range(spec["queries"])
    ]


def rewards(spec: dict, step: int, count: int) -> list[float]:
    """Random scores, the same on every side."""
    draw = random.Random(7_000_003 * spec["seed"] + step)
    return [draw.gauss(0.0, 1.0) for _ in range(count)]


class Steps:
    """Counts the steps of an optimizer with a hook, independently of its caller."""

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
    """The side's end of the connection. The output of libraries is redirected to standard error."""

    def __init__(self):
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self.imported = memory("VmRSS")
        self._write(imported_mb=self.imported)
        self.spec = self._read()
        self._ready = False

    def next(self, **answer) -> dict:
        """Answer the last command and return the next one. Ends the process when there is none."""
        answer["seconds"] = time.perf_counter() - self._started
        answer["peak_mb"] = memory("VmHWM") - self.imported
        answer["resident_mb"] = memory("VmRSS") - self.imported
        if not self._ready:  # the memory of building does not count as a peak of the steps
            self._ready = True
            reset_peak()
        self._write(**answer)
        return self._read()

    def _write(self, **answer) -> None:
        self._out.write(json.dumps(answer) + "\n")
        self._out.flush()

    def _read(self) -> dict:
        line = sys.stdin.readline()
        if not line:
            self._out.close()
            os._exit(0)  # works also inside a trainer's loop
        self._started = time.perf_counter()
        return json.loads(line)


def memory(kind: str) -> float:
    """MB of this process: `VmRSS` now, `VmHWM` at most. 0 if the system does not report it."""
    try:
        with open("/proc/self/status", encoding="utf-8") as status:
            return next(int(line.split()[1]) / 1024 for line in status if line.startswith(kind))
    except (OSError, StopIteration):
        return 0.0


def reset_peak() -> None:
    """Return freed memory to the system and reset the peak."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
            file.write("5")
    except OSError:
        pass
