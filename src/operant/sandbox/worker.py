"""The main program of a worker: it answers requests as JSON lines, over two pipes reserved for that.

Whatever it prints goes elsewhere. `pool.py` copes with a worker that misuses the pipes. `spec_of` gives the name by
which a worker finds the user's function or class.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from typing import Any

from operant.import_by_name import FROM_FILES
from operant.types import OperantError, describe_error, require

INSIDE = False


def main(setup_json: str) -> None:
    """Create the handler and answer requests until the pipe closes.

    setup_json: {"requests": fd, "answers": fd, "make": "module:function"}. The first line of the requests is an
    argument; `make(argument)` returns the handler, a function from plain data to plain data.
    """
    global INSIDE
    INSIDE, setup = True, json.loads(setup_json)
    for fd in (setup["requests"], setup["answers"]):
        os.set_inheritable(fd, False)  # programs that the handler starts do not get the pipes
    handler: Callable[[Any], Any] | None = None

    def make(argument: object) -> dict[str, object]:
        nonlocal handler
        module, name = setup["make"].split(":")
        handler = getattr(importlib.import_module(module), name)(argument)
        return {"ready": True}

    with os.fdopen(setup["requests"], "rb", closefd=False) as requests:
        _answer(setup["answers"], {}, make, json.loads(requests.readline()))
        for line in requests if handler is not None else ():
            message = json.loads(line)
            _answer(setup["answers"], {"id": message["id"]}, handler, message["request"])


def _answer(fd: int, head: dict[str, object], function: Callable[[object], object], argument: object) -> None:
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


def spec_of(thing: str | Callable[..., object]) -> str:
    """`module:function` or `/whole/path/file.py:function`, by which another process finds the thing."""
    how = 'put the code that starts the run under if __name__ == "__main__":'
    require(not INSIDE, f"isolated() was called by a worker that imports your file: {how}")
    if isinstance(thing, str):
        place, _, name = thing.strip().rpartition(":")
        require(place and name, f"isolated({thing!r}): give module:function or file.py:function")
        if place.endswith(".py"):
            require(os.path.exists(place), f"isolated({thing!r}): there is no file {place!r}")
            place = os.path.abspath(place)
        return f"{place}:{name}"
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    remedy = "put it at the top level of a file, and give isolated('file.py:function')"
    if not callable(thing) or module is None or name is None or "<" in name:
        what = name.rpartition(".")[2] if name else f"a {type(thing).__name__}"
        raise OperantError(f"isolated: no other process can find {what} by a name; {remedy}")
    imported, of_file = sys.modules.get(module), FROM_FILES.get(module)
    found = [
        place
        for place in (imported, of_file)
        if reduce(lambda at, part: getattr(at, part, None), name.split("."), place) is thing
    ]
    if imported in found and module != "__main__":
        return f"{module}:{name}"
    code = getattr(thing, "__code__", None)  # a class has none
    file = code.co_filename if code is not None else getattr(found[0] if found else None, "__file__", None)
    if file and os.path.exists(file) and (found or imported is None):
        return f"{os.path.abspath(file)}:{name}"
    raise OperantError(f"isolated: another process would not find {name} as {module}:{name}; {remedy}")
