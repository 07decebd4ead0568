"""Writes the report of a run as one self-contained HTML page: verdict, charts, replies, metrics, configuration.

    write_report("runs/x")     writes runs/x/report.html
    page_data("runs/x")        the page's data without the table of replies; a live page fetches it repeatedly

`page/app.js` lays the page out, `downsample.py` shortens long runs, and `diagnosis/` writes the verdict.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from operant.metrics.registry import CHOSEN, METRICS, describe
from operant.storage import atomic_io
from operant.tools.report import games, html, prompts
from operant.tools.report.cycle import cycle
from operant.tools.report.diagnosis import History, diagnose, read_history, verdict
from operant.tools.report.diagnosis.history import RECENT, capitalised, counted, read_json
from operant.tools.report.diagnosis.progress import progress
from operant.tools.report.downsample import Heatmaps, Metrics, curves, short, steps_per_interval
from operant.tools.report.parquet import reading_run
from operant.tools.report.replies import Reader, embedded, probes

_SCRIPTS = "charts heat export figures cycle replies rooms games labels prompts app"
SCRIPTS = tuple(f"{name}.js" for name in _SCRIPTS.split())
STYLES = ("style.css", "replies.css", "games.css", "labels.css", "prompts.css")
_HISTOGRAMS = ("reward", "kl_per_reply", "logprobs", "ref_logprobs", "reply_tokens")
_CONTROLLERS = ("adaptive", "per_token")
"""Values of `kl.control` that steer KL towards `kl.target`."""
HELD_OUT = {
    "game/score": "Score, of the largest",
    "game/turns_to_win": "Turns of a won game",
    "preference/accuracy": "Pairs in the right order",
    "preference/longer_is_better": "The same by length alone",
    "preference/best": "Best reply scored highest",
}
"""The metrics of held-out games and labels below the verdict, which has the success rate of games."""
IN_REWARD_UNITS = "_in_reward_units"
"""Ends the names of the curves that `in_reward_units` adds."""


def write_report(run_folder: str | Path) -> Path:
    """Write `report.html` into a run folder from its present contents; returns its path.

    Raises: OperantError where the folder cannot be read or written.
    """
    folder = Path(run_folder)
    path = folder / "report.html"
    with reading_run(folder):
        played = games.embedded(folder)
        text = page(page_data(folder) | {"replies": embedded(folder)} | ({"games": played} if played else {}))
    atomic_io.write(path, text)
    return path


def page(data: Mapping[str, object], live: bool = False) -> str:
    """Build the page's HTML from `page_data`, with `replies` added unless the page is live."""
    return html.page(data["name"], data, scripts=SCRIPTS, styles=STYLES, live=live)


def page_data(run_folder: str | Path) -> dict[str, object]:
    """Collect the page's data, as JSON can hold it, without the table of replies.

    Raises: OperantError where the folder cannot be read.
    """
    folder = Path(run_folder)
    history, config = read_history(folder), folder / "config.yaml"
    metrics, findings = history.metrics, diagnose(history)
    found_probes = probes(folder, Reader(), 2)
    samples = _probe_samples(found_probes) if found_probes else _held_out_samples(history.evaluation)
    heatmaps = Heatmaps(folder / "distributions.jsonl")
    return {
        "name": folder.resolve().name,
        "steps": [history.step, history.option("steps")],
        "verdict": verdict(history, findings),
        "findings": [asdict(finding) for finding in findings] if metrics else [],
        "cycle": cycle(history),
        "numbers": key_numbers(history),
        "samples": None if history.plays else samples,
        "curves": curves(in_reward_units(history)),
        "scaled": bool(history.option("score.normalise") or history.option("score.scale")),
        "labels": history.evaluation.get("labels"),
        "given": history.supervised,
        "prompts": prompts.embedded(folder),
        "steps_per_interval": steps_per_interval(len(metrics)),
        "histograms": {
            name: found
            for name in _HISTOGRAMS
            if (name, history.supervised) != ("reward", True) and (found := heatmaps.histogram(name))
        },
        "blocks": {name: found for name in ("gradient", "update", "weight") if (found := heatmaps.blocks(name))},
        "metrics": metric_table(metrics),
        "chosen": [  # the metrics of the option `evaluation.metrics`, without their spread
            name
            for name in dict.fromkeys(name for m in metrics for name in m if not name.endswith(("_std", "_before")))
            if (metric := describe(name)) and metric.group == CHOSEN
        ],
        "target": history.option("kl.target") if history.option("kl.control") in _CONTROLLERS else None,
        "config": config.read_text(encoding="utf-8") if config.is_file() else "",
        "environment": read_json(folder / "environment.json"),
    }


