"""The combinations of a sweep: an option with several values is an axis, and a point has one value for each axis.

    axes, fixed = divide({"kl.coef": "0,0.1", "seed": "1,2,3", "steps": "40"}, recipe="letters")
    [point.name for point in grid(axes)]      # ["kl.coef=0,seed=1", "kl.coef=0,seed=2", ...]
    draw(axes, 20, seed=0)                    # random search; the same seed draws the same 20

Values stay text, because they name folders and are passed to other processes. Each is written in one canonical form, so
that 0.10 is 0.1.
"""

import itertools
import math
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from operant import options as named
from operant.runs.config import chosen_options, load_recipe, with_short_names
from operant.sampling import counter
from operant.types import OperantError, require

LONGEST = 120
"""Maximum length of a folder's name in characters; a longer one is cut and ends in a hash."""
_TRIES = 1000
"""Draws for each combination that is wanted, before `draw` gives up."""
_DIGITS = 3
"""Significant digits of a number drawn from a range, so that names stay readable."""


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, drawn log-uniformly if they are positive and span a decade or more, else uniformly.

    whole: draw integers only.
    """

    low: float
    high: float
    whole: bool

    @property
    def text(self) -> str:
        """The range as text: `1e-05..0.001`."""
        return f"{number(self.low)}..{number(self.high)}"

    def at(self, share: float) -> str:
        """The quantile of `share`, 0 <= share < 1, as text."""
        low, high = (self.low - 0.5, self.high + 0.5) if self.whole else (self.low, self.high)
        if self.low > 0 and self.high >= 10 * self.low:
            value = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        else:
            value = low + share * (high - low)
        value = round(value) if self.whole else float(f"{value:.{_DIGITS}g}")
        return number(min(max(value, self.low), self.high))


@dataclass(frozen=True)
class Axis:
    """An option and its possible values: a list, or a range to draw from."""

    name: str
    values: tuple[str, ...] | Range

    @property
    def text(self) -> str | list[str]:
        """The values as sweep.yaml stores them."""
        return self.values.text if isinstance(self.values, Range) else list(self.values)

    def at(self, share: float) -> str:
        """The value at `share` of the way through the possible ones, 0 <= share < 1."""
        if isinstance(self.values, Range):
            return self.values.at(share)
        return self.values[int(share * len(self.values))]


@dataclass(frozen=True)
class Point:
    """One value for each axis: `Point({"kl.coef": "0.1", "learner.seed": "1"}).name == "kl.coef=0.1,seed=1"`."""

    values: Mapping[str, str]

    @property
    def name(self) -> str:
        """The name of its folder: no slashes, at most `LONGEST` characters, different for different points."""
        pairs = sorted((name.removeprefix("learner."), value.replace(",", "+")) for name, value in self.values.items())
        full = ",".join(f"{name}={value}" for name, value in pairs)
        safe = re.sub(r"[^\w.,=+-]+", "-", full, flags=re.ASCII).strip(".")
        if safe == full and len(safe) <= LONGEST:
            return safe
        digest = blake2b(full.encode("utf-8", errors="replace"), digest_size=3).hexdigest()
        return f"{safe[: LONGEST - len(digest) - 1]}-{digest}"


def divide(options: Mapping[str, object], recipe: str | None = None) -> tuple[list[Axis], dict[str, str]]:
    """Split options into axes and those with one value, both by full name.

    options: values as text; True for an option without a value.
    """
    # The names of the options depend on the algorithm and the named parts; of several, the first one counts.
    first = {name: named.read(split(str(text))[0]) for name, text in options.items()}
    schema = chosen_options(first, recipe).schema
    _, options = with_short_names(load_recipe(recipe) if recipe else {}, options)
    kinds = named.kinds(schema)
    axes, fixed = [], {}
    for name, value in named.resolve(schema, options).items():
        text, kind = "true" if value is True else str(value).strip(), kinds[name]
        items = split(text)
        if ends := _range(name, text, kind):
            axes.append(Axis(name, ends))
        elif len(items) == 1 or (_is_tuple(kind) and not all(item.startswith("[") for item in items)):
            fixed[name] = canonical(name, text, kind)
        else:
            axes.append(Axis(name, tuple(dict.fromkeys(canonical(name, item, kind) for item in items))))
    require(axes, "nothing to sweep: give an option several values, as in --kl.coef 0,0.1,0.5")
    return axes, fixed


def _range(name: str, text: str, kind: object) -> Range | None:
    """Read `low..high` for an option that takes numbers; None for any other text."""
    low, dots, high = text.partition("..")
    if not dots or not {int, float} & {kind, *typing.get_args(kind)}:
        return None
    whole = float not in (kind, *typing.get_args(kind))
    ends = [named.convert(end, int if whole else float, name) for end in (low, high)]
    require(ends[0] < ends[1], f"{name}={text}: a range goes from a lower to a higher number")
    return Range(ends[0], ends[1], whole)


def _is_tuple(kind: object) -> bool:
    """Whether an option of this type takes several numbers at once."""
    inside = typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)
    return any(typing.get_origin(one) is tuple for one in inside)


def split(text: str) -> list[str]:
    """Split at the commas outside brackets: `split("[0.9,0.95],[0.9,0.99]") == ["[0.9,0.95]", "[0.9,0.99]"]`."""
    items, depth = [""], 0
    for sign in text:
        depth += (sign in "[{(") - (sign in ")}]")
        if sign == "," and depth <= 0:
            items.append("")
        else:
            items[-1] += sign
    return [item.strip() for item in items]


def canonical(name: str, text: str, kind: object) -> str:
    """Return a value in its canonical form, without brackets around it."""
    open_until = (text[:end].count("[") > text[:end].count("]") for end in range(1, len(text)))
    if text[:1] + text[1:][-1:] == "[]" and all(open_until):  # and not [INST] {text} [/INST]
        text = text[1:-1].strip()
    require(text or _is_tuple(kind), f"{name} has an empty value: put a single comma between two values")
    value = named.convert(named.read(text), kind, name)
    return text if isinstance(value, Mapping) else written(value)


def written(value: object) -> str:
    """A value as text that the command line accepts."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ",".join(written(part) for part in value)
    return number(value) if isinstance(value, (int, float)) else str(value)


def number(value: float) -> str:
    """The shortest text for a number: 2, 0.02, 1e-05."""
    return repr(value).removesuffix(".0")


def grid(axes: Sequence[Axis]) -> list[Point]:
    """List every combination; the last axis changes fastest."""
    for axis in axes:
        if isinstance(axis.values, Range):
            raise OperantError(f"{axis.name}={axis.values.text} is a range: give the number of draws with --random N")
    listed = [axis.values for axis in axes if not isinstance(axis.values, Range)]
    return [Point(dict(zip([axis.name for axis in axes], values))) for values in itertools.product(*listed)]


def draw(axes: Sequence[Axis], count: int, seed: int = 0) -> list[Point]:
    """Draw `count` different combinations. A larger count draws the same ones first."""
    drawn: dict[tuple[str, ...], None] = {}
    for attempt in range(count * _TRIES):
        if len(drawn) == count:
            break
        shares = [(counter(seed, "sweep", attempt, axis.name) >> 11) * 2.0**-53 for axis in axes]
        drawn[tuple(axis.at(share) for axis, share in zip(axes, shares))] = None
    else:
        raise OperantError(f"--random {count}: the axes have only {len(drawn)} different combinations; draw fewer")
    return [Point(dict(zip([axis.name for axis in axes], values))) for values in drawn]
