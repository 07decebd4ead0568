"""Options by name: from keyword arguments, YAML or a command line to the dataclasses that use them.

A schema maps each group of options to a dataclass, to a function whose keyword-only arguments are the options, or to a
`Factory`, a function or class of the user's whose arguments are.
`compose` takes `{"kl.coef": 0.2}`, `{"kl": {"coef": 0.2}}` or, if only one group has the name, `{"coef": 0.2}`.
The options of group "" have no prefix. An unknown name, a wrong type or a value out of range is an `OperantError`.
"""

import difflib
import inspect
import math
import re
import types
import typing
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from operant.types import LARGEST_FLOAT, OperantError, name_of, require, said_of, shown


@dataclass(frozen=True)
class Factory:
    """A function or class whose arguments are options: all that can be passed by name, after the first `skip`."""

    make: Callable[..., Any]
    skip: int = 0
    gets: str = ""
    """What it is called with, in words; empty: its first arguments, by their names."""


Schema = Mapping[str, "type | Callable | Factory"]
MOST = 100_000
"""Most values that a YAML text may have, with its aliases expanded."""
MANY = (list, tuple, set, frozenset, Sequence, Collection, Iterable)
"""Kinds of options of which a text names several values, with commas between them."""


def names(schema: Schema) -> dict[str, tuple[str, str]]:
    """Map each full name to (group, field)."""
    return {f"{group}.{name}" if group else name: (group, name) for group in schema for name in defaults(schema[group])}


def compose(schema: Schema, options: Mapping[str, object]) -> dict[str, Any]:
    """Make one object per group: an instance of its dataclass, or a dict of keyword arguments for its function.

    Raises: OperantError for an unknown name, a wrong type or a value out of range.
    """
    picked: dict[str, dict[str, Any]] = {group: {} for group in schema}
    for full, value in resolve(schema, options).items():
        group, name = names(schema)[full]
        picked[group][name] = convert(value, _types(schema[group]).get(name, Any), full)
    for group, made in schema.items():
        needed = [name for name, value in defaults(made).items() if value is inspect.Parameter.empty]
        if name := next((name for name in needed if name not in picked[group]), None):
            why = "it has no default"
            if isinstance(made, Factory):
                called = name_of(made.make)
                passed = [*inspect.signature(made.make).parameters][: made.skip]
                gets = made.gets or (" and ".join(passed) + " alone" if passed else "no argument")
                why = f"{called} gets {gets}, and has no default for {name!r}; set the option, or write a default into "
                why += called
            raise OperantError(f"option {f'{group}.{name}' if group else name} is missing: {why}")
    return {g: made(**picked[g]) if inspect.isclass(made) else picked[g] for g, made in schema.items()}


def resolve(schema: Schema, options: Mapping[str, object]) -> dict[str, object]:
    """The options under their full names. Raises: OperantError for an unknown one, with the nearest."""
    known = names(schema)
    short = {full: part for full, part in known.items() if not isinstance(schema[part[0]], Factory)}
    flat: dict[str, object] = {}
    for key, value in options.items():
        require(isinstance(key, str), f"option {shown(key)} is no text, as names are (YAML reads unquoted on as true)")
        key = key.replace("-", "_")
        if not key or key not in schema or key in known:
            named = [(_full(known, short, key), value)]
        elif isinstance(value, Mapping):
            named = [(_full(known, short, f"{key}.{inner}"), v) for inner, v in value.items()]
        else:
            hint = f"; {elsewhere}" if (elsewhere := answer(key)) else ""
            inside, kinds_inside = defaults(schema[key]), _types(schema[key])
            example = f"{key}.{next(iter(inside), 'NAME')}=VALUE"
            for name in reversed(inside) if _to_scalar(value, float) is not None else ():
                with suppress(OperantError):  # the first option that takes this value
                    convert(value, kinds_inside.get(name, str), name)
                    example = f"{key}.{name}={value}"
            what = f"{key} is a group of options ({', '.join(inside)})"
            raise OperantError(f"{key}={shown(value)}: {what}: write {example}{hint}")
        for full, one in named:
            require(full not in flat, f"option {full} is given twice, by two names: use one")
            flat[full] = one
    return flat


