"""What a sweep runs: options with several values are axes, and a point has one value of each.

    axes, fixed = divide({"kl.coef": "0,0.1", "seed": "1,2,3", "steps": "40"}, recipe="letters")
    [point.name for point in grid(axes)]      # ["kl.coef=0,seed=1", "kl.coef=0,seed=2", ...]
    draw(axes, 20, seed=0)                    # random search: always the same 20

Values stay texts, as they were typed but in one spelling (0.10 is 0.1), because they name folders and are handed to
other processes.
"""

import itertools
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from operant import options as named
from operant.runs.config import config_schema, load_recipe
from operant.sampling import counter
from operant.types import OperantError

LONGEST = 120
"""Characters of a folder's name; what is longer is cut and ends in a hash."""
_TRIES = 1000
_DIGITS = 3
"""Of a number drawn from a range: names stay readable."""


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`: log-uniform over a decade or more of positive numbers, else uniform."""

    low: float
    high: float
    whole: bool

    @property
    def text(self) -> str:
        """As it is written: `1e-05..0.001`."""
        return f"{number(self.low)}..{number(self.high)}"

    def at(self, share: float) -> str:
        """The number below which `share` of the draws lie, 0 <= share < 1."""
        low, high = (self.low - 0.5, self.high + 0.5) if self.whole else (self.low, self.high)
        if self.low > 0 and self.high >= 10 * self.low:
            value = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        else:
            value = low + share * (high - low)
        value = round(value) if self.whole else float(f"{value:.{_DIGITS}g}")
        return number(min(max(value, self.low), self.high))


@dataclass(frozen=True)
class Axis:
    """One option and what it may be: listed values, or a range to draw from."""

    name: str
    values: tuple[str, ...] | Range

    @property
    def text(self) -> str | list[str]:
        """For sweep.yaml."""
        return self.values.text if isinstance(self.values, Range) else list(self.values)


@dataclass(frozen=True)
class Point:
    """One value of each axis: `Point({"kl.coef": "0.1", "learner.seed": "1"}).name == "kl.coef=0.1,seed=1"`."""

    values: Mapping[str, str]

    @property
    def name(self) -> str:
        """Its folder: no slashes, at most `LONGEST` characters, different for different points."""
        said = sorted((short(name), value.replace(",", "+")) for name, value in self.values.items())
        full = ",".join(f"{name}={value}" for name, value in said)
        safe = re.sub(r"[^\w.,=+-]+", "-", full, flags=re.ASCII).strip(".")
        if safe == full and len(safe) <= LONGEST:
            return safe
        digest = blake2b(full.encode("utf-8", errors="replace"), digest_size=3).hexdigest()
        return f"{safe[: LONGEST - len(digest) - 1]}-{digest}"


def short(name: str) -> str:
    """The name of an option as a person says it: seed, kl.coef."""
    return name.removeprefix("learner.")


# --- from the command line --------------------------------------------------------------------------------------------


def divide(given: Mapping[str, Any], recipe: str | None = None) -> tuple[list[Axis], dict[str, str]]:
    """Options into axes and fixed ones, by full name. given: texts as typed; True for an option without a value.

    Raises: OperantError for an unknown option, a value of a wrong type, or where nothing has several values.
    """
    schema = config_schema(_algorithm(given, recipe))
    kinds = named.kinds(schema)
    axes, fixed = [], {}
    for name, text in named.resolve(schema, given).items():
        found = _read(name, "true" if text is True else str(text).strip(), kinds[name])
        if isinstance(found, Axis):
            axes.append(found)
        else:
            fixed[name] = found
    if not axes:
        raise OperantError("there is nothing to sweep: give an option several values, as in --kl.coef 0,0.1,0.5")
    return axes, fixed


def _algorithm(given: Mapping[str, Any], recipe: str | None) -> str:
    """The one whose options are meant; where several are compared, the first."""
    own = (load_recipe(recipe) if recipe else {}).get("algorithm", "ppo")
    return split(str(given.get("algorithm", own)))[0]


def _read(name: str, text: str, kind: Any) -> Axis | str:
    """An axis, or the one value."""
    if ends := _range(name, text, kind):
        return Axis(name, ends)
    items = split(text)
    listed = all(item.startswith("[") for item in items)
    if len(items) == 1 or (_is_tuple(kind) and not listed):
        return spelt(name, unwrapped(text), kind)
    return Axis(name, tuple(dict.fromkeys(spelt(name, unwrapped(item), kind) for item in items)))


def _range(name: str, text: str, kind: Any) -> Range | None:
    low, dots, high = text.partition("..")
    if not dots or not {int, float} & {kind, *typing.get_args(kind)}:
        return None
    whole = float not in (kind, *typing.get_args(kind))
    ends = [named.convert(end, int if whole else float, name) for end in (low, high)]
    if ends[0] >= ends[1]:
        raise OperantError(f"{name}={text}: a range goes from a lower to a higher number")
    return Range(ends[0], ends[1], whole)


def _is_tuple(kind: Any) -> bool:
    inside = typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)
    return any(typing.get_origin(one) is tuple for one in inside)


def split(text: str) -> list[str]:
    """At the commas that stand in no bracket: `split("[0.9,0.95],[0.9,0.99]") == ["[0.9,0.95]", "[0.9,0.99]"]`."""
    items, depth = [""], 0
    for sign in text:
        depth += (sign in "[{(") - (sign in ")}]")
        if sign == "," and depth <= 0:
            items.append("")
        else:
            items[-1] += sign
    return [item.strip() for item in items]


def unwrapped(text: str) -> str:
    """Without the brackets that only keep its commas together."""
    return text[1:-1].strip() if text.startswith("[") and text.endswith("]") else text


def spelt(name: str, text: str, kind: Any) -> str:
    """A value in its one spelling. Raises: OperantError for a wrong type, or for nothing at all."""
    if not text and not _is_tuple(kind):
        raise OperantError(f"{name} has an empty value: write its values with one comma between two")
    made = named.convert(named.read(text), kind, name)
    return text if isinstance(made, Mapping) else written(made)


def written(made: Any) -> str:
    """A value as the command line takes it."""
    if made is None or isinstance(made, bool):
        return str(made).lower()
    if isinstance(made, (list, tuple)):
        return ",".join(written(part) for part in made)
    return number(made) if isinstance(made, (int, float)) else str(made)


def number(value: float) -> str:
    """The shortest text that means this number: 2, 0.02, 1e-05."""
    return repr(value).removesuffix(".0")


# --- points -----------------------------------------------------------------------------------------------------------


def grid(axes: Sequence[Axis]) -> list[Point]:
    """Every combination; the last axis changes fastest. Raises: OperantError for a range: it has no end of values."""
    for axis in axes:
        if isinstance(axis.values, Range):
            raise OperantError(f"{axis.name}={axis.values.text} is a range: say with --random N how many to draw")
    listed = [axis.values for axis in axes if not isinstance(axis.values, Range)]
    return [_point(axes, values) for values in itertools.product(*listed)]


def draw(axes: Sequence[Axis], count: int, seed: int = 0) -> list[Point]:
    """`count` different combinations. The first ten of twenty are the ten of ten, whatever was run before.

    Raises: OperantError where there are not so many.
    """
    made: dict[tuple[str, ...], None] = {}
    for number_of_draw in range(count * _TRIES):
        if len(made) == count:
            break
        made[tuple(_drawn(axis, seed, number_of_draw) for axis in axes)] = None
    else:
        raise OperantError(f"--random {count}: the axes have only {len(made)} different combinations; ask for fewer")
    return [_point(axes, values) for values in made]


def _point(axes: Sequence[Axis], values: Sequence[str]) -> Point:
    return Point(dict(zip((axis.name for axis in axes), values)))


def _drawn(axis: Axis, seed: int, number_of_draw: int) -> str:
    share = (counter(seed, "sweep", number_of_draw, axis.name) >> 11) * 2.0**-53
    if isinstance(axis.values, Range):
        return axis.values.at(share)
    return axis.values[int(share * len(axis.values))]
