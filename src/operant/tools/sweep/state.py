"""The folder of a sweep: `sweep.yaml` records what was asked for, and the folder of each run how far it is.

plan = make_plan({"kl.coef": "0,0.1", "seed": "1,2"}, "letters")    # checks the options of every run
remember(Path("runs/letters-sweep"), plan)                          # an error if the recorded sweep is another
progress(Path("runs/letters-sweep") / plan.points[0].name)          # "missing" | "begun" | "done"
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from operant.options import flat, read
from operant.runs import lock
from operant.runs.config import as_mapping, configure
from operant.runs.folder import read_config, state
from operant.storage import atomic_io, old_names
from operant.tools.report.runs import FILE, read_sweep
from operant.tools.sweep.grid import Axis, Point, divide, draw, grid
from operant.types import OperantError, said_of

_LEFT_BY_A_START = {"lock", "probe"}
"""Files in the folder of a run that was killed before it wrote its configuration."""


@dataclass(frozen=True)
class SweepPlan:
    """The points of a sweep, and the options that all of them share."""

    recipe: str | None
    axes: Sequence[Axis]
    fixed: Mapping[str, str]
    """Options on the command line with one value, as text."""
    points: Sequence[Point]
    common: Mapping[str, Any]
    """Every option that has the same value at every point, defaults included, by full name."""
    drawn: Mapping[str, int]
    """`random` and `sweep_seed` of a random search, else empty."""


def make_plan(options: Mapping[str, object], recipe: str | None, random: int = 0, seed: int = 0) -> SweepPlan:
    """Make the points from options as text."""
    axes, fixed = divide(options, recipe)
    points = draw(axes, random, seed) if random else grid(axes)
    configs = []
    for point in points:
        given = {name: read(text) for name, text in {**fixed, **point.values}.items()}
        with said_of(point.name):
            configs.append(flat(as_mapping(configure(given, recipe))))
    swept = {axis.name for axis in axes}
    common = {k: v for k, v in configs[0].items() if k not in swept and all(k in c and c[k] == v for c in configs)}
    drawn = {"random": random, "sweep_seed": seed} if random else {}
    return SweepPlan(recipe, axes, fixed, points, common, drawn)


def remember(folder: Path, plan: SweepPlan) -> None:
    """Write sweep.yaml, with the axes that it already records. Runs named by old option names get their current ones.

    Raises: OperantError if the folder holds something else, or a sweep whose shared options differ.
    """
    path = folder / FILE
    recorded = read_sweep(folder) if path.is_file() else {}
    if not path.is_file() and folder.is_dir() and any(folder.iterdir()):
        raise OperantError(f"{folder} is not empty and has no {FILE}; choose another folder with --out")
    fixed = recorded.get("fixed", {})
    changed = {n: (x, plan.common[n]) for n, x in fixed.items() if n in plan.common and plan.common[n] != x}
    for point in plan.points:  # of what has differed between runs before, the name of a run says nothing
        ran = flat(read_config(folder / point.name)) if (folder / point.name / "config.yaml").is_file() else {}
        changed |= {n: (ran[n], x) for n, x in plan.common.items() if n in ran and n not in fixed and ran[n] != x}
    if recorded and recorded.get("recipe") != plan.recipe:
        changed = {"recipe": (recorded.get("recipe"), plan.recipe)} | changed
    if changed:
        pairs = ", ".join(f"{name} {old!r}, now {new!r}" for name, (old, new) in list(changed.items())[:3])
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise OperantError(f"{folder} was made with {pairs}{more}: use the same values, or another folder with --out")
    axes = dict(recorded.get("axes", {}))
    for axis in plan.axes:
        old, new = axes.get(axis.name), axis.text
        lists = isinstance(old, list) and isinstance(new, list)
        axes[axis.name] = [*old, *(value for value in new if value not in old)] if lists else new
    common = {k: v for k, v in plan.common.items() if k not in axes}
    record = {"schema": old_names.SCHEMA, "recipe": plan.recipe, "axes": axes, **plan.drawn, "fixed": common}
    with atomic_io.explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for point in plan.points:
            before = folder / Point(old_names.former(point.values, recorded.get("schema", 1))).name
            if before.is_dir() and not (folder / point.name).exists():
                before.rename(folder / point.name)
    atomic_io.write(path, yaml.safe_dump(record, sort_keys=False, allow_unicode=True, width=120))


def progress(folder: Path) -> Literal["missing", "begun", "done"]:
    """How far a run is; it is done once its last step is logged and its evaluation and export are written.

    Raises: OperantError for a folder that is not a run.
    """
    if not (folder / "config.yaml").is_file():
        if folder.exists():
            _clear(folder)
        return "missing"
    config = read_config(folder)
    evaluated = not config.get("evaluate") or (folder / "evaluation.json").is_file()
    ended = state(folder, steps_done(folder), int(config.get("steps") or 0)) == "finished"
    return "done" if evaluated and ended else "begun"


def steps_done(folder: Path) -> int:
    """The last logged step; 0 before the first."""
    metrics = atomic_io.records(folder / "metrics.jsonl")
    return int(metrics[-1]["step"]) if metrics else 0


def _clear(folder: Path) -> None:
    """Remove a folder in which no run had begun."""
    left = {path.name for path in folder.iterdir()} if folder.is_dir() else {""}
    if any(name not in _LEFT_BY_A_START and not name.endswith(".tmp") for name in left):
        raise OperantError(f"{folder} is in the way and is not a run: move it elsewhere, or choose another --out")
    lock.take(folder / "lock")  # another process may be about to start a run here
    shutil.rmtree(folder)