def in_reward_units(history: History) -> Sequence[Metrics]:
    """Return the metrics, with KL penalty and return also in units of the reward where the scores are scaled.

    A step trains on (score - mean) / spread of all scores so far, so the ratio of the two recorded spreads is that
    divisor: one unit of the scaled score. Where scores are also clipped or replaced there is no such ratio, and where
    they are not scaled at all the metrics have the reward's units already.
    """
    if history.supervised:  # labels are no rewards, so that a charge for KL and what is left of them do not exist
        return [{name: x for name, x in m.items() if not name.startswith("reward/")} for m in history.metrics]
    altered = any(history.option(f"score.{name}") is not None for name in ("clip", "missing_stop", "truncate_token"))
    scaled = history.option("score.normalise") or history.option("score.scale")
    if not scaled or altered or history.option("score.overlong_tokens"):
        return history.metrics
    rows = []
    for m in history.metrics:
        unit = (m.get("reward/std") or 0.0) / (m.get("reward/scaled_std") or math.inf) or None
        found = {name: m.get(name) for name in ("reward/kl_penalty", "reward/return") if name in m}
        found |= {f"{name}_std": m.get(f"{name}_std") for name in found}
        if (total := found.get("reward/return")) is not None:  # minus the running mean, which the reward's mean has not
            found["reward/return"] = total - m["reward/scaled_mean"] + m["reward/mean"] / unit if unit else None
        rows.append({**m, **{name + IN_REWARD_UNITS: unit and x and unit * x for name, x in found.items()}})
    return rows


class Number(TypedDict):
    label: str
    note: str
    unit: str
    before: NotRequired[float | None]
    after: float


def key_numbers(history: History) -> list[Number]:
    """List the few numbers below the verdict, with a note on where each was measured.

    Numbers whose start means nothing have only `after`. Like the verdict, they average noisy metrics over the newest
    few steps; those on held-out tasks were measured once, after training.
    """
    score, steps = progress(history), min(RECENT, len(history.metrics))
    last = f"mean of the last {steps} steps" if steps > 1 else "step 1"
    before, after = (history.evaluation.get(when) or {} for when in ("before", "after"))
    rows = list[tuple[str, str, str, tuple[float | None, ...]]]()  # label, note, unit, (before,) after
    if score is not None:
        tasks = len({row["task"] for row in after.get("replies") or () if "task" in row})
        note, (unit, scale) = f"start, {last}", ("%", 100) if score.share else ("", 1)
        if score.held_out:
            note = f"{counted(tasks, 'task') + ', ' if tasks else ''}before and after training"
        elif not history.supervised and not any(score.steps):
            note = "before training, and the newest"
        rows += [(capitalised(score.label), note, unit, (score.before * scale, score.after * scale))]
    label, note = ("Log-ratio to the reference", f"of the given replies, {last}")
    label, note = (label, note) if history.supervised else ("KL per reply", last)
    entropy = history.first("policy/entropy"), history.recent("policy/entropy")
    rows += [
        (label, note, "nats", (history.recent("kl/per_reply"),)),
        ("KL per held-out reply", "after training", "nats", (after.get("kl"),)),
        ("Entropy per token", f"step 1, {last}", "nats", entropy),
        ("Training time", counted(history.step, "step"), "s", (sum(history.values("time/step")) or None,)),
    ]
    for name, value in after.get("metrics", {}).items():
        if name in HELD_OUT or not name.startswith(("game/", "preference/")):
            ends = before.get("metrics", {}).get(name), value
            rows += [(HELD_OUT.get(name, name), "held-out tasks", "", ends)]
    found = list[Number]()
    for label, note, unit, (*start, end) in rows:
        if end is not None:
            measured = {"before": short(start[0])} if start else {}
            found.append({"label": label, "note": note, "unit": unit, **measured, "after": short(end)})
    return found


