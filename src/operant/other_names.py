"""The names that options have in TRL, transformers and OpenRLHF, for errors and for docs/from-trl.md, from
`other_names.txt`.

answer("learning_rate")    # "that is its name in TRL and transformers; here it is optimizer.lr"
"""

from pathlib import Path
from typing import NamedTuple


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
PPO_CONFIG, TRL, TRANSFORMERS, GENERATION, OPENRLHF = _TABLES.values()
SYSTEMS = {
    "TRL": PPO_CONFIG | TRL,
    "transformers": TRANSFORMERS,
    "transformers' generate": GENERATION,
    "OpenRLHF": OPENRLHF,
}


ALIASES = {"model": "policy", "ahead": "rollouts_ahead", "carry": "partial_rollout_tokens"}
"""Second names of options, which are accepted for them."""


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
    here = f"here it is {' or '.join(ours(name))}" if ours(name)[0] else note(name)
    return f"that is its name in {' and '.join(found)}; {here}" + (
        f" ({note(name)})" if ours(name)[0] and note(name) else ""
    )
