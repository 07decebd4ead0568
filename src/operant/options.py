"""Options by name: from keyword arguments, YAML or a command line to the dataclasses that use them.

A schema maps a group to what it configures: a dataclass, or a function whose keyword-only arguments are the options.
`compose` takes `{"kl.coef": 0.2}`, `{"kl": {"coef": 0.2}}` or, where one group alone has the name, `{"coef": 0.2}`.
The group "" has names without a prefix. An unknown name, a wrong type or a value out of range is an `OperantError`.
"""

import difflib
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from operant.types import OperantError, shown

Schema = Mapping[str, type | Callable]
LARGEST = 3.4e38
"""Of float32, in which almost everything is computed."""
MOST = 100_000
"""Values of a YAML text, its aliases written out."""


def names(schema: Schema) -> dict[str, tuple[str, str]]:
    """Every full name -> (group, field)."""
    return {f"{group}.{name}" if group else name: (group, name) for group in schema for name in _fields(schema[group])}


def compose(schema: Schema, given: Mapping[str, Any]) -> dict[str, Any]:
    """One object a group: an instance of its dataclass, or a dict of keyword arguments for its function."""
    picked: dict[str, dict[str, Any]] = {group: {} for group in schema}
    for full, value in resolve(schema, given).items():
        group, name = names(schema)[full]
        picked[group][name] = convert(value, _hints(schema[group])[name], full)
    return {g: made(**picked[g]) if inspect.isclass(made) else picked[g] for g, made in schema.items()}


