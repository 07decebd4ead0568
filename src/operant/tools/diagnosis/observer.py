"""Diagnoses a run during training and reports new findings to its log and its trackers."""

from operant.runs.pace import Pace
from operant.runs.run import Observer, Run
from operant.tools.diagnosis import diagnose

SECONDS = 2.0
"""Least time between two diagnoses of a run in progress."""


class DiagnosisObserver(Observer):
    """Reports each problem and each warning once, when it is first found."""

    name = "diagnosis"

    def __init__(self) -> None:
        self._pace = Pace(SECONDS)
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
