"""A run folder as one page of HTML: charts, replies, numbers, configuration. Nothing on it comes from elsewhere."""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from operant import files
from operant.tracking.charts import line_chart, number
from operant.tracking.registry import describe

_CHARTS = [
    ("reward/mean", "Reward", "reward/std"),
    ("kl/per_reply", "KL per reply", None),
    ("kl/coef", "KL coefficient", None),
    ("policy/entropy", "Entropy", None),
    ("policy/clip_fraction", "Clip fraction", None),
    ("value/explained_variance", "Value: explained variance", None),
    ("rollout/reply_tokens", "Reply length", "rollout/reply_tokens_std"),
]
_FLOOR = {"value/explained_variance": -1.0}
"""What a young critic did below this would flatten all that followed."""
_REPLIES = 10


def write_report(run_folder: str | Path) -> Path:
    """Write `report.html` into a run folder, from what stands in it by now; returns its path.

    Raises `OperantError` where the folder cannot be read or written.
    """
    folder = Path(run_folder)
    metrics = files.records(folder / "metrics.jsonl")
    config = folder / "config.yaml"
    with files.explained(config, "read"):
        text = config.read_text(encoding="utf-8") if config.exists() else ""
    path = folder / "report.html"
    files.write(path, page(folder.resolve().name, metrics, _replies(folder), text))
    return path


def page(name: str, metrics: Sequence[dict[str, Any]], replies: dict[int, list[dict[str, Any]]], config: str) -> str:
    """The page. metrics: one mapping a step; replies: rows of a table by step; config: as YAML."""
    charts = [_chart(metrics, *chart) for chart in _CHARTS]
    tables = [_reply_table(step, rows) for step, rows in sorted(replies.items(), reverse=True)]
    body = [
        f"<h1>{escape(name)}</h1>",
        _summary(metrics),
        '<div class="charts">' + "".join(charts) + "</div>" if any(charts) else "",
        *tables,
        _metric_table(metrics),
        f"<details><summary>Configuration</summary><pre>{escape(config)}</pre></details>" if config else "",
    ]
    return _PAGE.replace("{title}", escape(name)).replace("{style}", _STYLE).replace("{body}", "\n".join(body))


def _summary(metrics: Sequence[dict[str, Any]]) -> str:
    if not metrics:
        return "<p>No step is finished yet.</p>"
    seconds = sum(m.get("time/step") or 0.0 for m in metrics)
    facts = [f"{metrics[-1]['step']} steps", f"{seconds / 60:.1f} minutes of training"]
    for key, title in (("reward/mean", "reward"), ("kl/per_reply", "KL per reply")):
        if known := _known(metrics, key):
            first, last = (number(round(x, 3) + 0.0) for x in (known[0], known[-1]))
            facts.append(f"{title} {first} → <b>{last}</b>")
    return f"<p>{' · '.join(facts)}</p>"


def _chart(metrics: Sequence[dict[str, Any]], name: str, title: str, spread: str | None) -> str:
    metric = describe(name)
    assert metric is not None, f"{name} is not in the registry"
    known, floor = _known(metrics, name), _FLOOR.get(name, -math.inf)
    if known and known[-1] < floor:
        floor = -math.inf
    points = [(m["step"], None if m.get(name) is None else max(m[name], floor)) for m in metrics]
    half = [m.get(spread) for m in metrics] if spread else None
    svg = line_chart(points, label=title, spread=half, band=metric.band)
    if not svg:
        return ""
    notes = {
        metric.meaning: True,
        f"healthy: {metric.healthy}": bool(metric.healthy),
        "shade: one standard deviation": any(half or ()),
        f"drawn from {floor:g} upwards": min(known) < floor,
    }
    note = escape("; ".join(text for text, holds in notes.items() if holds))
    return f"<figure><h2>{title} <b>{number(known[-1])}</b></h2>{svg}<figcaption>{note}</figcaption></figure>"


