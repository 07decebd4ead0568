"""Logging of a run: always to the run folder, and to the trackers that copy it.

The run folder is the record. If it cannot be written, training goes on with one warning, and another one when writing
works again. Until then metrics wait in memory, and the replies of such a step are lost. A tracker that raises is
dropped with a warning. Each built-in one is an extra: `pip install 'operant[wandb]'`.
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from operant.import_by_name import Table
from operant.options import Factory, arguments
from operant.runs.trackers.tensorboard import TensorBoard
from operant.runs.trackers.wandb import Trackio, WandB
from operant.types import OperantError, shown

TRACKERS = Table("tracker", "operant.trackers", {tracker.name: tracker for tracker in (TensorBoard, WandB, Trackio)})
"""The class of each tracker; it gets the run folder and a function that adds to its log, and then its options."""


class Recorder(Protocol):
    """Writes the data of a run: `runs.folder.RunFolder`."""

    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        """Write the metrics of a step."""

    def rollouts(self, step: int, rows: Sequence[Mapping[str, object]], /) -> None:
        """Write the replies of a step, one row per turn, with the columns of `registry.COLUMNS`."""

    def distributions(self, step: int, parts: Mapping[str, object], /) -> None:
        """Write `histograms` by name, norms by `blocks` and `gradients` by tensor; parts without data are absent."""


class Tracker(Recorder, Protocol):
    """Shows a run elsewhere. A tracker may have a method `note(text)` for sentences about the run."""

    def start(self, config: Mapping[str, object]) -> None:
        """Begin with the options of the run."""

    def close(self) -> None:
        """End the run."""


def tracker_options(named: Iterable[str] | Mapping[str, Mapping[str, object]]) -> dict[str, dict[str, object]]:
    """The options of each tracker, checked: `named` are names, or a mapping from names to options.

    Raises: OperantError for an unknown name or option, with the nearest one.
    """
    given = {name: (named[name] or {}) if isinstance(named, Mapping) else {} for name in named}
    if odd := [name for name, own in given.items() if not isinstance(own, Mapping)]:
        raise OperantError(f"trackers: the options of {odd[0]} are {shown(given[odd[0]])}; give a mapping of them")
    return {name: arguments(Factory(TRACKERS.find(name), 2), own, f"tracker {name}") for name, own in given.items()}


def make_trackers(
    named: Iterable[str] | Mapping[str, Mapping[str, object]],
    run_folder: str | Path,
    log_message: Callable[[str], object] = warnings.warn,
) -> list[Tracker]:
    """Return one tracker per different name, not yet started. log_message: adds a sentence to the log of the run.

    Raises: OperantError as `tracker_options` does, and for a package that is not installed.
    """
    made = []
    for name, options in tracker_options(named).items():
        try:
            made.append(TRACKERS.find(name)(run_folder, log_message, **options))
        except ImportError as error:
            why = "" if (error.name or "").split(".")[0] == name else f" ({error})"
            package = name if (own := name in TRACKERS.built_in) else error.name or "it imports"
            remedy = f"pip install 'operant[{name}]'" if own else "install it"
            raise OperantError(f"trackers={name} needs the package {package}{why}: {remedy}") from error
        except Exception as error:
            raise OperantError(f"tracker {name!r} cannot be made: {type(error).__name__}: {error}") from error
    return made


class Trackers:
    """The record of a run (None: it has none), followed by its trackers."""

    def __init__(
        self,
        record: Recorder | None,
        trackers: Iterable[Tracker] = (),
        log_message: Callable[[str], object] = warnings.warn,
    ) -> None:
        self.record = record
        self.active = list(trackers)
        """The trackers that still work, in order."""
        self._log_message = log_message
        self._early: list[str] | None = []
        """Sentences about the run from before its trackers have begun; None: they have."""
        self._unwritten: set[str] = set()
        """The parts of the record that could not be written the last time."""

    def start(self, config: Mapping[str, object]) -> None:
        self._track(lambda tracker: tracker.start(config))
        early, self._early = self._early or [], None
        for text in early:
            self.note(text)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write("metrics", lambda record: record.log(step, metrics))
        self._track(lambda tracker: tracker.log(step, metrics))

    def rollouts(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        self._write("replies", lambda record: record.rollouts(step, rows))
        self._track(lambda tracker: tracker.rollouts(step, rows))

    def distributions(self, step: int, parts: Mapping[str, object]) -> None:
        self._write("distributions", lambda record: record.distributions(step, parts))
        self._track(lambda tracker: tracker.distributions(step, parts))

    def note(self, text: str) -> None:
        """Pass a sentence about the run to the trackers that have a method `note`."""
        if self._early is not None:
            self._early.append(text)
            return
        self._track(lambda tracker: getattr(tracker, "note", str)(text))

    def close(self) -> None:
        self._track(lambda tracker: tracker.close())

    def warn(self, text: str) -> None:
        """Print a warning to standard error and add it to the log; it does not fail if standard error is closed."""
        with suppress(OSError):
            print(f"operant: {text}", file=sys.stderr, flush=True)
        self._log_message(text)

    def _write(self, part: str, write: Callable[[Recorder], None]) -> None:
        """Write a part of the record; warn once if that fails, and once when it works again."""
        if self.record is None:
            return
        try:
            write(self.record)
        except Exception as error:
            if part not in self._unwritten:
                self._unwritten.add(part)
                reason = str(error) if isinstance(error, OperantError) else f"{type(error).__name__}: {error}"
                until = "left out" if part == "replies" else "kept in memory"
                self.warn(f"{reason}; training goes on, and {part} are {until} until writing works again")
            return
        if part in self._unwritten:
            self._unwritten.discard(part)
            self.warn(f"{part} can be written again")

    def _track(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self.active):
            try:
                call(tracker)
            except Exception as error:
                self.active.remove(tracker)
                what = f"tracker {type(tracker).__name__} failed ({type(error).__name__}: {error})"
                self._log_message(f"{what} and is left out; training goes on")
