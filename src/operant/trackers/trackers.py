"""Where metrics go: the run folder always, and trackers that copy it.

    trackers = Trackers(folder, [Console(total=100), wandb_tracker], say=folder.say)
    trackers.start(config)
    trackers.log(1, {"reward/mean": 0.52})

The folder is the record, and training does not die of it either: what cannot be written is said once, on standard
error and in the log, and once more when it can be written again. Metrics wait in memory until then, so that none is
lost while the process lives; of a step's replies the file is missing. A tracker is a copy: one that raises is dropped
with one warning.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from operant.types import OperantError


class Record(Protocol):
    """What keeps the truth of a run: `run.RunFolder`."""

    def log(self, step: int, metrics: Mapping[str, float], /) -> None: ...

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]], /) -> None: ...

    def distributions(self, step: int, told: Mapping[str, Any], /) -> None: ...


class Tracker(Protocol):
    """What shows a run elsewhere."""

    def start(self, config: Mapping[str, Any]) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float], /) -> None: ...

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]], /) -> None:
        """One row a reply, with the columns that `registry.COLUMNS` lists."""
        ...

    def distributions(self, step: int, told: Mapping[str, Any], /) -> None:
        """`histograms` by name, norms by `blocks`, `gradients` by tensor; what was not looked at is absent."""
        ...

    def close(self) -> None: ...


class Trackers:
    """The record (None: nobody keeps one), then every tracker that still works, in order."""

    def __init__(
        self, record: Record | None, copies: Iterable[Tracker] = (), say: Callable[[str], Any] = warnings.warn
    ) -> None:
        self.record = record
        self.copies = list(copies)
        self._say = say
        self._refused: set[str] = set()
        """What of the record could not be written the last time."""

    def start(self, config: Mapping[str, Any]) -> None:
        """Tell the trackers what runs."""
        self._each(lambda tracker: tracker.start(config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One step's numbers."""
        self._keep("metrics", lambda record: record.log(step, metrics))
        self._each(lambda tracker: tracker.log(step, metrics))

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """One step's replies."""
        self._keep("replies", lambda record: record.rollouts(step, rows))
        self._each(lambda tracker: tracker.rollouts(step, rows))

    def distributions(self, step: int, told: Mapping[str, Any]) -> None:
        """One step's histograms and norms."""
        self._keep("distributions", lambda record: record.distributions(step, told))
        self._each(lambda tracker: tracker.distributions(step, told))

    def note(self, text: str) -> None:
        """A sentence about the run, for those trackers that have a `note`."""
        self._each(lambda tracker: getattr(tracker, "note", str)(text))

    def close(self) -> None:
        """Tell the trackers that it is over."""
        self._each(lambda tracker: tracker.close())

    def warn(self, text: str) -> None:
        """A sentence that must be seen, whatever can be written: standard error, and the log."""
        with suppress(OSError):
            print(f"operant: {text}", file=sys.stderr, flush=True)
        self._say(text)

    def _keep(self, what: str, write: Callable[[Any], None]) -> None:
        """The record's part, `what` it is: said where it cannot be written, and where it can again."""
        if self.record is None:
            return
        try:
            write(self.record)
        except Exception as error:
            if what not in self._refused:
                self._refused.add(what)
                reason = str(error) if isinstance(error, OperantError) else f"{type(error).__name__}: {error}"
                until = "left out" if what == "replies" else "kept in memory"
                self.warn(f"{reason}; training goes on, {what} are {until} until then")
            return
        if what in self._refused:
            self._refused.discard(what)
            self.warn(f"{what} can be written again")

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self.copies):
            try:
                call(tracker)
            except Exception as error:
                self.copies.remove(tracker)
                name = type(tracker).__name__
                self._say(f"tracker {name} failed ({type(error).__name__}: {error}) and is left out; training goes on")
