"""Several runs on one page: curves over each other, reward against KL, what differs, and what they say now.

    write_comparison(["runs/a", "runs/b"], "comparison.html")
    print(table(comparison(["runs/letters-sweep"])))

Runs that differ only in their seed are one line: the mean, and a 95 % interval of Student's t over the seeds.
`page/compare.js` lays the page out.
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from operant import files
from operant.tracking import pages, reading
from operant.tracking.compared import (
    FILE,
    SEED,
    Group,
    Told,
    differing,
    grouped,
    is_sweep,
    read_run,
    read_runs,
    spoken,
    swept,
)
from operant.tracking.diagnosis.history import flat
from operant.tracking.intervals import Interval, interval
from operant.tracking.registry import describe
from operant.tracking.thinning import POINTS, short
from operant.types import OperantError

__all__ = ["FILE", "brief", "comparison", "flat", "front", "report_path", "table", "write_comparison"]

Finals = Mapping[str, Interval | None]
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
FINALS = ("reward", "kl", "empty", "top_word")
MOST_REPLIES = 4000
LONGEST = 1500
"""Characters of a reply on the page."""


def write_comparison(places: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the page; returns its path. A sweep folder stands for its runs, and its page is its report.html.

    Raises: OperantError for a folder that is no run, or that cannot be read or written.
    """
    path = Path(out) if out is not None else report_path(places)
    data = comparison(places, path.parent)
    files.write(path, pages.page(data["name"], data, scripts=SCRIPTS, styles=STYLES))
    return path


def brief(folder: str | Path) -> str:
    """What a run came to, in a few words."""
    run = read_run(Path(folder))
    held_out = "reward" in run.held_out
    reward, kl = (run.final(name, held_out) for name in ("reward", "kl"))
    pair = [Interval(value, None, 1) if value is not None else None for value in (run.before, reward, kl)]
    said = f"reward {_plus_minus(pair[0])} -> {_plus_minus(pair[1])}{' on held-out tasks' if held_out else ''}"
    found = ", ".join(finding.name for finding in run.findings if finding.level != "note")
    return said + (f", KL {_plus_minus(pair[2])}" if pair[2] else "") + (f" ({found})" if found else "")


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
    finals = [_finals(group, held_out) for group in groups]
    return {
        "name": Path(places[0]).resolve().name if len(places) == 1 else f"{len(runs)} runs",
        "says": _sentence(groups, finals, held_out),
        "held_out": held_out,
        "runs": [_run(run, number, held_out, base) for number, g in enumerate(groups) for run in g.runs],
        "groups": [_group(group, final) for group, final in zip(groups, finals)],
        "frontier": _frontier(groups, finals, held_out),
        "curves": [told for name in CURVES if (told := _curves(name, groups))],
        "differs": {n: [spoken(run.config.get(n, "–")) for run in runs] for n in differing(runs)},
        "replies": _replies(runs),
    }


# --- numbers ----------------------------------------------------------------------------------------------------------


def _finals(group: Group, held_out: bool) -> Finals:
    return {name: interval([run.final(name, held_out) for run in group.runs]) for name in FINALS}


def _run(run: Told, group: int, held_out: bool, base: str | Path) -> dict[str, Any]:
    report = run.folder / "report.html"
    return {
        "name": run.name,
        "group": group,
        "seed": run.config.get(SEED),
        "steps": [run.history.step, run.config.get("steps")],
        "before": short(run.before),
        "word": run.held_out.get("word"),
        "findings": [{"name": f.name, "level": f.level, "says": f.says} for f in run.findings],
        "report": Path(os.path.relpath(report, base)).as_posix() if report.is_file() else None,
    } | {name: short(run.final(name, held_out)) for name in FINALS}


def _group(group: Group, final: Finals) -> dict[str, Any]:
    before = interval([run.before for run in group.runs])
    return {
        "label": group.label,
        "values": {name: spoken(value) for name, value in group.values.items()},
        "number": _only_number(group),
        "n": len(group.runs),
        "final": {name: _told(found) for name, found in {"before": before, **final}.items()},
        "findings": _named(group),
    }


def _only_number(group: Group) -> float | None:
    """Of groups that differ in one number: it orders their colours."""
    values = list(group.values.values())
    known = len(values) == 1 and isinstance(values[0], (int, float)) and not isinstance(values[0], bool)
    return float(values[0]) if known else None


def _told(found: Interval | None) -> dict[str, Any] | None:
    return None if found is None else {"mean": short(found.mean), "half": short(found.half), "n": found.n}