def _known(metrics: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [m[name] for m in metrics if m.get(name) is not None]


def _replies(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Rows of the first and the last step that were kept."""
    found = {files.step_of(p): p for p in (folder / "rollouts").glob("step-*.parquet")}
    steps = sorted(step for step in found if step is not None)
    return {step: _read(found[step]) for step in {*steps[:1], *steps[-1:]}}


def _read(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    with files.explained(path, "read"):
        names = [n for n in ("query", "reply", "reward", "reply_tokens", "end") if n in pq.read_schema(path).names]
        return pq.read_table(path, columns=names).slice(0, _REPLIES).to_pylist()


def _reply_table(step: int, rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        reward = "" if row.get("reward") is None else f"{row['reward']:,.3f}"
        text = f"<span>{escape(str(row.get('query', '')))}</span>{escape(str(row.get('reply', '')))}"
        ended = f"{row.get('reply_tokens', '')} tokens, {escape(str(row.get('end', '')))}"
        lines.append(f'<tr><td class="said">{text}</td><td class="n">{reward}</td><td class="end">{ended}</td></tr>')
    head = '<tr><th>query and reply</th><th class="n">reward</th><th>ended</th></tr>'
    title = f"<h2>Replies at step {step}</h2><p>The first {len(rows)}, as they came.</p>"
    return f'{title}<table class="replies">{head}{"".join(lines)}</table>'


def _metric_table(metrics: Sequence[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for m in metrics for name in m if name != "step"))
    lines = []
    for name in names:
        metric, known = describe(name), _known(metrics, name)
        if not known:
            continue
        odd = ' class="odd" title="outside of the healthy range"' if metric and metric.unhealthy(known[-1]) else ""
        meaning = escape(metric.meaning + (f" ({metric.unit})" if metric.unit else "")) if metric else ""
        healthy = escape(metric.healthy) if metric else ""
        lines.append(
            f'<tr><td><code>{escape(name)}</code></td><td class="n">{number(known[0])}</td>'
            f'<td class="n"><span{odd}>{number(known[-1])}</span></td><td>{healthy}</td><td>{meaning}</td></tr>'
        )
    head = '<tr><th>metric</th><th class="n">first</th><th class="n">last</th><th>healthy</th><th>meaning</th></tr>'
    table = f'<table class="all">{head}{"".join(lines)}</table>'
    return f"<details><summary>All metrics</summary>{table}</details>" if lines else ""


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
_STYLE = """
:root { --paper: #fff; --ink: #1c1e21; --soft: #63686f; --rule: #e3e5e8; --line: #2563c9; --good: #2e9e5b;
  --odd: #b4231f }
@media (prefers-color-scheme: dark) {
  :root { --paper: #16181c; --ink: #e6e8eb; --soft: #9aa1aa; --rule: #2c3037; --line: #6ea3f7; --good: #4cc07c;
    --odd: #ff8a80 }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif }
h1 { margin: 0; font-size: 1.6rem; overflow-wrap: anywhere }
h2 { margin: 2rem 0 .25rem; font-size: 1.05rem }
p { margin: 0 0 .75rem }
p, figcaption, th, .end, .said span { color: var(--soft) }
p b { color: var(--ink) }
.charts { display: grid; gap: 1.5rem 2rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)) }
figure { margin: 0 }
figure h2 { margin: 0; display: flex; justify-content: space-between; gap: 1rem }
figcaption { font-size: .8rem; line-height: 1.4 }
svg { display: block; width: 100%; height: auto }
.line { fill: none; stroke: var(--line); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round }
.dot { fill: var(--line) }
.spread { fill: var(--line); opacity: .16 }
.healthy { fill: var(--good); opacity: .1 }
.grid { stroke: var(--rule) }
.tick { fill: var(--soft); font-size: 12px }
table { width: 100%; border-collapse: collapse; font-size: .9rem }
th, td { padding: .4rem .75rem .4rem 0; border-bottom: 1px solid var(--rule); text-align: left; vertical-align: top }
th { font-weight: 500; font-size: .8rem }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
.said { width: 100%; white-space: pre-wrap; overflow-wrap: anywhere }
.end { white-space: nowrap }
.odd { color: var(--odd) }
.odd::after { content: " !" }
details { margin-top: 1.5rem }
summary { cursor: pointer; font-weight: 600 }
pre { overflow-x: auto; font-size: .85rem }
@media (max-width: 36rem) {
  table, tbody { display: block }
  tr { display: grid; grid-template-columns: 1fr auto auto; gap: 0 1rem; padding: .5rem 0 }
  tr:not(:last-child) { border-bottom: 1px solid var(--rule) }
  tr:first-child { display: none }
  td { padding: 0; border: 0; overflow-wrap: anywhere }
  .said, .all td:nth-child(n + 4) { grid-column: 1 / -1 }
  .all td:nth-child(n + 4) { color: var(--soft); font-size: .8rem }
  .all td:nth-child(4) { order: 1 }
  .all td:nth-child(4):not(:empty)::before { content: "healthy: " }
  .replies .n { order: 1; grid-column: 2 / -1 }
}
"""
