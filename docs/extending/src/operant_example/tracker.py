"""A tracker: it gets the metrics of every step. Here they go to a file that a spreadsheet opens."""

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Csv:
    """Writes some metrics to metrics.csv in the run folder. Options: --trackers csv --trackers.names reward/mean"""

    def __init__(self, run_folder: str | Path, log_message: Callable[[str], Any], *, names: tuple[str, ...] = ()):
        self.path, self.names = Path(run_folder) / "metrics.csv", list(names)

    def start(self, config: Mapping[str, Any]) -> None:
        """Called once, with all options of the run; a resumed run goes on in the same file."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after each step."""
        names = self.names or ["reward/mean", "kl/per_reply"]
        begun = self.path.exists()
        with self.path.open("a", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerows([["step", *names]] * (not begun) + [[step, *(metrics.get(name) for name in names)]])

    def rollouts(self, step: int, rows: Any) -> None:
        """Called after each step with its replies."""

    def distributions(self, step: int, parts: Any) -> None:
        """Called after each step with histograms and norms."""

    def close(self) -> None:
        """Called at the end."""
