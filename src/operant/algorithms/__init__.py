"""The methods by name. Each is a file of this package with a choice of parts and default options.

To add a method, add a file and its entry in `METHODS`. No code outside this package asks which method is running.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path

from operant.algorithms.base import Algorithm, Needs
from operant.import_by_name import Lazy, Table, nearest
from operant.options import read_mapping
from operant.types import OperantError, shown

__all__ = [
    "ALGORITHMS",
    "DEFAULT",
    "METHODS",
    "Algorithm",
    "Needs",
    "applicable_options",
    "find",
    "left_out_message",
    "preset",
    "presets",
]

METHODS = {
    name: f"operant.algorithms.{name.replace('++', '_pp').replace('-', '_')}"
    for name in (
        "ppo a2c trpo nlpo reinforce coderl grpo rloo dapo dr-grpo gspo cispo sapo dppo opo maxrl pass-at-k vapo gigpo "
        "rejection sft reward-model outcome-critic dpo online-dpo kto distill decision ilql soft_q reinforce++ "
        "reinforce++-baseline"
    ).split()
}
"""The module of each method, which is imported when the method is asked for."""
ALGORITHMS = Lazy({name: f"{module}:ALGORITHM" for name, module in METHODS.items()})
"""The methods by name."""
TABLE = Table("algorithm", "operant.algorithms", ALGORITHMS)
"""Another package's entry is an `Algorithm`, or a module with one of the name `ALGORITHM`."""
OF_RL4LMS = Lazy({"presets": "operant.algorithms.rl4lms:PRESETS"})
"""A table of RL4LMs' own values, read when a preset is asked for."""
DEFAULT = "ppo"
"""The algorithm of a run that does not choose one."""


@cache
def presets() -> dict[str, dict[str, object]]:
    """Presets by name, each a set of option values, as in `presets.yaml`. They can be combined: preset="trl,trunk"."""
    return read_mapping(Path(__file__).with_name("presets.yaml")) | OF_RL4LMS["presets"]


def preset_names() -> str:
    """The presets, for errors and help; those of RL4LMs as one, with the page that lists them."""
    own = [name for name in presets() if not name.startswith("rl4lms-")]
    return ", ".join([*own, "rl4lms-TASK-METHOD (docs/other-names.md)"])


def preset(name: str | None) -> dict[str, object]:
    """The options of a preset, or of several separated by commas, where later ones replace earlier ones.

    Raises: OperantError for an unknown preset, with the nearest name.
    """
    chosen: dict[str, object] = {}
    for part in (part.strip() for part in str(name or "").split(",")):
        if part and part not in presets():
            raise OperantError(
                f"preset {shown(part)} is unknown{nearest(part, [*presets()]) or '.'} Names: {preset_names()}"
            )
        chosen |= presets()[part] if part else {}
    return chosen


def find(name: "str | Algorithm") -> Algorithm:
    """The algorithm of a name, of an installed package's name, or of `module:object`; an `Algorithm` is itself.

    Raises: OperantError for an unknown one, with the nearest name, or for an object that is no algorithm.
    """
    found = name if isinstance(name, Algorithm) else TABLE.find(name)
    found = getattr(found, "ALGORITHM", found)
    if not isinstance(found, Algorithm):
        raise OperantError(f"algorithm {shown(name)} is a {type(found).__name__}: it must be an operant.Algorithm")
    return found


def applicable_options(
    options: Mapping[str, object], name: str, known: Collection[str]
) -> tuple[dict[str, object], list[str]]:
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


def left_out_message(source: str, names: Sequence[str], chosen: str) -> str:
    """The message about options of a recipe or preset that do not apply with `chosen`, such as "algorithm=grpo"."""
    return f"{source} was written for another choice; left out with {chosen}: {', '.join(names)}"
