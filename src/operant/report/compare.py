"""Several runs on one page: curves over each other, reward against KL, what differs, and what they say now.

    write_comparison(["runs/a", "runs/b"], "comparison.html")
    print(table(comparison(["runs/letters-sweep"])))

Runs that differ only in their seed are one line: the mean, and a 95 % interval of Student's t over the seeds.
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
from operant.report.outcomes import Finals, finals, group_row, run_row, sentence
from operant.report.runs import SEED, Group, Told, differing, grouped, is_sweep, read_runs, spoken, swept
from operant.report.summary import interval
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
    "text/top_word": "Share of the commonest word",
    "text/repeated": "Repeated trigrams",
    "policy/clip_fraction": "Clip fraction",
    "value/explained_variance": "Value: explained variance",
    "update/grad_norm": "Gradient norm",
}
_FLOOR = {"value/explained_variance": -1.0}
"""What a young critic did below this would flatten all that followed."""
MOST_REPLIES = 4000
LONGEST = 1500
"""Characters of a reply on the page."""


def write_comparison(places: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the page; returns its path. A sweep folder stands for its runs, and its page is its report.html.

    Raises: OperantError for a folder that is no run, or that cannot be read or written.
    """
    path = Path(out) if out is not None else report_path(places)
    with parquet.sound(", ".join(map(str, places))):
        data = comparison(places, path.parent)
        text = html.page(data["name"], data, scripts=SCRIPTS, styles=STYLES)
    atomic_io.write(path, text)
    return path


def report_path(places: Sequence[str | Path]) -> Path:
    """Where the page lies unless another place is asked for: in the sweep, or beside the runs."""
    if len(places) == 1 and is_sweep(places[0]):
        return Path(places[0]) / "report.html"
    parents = {os.path.dirname(os.path.abspath(place)) for place in places}
    return Path(os.path.relpath(os.path.commonpath(parents))) / "comparison.html"


def comparison(places: Sequence[str | Path], base: str | Path = ".") -> dict[str, Any]:
    """What the page is told, as JSON can hold it. base: the folder that links start from. Raises: OperantError."""
    runs = read_runs(places)
    if not runs:
        raise OperantError("there is nothing to compare: operant report runs/a runs/b ...")
    groups = grouped(runs, [name for name in swept(places) if name != SEED])
    runs = [run for group in groups for run in group.runs]  # in the order of the groups from here on
    held_out = all("reward" in run.held_out for run in runs if run.history.metrics)
    ends, options = [finals(group, held_out) for group in groups], differing(runs)
    alike = "reward" not in options
    return {
        "name": Path(places[0]).resolve().name if len(places) == 1 else f"{len(runs)} runs",
        "says": sentence(groups, ends, held_out)
        if alike
        else "The runs have different rewards: their scores are apart.",
        "held_out": held_out,
        "runs": [run_row(run, number, held_out, base) for number, g in enumerate(groups) for run in g.runs],
        "groups": [group_row(group, end) for group, end in zip(groups, ends)],
        "frontier": _frontier(groups, ends, held_out, alike),
        "curves": [told for name in CURVES if (told := _curves(name, groups))],
        "differs": {n: [spoken(run.config.get(n, "–")) for run in runs] for n in options},
        "replies": _replies(runs),
    }


# --- reward against KL ------------------------------------------------------------------------------------------------


