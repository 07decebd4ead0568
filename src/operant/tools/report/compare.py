"""Compares several runs on one page: curves, reward against KL, differing options, and replies side by side.

Runs that differ only in their seed are a group: a curve shows their mean in a band from the lowest to the highest, and
a number has a 95 % interval of Student's t over the seeds. Scores of different rewards never share an axis.
`page/compare.js` lays the page out.
"""

import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from operant.metrics import evaluation
from operant.metrics.games import SHOWN
from operant.metrics.registry import describe
from operant.storage import atomic_io
from operant.tools.report import html, parquet
from operant.tools.report.downsample import POINTS, short
from operant.tools.report.replies import last_replies
from operant.tools.report.runs import Group, RunRecord, as_text, grouped, is_sweep, read_runs, swept
from operant.tools.report.summary import group_row, interval, results, run_row, sentences, table
from operant.types import OperantError, require

SCRIPTS = ("charts.js", "export.js", "compare.js")
STYLES = ("style.css", "compare.css")
CURVES = {
    "reward/mean": "Reward",
    "kl/per_reply": "KL per reply",
    "policy/entropy": "Entropy",
    "rollout/reply_tokens": "Reply length",
    "probe/reward": "Reward on the probe prompts",
    "evaluate/reward": "Reward on held-out tasks",
    "preference/accuracy": "Pairs in the right order",
    "evaluate/preference/accuracy": "Held-out pairs in the right order",
    "supervised/loss": "Loss on demonstrations",
    "evaluate/loss": "Loss on held-out demonstrations",
    "text/empty": "Empty replies",
    "text/top_word": "Share of the most common word",
    "text/repeated": "Repeated trigrams",
    "policy/clip_fraction": "Clip fraction",
    "value/explained_variance": "Value: explained variance",
    "update/grad_norm": "Gradient norm",
}
_OF_REPLIES = ("data.loss_on", "data.max_length", "data.reply_field", "data.reference_field")  # of no prompt
_SCORES = ("reward/mean", "probe/reward", "evaluate/reward")  # in the unit of the reward
_MOST_POINTS = 6000  # of a chart of all runs: many runs have fewer each
MOST_REPLIES = 4000
LONGEST = 1500
"""Characters of a reply on the page."""


def write_comparison(
    places: Sequence[str | Path], out: str | Path | None = None, say: Callable[[str], None] | None = None
) -> Path:
    """Write the page of run folders and sweep folders; returns its path, which is `report_path` unless `out` is set.

    say: is called with a table of the results as text.
    """
    path = Path(out) if out is not None else report_path(places)
    require(path.suffix in (".html", ".htm"), f"--out {out}: the comparison is a page; let its name end in .html")
    with parquet.reading_run(", ".join(map(str, places))):
        data = comparison(places, path.parent)
        text = html.page(data["name"], data, scripts=SCRIPTS, styles=STYLES)
    atomic_io.write(path, text)
    if say is not None:
        say(table(data))
    return path


def report_path(places: Sequence[str | Path]) -> Path:
    """Return the default path of the page: `report.html` in the sweep, or `comparison.html` beside the runs."""
    if len(places) == 1 and is_sweep(places[0]):
        return Path(places[0]) / "report.html"
    parents = {os.path.dirname(os.path.abspath(place)) for place in places}
    return Path(os.path.relpath(os.path.commonpath(parents))) / "comparison.html"


def comparison(places: Sequence[str | Path], base: str | Path = ".") -> dict[str, object]:
    """Collect the page's data, as JSON can hold it. base: the folder that links are relative to."""
    groups = grouped(read_runs(places), swept(places))
    runs = [run for group in groups for run in group.runs]  # from here on in the order of the groups
    require(runs, "there is nothing to compare: operant report runs/a runs/b ...")
    rewards = _divided(range(len(groups)), groups, "reward/mean")
    rows = [group_row(group) for group in groups]
    for place, members in enumerate(rewards.values()):
        for i in members:
            rows[i]["reward"] = place
    unfinished = sum(not run.finished for run in runs)
    notes = [f"{unfinished} of {len(runs)} runs {'is' if unfinished == 1 else 'are'} unfinished."] if unfinished else []
    if len(rewards) > 1:
        notes.append("Scores of different rewards are not comparable, so each reward has its own verdict and charts.")
    return {
        "name": Path(places[0]).resolve().name if len(places) == 1 else f"{len(runs)} runs",
        "rewards": [_reward(name, [groups[i] for i in members], members) for name, members in rewards.items()],
        "notes": notes,
        "options": list(dict.fromkeys(name for group in groups for name in group.values)),
        "runs": [run_row(run, number, base) for number, group in enumerate(groups) for run in group.runs],
        "groups": rows,
        "metrics": list(dict.fromkeys(name for run in runs for name in _chosen(run))),
        "curves": _curves(groups),
        "replies": _replies(runs),
    }


