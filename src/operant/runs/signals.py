"""SIGINT and SIGTERM: the first signal requests a stop, the second one ends the process immediately.

    with stop_on_signal() as stop:
        while not stop: ...          # `stop` is true after the first signal

The second signal does not depend on Python. While a model loads, a checkpoint is written or a reward loops in C, a
Python handler has to wait. So the first signal restores the system's default action, which ends the process. A
temporary folder and a lock may then be left behind; the next start recognises them.
"""

import ctypes
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from operant.machine import stop_asked

NUMBERS = (signal.SIGINT, signal.SIGTERM)
PAIR = 5.0
"""Seconds in which signals to a rank are one request."""


class StopRequest:
    """True after the first signal."""

    def __init__(self) -> None:
        self.by: int | None = None
        """The number of the signal."""
        self.on_request: Callable[[str], Any] = lambda text: None
        """Called by the signal handler, with a sentence about the signal."""

    def __bool__(self) -> bool:
        return self.by is not None


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, as Ctrl-C does, so that a command can say what it has finished."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Handle the two signals. In a thread other than the main one, no signal is handled.

    In an interactive session the second signal raises KeyboardInterrupt, because the session must not end with the run.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    relayed, begun = "RANK" in os.environ, 0.0
    """torchrun forwards a signal to processes that may have received it too: both are one request."""

    def first(number: int, frame: object) -> None:
        nonlocal begun
        if stop.by is not None:
            if not relayed:
                raise KeyboardInterrupt
            if time.monotonic() > begun + PAIR:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if not interactive() and not relayed:
            for each in NUMBERS:
                signal.signal(each, signal.SIG_DFL)
        stop.by, begun = number, time.monotonic()
        stop_asked.set()
        later = f" more than {PAIR:g} seconds later" if relayed else ""
        name = signal.Signals(number).name
        text = f"signal {name}: the run ends after this step; a second one{later} ends it immediately"
        with suppress(OSError):  # print would fail if the signal interrupted a print
            os.write(2, f"\n{text}\n".encode())
        stop.on_request(text)

    old = {number: signal.signal(number, first) for number in NUMBERS}
    # With glibc, the kernel removes Python's handler on the first signal, so that the second one works before Python
    # reacts: `sysv_signal` installs a handler for one signal. Elsewhere Python's handler has to run first.
    if not interactive() and not relayed and platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        for function in (library.signal, library.sysv_signal):
            function.argtypes, function.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        for number in NUMBERS:  # `signal` returns the previous handler: the C function of Python's handling
            library.sysv_signal(number, library.signal(number, None))
    try:
        yield stop
    finally:
        stop_asked.clear()
        with suppress(ValueError):  # raised in another thread, when an unfinished generator is collected there
            for number, handler in old.items():
                signal.signal(number, handler)


def interactive() -> bool:
    """Whether this Python is interactive: a notebook or a prompt."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)
