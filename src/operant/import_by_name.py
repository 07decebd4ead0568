"""Import a function of the user by its name: `module:function` or `file.py:function`."""

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from operant.types import OperantError


def find(what: str, place: str, name: str, known: Sequence[str] = ()) -> Callable[..., Any]:
    """The function `name` of the module or file `place`. The working directory is searched too, as by `python -m`.

    `what` names the kind of function in errors, for example "reward"; `known` are names to suggest.
    Raises: OperantError if there is none.
    """
    module = _module(what, place, known)
    found = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise OperantError(f"{what} '{place}:{name}': {place!r} has no function {name!r}{nearest(name, dir(module))}")
    return found


def nearest(name: str, known: Sequence[str]) -> str:
    """The nearest known name as a question that ends a sentence; empty if none is near."""
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _module(what: str, name: str, known: Sequence[str]) -> Any:
    if name.endswith(".py") and not os.path.exists(name):
        raise OperantError(f"{what}: there is no file {name!r}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return _import_file(name) if name.endswith(".py") else importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            hint = nearest(name.partition(":")[0], known)
            raise OperantError(f"{what}: there is no {what} and no module {name!r}{hint}") from error
        raise OperantError(f"{what}: module {name!r} needs {error.name!r}, which is not installed") from error
    except OperantError:
        raise
    except Exception as error:
        raise OperantError(f"{what}: importing {name!r} raised {type(error).__name__}: {error}") from error


def _import_file(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(os.path.splitext(os.path.basename(path))[0], path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
