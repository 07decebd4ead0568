"""The live chart of a run in a notebook's cell: its curves, numbers, findings and newest replies, updated in place.

    if in_notebook():
        chart = Chart()                    # a tracker like `Console`
        chart.start({"steps": 100})
        chart.log(12, {"reward/mean": 0.71, "reward/std": 0.4, "rollout/count": 64, "kl/per_reply": 3.2, ...})

It is HTML with SVG, for light and dark themes, and needs no other package than the notebook's own IPython.
"""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from operant.runs.trackers.console import Console, episodes, plain, without_given_kl

CURVES = {
    "supervised/loss": "loss, nats a token",
    "reward/mean": "reward, mean of a step and its 95 % interval",
    "kl/per_reply": "KL to the reference, nats a reply",
}
SECONDS = 0.5
"""Least time between two updates of the cell."""
POINTS = 300
"""Most points of a curve; of more steps, every second, third, ... is drawn, and the last."""
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 360, 150, 46, 20, 18
"""Pixels of a chart and of its margins."""
_FILES = (Path(__file__).parent / name for name in ("curve.svg", "chart.html"))
CURVE, CHART = (file.read_text(encoding="utf-8").rstrip() for file in _FILES)
_Point = tuple[int, float, float]
"""Step, value and half of its 95 % interval (0: unknown)."""


def in_notebook() -> bool:
    """Whether this Python is the kernel of a notebook. IPython is not imported for the answer."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class Chart(Console):
    """A tracker that draws in the cell of a notebook."""

    def __init__(self) -> None:
        super().__init__()
        self.title, self.status, self.after = "", "starting", ""
        """Sentences above the curves; and HTML below them, which replaces the notes at the end."""
        self._points: dict[str, list[_Point]] = {}
        self._notes: list[str] = []
        self._rows: Sequence[Mapping[str, Any]] = ()
        self._step, self._drawn = 0, 0.0
        self._cell: Any = None

    def start(self, config: Mapping[str, object]) -> None:
        self.total = self.total or int(config.get("steps", 0))
        self.draw()

    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        metrics = without_given_kl(metrics)
        numbers, clock = self.line(step, metrics)
        self._step, self.status = step, " · ".join([f"step {step}/{self.total}", *numbers, clock])
        spread, count = metrics.get("reward/std", math.nan), metrics.get("rollout/count", 0)
        half = 1.96 * spread / math.sqrt(count) if count and math.isfinite(spread) else 0.0
        for name in CURVES:
            if (value := metrics.get(name)) is not None and math.isfinite(value):
                self._points.setdefault(name, []).append((step, value, half if name == "reward/mean" else 0.0))
        if time.monotonic() - self._drawn >= SECONDS:
            self.draw()

    def rollouts(self, step: int, rows: Sequence[Mapping[str, object]], /) -> None:
        self._rows = episodes(rows, self.samples)

    def note(self, text: str) -> None:
        self._notes.append(plain(text))
        self.draw()

    def close(self) -> None:
        self.draw()

    def draw(self) -> None:
        """Show the chart in the cell, in place of the one before."""
        from IPython.display import display

        shown = {"text/plain": f"{self.title}\n{self.status}", "text/html": self.html()}
        if self._cell is None:
            self._cell = display(shown, raw=True, display_id=True)
        else:
            self._cell.update(shown, raw=True)
        self._drawn = time.monotonic()

    def html(self) -> str:
        charts = "".join(curve(label, self._points[name]) for name, label in CURVES.items() if self._points.get(name))
        replies = ""
        for row in self._rows:
            score = "" if row.get("reward") is None else f" [{row['reward']:.2f}]"
            reply = escape(plain(" | ".join(row["replies"])))
            replies += f"<div>{escape(plain(row['query']))} <b>{reply}</b>{score}</div>"
        return CHART.format(
            title=escape(self.title),
            status=escape(self.status),
            share=100 * min(self._step / self.total, 1.0) if self.total else 0.0,
            charts=charts,
            notes=self.after or "".join(f"<div>{escape(note)}</div>" for note in self._notes),
            replies=replies and f"<details><summary>newest replies</summary>{replies}</details>",
        )


def link(path: Path) -> str:
    """A link to a file; relative if it lies below the working folder, which is that of the notebook."""
    near = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f'<a href="{escape(near.as_posix())}" target="_blank">{escape(near.as_posix())}</a>'


def curve(label: str, points: list[_Point]) -> str:
    """A line over steps with numbers on both axes. Text has the colour of the notebook's own."""
    every = -(-len(points) // POINTS)
    points = [*points[:-1][::every], points[-1]]
    low, high = min(y - half for _, y, half in points), max(y + half for _, y, half in points)
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    first, last = points[0][0], max(points[-1][0], points[0][0] + 1)
    bottom, right = HEIGHT - BOTTOM, WIDTH - 8

    def at(step: int, value: float) -> str:
        x = LEFT + (step - first) / (last - first) * (right - LEFT)
        return f"{x:.1f},{bottom - (value - low) / (high - low) * (bottom - TOP):.1f}"

    line = " ".join(at(step, y) for step, y, _ in points)
    band = " ".join([at(s, y + h) for s, y, h in points] + [at(s, y - h) for s, y, h in reversed(points)])
    end_x, end_y = at(*points[-1][:2]).split(",")
    return CURVE.format(
        label=escape(label), width=WIDTH, height=HEIGHT, left=LEFT, right=right, top=TOP, bottom=bottom,
        number_at=LEFT - 5, high_at=TOP + 4, step_at=HEIGHT - 5, high=high, low=low, first=first, last=points[-1][0],
        band=band, line=line, end_x=end_x, end_y=end_y,
    )  # fmt: skip
