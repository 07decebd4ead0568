"""A run folder as one page of HTML: verdict, charts, replies, numbers, configuration. It needs nothing from elsewhere.

    write_report("runs/x")     writes runs/x/report.html
    page_data("runs/x")        what the page is told, without the table of replies; a live page asks for it again

`page/app.js` lays the page out; `thinning.py` makes a long run small; `diagnosis/` writes the verdict.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from operant.diagnosis import History, diagnose, read_history, verdict
from operant.diagnosis.progress import progress
from operant.metrics.registry import METRICS, describe
from operant.report import html
from operant.report.downsample import Heatmaps, curves, short, stretch
from operant.report.parquet import sound
from operant.report.replies import Reader, embedded, probes
from operant.storage import atomic_io

SCRIPTS = ("charts.js", "heat.js", "figures.js", "replies.js", "app.js")
STYLES = ("style.css", "replies.css")
_HISTOGRAMS = ("reward", "kl_per_reply", "logprobs", "ref_logprobs", "reply_tokens")
_STEERED = ("adaptive", "per_token")
_TEASER = 3


def write_report(run_folder: str | Path) -> Path:
    """Write `report.html` into a run folder, from what stands in it by now; returns its path.

    Raises `OperantError` where the folder cannot be read or written.
    """
    folder = Path(run_folder)
    path = folder / "report.html"
    with sound(folder):
        text = page(page_data(folder) | {"replies": embedded(folder)})
    atomic_io.write(path, text)
    return path


def page(data: Mapping[str, Any], live: bool = False) -> str:
    """The page of `page_data`, with `replies` in it or, live, without."""
    return html.page(data["name"], data, scripts=SCRIPTS, styles=STYLES, live=live)


def page_data(run_folder: str | Path) -> dict[str, Any]:
    """What the page shows but for the table of replies, as JSON can hold it. Raises `OperantError`."""
    folder = Path(run_folder)
    history = read_history(folder)
    metrics, findings = history.metrics, diagnose(history)
    asked = probes(folder, Reader(), 2)
    heatmaps = Heatmaps(folder / "distributions.jsonl")
    return {
        "name": folder.resolve().name,
        "steps": [history.step, history.option("steps")],
        "verdict": verdict(history, findings),
        "findings": [asdict(finding) for finding in findings] if metrics else [],
        "numbers": key_numbers(history),
        "teaser": _probed(asked) if asked else _evaluated(history.evaluation),
        "curves": _with_first_probe(curves(metrics), asked),
        "stretch": stretch(len(metrics)),
        "heats": _present(_HISTOGRAMS, heatmaps.of),
        "blocks": _present(("gradient", "update", "weight"), heatmaps.blocks),
        "metrics": metric_table(metrics),
        "target": history.option("kl.target") if history.option("kl.control") in _STEERED else None,
        "config": _text(folder / "config.yaml"),
        "environment": json.loads(_text(folder / "environment.json") or "{}"),
    }


def _present(names: Sequence[str], of: Callable[[str], Any]) -> dict[str, Any]:
    return {name: found for name in names if (found := of(name)) is not None}


def _with_first_probe(told: dict[str, Any], asked: Mapping[str, Any] | None) -> dict[str, Any]:
    """The curves, that of the probes with what they scored before training: no step's metrics can tell that."""
    curve = told["of"].get("probe/reward")
    if asked is None or asked["steps"][0] != 0 or not isinstance(curve, dict) or 0 in curve["steps"]:
        return told
    scores = [score for score in asked["policy"][0]["reward"] if score is not None]
    if not scores:
        return told
    first = {"steps": [0, *curve["steps"]], "values": [short(sum(scores) / len(scores)), *curve["values"]]}
    return told | {"of": told["of"] | {"probe/reward": first}}


# --- numbers ----------------------------------------------------------------------------------------------------------


def key_numbers(history: History) -> list[dict[str, Any]]:
    """The few numbers beside the verdict: label, unit, before and after; after alone where a start says nothing.

    What goes up and down from step to step is a mean over the newest few, as in the verdict.
    """
    score, kl, entropy = progress(history), history.recent("kl/per_reply"), history.recent("policy/entropy")
    told: list[dict[str, Any]] = []
    if score is not None:
        label = score.label[0].upper() + score.label[1:]
        told.append({"label": label, "unit": "", "before": short(score.before), "after": short(score.after)})
    if kl is not None:
        told.append({"label": "KL per reply", "unit": "nats", "after": short(kl)})
    if entropy is not None:
        first = short(history.first("policy/entropy"))
        told.append({"label": "Entropy", "unit": "nats", "before": first, "after": short(entropy)})
    if seconds := sum(history.values("time/step")):
        told.append({"label": "Training time", "unit": "s", "after": short(seconds)})
    return told


def metric_table(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """First and newest value of every metric, and what the registry says of it, in the registry's order."""
    places = {name: place for place, name in enumerate(METRICS)}
    names = dict.fromkeys(name for m in metrics for name in m if name != "step")
    names = sorted(names, key=lambda name: places[known.name] if (known := describe(name)) else len(places))
    return [_metric_row(name, known) for name in names if (known := _known(metrics, name))]


def _metric_row(name: str, known: Sequence[float]) -> dict[str, Any]:
    metric = describe(name)
    row = {"name": name, "first": short(known[0]), "last": short(known[-1])}
    if metric is None:
        return row
    told = {"unit": metric.unit, "healthy": metric.healthy, "meaning": metric.meaning, "band": metric.band}
    return row | told | {"odd": metric.unhealthy(known[-1])}


def _known(metrics: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [m[name] for m in metrics if m.get(name) is not None]


# --- what it says -----------------------------------------------------------------------------------------------------


def _probed(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The first few fixed queries, answered before, or by the reference, and now."""
    steps, sides, reference = asked["steps"], asked["policy"], asked["reference"]
    before, label = (reference, "reference") if reference else (sides[0], f"policy, step {steps[0]}")
    rows = [
        {"query": query["query"], "before": _said(before, i), "after": _said(sides[-1], i)}
        for i, query in enumerate(asked["queries"])
        if sides[-1]["reply"][i] is not None
    ]
    return {"before": label, "after": f"policy, step {steps[-1]}", "of": len(rows), "rows": rows[:_TEASER]}


def _said(side: Mapping[str, Sequence[Any]], i: int) -> dict[str, Any] | None:
    return None if side["reply"][i] is None else {"reply": side["reply"][i], "reward": short(side["reward"][i])}


def _evaluated(evaluation: Mapping[str, Any]) -> dict[str, Any] | None:
    """The same from the held-out tasks, in a run without probes."""
    before, after = ((evaluation.get(key) or {}).get("replies") or [] for key in ("before", "after"))
    earlier = {row["task"]: row for row in reversed(before)}
    told = [
        {"query": row["query"], "before": _scored(earlier.get(row["task"])), "after": _scored(row)}
        for row in after[:_TEASER]
    ]
    return {"before": "before", "after": "after", "of": len(after), "rows": told} if told else None


def _scored(row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if row is None else {"reply": row["reply"], "reward": short(row["score"])}


# --- files ------------------------------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    with atomic_io.explained(path, "read"):
        return path.read_text(encoding="utf-8") if path.exists() else ""
