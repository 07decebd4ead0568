"""Keeps `report.html` up to date while a run goes on."""

from operant.report.run_report import write_report
from operant.runs.run import Observer, Pace, Run

SECONDS = 20.0
"""The report of a run in progress is written at most this often."""


class ReportObserver(Observer):
    """Writes the report after a step where one is due, and at the end."""

    name = "report"

    def __init__(self) -> None:
        self._pace = Pace(SECONDS)

    def after_step(self, run: Run) -> None:
        if self._pace.due:
            self.at_end(run)

    def at_end(self, run: Run) -> None:
        with self._pace, run.learner.timing("report"):
            write_report(run.path)
