"""Calls of a world that would end the run's process without a word, made heard."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from operant.types import OperantError


@contextmanager
def heard(world: str) -> Iterator[None]:
    """Inside this context, a call that would end this process without a word raises OperantError with the remedy.

    Other threads, and processes that the world has forked, may still end so.
    """
    usual = {name: getattr(os, name) for name in ("_exit", "abort", "kill")}
    owner = os.getpid(), threading.get_ident()

    def instead(name: str) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            here = owner == (os.getpid(), threading.get_ident())
            if not here or (name == "kill" and given != (os.getpid(), signal.SIGKILL)):
                return usual[name](*given)
            caller, called = sys._getframe(1), f"os.{name}({', '.join(map(str, given))})"
            file = Path(caller.f_code.co_filename).name
            raise OperantError(
                f"world {world!r} called {called} ({file}, line {caller.f_lineno}), which "
                "ends the process and the run with it; fix the world, or play it in processes of its own: "
                "env=workers:file.py:World"
            )

        return call

    for name in usual:
        setattr(os, name, instead(name))
    try:
        yield
    finally:
        for name, function in usual.items():
            setattr(os, name, function)
