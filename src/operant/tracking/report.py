"""A run folder as one page of HTML: verdict, charts, replies, numbers, configuration. Nothing on it comes from elsewhere.

    write_report("runs/x")     writes runs/x/report.html
    page_data("runs/x")        what the page is told, without the table of replies; a live page asks for it again

`page/app.js` lays the page out; `thinning.py` makes a long run small; `diagnosis/` writes the verdict.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from operant import files
from operant.tracking import pages
from operant.tracking.registry import describe
from operant.tracking.thinning import Heatmaps, curves, short, stretch

SCRIPTS = ("charts.js", "replies.js", "app.js")
STYLES = ("style.css", "replies.css")
MOST_BYTES = 8_000_000
_HISTOGRAMS = {"reward": 0.0, "kl_per_reply": 0.0, "logprobs": 0.0, "ref_logprobs": 0.0, "reply_tokens": 1.0}
"""What the page has a heatmap of, and the narrowest row: lengths are whole numbers."""
_TEASER = 3
Rows = list[dict[str, Any]]


def write_report(run_folder: str | Path) -> Path:
    """Write `report.html` into a run folder, from what stands in it by now; returns its path.

    Raises `OperantError` where the folder cannot be read or written.
    """
    from operant.tracking import replies

    folder = Path(run_folder)
    data, path = page_data(folder), folder / "report.html"
    html = page(data | {"replies": replies.embedded(folder)})
    files.write(path, html)
    return path


def page(data: Mapping[str, Any], live: bool = False) -> str:
    """The page of `page_data`, with `replies` in it or, live, without."""
    return pages.page(data["name"], data, scripts=SCRIPTS, styles=STYLES, live=live)


def page_data(run_folder: str | Path) -> dict[str, Any]:
    """What the page shows but for the table of replies, as JSON can hold it. Raises `OperantError`."""
    try:
        from operant.tracking.diagnosis import diagnose, read_history, verdict
    except ImportError:  # TODO
        diagnose, read_history, verdict = (lambda h: []), (lambda f: None), (lambda h, f: "It learned.")

    folder = Path(run_folder)
    metrics = files.records(folder / "metrics.jsonl")
    history = read_history(folder)
    findings = diagnose(history) if metrics else []
    config = _text(folder / "config.yaml")
    options, evaluation = yaml.safe_load(config) or {}, _json(folder / "evaluation.json")
    heatmaps = Heatmaps(folder / "distributions.jsonl")
    return {
        "name": folder.resolve().name,
        "steps": [metrics[-1]["step"] if metrics else 0, options.get("steps")],
        "verdict": verdict(history, findings) if metrics else "No step is finished yet.",
        "findings": [vars(finding) for finding in findings],
        "numbers": key_numbers(metrics, evaluation),
        "teaser": teaser(folder, evaluation),
        "curves": curves(metrics),
        "stretch": stretch(len(metrics)),
        "heats": _present(_HISTOGRAMS, lambda name: heatmaps.of(name, _HISTOGRAMS[name])),
        "blocks": _present(("gradient", "update", "weight"), heatmaps.blocks),
        "metrics": metric_table(metrics),
        "kl": _kl(options.get("kl") or {}),
        "config": config,
        "environment": _json(folder / "environment.json"),
    }


def _present(names: Iterable[str], of: Callable[[str], Any]) -> dict[str, Any]:
    return {name: found for name in names if (found := of(name)) is not None}


def _kl(kl: Mapping[str, Any]) -> dict[str, Any]:
    """The KL that a controller steers towards (None where nothing does), and how it is estimated."""
    steered = kl.get("control") in ("adaptive", "per_token")
    return {"target": kl.get("target") if steered else None, "kind": kl.get("kind")}


# --- numbers ----------------------------------------------------------------------------------------------------------


def key_numbers(metrics: Sequence[Mapping[str, Any]], evaluation: Mapping[str, Any]) -> Rows:
    """The few numbers beside the verdict: label, unit, before and after (after alone: a number of the newest step)."""
    if not metrics:
        return []
    score = _score(metrics, evaluation)
    kl = _known(metrics, "kl/per_reply")
    told = [score, {"label": "KL per reply", "unit": "nats", "after": kl[-1]} if kl else None]
    told.append({"label": "Entropy", "unit": "nats"} | _ends(_known(metrics, "policy/entropy")))
    told.append({"label": "Training time", "unit": "s", "after": sum(m.get("time/step") or 0.0 for m in metrics)})
    return [
        {key: short(value) if key in ("before", "after") else value for key, value in number.items()}
        for number in told
        if number and "after" in number
    ]


def _score(metrics: Sequence[Mapping[str, Any]], evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Before and after, on tasks that training did not see where there are some."""
    before, after = evaluation.get("before"), evaluation.get("after")
    if before and after and None not in (before["mean"], after["mean"]):
        return {"label": "Held-out reward", "unit": "", "before": before["mean"], "after": after["mean"]}
    for label, name in (("Held-out reward", "evaluate/reward"), ("Probe reward", "probe/reward")):
        if len(known := _known(metrics, name)) > 1:
            return {"label": label, "unit": ""} | _ends(known)
    return {"label": "Reward", "unit": ""} | _ends(_known(metrics, "reward/mean"))


def _ends(known: Sequence[float]) -> dict[str, float]:
    return {"before": known[0], "after": known[-1]} if len(known) > 1 else {"after": known[0]} if known else {}


def metric_table(metrics: Sequence[Mapping[str, Any]]) -> Rows:
    """First and newest value of every metric, and what the registry says of it."""
    names = dict.fromkeys(name for m in metrics for name in m if name != "step")
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


def teaser(folder: Path, evaluation: Mapping[str, Any]) -> dict[str, Any] | None:
    """The first few fixed queries, answered before and now: from the probes, else from the evaluation."""
    from operant.tracking.replies import Reader, probes

    asked = probes(folder, Reader(), 2)
    if asked is None:
        return _evaluated(evaluation)
    steps, sides, reference = asked["steps"], asked["policy"], asked["reference"]
    earlier = ("reference", reference) if reference else (f"policy, step {steps[0]}", sides[0])
    rows = [
        {"query": query["query"], "before": _said(earlier[1], i), "after": _said(sides[-1], i)}
        for i, query in enumerate(asked["queries"])
        if sides[-1]["reply"][i] is not None
    ][:_TEASER]
    return {"before": earlier[0], "after": f"policy, step {steps[-1]}", "of": len(asked["queries"]), "rows": rows}


def _said(side: Mapping[str, Sequence[Any]], i: int) -> dict[str, Any] | None:
    return None if side["reply"][i] is None else {"reply": side["reply"][i], "reward": short(side["reward"][i])}


def _evaluated(evaluation: Mapping[str, Any]) -> dict[str, Any] | None:
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
    with files.explained(path, "read"):
        return path.read_text(encoding="utf-8") if path.exists() else ""


def _json(path: Path) -> dict[str, Any]:
    text = _text(path)
    return json.loads(text) if text else {}