def _named(group: Group) -> list[dict[str, Any]]:
    """Finding names of a group, and in how many of its runs."""
    counts: dict[tuple[str, str], list[str]] = {}
    for run in group.runs:
        for finding in run.findings:
            counts.setdefault((finding.name, finding.level), []).append(finding.says)
    order = {"problem": 0, "warning": 1, "note": 2}
    found = sorted(counts.items(), key=lambda item: (order[item[0][1]], -len(item[1])))
    return [{"name": name, "level": level, "runs": len(said), "says": said[0]} for (name, level), said in found]


# --- reward against KL ------------------------------------------------------------------------------------------------


def _frontier(groups: Sequence[Group], finals: Sequence[Finals], held_out: bool) -> dict[str, Any]:
    points = [
        {"run": run.name, "group": number, "kl": short(kl), "reward": short(reward)}
        for number, group in enumerate(groups)
        for run in group.runs
        if (kl := run.final("kl", held_out)) is not None and (reward := run.final("reward", held_out)) is not None
    ]
    known = [i for i, final in enumerate(finals) if final["kl"] and final["reward"]]
    means = [(finals[i]["kl"].mean, finals[i]["reward"].mean) for i in known]
    before = interval([run.before for group in groups for run in group.runs])
    return {
        "points": points,
        "front": [known[i] for i in front(means)],
        "start": short(before.mean) if before else None,
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
    probes = reading.steps(run.folder / "probes")
    return _rows(probes[max(probes)]) if probes else _evaluated(run, "after")


def _reference(run: Told, probed: bool) -> dict[str, Any]:
    """The reference's answers to the probe queries, or what the policy said to the held-out tasks before training."""
    path = run.folder / "probes" / "reference.parquet"
    return _evaluated(run, "before") if not probed else _rows(path) if path.is_file() else {}


def _evaluated(run: Told, when: str) -> dict[str, Any]:
    replies = (run.history.evaluation.get(when) or {}).get("replies", [])
    return {reply["task"]: reply | {"reward": reply["score"]} for reply in replies}


def _rows(path: Path) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for row in reading.lines(path).to_pylist():
        rows.setdefault(row["task"], row)
    return rows


def _cell(row: Mapping[str, Any] | None) -> list[Any] | None:
    """[reply, reward], None where there was no answer."""
    if row is None:
        return None
    text = str(row["reply"])
    return [text if len(text) <= LONGEST else text[:LONGEST] + " …", short(row["reward"])]


# --- in words ---------------------------------------------------------------------------------------------------------


def _sentence(groups: Sequence[Group], finals: Sequence[Finals], held_out: bool) -> str:
    where = "on held-out tasks" if held_out else "over the last steps"
    known = [(found.mean, i) for i, final in enumerate(finals) if (found := final["reward"])]
    if not known:
        return "No run has finished a step yet."
    best, problems = max(known)[1], [[f["name"] for f in _named(g) if f["level"] == "problem"] for g in groups]
    said = f"The highest reward {where} is {_one(best, groups, finals)}"
    if problems[best]:
        said += f", but the diagnosis calls it {' and '.join(problems[best][:2]).replace('_', ' ')}"
        sane = [(mean, i) for mean, i in known if not problems[i]]
        said += f". Without a problem: {_one(max(sane)[1], groups, finals)}" if sane else ", and no setting is without"
    return said + "."


def _one(place: int, groups: Sequence[Group], finals: Sequence[Finals]) -> str:
    kl = finals[place]["kl"]
    at = f" at a KL of {_plus_minus(kl)} nats" if kl else ""
    return f"{_plus_minus(finals[place]['reward'])}, with {groups[place].label}{at}"


def _plus_minus(found: Interval | None, percent: bool = False) -> str:
    if found is None:
        return "–"
    scale, unit = (100, " %") if percent else (1, "")
    half = "" if found.half is None or percent else f" ± {found.half * scale:.3g}"
    return f"{found.mean * scale:.3g}{half}{unit}"


def table(data: Mapping[str, Any]) -> str:
    """The groups as lines of text: what differs, number of runs, reward, KL, empty replies, findings."""
    names = list(data["groups"][0]["values"])
    head = [*names, "runs", "before", "reward", "KL", "empty", "found"]
    lines = [[*(group["values"][n] for n in names), str(group["n"]), *_cells(group)] for group in data["groups"]]
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in [head, *lines])


def _cells(group: Mapping[str, Any]) -> list[str]:
    final = {k: Interval(**v) if v else None for k, v in group["final"].items()}
    found = ", ".join(f"{f['name']} ({f['runs']})" for f in group["findings"] if f["level"] != "note")
    numbers = [_plus_minus(final[name], name == "empty") for name in ("before", "reward", "kl", "empty")]
    return [*numbers, found or "nothing"]
