"""Compares several runs on one page: curves, reward against KL, differing options, and replies side by side.

    write_comparison(["runs/a", "runs/b"], "comparison.html")
    print(table(comparison(["runs/letters-sweep"])))

Runs that differ only in their seed share one line: their mean, and a 95 % interval of Student's t over the seeds.
`page/compare.js` lays the page out.
"""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from operant.metrics.registry import describe
from operant.report import html, parquet
from operant.report.downsample import POINTS, short
from operant.report.runs import SEED, Group, RunRecord, as_text, differing, grouped, is_sweep, read_runs, swept
from operant.report.summary import Finals, finals, group_row, interval, run_row, sentence
from operant.storage import atomic_io
from operant.types import OperantError

SCRIPTS = ("charts.js", "compare.js")
STYLES = ("style.css", "compare.css")
CURVES = {
    "reward/mean": "Reward",
    "kl/per_reply": "KL per reply",
    "policy/entropy": "Entropy",
    "rollout/reply_tokens": "Reply length",
    "probe/reward": "Reward on the probe queries",
    "evaluate/reward": "Reward on held-out tasks",
    "text/empty": "Empty replies",
    "text/top_word": "Share of the most common word",
    "text/repeated": "Repeated trigrams",
    "policy/clip_fraction": "Clip fraction",
    "value/explained_variance": "Value: explained variance",
    "update/grad_norm": "Gradient norm",
}
_FLOOR = {"value/explained_variance": -1.0}
"""Smallest value drawn: an untrained critic starts far below, which would flatten the rest of the curve."""
MOST_REPLIES = 4000
LONGEST = 1500
"""Characters of a reply on the page."""