def _held_out(run: RunRecord) -> Mapping[str, object]:
    """Return the options that make the held-out prompts. In place of `evaluate`: of a world that has own tasks, its."""
    own = {name: x for name, x in run.config.items() if name.partition(".")[0] == "env" and name not in SHOWN}
    named = run.config.get("evaluate")
    if str(named).endswith("%"):  # a share of the run's own tasks
        named = f"{named} of {run.config.get('tasks')}"
    read = {n: x for n, x in run.config.items() if n.partition(".")[0] in ("data", "form") and n not in _OF_REPLIES}
    return read | {"evaluate": named or (own if run.config.get("tasks") is None else None)}


def _scale(run: RunRecord, metric: str) -> Mapping[str, object]:
    """Return the options that fix what a metric measures: only its values under the same ones share an axis."""
    options = {}
    if metric in _SCORES:
        own = {n: x for n, x in run.config.items() if n.partition(".")[0] in ("reward", "env") and n not in SHOWN}
        options = own | ({"measure": run.measure} if metric == "reward/mean" else {})
    if metric.startswith("evaluate/"):
        options |= _held_out(run) | {"options": _chosen(run).get(metric[len("evaluate/") :])}
    return options


def _chosen(run: RunRecord) -> dict[str, object]:
    """Return the run's own metrics of the held-out tasks, each number of them by its name, with its options."""
    given = run.config.get("evaluation.metrics")
    options, measured = evaluation.chosen(given), dict.fromkeys(n for judged in run.held_out.values() for n in judged)
    return {
        number: options[full]
        for name, full in evaluation.metric_names(given).items()
        for number in [n for n in measured if n == name or n.startswith(f"{name}/")] or [name]  # rouge/rouge1, ...
    }


def _divided(members: Iterable[int], groups: Sequence[Group], metric: str) -> dict[str, list[int]]:
    """Divide groups by what the metric measures in them; each part is named by the options that tell it apart."""
    scales = {i: {name: as_text(x) for name, x in _scale(groups[i].runs[0], metric).items()} for i in members}
    names = itertools.chain.from_iterable(scales.values())
    apart = [name for name in dict.fromkeys(names) if len({scale.get(name) for scale in scales.values()}) > 1]
    parts: dict[tuple[str, ...], list[int]] = {}
    for i, scale in scales.items():
        parts.setdefault(tuple(scale.get(name, "none") for name in apart), []).append(i)
    of = {name: f"{name} " if "." in name else "" for name in apart}
    lacks = " and ".join(f"no {n}" for n in apart if n.split(".")[0] not in {*apart} - {n})
    titles = [  # the name of a world or of a reward stands for its options
        ", ".join(of[n] + x for n, x in p.items() if x != "none" and p.get(n.split(".")[0], x) in ("none", x)) or lacks
        for p in (dict(zip(apart, values)) for values in parts)
    ]
    if len(set(titles)) < len(titles):  # the same value of different options
        titles = [", ".join(f"{name} {x}" for name, x in zip(apart, values)) for values in parts]
    return dict(zip(titles, parts.values()))


def _reward(name: str, groups: Sequence[Group], members: Sequence[int]) -> dict[str, object]:
    """Collect the verdict on the groups with one reward, and their points of reward against KL and perplexity.

    name: empty if there is no other reward. members: the places of the groups on the page.
    """
    runs = [run for group in groups for run in group.runs]
    judged = [run for run in runs if run.result("reward", held_out=True) is not None]
    same_tasks = len({as_text(_held_out(run)) for run in judged}) == 1
    held_out = same_tasks and all(run in judged for run in runs if run.finished and run.history.metrics)
    raters = {(as_text(_scale(run, "evaluate/perplexity")), as_text(run.config.get("policy"))) for run in runs}
    axes = ("kl", "perplexity") if len(raters) == 1 else ("kl",)  # perplexities under two models share no axis
    planes = [_plane(of, groups, members, held_out) for of in axes]
    return {
        "name": name,
        "held_out": held_out,
        "verdict": sentences(groups, held_out),
        "planes": [plane for plane in planes if plane["points"]],
    }