def _frontier(groups: Sequence[Group], ends: Sequence[Finals], held_out: bool, alike: bool) -> dict[str, Any]:
    points = [
        {"run": run.name, "group": number, "kl": short(kl), "reward": short(reward)}
        for number, group in enumerate(groups)
        for run in group.runs
        if (kl := run.final("kl", held_out)) is not None and (reward := run.final("reward", held_out)) is not None
    ]
    known = [i for i, end in enumerate(ends) if end["kl"] and end["reward"]]
    means = [(ends[i]["kl"].mean, ends[i]["reward"].mean) for i in known]
    before = interval([run.before for group in groups for run in group.runs])
    return {
        "points": points,
        "front": [known[i] for i in front(means)] if alike else [],
        "start": short(before.mean) if before and alike else None,
    }


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Places of the (KL, reward) that no other beats in both: less KL and at least the reward, or more for no more.

    In the order of KL.
    """
    best, found = -math.inf, []
    for place in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if points[place][1] > best:
            best = points[place][1]
            found.append(place)
    return found


# --- curves -----------------------------------------------------------------------------------------------------------


def _curves(name: str, groups: Sequence[Group]) -> dict[str, Any] | None:
    lines = [_line(name, group) for group in groups]
    if not any(lines):
        return None
    metric, told = describe(name), {"name": name, "title": CURVES[name], "lines": lines, "floor": _FLOOR.get(name)}
    return told | ({"unit": metric.unit, "meaning": metric.meaning, "band": metric.band} if metric else {})


def _line(name: str, group: Group) -> dict[str, Any] | None:
    """Mean and half an interval over the runs that got to each step; evenly fewer steps where there are many."""
    values: dict[int, list[float | None]] = {}
    for run in group.runs:
        for m in run.history.metrics:
            if m.get(name) is not None:
                values.setdefault(int(m["step"]), []).append(m[name])
    steps = sorted(values)
    steps = steps[::-1][:: math.ceil(len(steps) / POINTS) or 1][::-1]
    found = [(step, told) for step in steps if (told := interval(values[step]))]
    if not found:
        return None
    return {
        "steps": [step for step, _ in found],
        "mean": [short(told.mean) for _, told in found],
        "half": [short(told.half) for _, told in found],
        "n": [min(told.n for _, told in found), max(told.n for _, told in found)],
    }


# --- what they say ----------------------------------------------------------------------------------------------------


def _replies(runs: Sequence[Told]) -> dict[str, Any]:
    """The same queries, answered by each run at its end, and by the reference: one column a run."""
    sides = [_answers(run) for run in runs]
    known = [side for side in sides if side]
    tasks = [task for task in known[0] if all(task in side for side in known)] if known else []
    tasks = tasks[: max(4, MOST_REPLIES // max(1, len(runs)))]
    answers = [[_cell(side.get(task)) for task in tasks] for side in sides]
    probed = any((run.folder / "probes" / "reference.parquet").is_file() for run in runs)
    reference = next((found for run in runs if (found := _reference(run, probed))), {})
    return {
        "queries": [known[0][task]["query"] for task in tasks],
        "columns": [{"run": run.name, "answers": cells} for run, cells in zip(runs, answers)],
        "reference": [_cell(reference.get(task)) for task in tasks] if reference else None,
        "other": "the reference" if probed else "before training",
        "apart": bool(known) and not tasks,
    }


def _answers(run: Told) -> dict[str, Any]:
    """By task: the newest answers to the probe queries; without them, to the held-out tasks."""
    probes = parquet.steps(run.folder / "probes")
    return _rows(probes[max(probes)]) if probes else _evaluated(run, "after")


def _reference(run: Told, probed: bool) -> dict[str, Any]:
    """The reference's answers to the probe queries, or what the policy said to the held-out tasks before training."""
    path = run.folder / "probes" / "reference.parquet"
    return _evaluated(run, "before") if not probed else _rows(path) if path.is_file() else {}


def _evaluated(run: Told, when: str) -> dict[str, Any]:
    replies = (run.history.evaluation.get(when) or {}).get("replies", [])
    return {reply["task"]: reply | {"reward": reply["score"]} for reply in replies}


def _rows(path: Path) -> dict[str, Any]:
    """A file that is damaged, or was replaced meanwhile, says nothing."""
    rows: dict[str, Any] = {}
    with suppress(OperantError, FileNotFoundError):
        for row in parquet.lines(path).to_pylist():
            rows.setdefault(row["task"], row)
    return rows


def _cell(row: Mapping[str, Any] | None) -> list[Any] | None:
    """[reply, reward], None where there was no answer."""
    if row is None:
        return None
    text = str(row["reply"])
    return [text if len(text) <= LONGEST else text[:LONGEST] + " …", short(row["reward"])]
