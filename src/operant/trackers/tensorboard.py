"""TensorBoard: event files in `runs/x/tensorboard`, for `tensorboard --logdir runs`."""

import html
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from operant.tally import Histogram
from operant.trackers.base import COLUMNS, Copy, Shown, edges
from operant.trackers.console import plain

_MARKS = {ord(c): f"&#{ord(c)};" for c in "\\`*_{}[]()#+-.!|~^:"}


class TensorBoard(Copy):
    """Writes event files. Steps that a resumed run plays again replace what stood there."""

    name = "tensorboard"

    def __init__(self, folder: str | Path, say: Callable[[str], Any]) -> None:
        super().__init__(folder, say)
        import tensorboard  # noqa: F401 - whether it is there; torch has the writer, not the package

        self._writer: Any = None
        self._config: Mapping[str, Any] = {}

    def begin(self, config: Mapping[str, Any]) -> None:
        """The file itself is opened by the first step, whose number says what it replaces."""
        self._config = config
        self._past, self.told = self.told, 0
        self.say(f"tensorboard: look with: tensorboard --logdir {self.folder}")

    def write(self, step: int, shown: Shown) -> None:
        """Add events."""
        writer = self._opened(step)
        for name, value in shown.scalars.items():
            writer.add_scalar(name, value, step)
        for name, histogram in shown.histograms.items():
            _add_histogram(writer, name, histogram, step)
        if shown.replies and step > self._past:  # a text does not replace a text
            writer.add_text("replies", markdown(COLUMNS, shown.replies), step)
        writer.flush()

    def shut(self, failed: bool) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def _opened(self, step: int) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder), purge_step=step if self._past else None)
            if not self._past:
                text = yaml.safe_dump(dict(self._config), sort_keys=False, allow_unicode=True)
                self._writer.add_text("config", "".join(f"    {line}\n" for line in text.splitlines()), 0)
        return self._writer


def _add_histogram(writer: Any, name: str, histogram: Histogram, step: int) -> None:
    ends = edges(histogram)
    counts = histogram.counts
    middles = [(a + b) / 2 for a, b in itertools.pairwise(ends)]
    total = sum(n * x for n, x in zip(counts, middles))
    squares = sum(n * x * x for n, x in zip(counts, middles))
    writer.add_histogram_raw(name, ends[0], ends[-1], sum(counts), total, squares, ends[1:], list(counts), step)


def markdown(columns: tuple[str, ...], rows: list[list[Any]]) -> str:
    """A table in Markdown whose cells are read as the text that they are."""
    lines = [columns, ["---"] * len(columns), *([_cell(value) for value in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.4g}" if isinstance(value, float) else plain(str(value))
    return html.escape(text).translate(_MARKS)
