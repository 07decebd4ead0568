"""A function of the user's by its name: `module:function` or `file.py:function`."""

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from operant.types import OperantError


def find(what: str, place: str, name: str, known: Sequence[str] = ()) -> Callable[..., Any]:
    """The function `name` of a module or a file, found from the working directory too, as with `python -m`.

    `what` it is, for messages: "reward"; `known`: names that may have been meant. Raises: OperantError.
    """
    held = _module(what, place, known)
    found = held
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise OperantError(f"{what} '{place}:{name}': {place!r} has no function {name!r}{nearest(name, dir(held))}")
    return found


def nearest(name: str, known: Sequence[str]) -> str:
    """What may have been meant, as the end of a sentence."""
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _module(what: str, name: str, known: Sequence[str]) -> Any:
    if name.endswith(".py") and not os.path.exists(name):
        raise OperantError(f"{what}: there is no file {name!r}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return _file(name) if name.endswith(".py") else importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            hint = nearest(name.partition(":")[0], known)
            raise OperantError(f"{what}: there is no {what} and no module {name!r}{hint}") from error
        raise OperantError(f"{what}: module {name!r} needs {error.name!r}, which is not installed") from error
    except OperantError:
        raise
    except Exception as error:
        raise OperantError(f"{what}: importing {name!r} raised {type(error).__name__}: {error}") from error


def _file(path: str) -> Any:
    made = importlib.util.spec_from_file_location(os.path.splitext(os.path.basename(path))[0], path)
    assert made is not None and made.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module
