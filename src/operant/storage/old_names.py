"""Names of options in earlier versions, so that run folders and sweeps written by those versions can be read."""

from collections.abc import Mapping
from typing import Any

from operant.types import OperantError, require

SCHEMA = 3
"""The current schema of names, stored as `schema` in `config.yaml`, `sweep.yaml` and each record of `changes.jsonl`;
without it the schema is 1."""
RENAMED: dict[int, dict[str, str]] = {
    1: {"guests": "isolation"},
    2: {"ahead": "rollouts_ahead", "carry": "partial_rollout_tokens"},
}
"""By schema: the full name of an option or group, and its name in the next schema."""


def current(config: Mapping[str, object], where: object) -> dict[str, object]:
    """The options of a file under their current names, without `schema`.

    `where` names the file in errors.
    """
    options: dict[str, Any] = dict(config)
    schema = options.pop("schema", 1)
    good = type(schema) is int and 1 <= schema <= SCHEMA
    require(good, f"{where} has schema {schema!r}, and this operant reads 1 to {SCHEMA}: use the version that wrote it")
    for version in range(schema, SCHEMA):
        for old, new in RENAMED[version].items():
            _rename(options, old, new, where)
    # 10,000 was the default of kl.horizon, which all runs stored beside the controller, also one that reads none.
    group = options.get("kl")
    for part, before in ((options, "kl."), (group if isinstance(group, Mapping) else {}, "")):
        if part.get(f"{before}horizon") == 10_000 and part.get(f"{before}control", "adaptive") != "adaptive":
            kept = {name: value for name, value in part.items() if name != f"{before}horizon"}
            options = kept if before else options | {"kl": kept}
    return options


def _rename(options: dict[str, object], old: str, new: str, where: object) -> None:
    """Rename an option or a group in place, written as `group.name` or as a mapping inside its group."""
    inner = {f"{name}.{key}" for name, value in options.items() if isinstance(value, Mapping) for key in value}
    names = {*map(str, options), *inner}
    for name in sorted(names):
        today = new + name.removeprefix(old)
        if (name == old or name.startswith(f"{old}.")) and today in names:
            raise OperantError(f"{where} has both {name!r} and {today!r}, its current name: remove one of them")
    for full in [name for name in options if name == old or str(name).startswith(f"{old}.")]:
        options[new + full.removeprefix(old)] = options.pop(full)
    group, _, name = old.rpartition(".")
    inside = options.get(group)
    if group and isinstance(inside, Mapping) and name in inside:
        options[group] = {new.rpartition(".")[2] if key == name else key: value for key, value in inside.items()}


def former(options: Mapping[str, object], schema: int) -> dict[str, object]:
    """Options by full name, under the names that they had in an earlier schema."""
    earlier = dict[str, object]()
    for name, value in options.items():
        for version in reversed(range(schema, SCHEMA)):
            for old, new in RENAMED[version].items():
                if name == new or name.startswith(f"{new}."):
                    name = old + name.removeprefix(new)
        earlier[name] = value
    return earlier


def refuse(options: Mapping[str, object]) -> None:
    """Raises: OperantError for an option that is set by an old name, with the current one."""
    renamed = [pair for table in RENAMED.values() for pair in table.items()]
    for name in map(str, options):
        for old, new in renamed:
            if name == old or name.startswith(f"{old}."):
                raise OperantError(f"option {name!r} is called {new + name.removeprefix(old)!r} now")
