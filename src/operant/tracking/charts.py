"""Line charts as SVG, drawn by hand: no library, no network, colours from the page's own style.

Classes for the style sheet: `line`, `spread`, `healthy`, `grid`, `tick`, `dot`.
"""

import math
from collections.abc import Sequence

Points = Sequence[tuple[float, float | None]]
WIDTH, HEIGHT = 440, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 12, 10, 24
_MOST = 600  # points of a line; more than there are pixels shows nothing


def line_chart(
    points: Points,
    *,
    label: str,
    spread: Sequence[float | None] | None = None,
    band: tuple[float | None, float | None] | None = None,
) -> str:
    """An SVG of `points` (step, value); a value of None leaves a gap.

    spread: half the height of the shade around each point. band: the healthy range, shaded.
    Returns "" where there is nothing to draw.
    """
    spread = list(spread) if spread is not None else [None] * len(points)
    known = [(x, y, s or 0.0) for (x, y), s in zip(points, spread) if y is not None]
    if not known:
        return ""
    limits = [limit for limit in band or () if limit is not None]
    xs = _Axis([x for x, _, _ in known], _LEFT, WIDTH - _RIGHT)
    ys = _Axis([y + s * sign for _, y, s in known for sign in (-1, 1)] + limits, HEIGHT - _BOTTOM, _TOP, grow=True)
    first, last = known[0][1], known[-1][1]
    said = f"{label}: from {number(first)} to {number(last)} over {len(known)} steps"
    runs = [_thin(run) for run in _runs(points, spread)]
    return "".join([
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{said}"><title>{said}</title>',
        _healthy(band, ys) if band else "",
        _grid(xs, ys),
        *(_shade(run, xs, ys) for run in runs if any(s for _, _, s in run)),
        *(_stroke(run, xs, ys) for run in runs),
        "</svg>",
    ])  # fmt: skip


def number(value: float) -> str:
    """Short, for people: 0.5234 -> 0.523, 12345.6 -> 12,346."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.2g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


class _Axis:
    """Values to pixels, with round ticks."""

    def __init__(self, values: Sequence[float], start: float, end: float, *, grow: bool = False) -> None:
        self.low, self.high, self.start, self.end = min(values), max(values), start, end
        if self.low == self.high:  # one point stands in the middle
            room = abs(self.low) * 0.1 or 1.0
            self.low, self.high = self.low - room, self.high + room
            self.ticks = _ticks(self.low, self.high) if grow else [values[0]]
        else:
            self.ticks = _ticks(self.low, self.high, whole=not grow)
            if grow:
                gap = (self.high - self.low) * 0.04
                self.low, self.high = self.low - gap, self.high + gap

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def _ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Up to six round numbers in [low, high]."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    if whole:
        step = max(round(step), 1)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _runs(points: Points, spread: Sequence[float | None]) -> list[list[tuple[float, float, float]]]:
    """The points between gaps."""
    runs: list[list[tuple[float, float, float]]] = [[]]
    for (x, y), s in zip(points, spread):
        if y is None:
            runs.append([])
        else:
            runs[-1].append((x, y, s or 0.0))
    return [run for run in runs if run]


def _thin(run: list[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    """Lowest and highest of each stretch: no peak is lost."""
    size = math.ceil(len(run) * 2 / _MOST)
    if size < 3:
        return run
    pieces = [run[i : i + size] for i in range(0, len(run), size)]
    extremes = [{min(p, key=lambda q: q[1]), max(p, key=lambda q: q[1])} for p in pieces]
    return sorted(point for pair in extremes for point in pair)


def _grid(xs: _Axis, ys: _Axis) -> str:
    parts = []
    for tick in ys.ticks:
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{ys(tick)}" y2="{ys(tick)}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{_LEFT - 6}" y="{ys(tick) + 4}">{number(tick)}</text>')
    for tick in xs.ticks:
        parts.append(f'<text class="tick" text-anchor="middle" x="{xs(tick)}" y="{HEIGHT - 6}">{number(tick)}</text>')
    return "".join(parts)


def _healthy(band: tuple[float | None, float | None], ys: _Axis) -> str:
    low, high = (edge if edge is None else ys(edge) for edge in band)
    top, bottom = (_TOP if high is None else high), (HEIGHT - _BOTTOM if low is None else low)
    return f'<rect class="healthy" x="{_LEFT}" y="{top}" width="{WIDTH - _LEFT - _RIGHT}" height="{bottom - top:.1f}"/>'


def _shade(run: list[tuple[float, float, float]], xs: _Axis, ys: _Axis) -> str:
    above = [f"{xs(x)},{ys(y + s)}" for x, y, s in run]
    below = [f"{xs(x)},{ys(y - s)}" for x, y, s in reversed(run)]
    return f'<polygon class="spread" points="{" ".join(above + below)}"/>'


def _stroke(run: list[tuple[float, float, float]], xs: _Axis, ys: _Axis) -> str:
    if len(run) == 1:
        return f'<circle class="dot" r="3" cx="{xs(run[0][0])}" cy="{ys(run[0][1])}"/>'
    return f'<polyline class="line" points="{" ".join(f"{xs(x)},{ys(y)}" for x, y, _ in run)}"/>'
