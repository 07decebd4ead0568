"""What a run runs on: versions, machine, memory, and how long its phases take."""

import ctypes
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Clock:
    """Seconds of the phases of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.under_way: list[tuple[str, float]] = []
        """Phases that have begun and not ended, by name and beginning; of those inside others, the last."""

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Add what passes while this lasts to the phase."""
        start = time.perf_counter()
        self.under_way.append((phase, start))
        try:
            yield
        finally:
            self.under_way.pop()
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """The metrics `time/...`; the clock begins anew."""
        taken, self.seconds = self.seconds, {}
        return {f"time/{name}": seconds for name, seconds in taken.items()}


def about() -> dict[str, Any]:
    """What decides the bits of a run besides its state."""
    import transformers

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "machine": f"{platform.system()} {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def resident_gb() -> float | None:
    """Memory that this process holds now, in GB; None where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9
    except (OSError, ValueError):
        return None


def memory() -> dict[str, float]:
    """Metrics of memory: of the process, and the most that tensors held on the GPU since the last call."""
    told = {}
    held = resident_gb()
    if held is not None:
        told["memory/resident_gb"] = held
    if torch.cuda.is_available():
        told["memory/gpu_gb"] = torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.reset_peak_memory_stats()
    return told


def size_gb() -> float | None:
    """Memory of the machine, in GB."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    except (OSError, ValueError):
        return None


def command() -> str:
    """How this process was called."""
    return " ".join([os.path.basename(sys.argv[0] or "python"), *sys.argv[1:]])


WORTH = 3e8
"""Multiplications of a matrix product from which a second thread gains more than waiting for it costs."""


def worth(tokens: int, largest: int) -> int:
    """Threads for products of `tokens` rows with a matrix of `largest` numbers: one, or all that torch has.

    A rule on sizes alone, so that equal runs have equal bits. Threads wait for each other by spinning: on small
    products they gain little on an idle machine and lose a lot on a busy one (docs/fast.md).
    """
    return torch.get_num_threads() if tokens * largest >= WORTH else 1


def largest(model: Any) -> int:
    """Numbers of the largest matrix that is multiplied with: an embedding is not, but where it is the output head."""
    head = model.get_output_embeddings()
    tables = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)} - {getattr(head, "weight", None)}
    return max((p.numel() for p in model.parameters() if p.ndim > 1 and p not in tables), default=0)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """While this lasts, torch computes with so many threads on the processor."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def others(looks: int = 8) -> int:
    """How many other processes compute right now, of the whole machine; 0 where the system does not tell.

    The calling thread sleeps between the looks, 0.1 s in all, and counts itself while it looks.
    """
    seen = []
    try:
        for _ in range(looks):
            time.sleep(0.1 / looks)
            with open("/proc/stat", encoding="ascii") as file:
                running = next(line for line in file if line.startswith("procs_running"))
            seen.append(int(running.split()[1]) - 1)
    except (OSError, ValueError, StopIteration):
        return 0
    return sorted(seen)[looks // 2]


def crowded() -> str | None:
    """What is wrong where several threads of torch would wait for others' processes; None where there is room."""
    here, count = torch.get_num_threads(), others()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if here == 1 or here + count <= cores:
        return None
    other = "another process computes" if count == 1 else f"{count} other processes compute"
    return f"{other} on these {cores} cores, and torch has {here} threads, which then wait for each other"


def keep_memory() -> bool:
    """Have the C library keep what is freed for the next allocation; returns whether it could be asked.

    Half a gigabyte of gradients that is given back every step is cleared by the system every step, page by page: a few
    per cent of an update of GPT-2 124M, and up to 40 % on a virtual machine whose host takes pages back. Of glibc only;
    GPUs have an allocator of their own.
    """
    trim_threshold, top_pad, mmap_max = -1, -2, -4  # of glibc's malloc.h
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    asked = ((mmap_max, 0), (trim_threshold, 2**31 - 1), (top_pad, 64 << 20))
    return all([library.mallopt(option, value) == 1 for option, value in asked])
