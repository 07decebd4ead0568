"""Options of a dataclass with the values that they may have.

@dataclass(frozen=True)
class RateOptions:
    lr: float = bounded(1e-5, at_least=0, at_most=10)

    def __post_init__(self) -> None:
        check_bounds(self, "optimizer")      # optimizer.lr=11: it must be in [0, 10]
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from operant.types import OperantError, shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Value = TypeVar("Value")


def bounded(
    default: Value,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    choices: Iterable[object] = (),
    fits: Callable[[Any], object] | None = None,
    rule: str = "",
) -> Value:
    """A field with that default. None is never refused.

    fits: tells whether a value is one that the option may have, where no bound does. rule: the words for it, which
    follow "it must be"; by default made of the bounds.
    """
    allowed = tuple(choices)
    low, high = (above if at_least is None else at_least), (below if at_most is None else at_most)

    def good(value: Any) -> bool:
        if allowed or fits:
            return value in allowed if allowed else bool(fits and fits(value))
        enough = low is None or (value > low if at_least is None else value >= low)
        return enough and (high is None or (value < high if at_most is None else value <= high))

    if not rule and allowed:
        rule = " or ".join(filter(None, [", ".join(map(str, allowed[:-1])), str(allowed[-1])]))
    elif not rule and high in (None, math.inf):
        rule = f"above {above:g}" if at_least is None else f"at least {at_least:g}"
    elif not rule and low is None:
        rule = f"below {below:g}" if at_most is None else f"at most {at_most:g}"
    elif not rule:
        rule = f"in {'(' if at_least is None else '['}{low:g}, {high:g}{')' if at_most is None else ']'}"
    return field(default=default, metadata={"good": good, "rule": rule})


def at_least_one(count: int | str) -> bool:
    """Whether an option is a number from 1, or `auto`."""
    return count >= 1 if isinstance(count, int) else count == "auto"


def rules(made: object) -> dict[str, str]:
    """The bounds of the options of a dataclass by name, in words: `at least 1`, `constant, linear or cosine`."""
    return {f.name: f.metadata["rule"] for f in (fields(made) if is_dataclass(made) else ()) if f.metadata}


def check_bounds(made: "DataclassInstance", group: str = "") -> None:
    """Check the fields of an instance of a dataclass of options. group: of its options, for the sentence."""
    for f in fields(made):
        value = getattr(made, f.name)
        if f.metadata and value is not None and not f.metadata["good"](value):
            name = f"{group}.{f.name}" if group else f.name
            optional = "none" not in f.metadata["rule"] and type(None) in get_args(get_type_hints(type(made))[f.name])
            rule = f"{f.metadata['rule']}{', or none' if optional else ''}"
            raise OperantError(f"{name}={shown(value)}: it must be {rule}")