def _full(known: Mapping[str, tuple[str, str]], short: Mapping[str, tuple[str, str]], key: str) -> str:
    """The full name of an option. `short`: those that are also known by their last part, if it is unique.

    Raises: OperantError for an unknown or ambiguous one.
    """
    key = key.replace("-", "_")
    if key in known:
        return key
    same = [full for full, (_, name) in short.items() if name == key]
    if len(same) == 1:
        return same[0]
    require(not same, f"option {key!r} is ambiguous: use {' or '.join(same)}")
    group = [name for full, (of, name) in known.items() if of and of == key.partition(".")[0] and full not in short]
    if elsewhere := answer(key) or ("" if group else answer(key.rpartition(".")[2])):
        raise OperantError(f"option {key!r} is unknown; {elsewhere}")
    named = [full for full in known if full.rpartition(".")[2] == key.rpartition(".")[2]]  # of another group
    near = named or difflib.get_close_matches(key[:100], [*known, *(name for _, name in short.values())], 1)
    every = f"{key.partition('.')[0]} has the options {', '.join(group)}" if group else ""
    hint = f"did you mean {near[0]!r}?" if near else every or "`operant train --help-all` lists all"
    raise OperantError(f"option {shown(key)} is unknown; {hint}")


def defaults(made: type | Callable | Factory) -> dict[str, object]:
    """Map each option of a group to its default; `inspect.Parameter.empty`: it has none."""
    if isinstance(made, Factory):
        try:
            parameters = list(inspect.signature(made.make).parameters.values())[made.skip :]
        except ValueError:  # some functions written in C do not say
            return {}
        return {p.name: p.default for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    if is_dataclass(made):
        return {f.name: f.default for f in fields(made) if f.init}
    parameters = inspect.signature(made).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def _types(made: type | Callable | Factory) -> dict[str, object]:
    if not isinstance(made, Factory):
        return typing.get_type_hints(made)
    make = made.make.__init__ if inspect.isclass(made.make) and not is_dataclass(made.make) else made.make
    make = make if inspect.isroutine(make) or inspect.isclass(make) else type(make).__call__
    try:
        return typing.get_type_hints(make)
    except (NameError, TypeError, SyntaxError):  # some annotation is for type checkers only: each by itself
        scope, found = getattr(inspect.unwrap(make), "__globals__", {}), {}
        for name, hint in getattr(make, "__annotations__", {}).items():
            with suppress(Exception):
                found[name] = eval(hint, scope) if isinstance(hint, str) else hint  # as get_type_hints evaluates it
        return found


def arguments(factory: Factory, given: Mapping[str, object], what: str) -> dict[str, Any]:
    """The arguments of a user's function or class, checked as options are.

    Raises: OperantError that begins with `what`, for an unknown name, a wrong type, or one that is missing.
    """
    with said_of(what):
        return compose({"": factory}, given)[""]


def values(made: object) -> dict[str, Any]:
    """The options of one composed group, as a dict. Values are not copied or converted: a model stays a model."""
    return dict(made) if isinstance(made, dict) else {name: getattr(made, name) for name in defaults(type(made))}


def read(text: object) -> Any:
    """Parse a value in YAML braces to a mapping. Any other value is returned unchanged, to be converted later.

    A text with places in braces, such as "{sentence} {prompt}", is no mapping: no colon stands in its first braces.
    """
    if isinstance(text, str) and re.match(r"\{([^{}]*:|\s*\})", text):
        return parse(text, f"{shown(text)} (a mapping is written {{name: weight, ...}})")
    return text


def read_mapping(path: Path) -> dict[str, Any]:
    """The names and values of a YAML file, which may be untrusted.

    Raises: OperantError for a file that cannot be read, or whose content is not a YAML mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OperantError(f"{path} cannot be read as YAML: {error}; it must be a text file in UTF-8") from error
    options = parse(text, str(path))
    require(isinstance(options, dict), f"{path} holds no options: it must be a YAML mapping of names to values")
    return options


def flat(options: Mapping[str, object], whole: Sequence[str] = ("reward",)) -> dict[str, object]:
    """The options of a nested configuration by full name. whole: those that may be mappings, and stay one value."""
    found: dict[str, object] = {}
    for name, value in options.items():
        if isinstance(value, Mapping) and name not in whole:
            found |= {f"{name}.{inner}": x for inner, x in value.items()}
        else:
            found[name] = value
    return found


def parse(text: str, what: str) -> Any:
    """Plain data from a YAML text. Aliases are counted before they are expanded, so they cannot exhaust memory.

    Raises: OperantError that begins with `what`.
    """
    return deepcopy(_parsed(text, what))


@lru_cache(64)  # a run reads its config several times
def _parsed(text: str, what: str) -> object:
    import yaml

    loader = yaml.SafeLoader("")
    shallow = len(text) < 20_000 and sum(map(text.count, ("[", "{", "- ", "? "))) < 200
    # libyaml is ten times as fast, but a text that is nested deeply ends the process there
    fast = getattr(yaml, "CSafeLoader", yaml.SafeLoader) if shallow else yaml.SafeLoader
    try:
        try:
            loader = fast(text)
            node = loader.get_single_node()
        except yaml.YAMLError:  # once more, for its sentences
            loader = yaml.SafeLoader(text)
            node = loader.get_single_node()
        # Without an alias, a text has no more values than characters.
        if _size(node, {}) <= MOST or (len(text) < MOST and "*" not in text):
            return None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        why = " ".join(str(error).replace('in "<unicode string>", ', "at ").split())[:200]
        raise OperantError(f"{what} cannot be read as YAML: {why}; correct it by hand") from error
    raise OperantError(f"{what} has more than {MOST:,} values once its aliases are expanded: use fewer aliases")


def _size(node: Any, known: dict[int, float]) -> float:
    """Number of values of a YAML node with its aliases expanded; infinity if it contains itself.
    Raises: ValueError for a name that is written twice, of which PyYAML takes the last."""
    if id(node) not in known:
        known[id(node)] = math.inf
        inner = node.value if isinstance(getattr(node, "value", None), list) else []
        pairs = [pair if isinstance(pair, tuple) else (pair,) for pair in inner]
        names = Counter((key.tag, key.value) for key, *value in pairs if value and isinstance(key.value, str))
        twice = [name for (_, name), times in names.items() if times > 1 and name != "<<"]
        if twice:
            raise ValueError(f"{shown(twice[0])} is written twice")
        known[id(node)] = 1 + sum(_size(part, known) for pair in pairs for part in pair)
    return known[id(node)]


def kinds(schema: Schema) -> dict[str, object]:
    """Map each full name to its type."""
    types = {group: _types(made) for group, made in schema.items()}
    return {full: types[group].get(name, Any) for full, (group, name) in names(schema).items()}


def convert(value: Any, kind: Any, name: str) -> Any:
    """Convert `value` (from Python, YAML or a command line) to the type `kind`.

    Raises: OperantError that names the option and its value.
    """
    if kind is Any:
        return None if is_none(value) else value
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if type(None) in inside and is_none(value):
            return None
        reasons = []
        for possible in (possible for possible in inside if possible is not type(None)):
            try:
                return convert(value, possible, name)
            except OperantError as error:
                reasons.append(str(error))
        raise OperantError(reasons[0] + (", or none" if type(None) in inside else ""))
    if origin is tuple:
        return _to_tuple(value, inside, name)
    if origin in (dict, Mapping) or (inspect.isclass(kind) and issubclass(kind, Mapping)):
        require(isinstance(value, Mapping), f"{name}={shown(value)}: give a mapping")
        of_value = inside[1] if len(inside) == 2 else Any
        return {key: x if of_value is Any else convert(x, of_value, f"{name}.{key}") for key, x in value.items()}
    many = kind if kind in (list, tuple, set, frozenset) else origin
    if origin is list or (isinstance(value, str) and many in MANY):
        make = many if many in (tuple, set, frozenset) else list
        return make(_to_tuple(value, (inside[0] if inside else Any, ...), name))
    if origin is typing.Literal:
        same = [one for one in inside if value == one or (isinstance(value, str) and value == str(one))]
        require(same, f"{name}={shown(value)}: it must be {' or '.join(map(str, inside))}")
        return same[0]
    if kind is Path and isinstance(value, str):
        return Path(value)
    if isinstance(kind, type) and kind in _DESCRIPTIONS:
        made = _to_scalar(value, kind)
        require(made is not None, f"{name}={shown(value)}: it must be {_DESCRIPTIONS[kind]}")
        return made
    return value


def is_none(value: object) -> bool:
    """Whether the value is None, or the text none or null."""
    return value is None or (isinstance(value, str) and value.lower() in ("none", "null"))


def _to_tuple(value: object, kinds: tuple[Any, ...], name: str) -> tuple:
    if isinstance(value, str):
        value = value.split(",") if value else []
    parts = list(value) if isinstance(value, (list, tuple)) else [value]
    if kinds[-1] is Ellipsis:
        return tuple(convert(p, kinds[0], name) for p in parts)
    require(len(parts) == len(kinds), f"{name}={shown(value)}: give {len(kinds)} values")
    return tuple(convert(p, k, name) for p, k in zip(parts, kinds, strict=True))


_DESCRIPTIONS = {
    bool: "true or false",
    int: "a whole number of at most 64 bits",
    float: f"a finite number (up to {LARGEST_FLOAT:g}, as float32 has)",
    str: "text",
}


def _to_scalar(value: object, kind: type) -> bool | int | float | str | None:
    """The value as bool, int, float or str; None if it is not one."""
    if kind is str:
        return value if isinstance(value, str) else None
    if kind is bool:
        text = str(value).lower() if isinstance(value, str) or (isinstance(value, int) and value in (0, 1)) else ""
        return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(text)
    if isinstance(value, (bool, bytes, bytearray)):
        return None
    try:
        # An integer is not read through a float, which holds no more than 53 bits.
        exact = isinstance(value, int) or (isinstance(value, str) and value.strip().lstrip("+-").isdecimal())
        number = int(value) if kind is int and exact else float(value)
        if kind is float:
            return number if abs(number) <= LARGEST_FLOAT else None
        return int(number) if number == int(number) and -(2**63) <= number < 2**63 else None
    except (TypeError, ValueError, OverflowError):
        return None


class Theirs(NamedTuple):
    """An option of another system."""

    ours: str = ""
    """Our options, separated by commas; empty: there is none."""
    note: str = ""
    """What differs, or what to do instead."""
    default: str = ""
    """Its default there, for the page."""


def _read(text: str) -> dict[str, dict[str, Theirs]]:
    """From "# TABLE: what it is" and lines "their name | ours | note | default"."""
    tables: dict[str, dict[str, Theirs]] = {}
    for line in text.splitlines():
        if line.startswith("# "):
            tables[line[2:].partition(":")[0]] = table = {}
        else:
            name, *cells = (cell.strip() for cell in line.split("|"))
            table[name] = Theirs(*cells)
    return tables


_TABLES = _read((Path(__file__).parent / "other_names.txt").read_text(encoding="utf-8"))
PPO_CONFIG, TRL, TRANSFORMERS, GENERATION, OPENRLHF, TRLX = _TABLES.values()
SYSTEMS = {
    "TRL": PPO_CONFIG | TRL,
    "transformers": TRANSFORMERS,
    "transformers' generate": GENERATION,
    "OpenRLHF": OPENRLHF,
    "trlX": TRLX,
}


def _named(name: str) -> dict[str, Theirs]:
    """The options of other systems that have this name, by system."""
    return {system: table[name] for system, table in SYSTEMS.items() if name in table}


def ours(name: str) -> list[str]:
    """Our options for one that has this name in another system."""
    return next((theirs.ours.split(", ") for theirs in _named(name).values()), [])


def note(name: str) -> str:
    """What is said beside our option for one that has this name in another system."""
    return next((theirs.note.replace("`", "") for theirs in _named(name).values()), "")


def answer(name: str) -> str:
    """The rest of a sentence about an option that has this name in another system; empty if none has it."""
    if not (found := _named(name)):
        return ""
    here, more = ours(name), note(name)
    text = f"here it is {' or '.join(here)}{f' ({more})' if more else ''}" if here[0] else more
    return f"that is its name in {' and '.join(found)}; {text}"
