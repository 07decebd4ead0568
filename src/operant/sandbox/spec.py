"""The name by which another process finds a function or class of the user."""

import os
import sys
from collections.abc import Callable
from typing import Any

from operant.sandbox import worker
from operant.types import OperantError


def spec_of(thing: str | Callable[..., Any]) -> str:
    """`module:function` or `/whole/path/file.py:function`, by which another process finds the thing."""
    if worker.INSIDE:
        raise OperantError(
            "isolated() was called by a worker that imports your file: put the code that starts the run under "
            'if __name__ == "__main__":'
        )
    if not isinstance(thing, str):
        return _spec_of_object(thing)
    place, _, name = thing.strip().rpartition(":")
    if not place or not name:
        raise OperantError(f"isolated({thing!r}): give module:function or file.py:function")
    if place.endswith(".py"):
        if not os.path.exists(place):
            raise OperantError(f"isolated({thing!r}): there is no file {place!r}")
        place = os.path.abspath(place)
    return f"{place}:{name}"


def _spec_of_object(thing: Any) -> str:
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    remedy = "put it at the top level of a file, and give isolated('file.py:function')"
    if not callable(thing) or module is None or name is None or "<" in name:
        what = name.rpartition(".")[2] if name else f"a {type(thing).__name__}"
        raise OperantError(f"isolated: no other process can find {what} by a name; {remedy}")
    found: Any = sys.modules.get(module)
    imported = found is not None
    for part in name.split("."):
        found = getattr(found, part, None)
    code = getattr(thing, "__code__", None)  # a class has none
    file = code.co_filename if code is not None else getattr(found is thing and sys.modules[module], "__file__", None)
    if found is thing and module != "__main__":
        return f"{module}:{name}"
    if file and os.path.exists(file) and (found is thing or not imported):
        return f"{os.path.abspath(file)}:{name}"
    raise OperantError(f"isolated: another process would not find {name} as {module}:{name}; {remedy}")
