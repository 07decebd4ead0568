"""Reduces a run of any length to few enough numbers for a page: curves keep their peaks, histograms share one grid.

    curves(metrics)         {"steps": [1, 2, ...], "values": {"reward/mean": [0.5, ...], "probe/reward": {"steps": ..}}}
    Heatmaps(path).histogram("reward")    {"width": 0.0625, "start": 3, "rows": 12, "steps": [...], "columns": [...]}

Nothing is smoothed: a curve shows the lowest and the highest value of each interval of steps, a heatmap every n-th
histogram.
"""

import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from operant.storage import atomic_io

POINTS = 500
"""Most points of a curve."""
COLUMNS = 300
"""Most columns of a heatmap."""
ROWS, _FEWEST_ROWS = 64, 8
_TAIL = 0.001
"""Share of the values beyond each end of a heatmap, which its outermost rows may count."""

T = TypeVar("T")
Metrics = Mapping[str, float | None]
"""The numbers of a step."""


class Curve(TypedDict):
    """A metric that some steps lack."""

    steps: list[int]
    values: list[float | None]


class Curves(TypedDict):
    """All metrics: the steps of those that every step has, and the values of each."""

    steps: list[int]
    values: dict[str, list[float | None] | Curve]


class Counts(TypedDict):
    """A histogram: bin i of `counts` begins at `(start + i) * width`."""

    width: float
    start: int
    counts: list[int]


def curves(metrics: Sequence[Metrics]) -> Curves:
    """Downsample every metric; one that some steps lack has steps of its own, and NaN or infinity is None."""
    values: dict[str, list[float | None] | Curve] = {}
    for name in dict.fromkeys(name for m in metrics for name in m if name != "step"):
        known = [m for m in metrics if name in m]
        values[name] = _extremes([m[name] for m in known])
        if len(known) < len(metrics):
            values[name] = {"steps": _ends([m["step"] for m in known]), "values": values[name]}
    return {"steps": _ends([m["step"] for m in metrics]), "values": values}


def steps_per_interval(count: int) -> int:
    """Return how many of `count` steps each two points of a curve stand for; 1 where every step is drawn."""
    return 1 if count <= POINTS else math.ceil(2 * count / POINTS)


def _intervals(values: Sequence[T]) -> list[Sequence[T]]:
    size = steps_per_interval(len(values))
    return [values[i : i + size] for i in range(0, len(values), size)]


def _ends(steps: Sequence[int]) -> list[int]:
    """Return the first and the last step of each interval, at which its two points are drawn."""
    return [step for interval in _intervals(steps) for step in dict.fromkeys((interval[0], interval[-1]))]


def _extremes(values: Sequence[float | None]) -> list[float | None]:
    """Return the lowest and the highest value of each interval, in their order in time."""
    found: list[float | None] = []
    for interval in _intervals(values):
        known = [(value, place) for place, value in enumerate(interval) if value is not None]
        pair = sorted((min(known), max(known)), key=lambda p: p[1]) if known else [(None, 0)] * 2
        found += [short(value) for value, _ in pair][: len(interval)]
    return found


def short(value: float | None) -> float | None:
    """Round to five significant digits, more than a screen shows; NaN and infinity become None."""
    if value is None or isinstance(value, (int, str)):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None


