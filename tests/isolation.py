"""Processes that are held apart: the levels that this machine allows, and the search for what is left of them."""

import contextlib
import os
import sys
import time
from pathlib import Path

from operant.sandbox.process import Limits, SupervisedProcess


def strongest() -> str:
    process = SupervisedProcess([sys.executable, "-c", "pass"], Limits())
    while not process.level and process.ended is None:
        process.receive()
        time.sleep(0.005)
    process.end()
    return process.level


WEAK = "sub-reaper"
STRONG = strongest() if sys.platform == "linux" else WEAK

MARK = "OPERANT_REWARD_MARK"
"""The variable in the environment of every process that is searched for, which no child can remove."""


def memory_by_process(mark: str) -> dict[int, int]:
    """Resident memory in bytes of each process with the mark in its environment, which no child can remove."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if int(name) != os.getpid() and mark.encode() in Path(f"/proc/{name}/environ").read_bytes():
                pages = int(Path(f"/proc/{name}/statm").read_text(encoding="ascii").split()[1])
                found[int(name)] = pages * os.sysconf("SC_PAGE_SIZE")
    return found


def marked_processes(mark: str, patience: float = 0.0) -> list[int]:
    """Pids of the processes with the mark; waits up to `patience` seconds for there to be none."""
    end = time.monotonic() + patience
    while (found := memory_by_process(mark)) and time.monotonic() < end:
        time.sleep(0.02)
    return list(found)
