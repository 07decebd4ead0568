"""Objects by name: built in, `module:object`, `file.py:object`, or installed by another package as an entry point."""

import difflib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

from operant.types import OperantError, of_user, require, shown


@contextmanager
def extra(what: str, name: str) -> Iterator[None]:
    """Turn a missing package inside this context into a sentence. what: needs it; name: the extra that has it."""
    try:
        yield
    except ImportError as error:
        raise OperantError(f"{what}: pip install 'operant[{name}]'") from error


class Lazy(UserDict[str, Any]):
    """Objects by name, each written as "operant.module:object", or modules, imported when they are first looked up."""

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if isinstance(found, str):
            place, _, inside = found.partition(":")
            found = self.data[name] = find("part", place, inside) if inside else importlib.import_module(place)
        return found


class Table:
    """The objects of one kind that a user can name.

    kind: the word for one of them in errors, such as "environment". built_in: by name, the object, or the text
    "module:object", which is imported when it is first looked up. A name that ends in a colon is that of a suite: its
    function makes the object from what stands behind the colon. Other packages add names as entry points of the group
    `group`, such as `operant.envs`, in their `pyproject.toml`.
    """

    made: ClassVar[WeakSet["Table"]] = WeakSet()
    """Every table, to say which kind has a name."""

    def __init__(self, kind: str, group: str, built_in: Mapping[str, Any]):
        self.kind, self.group, self.built_in = kind, group, built_in
        Table.made.add(self)

    def names(self) -> list[str]:
        """The names that are built in, and those that installed packages add."""
        return sorted({*self.built_in, *(entry.name for entry in self._installed())})

    def find(self, name: object) -> Any:
        """The object of that name, or of a `module:object`."""
        if not isinstance(name, str):
            raise OperantError(f"{self.kind} {shown(name)} is no name: give one of {', '.join(self.names())} as text")
        entries = [entry for entry in self._installed() if entry.name == name]
        if len(entries) + (name in self.built_in) > 1:
            owners = [_package(entry) for entry in entries] + ["operant"] * (name in self.built_in)
            raise OperantError(f"{self.kind} {name!r} belongs to {' and to '.join(owners)}; name it module:object")
        if (suite := suite_of(name)) in self.built_in:
            return find(self.kind, *self.built_in[suite].split(":"))(name.removeprefix(suite))
        if name in self.built_in:
            found = self.built_in[name]
            return find(self.kind, *found.split(":")) if isinstance(found, str) else found
        if entries:
            what = f"{self.kind} {name!r} of package {_package(entries[0])} ({entries[0].value}) cannot be imported: "
            with of_user(what, "; mend or remove that package"):
                return entries[0].load()
        others = sorted(table.kind for table in Table.made if table is not self and name in table)
        if ":" in name and not others:
            return find(self.kind, *name.rpartition(":")[::2], known=self.names())
        hint = f"; only the {others[0]} has that name." if others else nearest(name[:100], self.names()) or "."
        known = f"{', '.join(self.names())}, or module:object"
        raise OperantError(f"{self.kind} {shown(name)} is unknown{hint} Names: {known}")

    def place(self, name: str) -> str:
        """The `module:object` that an installed package has under that name, without importing it; else the name."""
        return next((entry.value for entry in self._installed() if entry.name == name), name)

    def __contains__(self, name: object) -> bool:
        return name in self.built_in or suite_of(name) in self.built_in or name in {e.name for e in self._installed()}

    def _installed(self) -> tuple[importlib.metadata.EntryPoint, ...]:
        return _entries(self.group, tuple(sys.path))


@functools.cache
def _entries(group: str, path: tuple[str, ...]) -> tuple[importlib.metadata.EntryPoint, ...]:
    """The entry points of a group in the packages on `path`, which takes a hundredth of a second to read."""
    return tuple(importlib.metadata.entry_points(group=group))


def _package(entry: importlib.metadata.EntryPoint) -> str:
    """The name and version of the package that an entry point belongs to."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.module


def suite_of(name: object) -> str:
    """The name of a suite in a name: suite_of("reasoning_gym:countdown") == "reasoning_gym:"; empty without a colon."""
    return "".join(name.partition(":")[:2]) if isinstance(name, str) and ":" in name else ""


def names_object(name: object, table: Table) -> bool:
    """Whether a text is a name of the table, or `module:object` or `file.py:object` of a module that can be found.

    So a data set or model of the Hub, which has a colon too, is not taken for one, unless a module has its name.
    """
    if not isinstance(name, str) or name in table:
        return isinstance(name, str)
    place, colon, inside = name.rpartition(":")
    if not colon or not all(part.isidentifier() for part in inside.split(".")) or place == "builtin":
        return False
    if place.endswith(".py"):
        return True
    parts = place.split(".")
    here = os.path.exists(f"{parts[0]}.py") or os.path.exists(os.path.join(parts[0], "__init__.py"))
    return all(part.isidentifier() for part in parts) and (here or importlib.util.find_spec(parts[0]) is not None)


def find(what: str, place: str, name: str, known: Sequence[str] = ()) -> Any:
    """The object `name` of the module or file `place`. The working directory is searched too, as by `python -m`.

    `what` names the kind of object in errors, for example "reward"; `known` are names to suggest.
    """
    found = module = _module(what, place, known)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise OperantError(f"{what} '{place}:{name}': {place!r} has no {name!r}{nearest(name, dir(module))}")
    return found


def find_function(what: str, place: str, name: str, known: Sequence[str] = ()) -> Callable[..., Any]:
    """As `find`, for a function or another callable. Raises: OperantError also for an object that is none."""
    found = find(what, place, name, known)
    require(callable(found), f"{what} '{place}:{name}' is of type {type(found).__name__}; name a function or a class")
    return found


def nearest(name: str, known: Sequence[str]) -> str:
    """The nearest known name as a question that ends a sentence; empty if none is near."""
    near = difflib.get_close_matches(name, known)
    near = sorted(near, key=lambda other: sorted(other) != sorted(name))  # two letters that changed places come first
    return f"; did you mean {near[0]!r}?" if near else ""


FROM_FILES: dict[str, Any] = {}
"""The modules that were loaded from files, by name; `sys.modules` does not have them. Of one name, the last."""


def _module(what: str, name: str, known: Sequence[str]) -> Any:
    require(not name.endswith(".py") or os.path.exists(name), f"{what}: there is no file {name!r}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    with of_user(f"{what}: importing {name!r} raised "):
        try:
            spec = importlib.util.spec_from_file_location(Path(name).stem, name) if name.endswith(".py") else None
            if spec is None or spec.loader is None:
                return importlib.import_module(name)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            FROM_FILES[module.__name__] = module
            return module
        except ModuleNotFoundError as error:
            if error.name and (name == error.name or name.startswith(f"{error.name}.")):
                hint = nearest(name.partition(":")[0], known)
                raise OperantError(f"{what}: there is no {what} and no module {name!r}{hint}") from error
            raise OperantError(f"{what}: module {name!r} needs {error.name!r}, which is not installed") from error
