"""The methods by name, each a file of this package: a choice of parts, its defaults and its presets.

A new method is a new file and its name in `METHODS`. Nothing outside this package asks which method is running.
"""

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from operant.algorithms import grpo, ppo, rloo, sft
from operant.algorithms.base import Algorithm, Needs
from operant.types import OperantError, shown

__all__ = [
    "ALGORITHMS",
    "DEFAULT",
    "METHODS",
    "PRESETS",
    "Algorithm",
    "Needs",
    "find",
    "fitting",
    "left_out_message",
    "preset",
]

METHODS = {"ppo": ppo, "grpo": grpo, "rloo": rloo, "sft": sft}
"""The file of each method."""
ALGORITHMS: dict[str, Algorithm] = {name: module.ALGORITHM for name, module in METHODS.items()}
DEFAULT = "ppo"
"""The algorithm of a run that names none."""
PRESETS: dict[str, dict[str, object]] = {name: own for m in METHODS.values() for name, own in m.PRESETS.items()}
PRESETS["trunk"] = {"model.train_layers": "auto"}
"""Option values by name: those of other systems, and `trunk`, which trains the top sixth of the layers and caches the
hidden states of the others. Presets combine: preset="trl,trunk"."""


def preset(name: str | None) -> dict[str, object]:
    """The options of a preset, or of several by comma, later over earlier. Raises: OperantError with the nearest."""
    names = [part.strip() for part in str(name or "").split(",") if part.strip()]
    return {k: v for part in names for k, v in _row(PRESETS, part, "preset").items()}


def find(name: str) -> Algorithm:
    """The row of that name. Raises: OperantError with the nearest."""
    return _row(ALGORITHMS, name, "algorithm")


def fitting(options: Mapping[str, Any], name: str, known: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """What of a recipe or preset goes with algorithm `name`, whose options are `known`; and the names left out.

    Options of another method are those that this one does not have; and, where the recipe was written for another,
    those that either method sets for itself.
    """
    theirs = options.get("algorithm") or DEFAULT
    own = () if theirs == name else (*find(name).defaults, *find(str(theirs)).defaults)
    kept = {k: v for k, v in options.items() if k in known and k not in own and (k != "algorithm" or theirs == name)}
    return kept, sorted(k for k in options if k not in kept and k != "algorithm")


def left_out_message(source: str, names: Sequence[str], algorithm: str) -> str:
    """A line about options of a recipe or preset that do not go with the chosen method."""
    return f"{source} was written for another method; left out with algorithm={algorithm}: {', '.join(names)}"


def _row(table: Mapping, name: str, what: str):
    if not isinstance(name, str) or name not in table:
        near = difflib.get_close_matches(str(name)[:100], table, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(table)}"
        raise OperantError(f"{what} {shown(name)} is unknown; {hint}")
    return table[name]
