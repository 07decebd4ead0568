"""What a run does beside its steps: it reports new findings, and keeps `report.html` up to date."""

import time

from operant.runs.run import Observer, Run
from operant.tools.report.diagnosis import diagnose
from operant.tools.report.run_report import write_report

SECONDS = 20.0
"""Least time between two writes of the report during a run."""
DIAGNOSIS_SECONDS = 2.0
"""Least time between two diagnoses."""
SHARE = 0.02
"""The largest part of a run's time that an observer may take; a slow observer is called less often."""


class Pace:
    """Limits how often something happens: at most every `least` seconds, and for at most a `SHARE` of the time."""

    def __init__(self, least: float):
        self.least, self._next = least, 0.0

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._next

    def __enter__(self) -> None:
        self._begun = time.monotonic()

    def __exit__(self, *exception: object) -> None:
        now = time.monotonic()
        self._next = now + max(self.least, (now - self._begun) / SHARE)


class ReportObserver(Observer):
    """Writes the report at the end of a run, and after a step where enough time has passed."""

    name = "report"

    def __init__(self) -> None:
        self._pace = Pace(SECONDS)

    def after_step(self, run: Run) -> None:
        if self._pace.due:
            self.at_end(run)

    def at_end(self, run: Run) -> None:
        with self._pace, run.learner.clock.timing("report"):
            write_report(run.path)

    at_failure = at_end


class DiagnosisObserver(Observer):
    """Reports each problem and each warning to the log and the trackers once, when it is first found."""

    name = "diagnosis"

    def __init__(self) -> None:
        self._pace = Pace(DIAGNOSIS_SECONDS)
        self._reported: set[str] = set()

    def after_step(self, run: Run) -> None:
        last = run.metrics[-1]["step"] >= run.config.train.steps
        if not self._pace.due and not last:
            return
        with self._pace:
            found = diagnose(run)
        for finding in found:
            if finding.name not in self._reported and finding.level != "note":
                self._reported.add(finding.name)
                text = f"{finding.level}: {finding.message} {finding.remedy}"
                run.folder.log_message(text)
                run.trackers.note(text)

    def likely_cause(self, run: Run) -> str | None:
        found = next((finding for finding in diagnose(run) if finding.name == "not_finite"), None)
        return f"{found.cause}; try {found.remedy}" if found else None
