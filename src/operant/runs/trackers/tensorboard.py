"""TensorBoard: event files in `runs/x/tensorboard`, for `tensorboard --logdir runs`."""

import html
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from operant.runs.trackers.base import COLUMNS, ExternalTracker, StepData, edges
from operant.runs.trackers.console import plain

_MARKDOWN_CHARACTERS = {ord(c): f"&#{ord(c)};" for c in "\\`*_{}[]()#+-.!|~^:"}


class TensorBoard(ExternalTracker):
    """Writes event files. Steps that a resumed run repeats replace the earlier ones."""

    name = "tensorboard"

    def __init__(self, run_folder: str | Path, log_message: Callable[[str], object]) -> None:
        super().__init__(run_folder, log_message)
        import tensorboard  # noqa: F401 - only a check: the writer is torch's, but it needs the package

        self._writer: Any = None
        self._logged_before = 0  # the last step that an earlier process of the run logged; 0: a new run

    def begin(self, config: Mapping[str, object]) -> None:
        """Prepare the run. The first step opens the event file, which replaces earlier events from that step on."""
        self._config = config
        self._logged_before, self.skip_until = self.skip_until, 0
        self.log_message(f"tensorboard: look with: tensorboard --logdir {self.folder}")

    def write(self, step: int, data: StepData) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder), purge_step=step if self._logged_before else None)
            if not self._logged_before:
                text = yaml.safe_dump(dict(self._config), sort_keys=False, allow_unicode=True)
                self._writer.add_text("config", "".join(f"    {line}\n" for line in text.splitlines()), 0)
        for name, value in data.scalars.items():
            self._writer.add_scalar(name, value, step)
        for name, histogram in data.histograms.items():
            ends, counts = edges(histogram), histogram.counts
            middles = [(a + b) / 2 for a, b in itertools.pairwise(ends)]
            total = sum(n * x for n, x in zip(counts, middles))
            squares = sum(n * x * x for n, x in zip(counts, middles))
            sums = (sum(counts), total, squares)
            self._writer.add_histogram_raw(name, ends[0], ends[-1], *sums, ends[1:], list(counts), step)
        if data.replies and step > self._logged_before:  # a text event does not replace an earlier one
            self._writer.add_text("replies", markdown(COLUMNS, data.replies), step)
        self._writer.flush()

    def end(self, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()


def markdown(columns: tuple[str, ...], rows: list[list[object]]) -> str:
    """Return a table in Markdown. Every cell is escaped, so that it shows exactly its text."""
    lines = [columns, ["---"] * len(columns), *([_cell(value) for value in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: object) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else plain(str(value))
    return html.escape(text).translate(_MARKDOWN_CHARACTERS)
