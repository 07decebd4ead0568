"""The methods by name. Each is a file of this package with a choice of parts, default options and presets.

To add a method, add a file and its entry in `METHODS`. No code outside this package asks which method is running.
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
    "applicable_options",
    "find",
    "left_out_message",
    "preset",
]

METHODS = {"ppo": ppo, "grpo": grpo, "rloo": rloo, "sft": sft}
"""The module of each method."""
ALGORITHMS: dict[str, Algorithm] = {name: module.ALGORITHM for name, module in METHODS.items()}
"""The methods by name."""
DEFAULT = "ppo"
"""The algorithm of a run that does not choose one."""
PRESETS: dict[str, dict[str, object]] = {name: own for m in METHODS.values() for name, own in m.PRESETS.items()}
"""Presets by name, each a set of option values: those of other systems, and `trunk`, which trains the top sixth of the
layers and caches the hidden states of the others. Presets can be combined: preset="trl,trunk"."""
PRESETS["trunk"] = {"model.train_layers": "auto"}


def preset(name: str | None) -> dict[str, object]:
    """The options of a preset, or of several separated by commas, where later ones replace earlier ones.

    Raises: OperantError for an unknown preset, with the nearest name.
    """
    names = [part.strip() for part in str(name or "").split(",") if part.strip()]
    return {k: v for part in names for k, v in _lookup(PRESETS, part, "preset").items()}


def find(name: str) -> Algorithm:
    """The algorithm of that name. Raises: OperantError for an unknown one, with the nearest name."""
    return _lookup(ALGORITHMS, name, "algorithm")


def applicable_options(
    options: Mapping[str, Any], name: str, known: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Split the options of a recipe or preset into those that apply to algorithm `name`, and the names of the others.

    `known`: the names of the options that the algorithm has. If the recipe was written for another algorithm, options
    for which either of the two has a default of its own do not apply either.
    """
    written_for = options.get("algorithm") or DEFAULT
    own = () if written_for == name else (*find(name).defaults, *find(str(written_for)).defaults)
    applicable = {
        k: v for k, v in options.items() if k in known and k not in own and (k != "algorithm" or written_for == name)
    }
    return applicable, sorted(k for k in options if k not in applicable and k != "algorithm")


def left_out_message(source: str, names: Sequence[str], algorithm: str) -> str:
    """The message about options of a recipe or preset that do not apply to the chosen algorithm."""
    return f"{source} was written for another method; left out with algorithm={algorithm}: {', '.join(names)}"


def _lookup(table: Mapping, name: str, what: str):
    """The entry `name` of a table of `what`s. Raises: OperantError for an unknown one, with the nearest name."""
    if not isinstance(name, str) or name not in table:
        near = difflib.get_close_matches(str(name)[:100], table, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(table)}"
        raise OperantError(f"{what} {shown(name)} is unknown; {hint}")
    return table[name]