def write_comparison(places: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the page of run folders and sweep folders; returns its path, which is `report_path` unless `out` is set.

    Raises: OperantError for a folder that is not a run, or that cannot be read or written.
    """
    path = Path(out) if out is not None else report_path(places)
    with parquet.reading_run(", ".join(map(str, places))):
        data = comparison(places, path.parent)
        text = html.page(data["name"], data, scripts=SCRIPTS, styles=STYLES)
    atomic_io.write(path, text)
    return path


def report_path(places: Sequence[str | Path]) -> Path:
    """Return the default path of the page: `report.html` in the sweep, or `comparison.html` beside the runs."""
    if len(places) == 1 and is_sweep(places[0]):
        return Path(places[0]) / "report.html"
    parents = {os.path.dirname(os.path.abspath(place)) for place in places}
    return Path(os.path.relpath(os.path.commonpath(parents))) / "comparison.html"


def comparison(places: Sequence[str | Path], base: str | Path = ".") -> dict[str, Any]:
    """Collect the page's data, as JSON can hold it.

    base: the folder that links are relative to.
    Raises: OperantError for a folder that is not a run, or that cannot be read.
    """
    runs = read_runs(places)
    if not runs:
        raise OperantError("there is nothing to compare: operant report runs/a runs/b ...")
    groups = grouped(runs, [name for name in swept(places) if name != SEED])
    runs = [run for group in groups for run in group.runs]  # from here on in the order of the groups
    held_out = all("reward" in run.held_out for run in runs if run.history.metrics)
    ends, options = [finals(group, held_out) for group in groups], differing(runs)
    same_reward = "reward" not in options
    verdict = "The rewards of the runs differ, so their scores are not comparable."
    return {
        "name": Path(places[0]).resolve().name if len(places) == 1 else f"{len(runs)} runs",
        "verdict": sentence(groups, ends, held_out) if same_reward else verdict,
        "held_out": held_out,
        "runs": [run_row(run, number, held_out, base) for number, g in enumerate(groups) for run in g.runs],
        "groups": [group_row(group, end) for group, end in zip(groups, ends)],
        "frontier": _frontier(groups, ends, held_out, same_reward),
        "curves": [curve for name in CURVES if (curve := _curve(name, groups))],
        "differs": {n: [as_text(run.config.get(n, "–")) for run in runs] for n in options},
        "replies": _replies(runs),
    }


# --- reward against KL ------------------------------------------------------------------------------------------------


def _frontier(groups: Sequence[Group], ends: Sequence[Finals], held_out: bool, same_reward: bool) -> dict[str, Any]:
    """Collect the points of the runs and, if rewards are comparable, the groups on the front and the initial reward."""
    points = []
    for number, group in enumerate(groups):
        for run in group.runs:
            kl, reward = run.final("kl", held_out), run.final("reward", held_out)
            if kl is not None and reward is not None:
                points.append({"run": run.name, "group": number, "kl": short(kl), "reward": short(reward)})
    known = [(i, kl.mean, reward.mean) for i, end in enumerate(ends) if (kl := end["kl"]) and (reward := end["reward"])]
    before = interval([run.before for group in groups for run in group.runs])
    return {
        "points": points,
        "front": [known[place][0] for place in front([(kl, reward) for _, kl, reward in known])] if same_reward else [],
        "start": short(before.mean) if before and same_reward else None,
    }


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the (KL, reward) points that no other beats in both, in the order of KL."""
    best, found = -math.inf, []
    for place in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if points[place][1] > best:
            best = points[place][1]
            found.append(place)
    return found


# --- curves -----------------------------------------------------------------------------------------------------------


def _curve(name: str, groups: Sequence[Group]) -> dict[str, Any] | None:
    """Collect a metric over the steps with one line per group; None where no run has it."""
    lines = [_line(name, group) for group in groups]
    if not any(lines):
        return None
    curve = {"name": name, "title": CURVES[name], "lines": lines, "floor": _FLOOR.get(name)}
    if metric := describe(name):
        curve |= {"unit": metric.unit, "meaning": metric.meaning, "band": metric.band}
    return curve


def _line(name: str, group: Group) -> dict[str, Any] | None:
    """Average a metric over the runs that reached each step, with half its interval, at up to `POINTS` steps."""
    values: dict[int, list[float | None]] = {}
    for run in group.runs:
        for m in run.history.metrics:
            if m.get(name) is not None:
                values.setdefault(int(m["step"]), []).append(m[name])
    steps = sorted(values)
    steps = steps[::-1][:: math.ceil(len(steps) / POINTS) or 1][::-1]
    intervals = {step: found for step in steps if (found := interval(values[step]))}
    if not intervals:
        return None
    counts = [found.n for found in intervals.values()]
    return {
        "steps": list(intervals),
        "mean": [short(found.mean) for found in intervals.values()],
        "half": [short(found.half) for found in intervals.values()],
        "n": [min(counts), max(counts)],
    }


# --- replies ----------------------------------------------------------------------------------------------------------


def _replies(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Collect the replies of each run and of the reference to the queries that all runs have answered.

    They are the newest replies to the probe queries; a run without probes has those to the held-out tasks.
    """
    sides = []
    for run in runs:
        probes = parquet.steps(run.folder / "probes")
        sides.append(_rows(probes[max(probes)]) if probes else _evaluated(run, "after"))
    known = [side for side in sides if side]
    tasks = [task for task in known[0] if all(task in side for side in known)] if known else []
    tasks = tasks[: max(4, MOST_REPLIES // max(1, len(runs)))]
    paths = [path for run in runs if (path := run.folder / "probes" / "reference.parquet").is_file()]
    references = map(_rows, paths) if paths else (_evaluated(run, "before") for run in runs)
    reference = next(filter(None, references), None)
    return {
        "queries": [known[0][task]["query"] for task in tasks],
        "columns": [
            {"run": run.name, "answers": [_cell(side.get(task)) for task in tasks]} for run, side in zip(runs, sides)
        ],
        "reference": [_cell(reference.get(task)) for task in tasks] if reference else None,
        "reference_label": "the reference" if paths else "before training",
        "queries_differ": bool(known) and not tasks,
    }


def _evaluated(run: RunRecord, when: str) -> dict[str, Any]:
    """Return by task the replies to the held-out tasks `before` or `after` training."""
    replies = (run.history.evaluation.get(when) or {}).get("replies", [])
    return {reply["task"]: reply | {"reward": reply["score"]} for reply in replies}


def _rows(path: Path) -> dict[str, Any]:
    """Return by task the first row of a file; none where the file is damaged or has been removed."""
    rows: dict[str, Any] = {}
    with suppress(OperantError, FileNotFoundError):
        for row in parquet.lines(path).to_pylist():
            rows.setdefault(row["task"], row)
    return rows


def _cell(row: Mapping[str, Any] | None) -> list[Any] | None:
    """Return [reply, reward]; None where there is no answer."""
    if row is None:
        return None
    text = str(row["reply"])
    return [text if len(text) <= LONGEST else text[:LONGEST] + " …", short(row["reward"])]
