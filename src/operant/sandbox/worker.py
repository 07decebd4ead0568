"""The main program of a worker: it answers requests as JSON lines, over two pipes reserved for that.

Whatever it prints goes elsewhere. `pool.py` copes with a worker that misuses the pipes.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from operant.types import describe_error

INSIDE = False
"""Whether this process is a worker."""


def main(setup_json: str) -> None:
    """Create the handler and answer requests until the pipe closes.

    setup_json: {"requests": fd, "answers": fd, "make": "module:function", "argument": ...}. `make(argument)` returns
    the handler, a function from plain data to plain data.
    """
    global INSIDE
    INSIDE, setup = True, json.loads(setup_json)
    for fd in (setup["requests"], setup["answers"]):
        os.set_inheritable(fd, False)  # programs that the handler starts do not get the pipes
    handler: Callable[[Any], Any] | None = None

    def make(argument: Any) -> dict[str, Any]:
        nonlocal handler
        module, name = setup["make"].split(":")
        handler = getattr(importlib.import_module(module), name)(argument)
        return {"ready": True}

    _answer(setup["answers"], {}, make, setup["argument"])
    if handler is None:
        return
    with os.fdopen(setup["requests"], "rb", closefd=False) as requests:
        for line in requests:
            message = json.loads(line)
            _answer(setup["answers"], {"id": message["id"]}, handler, message["request"])


def _answer(fd: int, head: dict[str, Any], function: Callable[[Any], Any], argument: Any) -> None:
    """Send `head` with the return value of a function as "answer", or with the exception that it raised as "error"."""
    try:
        line = json.dumps(head | {"answer": function(argument)})
    except BaseException as error:  # SystemExit too: the worker outlives a reward that calls sys.exit
        line = json.dumps(head | {"error": describe_error(error)})
    for stream in (sys.stdout, sys.stderr):
        with suppress(BaseException):
            stream.flush()
    unsent = memoryview(line.encode() + b"\n")
    while unsent:
        unsent = unsent[os.write(fd, unsent) :]
