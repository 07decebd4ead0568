"""SIGINT and SIGTERM: the first one asks, the second one ends the process at once.

    with asked_to_end() as asked:
        while not asked: ...          # after the first signal, `asked` is true

The second one does not depend on Python. While a model loads, a checkpoint is written or a reward loops in C, Python's
own handlers wait for as long as that takes; so with the first signal the system's own handling is put back, which ends
a process without asking it. What that may leave, a temporary folder and a lock, the next start recognises.
"""

import ctypes
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Asked:
    """Whether the end was asked for: true after the first signal."""

    def __init__(self) -> None:
        self.by: int | None = None
        """The number of the signal."""
        self.told: Callable[[str], Any] = _nowhere
        """Takes a sentence about it; called between two lines of whatever runs."""

    def __bool__(self) -> bool:
        return self.by is not None


@contextmanager
def asked_to_end() -> Iterator[Asked]:
    """Take the two signals while this lasts; in a thread beside the main one, nothing is taken.

    In an interactive session the second one is a KeyboardInterrupt: the session is not the run's to end.
    """
    asked = Asked()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    relayed = "RANK" in os.environ
    """By torchrun, which hands a Ctrl-C that its processes have heard themselves on as SIGTERM: one of each asks."""

    def first(number: int, frame: Any) -> None:
        again = asked.by is not None
        if again and not relayed:
            raise KeyboardInterrupt
        if not interactive():
            for each in (number,) if relayed else NUMBERS:
                signal.signal(each, signal.SIG_DFL)
        if again:
            return
        asked.by = number
        text = f"signal {signal.Signals(number).name}: the run ends after this step; a second one ends it at once"
        with suppress(OSError):  # print would fail where the signal met a print
            os.write(2, f"\n{text}\n".encode())
        asked.told(text)

    old = {number: signal.signal(number, first) for number in NUMBERS}
    if not interactive():
        for number in NUMBERS:
            _once(number)
    try:
        yield asked
    finally:
        with suppress(ValueError):  # in another thread, where a generator that nobody drained is thrown away
            for number, handler in old.items():
                signal.signal(number, handler)


def interactive() -> bool:
    """Whether a person types at this Python: a notebook, a prompt."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _once(number: int) -> None:
    """Have the kernel forget Python's handler as it calls it, so that not even the first signal need be looked at.

    Of glibc: its `sysv_signal` is the old kind that holds for one signal. Elsewhere the handler itself has to run.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    library = ctypes.CDLL(None)
    for name in ("signal", "sysv_signal"):
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    handler = library.signal(number, None)  # what stood there: the C side of Python's handling
    library.sysv_signal(number, handler)


def _nowhere(text: str) -> None:
    pass