class Heatmaps:
    """Reads every n-th line of `distributions.jsonl`, so that a long run costs no more than a short one."""

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        with atomic_io.explained(path, "read"):
            text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        self._lines = [line for line in text.split("\n")[:-1] if line]  # the last line may still be being written
        self._parsed: dict[int, dict[str, Any]] = {}

    def histogram(self, name: str) -> dict[str, object] | None:
        """Return a histogram over the steps, with columns [first row, share, share, ...]; None where no step has it."""
        found = [(step, h) for step, h in self._records("histograms", name) if sum(h["counts"])]
        if not found:
            return None
        # Bins that are finer than the rows of this one grid are merged, coarser ones spread over its rows.
        histograms = [h for _, h in found]
        low, high = _range(histograms)
        fitting = 2.0 ** math.ceil(math.log2((high - low) / ROWS))
        width = max(fitting, statistics.median_low([h["width"] for h in histograms]))
        width = _without_empty_rows(histograms, width, high - low)
        start = math.floor(low / width)
        rows = max(1, math.ceil(high / width) - start)
        columns = [_column(h, width, start, rows) for h in histograms]
        return {"width": width, "start": start, "rows": rows, "steps": [step for step, _ in found], "columns": columns}

    def blocks(self, kind: str) -> dict[str, object] | None:
        """Return `gradient`, `update` or `weight` norms: the names of the blocks, and one list of norms per step."""
        found = self._records("blocks", kind)
        names = list(dict.fromkeys(name for _, norms in found for name in norms))
        columns = [[short(norms.get(name)) for name in names] for _, norms in found]
        return {"names": names, "steps": [step for step, _ in found], "columns": columns} if found else None

    def _records(self, section: str, name: str) -> list[tuple[int, Any]]:
        """Return (step, record) of evenly spaced lines that have `name`; the newest is always among them."""
        places = [i for i, line in enumerate(self._lines) if f'"{name}": {{' in line]
        every = max(1, math.ceil(len(places) / COLUMNS))
        records = []
        for place in places[::-1][::every][::-1]:
            if place not in self._parsed:
                self._parsed[place] = json.loads(self._lines[place])
            line = self._parsed[place]
            if record := line.get(section, {}).get(name):
                records.append((line["step"], record))
        return records


def _without_empty_rows(histograms: Sequence[Counts], width: float, span: float) -> float:
    """Double the width while every other row is empty at every step, as between whole numbers: no bins are merged."""
    filled = {
        math.floor(i * h["width"] / width) + part
        for h in histograms
        for i, count in enumerate(h["counts"], h["start"])
        for part in range(min(2, math.ceil(h["width"] / width)) if count else 0)
    }
    while span / width > _FEWEST_ROWS and all(row % 2 == 0 for row in filled):
        filled, width = {row // 2 for row in filled}, 2 * width
    return width


def _range(histograms: Sequence[Counts]) -> tuple[float, float]:
    """Return the range of all values but the tails, with equal weight for each histogram."""
    bins = sorted(
        ((h["start"] + i) * h["width"], h["width"], count / sum(h["counts"]) / len(histograms))
        for h in histograms
        for i, count in enumerate(h["counts"])
        if count
    )
    return _beyond_tail(bins, 0), _beyond_tail(bins[::-1], 1)


def _beyond_tail(bins: Sequence[tuple[float, float, float]], side: int) -> float:
    """Return an edge of the first bin at which the cumulated share exceeds the tail: 0 its lower one, 1 its upper."""
    cumulated = itertools.accumulate(share for *_, share in bins)
    return next(edge + side * width for (edge, width, _), share in zip(bins, cumulated) if share > _TAIL)


def _column(histogram: Counts, width: float, start: int, rows: int) -> list[float]:
    """Return [first row, shares of the replies or tokens...] without the empty rows at both ends."""
    ratio, total = histogram["width"] / width, sum(histogram["counts"])
    column = [0.0] * rows
    parts = max(1, round(ratio))
    for i, count in enumerate(histogram["counts"], histogram["start"]):
        first, share = math.floor(i * ratio) - start, count / total / parts
        for row in range(max(first, 0), min(first + parts, rows)):
            column[row] += share
        column[0] += share * min(max(-first, 0), parts)  # a bin may have millions of rows outside of the picture
        column[-1] += share * min(max(first + parts - rows, 0), parts)
    filled = [i for i, share in enumerate(column) if share]
    return [filled[0], *(round(share, 4) for share in column[filled[0] : filled[-1] + 1])]