def metric_table(metrics: Sequence[Metrics]) -> list[dict[str, object]]:
    """List the first and newest value of every metric with its description, in the registry's order."""
    places = {name: place for place, name in enumerate(METRICS)}
    known = {name: describe(name) for m in metrics for name in m if name != "step"}
    rows = []
    for name, metric in sorted(known.items(), key=lambda item: places[item[1].name] if item[1] else len(places)):
        values = [m[name] for m in metrics if m.get(name) is not None]
        if not values:
            continue
        row = {"name": name, "first": short(values[0]), "last": short(values[-1])}
        if metric is not None:
            row |= {"unit": metric.unit, "healthy": metric.healthy, "meaning": metric.meaning, "band": metric.band}
            row["odd"] = metric.unhealthy(values[-1])
        rows.append(row)
    return rows


class Answer(TypedDict):
    reply: str
    reward: float | None


class Sample(TypedDict):
    """A reply to a query before training, if it is known, and after it."""

    query: str
    before: Answer | None
    after: Answer


def _probe_samples(found_probes: Mapping[str, Any]) -> dict[str, object]:
    """Collect probe prompts with the newest answers beside those of the reference, or else the oldest."""
    steps, sides, reference = found_probes["steps"], found_probes["policy"], found_probes["reference"]
    before, label = (reference, "reference") if reference else (sides[0], f"policy, step {steps[0]}")
    queries = [row["query"] for row in found_probes["queries"]]
    replies = [[_answer(*pair) for pair in zip(side["reply"], side["reward"])] for side in (before, sides[-1])]
    rows = [{"query": query, "before": old, "after": new} for query, old, new in zip(queries, *replies) if new]
    return {"before": label, "after": f"policy, step {steps[-1]}", "queries": "probe prompts", **_showcase(rows)}


def _held_out_samples(evaluation: Mapping[str, Any]) -> dict[str, object] | None:
    before, after = ((evaluation.get(key) or {}).get("replies") or [] for key in ("before", "after"))
    earlier = {row["task"]: _answer(row["reply"], row["score"]) for row in reversed(before)}
    rows = [
        {"query": row["query"], "before": earlier.get(row["task"]), "after": _answer(row["reply"], row["score"])}
        for row in after
    ]
    return {"before": "before", "after": "after", "queries": "held-out tasks", **_showcase(rows)} if rows else None


def _showcase(rows: Sequence[Sample]) -> dict[str, object]:
    """Choose the median, the best and the worst gain: the first queries alone may be exceptions.

    Returns them, or the first three without scores; the number of all; and how many improved, None without scores.
    """
    gains = [
        (row["after"]["reward"] - row["before"]["reward"], i)
        for i, row in enumerate(rows)
        if row["before"] and None not in (row["before"]["reward"], row["after"]["reward"])
    ]
    if not gains:
        return {"of": len(rows), "better": None, "rows": list(rows[:3])}
    gains.sort()
    places = {"median": (len(gains) - 1) // 2, "best": -1, "worst": 0}
    picks = list(places) if len(gains) > 2 else ["best", "worst"][: len(gains)]
    chosen = [(pick, *gains[places[pick]]) for pick in picks]
    picked = [{**rows[i], "gain": short(gain), "pick": pick} for pick, gain, i in chosen]
    return {"of": len(gains), "better": sum(gain > 0 for gain, _ in gains), "rows": picked}


def _answer(reply: str | None, reward: float | None) -> Answer | None:
    return None if reply is None else {"reply": reply, "reward": short(reward)}