def _plane(of: str, groups: Sequence[Group], members: Sequence[int], held_out: bool) -> dict[str, object]:
    """Collect the points of reward against `kl` or `perplexity`, which is less where texts are more natural.

    perplexity is the metric of that name of `evaluation.metrics`. start: where the runs began, [x, reward], or None.
    """
    points, means, runs = [], [], [run for group in groups for run in group.runs]
    for i, group in zip(members, groups):
        own = results(group.runs, held_out)
        if of in own and "reward" in own and (x := own[of].after) and (reward := own["reward"].after):
            means.append((i, x.mean, reward.mean))
        for run in group.runs:
            x, y = (run.result(name, held_out) for name in (of, "reward"))
            if x is not None and y is not None:
                points.append({"run": run.name, "group": i, "x": short(x), "reward": short(y)})
    before = [interval([run.result(name, held_out, "before") for run in runs]) for name in (of, "reward")]
    x, reward = (None if found is None else short(found.mean) for found in before)
    x = 0.0 if of == "kl" else x
    start = [] if x is None or reward is None else [(x, reward)]  # no training, which may beat a setting in both
    ends = [(x, reward) for _, x, reward in means]
    return {
        "of": of,
        "points": points,
        "front": [means[place - len(start)][0] for place in front([*start, *ends]) if place >= len(start)],
        "start": list(start[0]) if start else None,
    }


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the (x, reward) points that no other beats in both, in the order of x."""
    best, found = -math.inf, []
    for place in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if points[place][1] > best:
            best = points[place][1]
            found.append(place)
    return found


def _curves(groups: Sequence[Group]) -> list[dict[str, object]]:
    """Collect the charts: a metric over the steps, with a line for each group that has it and the same scale."""
    chosen = {f"evaluate/{name}": name for group in groups for run in group.runs for name in _chosen(run)}
    charts, points = [], max(60, min(POINTS, _MOST_POINTS // sum(len(group.runs) for group in groups)))
    for name, title in {**CURVES, **{full: f"{own} on held-out tasks" for full, own in chosen.items()}}.items():
        lines = {i: line for i, group in enumerate(groups) if (line := _line(name, group, points))}
        for part, members in _divided(lines, groups, name).items():
            chart = {"name": name, "title": title, "of": part, "lines": [{"group": i} | lines[i] for i in members]}
            if metric := describe(name):
                chart |= {"unit": metric.unit, "meaning": metric.meaning, "band": metric.band}
            floor = -1.0 if name == "value/explained_variance" else None  # an untrained critic starts far below
            charts.append(chart | {"floor": floor})
    first = ("reward/", "kl/", "probe/", "evaluate/")
    return sorted(charts, key=lambda chart: not str(chart["name"]).startswith(first))


def _line(name: str, group: Group, points: int) -> dict[str, object] | None:
    """Average a metric over the runs that reached each step, with the lowest and the highest, at up to `points` steps.

    Runs of several seeds are also listed one by one.
    """
    found = [_values(name, run) for run in group.runs]
    steps = sorted(set(itertools.chain.from_iterable(found)))
    steps = steps[::-1][:: math.ceil(len(steps) / points) or 1][::-1]
    if not steps:
        return None
    known = [[values[step] for values in found if step in values] for step in steps]
    line: dict[str, object] = {"steps": steps, "mean": [short(statistics.fmean(values)) for values in known]}
    if len(group.runs) > 1:
        line["low"], line["high"] = ([short(end(values)) for values in known] for end in (min, max))
        line["n"] = [min(map(len, known)), max(map(len, known))]
        line["runs"] = [[short(values.get(step)) for step in steps] for values in found]
    return line


def _values(name: str, run: RunRecord) -> dict[int, float]:
    """Return the finite values of a metric by step; one of the held-out tasks has those before and after training."""
    values = {int(m["step"]): float(m[name]) for m in run.history.metrics if m.get(name) is not None}
    kind, _, of = name.partition("/")
    if kind == "kl" and run.history.supervised:
        return {}  # a log-ratio of given replies
    if kind == "evaluate" and (of != "reward" or run.measure == "reward"):
        for when, step in (("before", 0), ("after", run.history.step)):
            if (value := run.result(of, held_out=True, when=when)) is not None:
                values.setdefault(step, float(value))
    return values


def _replies(runs: Sequence[RunRecord]) -> dict[str, object]:
    """Collect the replies of each run and of the reference to the queries that all runs have answered.

    They are the newest replies to the probe prompts; a run without probes has those to the held-out tasks.
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

    def answers(side: Mapping[tuple[str, str], Mapping[str, object]]) -> list[list[str | float | None] | None]:
        rows = [side.get(task) for task in tasks]
        return [[html.cut(str(row["reply"]), LONGEST), short(row["reward"])] if row else None for row in rows]

    return {
        "queries": [query for _, query in tasks],
        "columns": [{"run": run.name, "answers": answers(side)} for run, side in zip(runs, sides)],
        "reference": answers(reference) if reference else None,
        "reference_label": "the reference" if paths else "before training",
        "queries_differ": bool(known) and not tasks,
    }


def _evaluated(run: RunRecord, when: str) -> dict[tuple[str, str], Mapping[str, object]]:
    replies = (run.history.evaluation.get(when) or {}).get("replies", [])
    return {(reply["task"], reply["query"]): reply | {"reward": reply["score"]} for reply in replies}


def _rows(path: Path) -> dict[tuple[str, str], Mapping[str, object]]:
    """Return the last row of each task's first attempt; none where the file is damaged or has been removed."""
    with suppress(OperantError, FileNotFoundError):
        return {(task, str(row["query"])): row for task, row in last_replies(parquet.lines(path)).items()}
    return {}