def resolve(schema: Schema, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given options under their full names. Raises: OperantError for an unknown one, with the nearest."""
    known = names(schema)
    flat: dict[str, Any] = {}
    for key, value in given.items():
        if not isinstance(key, str):
            raise OperantError(f"option {shown(key)} has no name: a name is text (YAML takes an unquoted on for true)")
        key = key.replace("-", "_")
        if not key or key not in schema or key in known:
            flat[_full(known, key)] = value
        elif isinstance(value, Mapping):
            flat |= {_full(known, f"{key}.{inner}"): v for inner, v in value.items()}
        else:
            raise OperantError(f"{key}={shown(value)}: give a mapping with some of {', '.join(_fields(schema[key]))}")
    return flat


def _full(known: Mapping[str, tuple[str, str]], key: str) -> str:
    key = key.replace("-", "_")
    if key in known:
        return key
    same = [full for full, (_, name) in known.items() if name == key]
    if len(same) == 1:
        return same[0]
    if same:
        raise OperantError(f"option {key!r} is ambiguous: say {' or '.join(same)}")
    short = {name: full for full, (_, name) in known.items()}
    near = difflib.get_close_matches(key[:100], [*known, *short], 1)
    hint = f"did you mean {near[0]!r}?" if near else "`--help` lists all"
    raise OperantError(f"option {shown(key)} is unknown; {hint}")


def defaults(made: type | Callable) -> dict[str, Any]:
    """The default of each option."""
    if is_dataclass(made):
        return {f.name: f.default for f in fields(made) if f.init}
    parameters = inspect.signature(made).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def values(made: Any) -> dict[str, Any]:
    """The options that one group was composed to, values untouched: a model stays a model."""
    return dict(made) if isinstance(made, dict) else {name: getattr(made, name) for name in defaults(type(made))}


def _fields(made: type | Callable) -> list[str]:
    return list(defaults(made))


def _hints(made: type | Callable) -> dict[str, Any]:
    return typing.get_type_hints(made)


# --- values -----------------------------------------------------------------------------------------------------------


def read(text: Any) -> Any:
    """A mapping that is written in YAML's braces becomes one; all else is read where its type is known."""
    if isinstance(text, str) and text.startswith("{"):
        return parse(text, f"{shown(text)} (a mapping is written {{name: weight, ...}})")
    return text


def read_mapping(path: Path) -> dict[str, Any]:
    """The names and values of a YAML file, from whomever it comes.

    Raises: OperantError for a file that cannot be read, or is no YAML mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OperantError(f"{path} cannot be read as YAML: {error}; it must be a text file in UTF-8") from error
    held = parse(text, str(path))
    if not isinstance(held, dict):
        raise OperantError(f"{path} holds no options: it must be a YAML mapping of names to values")
    return held


def parse(text: str, what: str) -> Any:
    """Plain data from YAML. Raises: OperantError that begins with `what`; aliases of aliases never grow in memory."""
    import yaml

    loader, size = yaml.SafeLoader(""), 0.0
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        size = _size(node, {})
        if size <= MOST:
            return None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        why = " ".join(str(error).split())[:200]
        raise OperantError(f"{what} is no YAML that can be read: {why}; mend it by hand") from error
    raise OperantError(f"{what} stands for more than {MOST:,} values, by aliases of aliases: write out what is meant")


def _size(node: Any, known: dict[int, float]) -> float:
    """How many values a YAML node stands for, each alias counted as what it names; infinite where one holds itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        inner = node.value if isinstance(getattr(node, "value", None), list) else []
        pairs = (part for pair in inner for part in (pair if isinstance(pair, tuple) else (pair,)))
        known[id(node)] = 1 + sum(_size(part, known) for part in pairs)
    return known[id(node)]


def kinds(schema: Schema) -> dict[str, Any]:
    """Every full name -> its type."""
    return {full: _hints(schema[group])[name] for full, (group, name) in names(schema).items()}


def convert(value: Any, kind: Any, name: str) -> Any:
    """`value` (from Python, YAML or a command line) as `kind`. Raises: OperantError that names option and value."""
    if kind is Any:
        return None if is_none(value) else value
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _first(value, inside, kind, name)
    if origin is tuple:
        return _tuple(value, inside, name)
    if origin in (dict, Mapping) or (inspect.isclass(kind) and issubclass(kind, Mapping)):
        if not isinstance(value, Mapping):
            raise OperantError(f"{name}={shown(value)}: give a mapping")
        return dict(value)
    if isinstance(kind, type) and kind in _PLAIN:
        made = _PLAIN[kind](value)
        if made is None:
            raise OperantError(f"{name}={shown(value)}: it must be {_WORDS[kind]}")
        return made
    return value


def _first(value: Any, kinds: tuple[Any, ...], whole: Any, name: str) -> Any:
    optional = type(None) in kinds
    if optional and is_none(value):
        return None
    reasons = []
    for kind in kinds:
        if kind is type(None):
            continue
        try:
            return convert(value, kind, name)
        except OperantError as error:
            reasons.append(str(error))
    raise OperantError(reasons[0] + (", or none" if optional else ""))


def is_none(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.lower() in ("none", "null"))


def _tuple(value: Any, kinds: tuple[Any, ...], name: str) -> tuple:
    if isinstance(value, str):
        value = value.split(",") if value else []
    parts = list(value) if isinstance(value, (list, tuple)) else [value]
    if kinds[-1] is Ellipsis:
        return tuple(convert(p, kinds[0], name) for p in parts)
    if len(parts) != len(kinds):
        raise OperantError(f"{name}={shown(value)}: give {len(kinds)} values")
    return tuple(convert(p, k, name) for p, k in zip(parts, kinds, strict=True))


def _bool(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    text = str(value).lower() if isinstance(value, str) or (isinstance(value, int) and value in (0, 1)) else ""
    return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(text)


def _int(value: Any) -> int | None:
    """Exactly: a float holds no more than 53 bits."""
    if isinstance(value, (bool, bytes, bytearray)):
        return None
    try:
        number = int(value) if isinstance(value, int) else _whole(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number is not None and -(2**63) <= number < 2**63 else None


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and value.strip().lstrip("+-").isdecimal():
        return int(value)
    number = float(value)
    return int(number) if number == int(number) else None


def _float(value: Any) -> float | None:
    if isinstance(value, (bool, bytes, bytearray)):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= LARGEST else None


def _str(value: Any) -> str | None:
    return value if isinstance(value, str) else None


_PLAIN: dict[type, Callable[[Any], Any]] = {bool: _bool, int: _int, float: _float, str: _str}
_WORDS = {
    bool: "true or false",
    int: "a whole number of at most 64 bits",
    float: f"a finite number (up to {LARGEST:g}, as float32 has)",
    str: "text",
}
