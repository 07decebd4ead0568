"""A sweep's folder: `sweep.yaml` says what was asked, and each point's own folder how far it has come.

plan = make_plan({"kl.coef": "0,0.1", "seed": "1,2"}, "letters")    # every point's options are checked
remember(Path("runs/letters-sweep"), plan)                          # or a sentence: what is different now
progress(Path("runs/letters-sweep") / plan.points[0].name)          # "missing" | "begun" | "done"
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from operant.diagnosis.history import flat
from operant.options import read, read_mapping
from operant.report.runs import FILE
from operant.runs import lock
from operant.runs.config import as_mapping, configure
from operant.runs.folder import read_config
from operant.storage import atomic_io
from operant.sweep.grid import Axis, Point, divide, draw, grid
from operant.types import OperantError

_ABSENT = object()
_LEFT_BY_A_START = {"lock", "probe"}
"""What stands in a folder whose run was killed before it wrote its configuration."""


@dataclass(frozen=True)
class Plan:
    """What is asked for: the points, and what they have in common."""

    recipe: str | None
    axes: Sequence[Axis]
    fixed: Mapping[str, str]
    """Options that were given one value, as texts."""
    points: Sequence[Point]
    common: Mapping[str, Any]
    """Every other option that is the same at every point, by full name."""
    drawn: Mapping[str, int]
    """Of a random search: `random` and `sweep_seed`."""


def make_plan(given: Mapping[str, Any], recipe: str | None, random: int = 0, seed: int = 0) -> Plan:
    """Points from options as they were typed. Raises: OperantError for the first that no run would accept."""
    axes, fixed = divide(given, recipe)
    points = draw(axes, random, seed) if random else grid(axes)
    whole = [_checked(point, fixed, recipe) for point in points]
    axed = {axis.name for axis in axes}
    common = {k: v for k, v in whole[0].items() if k not in axed and all(o.get(k, _ABSENT) == v for o in whole)}
    drawn = {"random": random, "sweep_seed": seed} if random else {}
    return Plan(recipe, axes, fixed, points, common, drawn)


def _checked(point: Point, fixed: Mapping[str, str], recipe: str | None) -> dict[str, Any]:
    options = {name: read(text) for name, text in {**fixed, **point.values}.items()}
    try:
        return flat(as_mapping(configure(options, recipe)))
    except OperantError as error:
        raise OperantError(f"{point.name}: {error}") from error


# --- the record -------------------------------------------------------------------------------------------------------


def remember(folder: Path, plan: Plan) -> None:
    """Write sweep.yaml. Raises: OperantError where the sweep that lies there had other options in common."""
    kept = recorded(folder)
    if kept is None and folder.is_dir() and any(folder.iterdir()):
        raise OperantError(f"{folder} holds something that is no sweep; choose another folder with --out")
    _same(folder, kept or {}, plan)
    axes = dict((kept or {}).get("axes", {}))
    for axis in plan.axes:
        axes[axis.name] = _union(axes.get(axis.name), axis.text)
    common = {k: v for k, v in plan.common.items() if k not in axes}
    told = {"recipe": plan.recipe, "axes": axes, **plan.drawn, "fixed": common}
    with atomic_io.explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    atomic_io.write(folder / FILE, yaml.safe_dump(told, sort_keys=False, allow_unicode=True, width=120))


def recorded(folder: Path) -> dict[str, Any] | None:
    """What sweep.yaml says; None where there is none."""
    path = folder / FILE
    return read_mapping(path) if path.is_file() else None


def _same(folder: Path, kept: Mapping[str, Any], plan: Plan) -> None:
    changed = {
        name: (value, plan.common[name])
        for name, value in kept.get("fixed", {}).items()
        if name in plan.common and plan.common[name] != value
    }
    if kept and kept.get("recipe") != plan.recipe:
        changed = {"recipe": (kept.get("recipe"), plan.recipe)} | changed
    if changed:
        told = ", ".join(f"{name} {old!r}, now {new!r}" for name, (old, new) in list(changed.items())[:3])
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise OperantError(f"{folder} was made with {told}{more}: give the same, or another folder with --out")


def _union(old: Any, new: Any) -> Any:
    return [*old, *(v for v in new if v not in old)] if isinstance(old, list) and isinstance(new, list) else new


# --- how far a point is -----------------------------------------------------------------------------------------------


def progress(folder: Path) -> Literal["missing", "begun", "done"]:
    """Of one run: done when its last step is logged and everything that its end writes is there.

    Raises: OperantError for a folder that is no run.
    """
    if not folder.exists():
        return "missing"
    if not (folder / "config.yaml").is_file():
        _clear(folder)
        return "missing"
    config = read_config(folder)
    told = config.get("evaluate") is None or (folder / "evaluation.json").is_file()
    # A process that was killed while it exported leaves its lock.
    exported = (folder / "export" / "config.json").is_file() and not (folder / "lock").exists()
    return "done" if told and exported and steps_done(folder) >= int(config.get("steps") or 0) else "begun"


def steps_done(folder: Path) -> int:
    """The last step that was logged; 0 before the first."""
    metrics = atomic_io.records(folder / "metrics.jsonl")
    return int(metrics[-1]["step"]) if metrics else 0


def _clear(folder: Path) -> None:
    """Remove a folder in which nothing had begun."""
    left = {path.name for path in folder.iterdir()} if folder.is_dir() else {""}
    if any(name not in _LEFT_BY_A_START and not name.endswith(".tmp") for name in left):
        raise OperantError(f"{folder} is in the way and is no run: move it elsewhere, or choose another --out")
    lock.take(folder / "lock")  # somebody may be about to begin there
    shutil.rmtree(folder)
