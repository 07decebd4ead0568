"""The sets of reasoning-gym as tasks: `--tasks reasoning_gym:countdown --tasks.min-numbers 3`, the extra `reasoning`.

A task holds the set, its options and its index; reasoning-gym makes the problem again where a reply is judged.
"""

import ast
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, is_dataclass
from datetime import date, time
from enum import Enum
from functools import cache, lru_cache
from importlib.util import find_spec
from inspect import Parameter, Signature
from itertools import chain
from typing import Any, Literal, get_args, get_origin, get_type_hints

from operant.import_by_name import nearest
from operant.options import parse
from operant.types import OperantError, of_user, require, shown

PACKAGE, EXTRA, LOADS = "reasoning_gym", "reasoning", "reasoning_gym"
"""What must be installed, the extra that has it, and what a worker imports before its first reply."""
TESTED = 8
"""Problems of a set that are tested before a run."""


def need(package: str, extra: str, what: str) -> None:
    """Raises: OperantError that names the extra, if a package is missing."""
    require(find_spec(package) is not None, f"{what} needs a package: pip install 'operant[{extra}]'")


def named(name: str) -> Callable[..., Iterator[dict[str, object]]]:
    """The function that makes the rows of a set; its arguments are the options of the set, with their defaults.

    Raises: OperantError for an unknown set, with the nearest one, or without the package.
    """
    need("reasoning_gym", "reasoning", f"tasks=reasoning_gym:{name}")
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        hint = nearest(name, list(DATASETS)) or f"; there are {len(DATASETS)}: {', '.join(sorted(DATASETS))}"
        raise OperantError(f"tasks=reasoning_gym:{name}: reasoning-gym has no set {shown(name)}{hint}")
    config = DATASETS[name][1]

    def reasoning_gym(**options: object) -> Iterator[dict[str, object]]:
        size = options.get("size", usual["size"])
        require(size >= 1, f"tasks.size={size}: it must be at least 1")
        read = {
            option: parse(value, f"tasks.{option}") if written.get(option) is Any and isinstance(value, str) else value
            for option, value in options.items()
        }
        made = json.dumps({"seed": 0} | read, default=as_plain)

        def at(index: int) -> dict[str, object]:
            with of_user(f"tasks=reasoning_gym:{name} cannot be made: "):  # its options are checked by assertions
                entry = problem(name, made, index)
            answer = entry["answer"] if isinstance(entry["answer"], str) else ""
            target = {"set": name, "index": index, "options": made}
            return {"prompt": entry["question"], "completion": answer, "target": target}

        return chain([at(0)], map(at, range(1, size)))  # the first one now, for its error

    usual, kinds = vars(config()) | {"seed": 0}, get_type_hints(config) | {"seed": int}
    written = {f.name: as_written(kinds[f.name]) for f in fields(config) if f.init}
    reasoning_gym.__annotations__ = written
    defaults = json.loads(json.dumps(usual, default=as_plain))
    arguments = [
        Parameter(option, Parameter.KEYWORD_ONLY, default=usual[option] if kind is kinds[option] else defaults[option])
        for option, kind in written.items()
    ]
    reasoning_gym.__signature__ = Signature(arguments)  # type: ignore[attr-defined]
    return reasoning_gym


def as_written(kind: object) -> object:
    """The type of an option as a command or file gives it: enumerations and dates are texts, what has parts YAML."""
    inside = get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return Literal[tuple(str(member.value) for member in kind)]
    if isinstance(kind, type) and issubclass(kind, (date, time)):
        return str
    if any(is_dataclass(part) for part in (kind, *inside)):
        return Any
    if get_origin(kind) is list and as_written(inside[0]) is not inside[0]:
        return list[as_written(inside[0])]
    return kind


def as_plain(value: object) -> object:
    """The value of an option as JSON has it."""
    if isinstance(value, Enum):
        return value.value
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


@cache
def data_set(name: str, options: str) -> Any:
    """A set of reasoning-gym, with its options as JSON. A problem is made from seed and index when it is asked for."""
    from reasoning_gym import create_dataset
    from reasoning_gym.factory import DATASETS

    kinds = get_type_hints(DATASETS[name][1])
    return create_dataset(name, **{key: as_kind(value, kinds.get(key)) for key, value in json.loads(options).items()})


def as_kind(value: Any, kind: object) -> object:
    """A plain value as a set has it: a list or tuple, a member of an enumeration, a date or time, a dataclass.

    Raises: ValueError or TypeError for one that it cannot be.
    """
    origin, inside = get_origin(kind), get_args(kind)
    if type(None) in inside and value is not None:
        return as_kind(value, inside[0])
    if isinstance(value, list):
        return [as_kind(x, inside[0]) for x in value] if origin is list else tuple(value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if isinstance(kind, type) and issubclass(kind, (date, time)):
        return kind.fromisoformat(value)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = get_type_hints(kind)
        left_out = {f.name: {} for f in fields(kind) if hints[f.name] is dict}  # of a set in `composite`: its options
        return kind(**left_out | {key: as_kind(x, hints.get(key)) for key, x in value.items()})
    return value


@lru_cache(10_000)
def problem(name: str, options: str, index: int) -> dict[str, object]:
    """A problem of a set, made once in this process: some take seconds."""
    return data_set(name, options)[index]


@lru_cache(10_000)
def packed(name: str, options: str, index: int) -> str | None:
    """A problem for a request, so that the time limit of a reply is not spent on making it again: `paid` reads it.

    None if a problem has more than plain values.
    """
    made = problem(name, options, index)
    text = repr(made)
    try:
        return text if ast.literal_eval(text) == made else None
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def paid(name: str, options: str, index: int, answer: str, entry: str | None = None) -> float:
    """What an answer pays. entry: the problem as `packed` has it; None: it is made here."""
    made = problem(name, options, index) if entry is None else ast.literal_eval(entry)
    return float(data_set(name, options).score_answer(answer, made))


def first(name: str, options: str) -> list[list[object]]:
    """Of the first problems of a set, by which it is tested: what tells each from others, and its answer."""
    made = [problem(name, options, index) for index in range(min(TESTED, len(data_set(name, options))))]
    return [[each["question"], each["answer"]] for each in made]
