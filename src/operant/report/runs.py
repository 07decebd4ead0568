"""Runs side by side: read from their folders, and brought into groups that differ in nothing but the seed.

runs = [read_run(folder) for folder in expand(["runs/letters-sweep"])]
groups = grouped(runs)        # [Group("kl.coef 0", [run, run, run]), Group("kl.coef 0.02", ...), ...]
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from operant.diagnosis import Finding, History, diagnose, read_history
from operant.diagnosis.history import RECENT
from operant.metrics import collect
from operant.options import read_mapping
from operant.types import OperantError

FILE = "sweep.yaml"
"""What makes a folder of runs a sweep."""
SEED = "learner.seed"
UNIMPORTANT = frozenset({"checkpoint_minutes", "keep", "samples_every", "trackers", "learner.device"})
"""Options that change nothing of what is learnt."""
_ABSENT = "–"


@dataclass(frozen=True)
class Told:
    """One run as far as it is known."""

    name: str
    folder: Path
    history: History
    findings: Sequence[Finding]
    held_out: Mapping[str, Any]
    """Of the replies to held-out tasks after training: reward, kl, empty, top_word, word, words; empty without them."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Options by full name."""
        return self.history.config

    @property
    def before(self) -> float | None:
        """Mean reward on held-out tasks before training; else that of the first step."""
        held = (self.history.evaluation.get("before") or {}).get("mean")
        return held if held is not None else self.history.first("reward/mean")

    def final(self, name: str, held_out: bool) -> Any:
        """A number at the end, from the held-out tasks, or from the mean of the last steps."""
        if held_out:
            return self.held_out.get(name)
        metric = {"reward": "reward/mean", "kl": "kl/per_reply"}.get(name, f"text/{name}")
        return self.history.recent(metric, RECENT)


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but the seed."""

    label: str
    """What tells it from the others: `kl.coef 0.1`."""
    values: Mapping[str, Any]
    runs: Sequence[Told]


# --- reading ----------------------------------------------------------------------------------------------------------


def is_sweep(place: str | Path) -> bool:
    """Whether a folder holds the runs of a sweep."""
    return (Path(place) / FILE).is_file()


def expand(places: Sequence[str | Path]) -> list[Path]:
    """Run folders, a sweep standing for its runs. Raises: OperantError for a folder that is neither."""
    found: list[Path] = []
    for place in map(Path, places):
        inner = sorted(path.parent for path in place.glob("*/config.yaml"))
        if (place / "config.yaml").is_file():
            found.append(place)
        elif is_sweep(place) and inner:
            found += inner
        elif is_sweep(place):
            raise OperantError(f"{place} is a sweep in which no run has begun; let it begin, then ask again")
        else:
            near = f"; the runs in it: {', '.join(p.name for p in inner[:5])}" if inner else ""
            raise OperantError(f"{place} is no run folder: it has no config.yaml{near}")
    return list(dict.fromkeys(found))


def read_run(folder: Path, name: str | None = None) -> Told:
    """Raises: OperantError where a file of it cannot be read."""
    history = read_history(folder)
    findings = diagnose(history) if history.metrics else []
    return Told(name or folder.name, folder, history, findings, _held_out(history.evaluation.get("after")))


def _held_out(after: Mapping[str, Any] | None) -> dict[str, Any]:
    if not after or after.get("mean") is None:
        return {}
    texts = [str(reply.get("reply") or "") for reply in after.get("replies", [])]
    told = {"reward": after["mean"], "kl": after.get("kl")}
    if texts:
        told |= {name: collect.of_texts(texts).result().get(f"text/{name}") for name in ("empty", "top_word")}
        told["word"] = collect.top_word(texts)[0]
    return told


def read_runs(places: Sequence[str | Path]) -> list[Told]:
    """Every run, called by its folder, or by as much of its path as tells it from the others."""
    folders = expand(places)
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        base = os.path.commonpath([folder.resolve().parent for folder in folders])
        names = [folder.resolve().relative_to(base).as_posix() for folder in folders]
    return [read_run(folder, name) for folder, name in zip(folders, names)]


def swept(places: Sequence[str | Path]) -> list[str]:
    """The axes of the sweep, where there is one and nothing else."""
    if len(places) != 1 or not is_sweep(places[0]):
        return []
    return list(read_mapping(Path(places[0]) / FILE).get("axes") or {})


# --- what differs -----------------------------------------------------------------------------------------------------


def differing(runs: Sequence[Told]) -> list[str]:
    """Options in which the runs are not all equal, by full name; one that a run lacks counts as different."""
    names = dict.fromkeys(name for run in runs for name in run.config)
    first = runs[0].config
    return [
        name
        for name in names
        if name not in UNIMPORTANT
        and any(name not in run.config or name not in first or run.config[name] != first[name] for run in runs)
    ]


def grouped(runs: Sequence[Told], known: Sequence[str] = ()) -> list[Group]:
    """Groups in the order of their values: numbers by size. known: options to name even where all runs agree."""
    names = [name for name in dict.fromkeys([*known, *differing(runs)]) if name != SEED]
    held: dict[tuple[str, ...], list[Told]] = {}
    for run in runs:
        held.setdefault(tuple(spoken(run.config.get(name, _ABSENT)) for name in names), []).append(run)
    if not names and len(runs) == 1:
        return [Group(runs[0].name, {}, runs)]
    groups = [
        Group(_label(names, key) or "all runs", {name: members[0].config.get(name) for name in names}, members)
        for key, members in held.items()
    ]
    return sorted(groups, key=lambda group: [_order(value) for value in group.values.values()])


def _label(names: Sequence[str], key: Sequence[str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(names, key))


def spoken(value: Any) -> str:
    """A value as one reads it in a sentence."""
    if isinstance(value, float) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(spoken, value)) + "]"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _order(value: Any) -> tuple[int, float, str]:
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return (0, float(value), "") if known else (1, 0.0, spoken(value))
