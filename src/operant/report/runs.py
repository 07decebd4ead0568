"""Reads runs from their folders and groups those that differ only in the seed.

runs = read_runs(["runs/letters-sweep"])
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
from operant.storage import old_names
from operant.types import OperantError

FILE = "sweep.yaml"
"""The file that marks a folder of runs as a sweep."""
SEED = "learner.seed"
UNIMPORTANT = frozenset({"checkpoint_minutes", "keep", "samples_every", "trackers", "learner.device"})
"""Options that do not change the training."""
_ABSENT = "–"


@dataclass(frozen=True)
class RunRecord:
    """The recorded data of one run."""

    name: str
    folder: Path
    history: History
    findings: Sequence[Finding]
    held_out: Mapping[str, Any]
    """Results on held-out tasks after training: reward, kl, empty, top_word; empty without held-out tasks."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Options by full name."""
        return self.history.config

    @property
    def before(self) -> float | None:
        """Mean reward on held-out tasks before training; else that of the first step."""
        mean = (self.history.evaluation.get("before") or {}).get("mean")
        return mean if mean is not None else self.history.first("reward/mean")

    def final(self, name: str, held_out: bool) -> Any:
        """Return a result after training, from the held-out tasks or as the mean of the last steps."""
        if held_out:
            return self.held_out.get(name)
        metric = {"reward": "reward/mean", "kl": "kl/per_reply"}.get(name, f"text/{name}")
        return self.history.recent(metric, RECENT)


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the seed."""

    label: str
    """The options that distinguish it from the other groups: `kl.coef 0.1`."""
    values: Mapping[str, Any]
    runs: Sequence[RunRecord]


# --- reading ----------------------------------------------------------------------------------------------------------


def is_sweep(place: str | Path) -> bool:
    """Whether a folder holds the runs of a sweep."""
    return (Path(place) / FILE).is_file()


def expand(places: Sequence[str | Path]) -> list[Path]:
    """Replace each sweep folder by its run folders. Raises: OperantError for a folder that is neither."""
    found: list[Path] = []
    for place in map(Path, places):
        inner = sorted(path.parent for path in place.glob("*/config.yaml"))
        if (place / "config.yaml").is_file():
            found.append(place)
        elif is_sweep(place) and inner:
            found += inner
        elif is_sweep(place):
            raise OperantError(f"{place} is a sweep in which no run has started yet; try again once one has")
        else:
            hint = f"; the runs in it: {', '.join(p.name for p in inner[:5])}" if inner else ""
            raise OperantError(f"{place} is not a run folder: it has no config.yaml{hint}")
    return list(dict.fromkeys(found))


def read_run(folder: Path, name: str | None = None) -> RunRecord:
    """Read one run folder. Raises: OperantError where one of its files cannot be read."""
    history = read_history(folder)
    findings = diagnose(history) if history.metrics else []
    after, held_out = history.evaluation.get("after"), {}
    if after and after.get("mean") is not None:
        held_out = {"reward": after["mean"], "kl": after.get("kl")}
        if texts := [str(reply.get("reply") or "") for reply in after.get("replies", [])]:
            statistics = collect.of_texts(texts).result()
            held_out |= {name: statistics.get(f"text/{name}") for name in ("empty", "top_word")}
    return RunRecord(name or folder.name, folder, history, findings, held_out)


def read_runs(places: Sequence[str | Path]) -> list[RunRecord]:
    """Read every run, named by its folder or, where folders share a name, by as much of its path as is needed."""
    folders = expand(places)
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        base = os.path.commonpath([folder.resolve().parent for folder in folders])
        names = [folder.resolve().relative_to(base).as_posix() for folder in folders]
    return [read_run(folder, name) for folder, name in zip(folders, names)]


def swept(places: Sequence[str | Path]) -> list[str]:
    """List the swept options where the only folder is a sweep, else none."""
    if len(places) != 1 or not is_sweep(places[0]):
        return []
    return list(read_sweep(Path(places[0]))["axes"])


def read_sweep(folder: Path) -> dict[str, Any]:
    """Read `sweep.yaml`, with the options in `axes` and `fixed` under their current names.

    Raises: OperantError where it is not such a file.
    """
    path = folder / FILE
    record = read_mapping(path)
    schema = record.get("schema", 1)
    for part in ("axes", "fixed"):
        options = record.get(part) or {}
        if not isinstance(options, Mapping):
            raise OperantError(f"{path} has {part}={options!r}: it must be a mapping of names to values")
        record[part] = old_names.current({"schema": schema, **options}, path)
    return record


# --- differences ------------------------------------------------------------------------------------------------------


def differing(runs: Sequence[RunRecord]) -> list[str]:
    """List the options that are not equal in all runs, by full name; one that a run lacks counts as different."""
    first = runs[0].config
    return [
        name
        for name in dict.fromkeys(name for run in runs for name in run.config)
        if name not in UNIMPORTANT
        and any(name not in run.config or name not in first or run.config[name] != first[name] for run in runs)
    ]


def grouped(runs: Sequence[RunRecord], known: Sequence[str] = ()) -> list[Group]:
    """Group runs by the options that differ, in the order of their values, numbers by size.

    known: options that label the groups even where they are equal in all runs.
    """
    names = [name for name in dict.fromkeys([*known, *differing(runs)]) if name != SEED]
    if not names and len(runs) == 1:
        return [Group(runs[0].name, {}, runs)]
    members: dict[str, list[RunRecord]] = {}
    for run in runs:
        label = ", ".join(f"{name} {as_text(run.config.get(name, _ABSENT))}" for name in names)
        members.setdefault(label or "all runs", []).append(run)
    groups = [Group(label, {name: same[0].config.get(name) for name in names}, same) for label, same in members.items()]
    return sorted(groups, key=lambda group: [_order(value) for value in group.values.values()])


def as_text(value: Any) -> str:
    """Write the value of an option as in a sentence: `2` for 2.0, `none`, `true`, `[1, 2]`."""
    if isinstance(value, float) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(as_text, value)) + "]"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _order(value: Any) -> tuple[int, float, str]:
    """Return a sort key that orders numbers by size, and other values after them by their text."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return (0, float(value), "") if number else (1, 0.0, as_text(value))
