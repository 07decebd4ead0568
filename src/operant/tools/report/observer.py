"""Keeps `report.html` up to date while a run is in progress."""

from operant.runs.pace import Pace
from operant.runs.run import Observer, Run
from operant.tools.report.run_report import write_report

SECONDS = 20.0
"""Least time between two writes of the report during a run."""


class ReportObserver(Observer):
    """Writes the report at the end of a run, and after a step where enough time has passed."""

    name = "report"

    def __init__(self) -> None:
        self._pace = Pace(SECONDS)

    def after_step(self, run: Run) -> None:
        if self._pace.due:
            self.at_end(run)

    def at_end(self, run: Run) -> None:
        with self._pace, run.learner.timing("report"):
            write_report(run.path)
