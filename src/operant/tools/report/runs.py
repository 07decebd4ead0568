"""Reads runs from their folders and groups those that differ only in the seed.

runs = read_runs(["runs/letters-sweep"])
groups = grouped(runs)        # [Group("kl.coef=0", {...}, [run, run, run]), Group("kl.coef=0.02", ...), ...]
"""

import itertools
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from operant.metrics import collect
from operant.options import read_mapping
from operant.storage import old_names
from operant.tools.report.diagnosis import Finding, History, diagnose, read_history
from operant.types import OperantError, require

FILE = "sweep.yaml"
"""The file that marks a folder of runs as a sweep."""
LONGEST = 60
"""Characters of the options that a group may be named by."""
SEED = "learner.seed"
UNIMPORTANT = frozenset({"checkpoint_minutes", "keep", "samples_every", "trackers", "learner.device"})
"""Options that do not change the training."""


@dataclass(frozen=True)
class RunRecord:
    """The recorded data of one run."""

    name: str
    folder: Path
    history: History
    findings: Sequence[Finding]
    held_out: Mapping[str, Mapping[str, float | None]]
    """Results on the held-out tasks `before` and `after` training, as far as there are any: reward, kl, empty, top_word
    and the chosen metrics by name."""

    @property
    def config(self) -> Mapping[str, object]:
        return self.history.config

    @property
    def finished(self) -> bool:
        return self.history.step >= (self.config.get("steps") or 0)

    @property
    def measure(self) -> str:
        """What the run is judged by: the reward, or the order of pairs where it learns from labels alone."""
        of_labels = self.history.values("preference/accuracy") and not self.history.values("reward/mean")
        return "share of pairs in the right order" if of_labels else "reward"

    @property
    def collapsed(self) -> bool:
        """Whether its held-out score fell by more than two standard errors, or its diagnosis has a problem."""
        scores = [
            [reply["score"] for reply in judged.get("replies", []) if reply.get("score") is not None]
            for when in ("before", "after")
            if (judged := self.history.evaluation.get(when))
        ]
        fell = False
        if len(scores) == 2 and all(len(each) > 1 for each in scores):
            error = math.sqrt(sum(statistics.variance(each) / len(each) for each in scores))
            fell = statistics.fmean(scores[0]) - statistics.fmean(scores[1]) > 2 * error
        return fell or any(finding.level == "problem" for finding in self.findings)

    def result(self, name: str, held_out: bool, when: str = "after") -> float | None:
        """Return a result on the held-out tasks; else that of the first step (`before`) or the mean of the last ones.

        The replies of the first step are those of the policy before training. The `reward` is `measure`.
        """
        if name == "reward" != self.measure:
            name = "preference/accuracy"
        if held_out:
            return self.held_out.get(when, {}).get(name)
        if name == "kl" and self.history.supervised:
            return None  # of given replies it is a log-ratio
        metric = {"reward": "reward/mean", "kl": "kl/per_reply"}.get(name, name if "/" in name else f"text/{name}")
        return self.history.recent(metric) if when == "after" else self.history.first(metric)


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the seed."""

    name: str
    """What the names of its runs have in common: `kl.coef=0.1`, `control-*`."""
    values: Mapping[str, Any]
    """The options that distinguish it from the other groups; one that its runs lack is absent."""
    runs: Sequence[RunRecord]


def is_sweep(place: str | Path) -> bool:
    return (Path(place) / FILE).is_file()


def expand(places: Sequence[str | Path]) -> list[Path]:
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
    return list({folder.resolve(): folder for folder in reversed(found)}.values())[::-1]


def read_run(folder: Path, name: str | None = None) -> RunRecord:
    """Read one run folder. Raises: OperantError where one of its files cannot be read."""
    history = read_history(folder)
    findings = diagnose(history) if history.metrics else []
    held_out = {when: _judged(judged) for when in ("before", "after") if (judged := history.evaluation.get(when))}
    return RunRecord(name or folder.name, folder, history, findings, held_out)


def _judged(judged: Mapping[str, Any]) -> dict[str, float | None]:
    texts = [str(reply.get("reply") or "") for reply in judged.get("replies", [])]
    statistics = collect.of_texts(texts).result() if texts else {}
    found = {n: judged.get(n) for n in ("kl", "loss")} | {n: statistics.get(f"text/{n}") for n in ("empty", "top_word")}
    return {"reward": judged.get("mean")} | found | judged.get("metrics", {})


def read_runs(places: Sequence[str | Path]) -> list[RunRecord]:
    """Read every run, named by its folder; where folders share a name, with as many parents as tell them apart."""
    folders = expand(places)
    parts = [folder.resolve().parts for folder in folders]
    depth = [1] * len(parts)
    while True:
        names = ["/".join(path[-count:]) for path, count in zip(parts, depth)]
        if len(set(names)) == len(names):
            return [read_run(folder, name) for folder, name in zip(folders, names)]
        depth = [count + (names.count(name) > 1) for count, name in zip(depth, names)]


def swept(places: Sequence[str | Path]) -> list[str]:
    if len(places) != 1 or not is_sweep(places[0]):
        return []
    return [name for name in read_sweep(Path(places[0]))["axes"] if name != SEED]


def read_sweep(folder: Path) -> dict[str, Any]:
    """Read `sweep.yaml`, with the options in `axes` and `fixed` under their current names."""
    path = folder / FILE
    record = read_mapping(path)
    for part in ("axes", "fixed"):
        options = record.get(part) or {}
        require(isinstance(options, Mapping), f"{path} has {part}={options!r}: it must be a mapping of names to values")
        record[part] = old_names.current({"schema": record.get("schema", 1), **options}, path)
    return record


def grouped(runs: Sequence[RunRecord], axes: Sequence[str] = ()) -> list[Group]:
    """Group runs by the options that differ, or that some lack; of two that have the same seed too, the second is in a
    group of its own.

    axes: options by whose values the groups are ordered, numbers by size. Without any, groups that differ in one option
    are ordered by it, and others are in the order of the runs.
    """
    first = runs[0].config
    names = [
        name
        for name in dict.fromkeys(name for run in runs for name in run.config)
        if name not in {*UNIMPORTANT, SEED}
        and any(name not in run.config or name not in first or run.config[name] != first[name] for run in runs)
    ]
    members: dict[tuple, list[RunRecord]] = {}
    for run in runs:
        setting = tuple((name, as_text(run.config[name])) for name in names if name in run.config)
        again = 0
        while any(run.config.get(SEED) == other.config.get(SEED) for other in members.get((setting, again), [])):
            again += 1
        members.setdefault((setting, again), []).append(run)
    shared = [_shared(same) for same in members.values()]
    values = [{name: same[0].config[name] for name in names if name in same[0].config} for same in members.values()]
    settings = [", ".join(f"{name}={as_text(x)}" for name, x in own.items()) for own in values]
    groups = [
        Group(name if name and shared.count(name) == 1 else _named(setting, settings, same), own, same)
        for name, setting, own, same in zip(shared, settings, values, members.values())
    ]
    order = axes or (names if len(names) == 1 else ())
    return sorted(groups, key=lambda group: [_order(group.values.get(name)) for name in order])


def _named(setting: str, settings: Sequence[str], runs: Sequence[RunRecord]) -> str:
    """Name runs whose names have nothing of their own: by what differs if that is short, else by the first of them."""
    if setting and settings.count(setting) == 1 and len(setting) <= LONGEST:
        return setting
    more = f" and {len(runs) - 2} more" if len(runs) > 2 else ""
    return ", ".join(run.name for run in runs[:2]) + more


def _shared(runs: Sequence[RunRecord]) -> str:
    """Return what the names of runs have in common, with * for the rest, or nothing; a sweep's `seed=*` is left out."""
    if len(runs) == 1:
        return runs[0].name
    words = [re.split(r"(\W|_)", run.name) for run in runs]
    head = _common(words)
    tail = _common([name[len(head) :][::-1] for name in words])[::-1]
    name = "".join(head) + "*" + "".join(tail)
    return "" if name == "*" else re.sub(r"(^|,)seed=\*", "", name).lstrip(",") or name


def _common(lists: Sequence[Sequence[str]]) -> list[str]:
    return [same[0] for same in itertools.takewhile(lambda items: len(set(items)) == 1, zip(*lists))]


def as_text(value: object) -> str:
    """Write the value of an option as in a sentence: `2` for 2.0, `none`, `true`, `[1, 2]`."""
    if isinstance(value, float) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {as_text(inner)}" for name, inner in value.items())
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(as_text, value)) + "]"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _order(value: object) -> tuple[int, float, str]:
    """Return a sort key that orders numbers by size, and other values after them by their text."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return (0, float(value), "") if number else (1, 0.0, as_text(value))
