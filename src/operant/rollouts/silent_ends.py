"""Calls of a world or a reward that would end the run's process without a word, made heard."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from operant.types import OperantError

ENDS = ("_exit", "abort", "kill", "killpg", "execv", "execve")
"""Of `os`; its other functions `exec...` call the last two."""


@contextmanager
def heard(called: str, remedy: str) -> Iterator[None]:
    """Inside this context, a call that would end this process without a word raises OperantError with the remedy.

    called: whose calls they are, such as "world 'Guess'". Other threads, and processes that it has forked, may still
    end so.
    """
    usual = {name: getattr(os, name) for name in ENDS}
    owner = os.getpid(), threading.get_ident()

    def instead(name: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            here = owner == (os.getpid(), threading.get_ident())
            if not here or (name.startswith("kill") and not _ends(*given)):
                return usual[name](*given, **named)
            caller = sys._getframe(1)
            while caller.f_globals is vars(os) and caller.f_back:  # os.execl calls os.execv
                caller = caller.f_back
            file, values = Path(caller.f_code.co_filename).name, ", ".join(map(str, given))
            raise OperantError(
                f"{called} called os.{name}({values}) ({file}, line {caller.f_lineno}), which ends the process and "
                f"the run with it; {remedy}"
            )

        return call

    for name in usual:
        setattr(os, name, instead(name))
    try:
        yield
    finally:
        for name, function in usual.items():
            setattr(os, name, function)


def _ends(target: int = 1, number: int = 0) -> bool:
    """Whether a signal to this process, or to its group, kills it; one that is handled says a sentence of its own."""
    own = target in (os.getpid(), os.getpgrp(), 0)
    deadly = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT, signal.SIGSEGV, signal.SIGKILL)
    return own and number in deadly and signal.getsignal(number) == signal.SIG_DFL
