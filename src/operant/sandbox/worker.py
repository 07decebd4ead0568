"""A worker's own end: it is asked and answers with JSON lines, on two pipes that nothing else is meant to use.

What it prints goes elsewhere, and what it does with the pipes is for `pool.py` to bear.
"""

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from operant.types import OperantError

INSIDE = False
"""Whether this process is a worker."""
LONGEST = 1000
"""Characters of what an exception says that are passed on."""


def main(told: str) -> None:
    """`told`: {"requests": fd, "answers": fd, "make": "module:function", "argument": ...}.

    `make(argument)` is what answers: a function from plain data to plain data.
    """
    global INSIDE
    INSIDE, setup = True, json.loads(told)
    for fd in (setup["requests"], setup["answers"]):
        os.set_inheritable(fd, False)  # of this process alone: its children by `exec` have none of it
    handle: Callable[[Any], Any] | None = None

    def make(argument: Any) -> dict[str, Any]:
        nonlocal handle
        module, name = setup["make"].split(":")
        handle = getattr(importlib.import_module(module), name)(argument)
        return {"ready": True}

    _send(setup["answers"], _tried(make, setup["argument"], {}))
    if handle is None:
        return
    with os.fdopen(setup["requests"], "rb", closefd=False) as requests:
        for line in requests:
            asked = json.loads(line)
            _send(setup["answers"], _tried(handle, asked["ask"], {"id": asked["id"]}))


def _tried(work: Callable[[Any], Any], argument: Any, head: dict[str, Any]) -> bytes:
    """A line with what `work` returns as {"answer": ...}, or with what it raises as {"error": ...}."""
    try:
        line = json.dumps(head | {"answer": work(argument)})
    except BaseException as error:  # SystemExit too: a guest's end is not the worker's
        line = json.dumps(head | {"error": _words(error)})
    for stream in (sys.stdout, sys.stderr):
        with suppress(BaseException):
            stream.flush()
    return line.encode() + b"\n"


def _words(error: BaseException) -> str:
    """The type, the text and the line: `ValueError: no such word (score.py, line 12)`."""
    try:
        if isinstance(error, OperantError):
            return str(error)[:LONGEST]
        frames = traceback.extract_tb(error.__traceback__)
        place = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
        text = str(error)[:LONGEST]
        return f"{type(error).__name__}{': ' if text else ''}{text}{place}"
    except BaseException:
        return f"{type(error).__name__}, which cannot be shown"


def _send(fd: int, line: bytes) -> None:
    left = memoryview(line)
    while left:
        left = left[os.write(fd, left) :]
