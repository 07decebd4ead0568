"""A run of any length as few enough numbers for a page: curves keep their peaks, histograms share one grid.

    curves(metrics)         {"steps": [1, 2, ...], "of": {"reward/mean": [0.5, ...], "probe/reward": {"steps": ..}}}
    Heatmaps(path).of("reward")    {"width": 0.0625, "start": 3, "rows": 12, "steps": [...], "columns": [...]}

Nothing is smoothed: of a stretch of steps the lowest and the highest value stay, and of the histograms every n-th.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from operant.storage import atomic_io

POINTS = 500
"""Most points of a curve."""
COLUMNS = 300
"""Most columns of a heatmap."""
ROWS, _FEW = 64, 8
_TAIL = 0.001
"""This share of a figure may lie in its lowest and highest row together with what is beyond."""

Values = list[float | None]


def curves(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Every metric over the steps. One that some steps lack has steps of its own; null is a number not finite."""
    steps = [m["step"] for m in metrics]
    names = dict.fromkeys(name for m in metrics for name in m if name != "step")
    return {"steps": _ends(steps), "of": {name: _curve(metrics, name) for name in names}}


def _curve(metrics: Sequence[Mapping[str, Any]], name: str) -> Values | dict[str, Any]:
    known = [m for m in metrics if name in m]
    values = _extremes([m[name] for m in known])
    return values if len(known) == len(metrics) else {"steps": _ends([m["step"] for m in known]), "values": values}


def stretch(count: int) -> int:
    """How many steps stand behind two points of a curve of `count` steps; 1 where every step is drawn."""
    return 1 if count <= POINTS else math.ceil(2 * count / POINTS)


def _pieces(values: Sequence[Any]) -> list[Sequence[Any]]:
    size = stretch(len(values))
    return [values[i : i + size] for i in range(0, len(values), size)]


def _ends(steps: Sequence[int]) -> list[int]:
    """Where the two points of each stretch stand: at its first and its last step."""
    if stretch(len(steps)) == 1:
        return list(steps)
    return [step for piece in _pieces(steps) for step in dict.fromkeys((piece[0], piece[-1]))]


def _extremes(values: Sequence[float | None]) -> Values:
    """The lowest and the highest of each stretch, in the order in which they came."""
    if stretch(len(values)) == 1:
        return [short(value) for value in values]
    found: Values = []
    for piece in _pieces(values):
        known = [(value, place) for place, value in enumerate(piece) if value is not None]
        pair = sorted((min(known), max(known)), key=lambda p: p[1]) if known else [(None, 0)] * 2
        found += [short(value) for value, _ in pair][: len(piece)]
    return found


def short(value: float | None) -> float | None:
    """Five digits: more than a screen shows, a third of the bytes."""
    if value is None or isinstance(value, (int, str)):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None


class Heatmaps:
    """Reads `distributions.jsonl` one line in n, so that a long run costs no more than a short one."""

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        with atomic_io.explained(path, "read"):
            text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        self._lines = [line for line in text.split("\n")[:-1] if line]  # without one that is being written
        self._parsed: dict[int, dict[str, Any]] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def of(self, name: str) -> dict[str, Any] | None:
        """A histogram over the steps; None where no step has it. Columns: [first row, share, share, ...]."""
        found = [(line["step"], h) for line in self._having(name) if (h := line.get("histograms", {}).get(name))]
        found = [(step, h) for step, h in found if sum(h["counts"])]
        return _grid(found) if found else None

    def blocks(self, kind: str) -> dict[str, Any] | None:
        """`gradient`, `update` or `weight` norms: names of the blocks, and one list of norms a step."""
        found = [(line["step"], b) for line in self._having(kind) if (b := line.get("blocks", {}).get(kind))]
        names = list(dict.fromkeys(name for _, norms in found for name in norms))
        columns = [[short(norms.get(name)) for name in names] for _, norms in found]
        return {"names": names, "steps": [step for step, _ in found], "columns": columns} if found else None

    def _having(self, name: str) -> list[dict[str, Any]]:
        """The lines that hold `name`, evenly thinned out; the newest is among them."""
        places = [i for i, line in enumerate(self._lines) if f'"{name}": {{' in line]
        size = max(1, math.ceil(len(places) / COLUMNS))
        return [self._line(i) for i in places[::-1][::size][::-1]]

    def _line(self, place: int) -> dict[str, Any]:
        if place not in self._parsed:
            self._parsed[place] = json.loads(self._lines[place])
        return self._parsed[place]


def _grid(found: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Histograms of different widths on one grid: finer ones are merged, coarser ones spread over its rows."""
    histograms = [h for _, h in found]
    low, high = _range(histograms)
    fitting = 2.0 ** math.ceil(math.log2((high - low) / ROWS))
    width = _lattice(histograms, max(fitting, statistics.median_low([h["width"] for h in histograms])), high - low)
    start = math.floor(low / width)
    rows = max(1, math.ceil(high / width) - start)
    columns = [_column(h, width, start, rows) for _, h in found]
    return {"width": width, "start": start, "rows": rows, "steps": [step for step, _ in found], "columns": columns}


def _lattice(histograms: Sequence[Mapping[str, Any]], width: float, span: float) -> float:
    """A wider row where every other one would be empty at every step, as between whole numbers: nothing is merged."""
    filled = {
        math.floor(i * h["width"] / width) + part
        for h in histograms
        for i, count in enumerate(h["counts"], h["start"])
        for part in range(min(2, math.ceil(h["width"] / width)) if count else 0)
    }
    while span / width > _FEW and all(row % 2 == 0 for row in filled):
        filled, width = {row // 2 for row in filled}, 2 * width
    return width


def _range(histograms: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Where all but the furthest of the values lie, each histogram counting the same."""
    bins = sorted(
        ((h["start"] + i) * h["width"], h["width"], count / sum(h["counts"]) / len(histograms))
        for h in histograms
        for i, count in enumerate(h["counts"])
        if count
    )
    return _beyond_tail(bins, 0), _beyond_tail(bins[::-1], 1)


def _beyond_tail(bins: Sequence[tuple[float, float, float]], side: int) -> float:
    seen = 0.0
    for edge, width, share in bins:
        seen += share
        if seen > _TAIL:
            return edge + side * width
    raise AssertionError("shares sum to 1")


def _column(histogram: Mapping[str, Any], width: float, start: int, rows: int) -> list[float]:
    """[first row, shares of the replies or tokens...] without the empty rows around."""
    ratio, total = histogram["width"] / width, sum(histogram["counts"])
    column = [0.0] * rows
    parts = max(1, round(ratio))
    for i, count in enumerate(histogram["counts"], histogram["start"]):
        for part in range(parts if count else 0):
            row = math.floor(i * ratio) + part - start
            column[min(max(row, 0), rows - 1)] += count / total / parts
    filled = [i for i, share in enumerate(column) if share]
    return [filled[0], *(round(share, 4) for share in column[filled[0] : filled[-1] + 1])]
