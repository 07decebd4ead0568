"""The machine of a run: versions, memory, threads, and the duration of its phases."""

import ctypes
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch

from operant.types import cores

beats = 0
"""How often `beat` was called: what the watchdog looks at."""


stop_asked = threading.Event()
"""Set once a run shall end after its step: what waits for people, not for a computer, need not go on."""


def beat() -> None:
    """Record progress, which resets the silence timer of the watchdog."""
    global beats
    beats += 1


class Clock:
    """Measures the seconds of each phase of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.under_way: list[tuple[str, float]] = []
        """Name and beginning of the phases that are running; an inner phase comes after its outer one."""

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Add the duration of the block to the phase."""
        start = time.perf_counter()
        self.under_way.append((phase, start))
        try:
            yield
        finally:
            self.under_way.pop()
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """The seconds by phase as metrics `time/...`; resets the clock."""
        taken, self.seconds = self.seconds, {}
        return {f"time/{name}": seconds for name, seconds in taken.items()}


def about() -> dict[str, object]:
    """Everything besides its state on which bit-identical results of a run depend."""
    import transformers

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "machine": f"{platform.system()} {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def memory() -> dict[str, float]:
    """Metrics of memory: of the process, and the peak of tensors on the GPU since the last call."""
    metrics = {"memory/resident_gb": psutil.Process().memory_info().rss / 1e9}
    if torch.cuda.is_available():
        metrics["memory/gpu_gb"] = torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.reset_peak_memory_stats()
    return metrics


def size_gb() -> float:
    """Memory of the machine, in GB."""
    return psutil.virtual_memory().total / 1e9


def command() -> str:
    return " ".join([os.path.basename(sys.argv[0] or "python"), *sys.argv[1:]])


WORTH = 3e8
"""Multiplications of a matrix product above which a second thread saves more time than it costs."""


def worth(tokens: int, largest: int) -> int:
    """Number of threads for products of `tokens` rows with a matrix of `largest` numbers: one, or all of torch's.

    The rule depends on sizes alone, so that equal runs are bit-identical. Threads wait for each other by spinning: on
    small products they gain little on an idle machine and lose a lot on a busy one (docs/fast.md).
    """
    return torch.get_num_threads() if tokens * largest >= WORTH else 1


def largest(model: Any) -> int:
    """Size of the largest matrix that is multiplied with. An embedding counts only if it is the output head too."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    tables = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)} - {getattr(head, "weight", None)}
    return max((p.numel() for p in model.parameters() if p.ndim > 1 and p not in tables), default=0)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Inside the block, torch computes with `count` threads on the CPU."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def others() -> int:
    """Number of other processes of the machine that compute right now; 0 if the system does not report it.

    The median of eight samples, taken within 0.1 s.
    """
    counts = []
    try:
        for _ in range(8):
            time.sleep(0.1 / 8)
            with open("/proc/stat", encoding="ascii") as file:
                running = next(line for line in file if line.startswith("procs_running"))
            counts.append(int(running.split()[1]) - 1)  # without this process
    except (OSError, ValueError, StopIteration):
        return 0
    return sorted(counts)[len(counts) // 2]


def crowded() -> str | None:
    """A warning if torch's threads would have to wait for other processes; None if there are enough cores."""
    here, count = torch.get_num_threads(), others()
    if here == 1 or here + count <= cores():
        return None
    other = "another process computes" if count == 1 else f"{count} other processes compute"
    return f"{other} on these {cores()} cores, and torch has {here} threads, which then wait for each other"


def keep_memory() -> bool:
    """Let the C library keep freed memory for the next allocation; returns whether that was possible.

    Memory that is returned to the system, such as half a gigabyte of gradients in every step, is cleared page by page
    when it is allocated again: a few per cent of an update of GPT-2 124M, and up to 40 % on a virtual machine whose
    host takes pages back. Works with glibc only; GPUs have an allocator of their own.
    """
    trim_threshold, top_pad, mmap_max = -1, -2, -4  # of glibc's malloc.h
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    settings = ((mmap_max, 0), (trim_threshold, 2**31 - 1), (top_pad, 64 << 20))
    return all([library.mallopt(option, value) == 1 for option, value in settings])
