"""When a run writes checkpoints, of which kinds, and what happens if the disk refuses one.

If a checkpoint cannot be written, a warning is logged, training goes on, the last complete checkpoint stays, and the
next attempt follows soon. If the last checkpoint of a run cannot be written, the run ends with an error.
"""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from operant.models.loading import export
from operant.models.policy import Policy
from operant.runs.config import TrainOptions
from operant.runs.folder import RunFolder
from operant.storage import atomic_io
from operant.storage.checkpoint import OPTIMIZER, RunState
from operant.storage.checkpoint_store import path_of
from operant.types import OperantError

KINDS = {"resume": ("resume",), "light": ("light",), "both": ("resume", "light")}
RETRY = 60.0
"""Seconds until a checkpoint that could not be written is tried again."""


class CheckpointSchedule:
    """Decides when checkpoints are due, and writes them. `warn` shows a warning to the user."""

    def __init__(self, state: RunState, folder: RunFolder, options: TrainOptions, warn: Callable[[str], Any]):
        self.state, self.folder, self.options, self.warn = state, folder, options, warn
        self._wait = 60 * options.checkpoint_minutes
        self._next = time.monotonic() + self._wait
        self._written: dict[str, float] = {}
        self.last: int | None = None
        """The step of the last checkpoint that has all kinds; None if there is none."""

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        counted = (self.options.checkpoint_every, self.options.keep_every)
        return time.monotonic() >= self._next or any(n and step % n == 0 for n in counted)

    def save(self, step: int, extra: dict[str, Any], spare: Iterable[int] = ()) -> None:
        """Write a checkpoint of each kind. Raises: OperantError if the disk refuses, or for NaN or infinity.

        extra: values beside the state. spare: steps whose checkpoints must stay.
        """
        options, spare = self.options, list(spare)
        self._next = time.monotonic() + min(self._wait, RETRY)
        for kind in KINDS[options.checkpoint]:
            self.state.save(
                self.folder.checkpoints,
                step,
                extra | ({"small": self._small_parts()} if kind == "light" else {}),
                kind=kind,
                lengths=self.folder.lengths(),
                keep=options.keep,
                keep_every=options.keep_every,
                spare=spare,
            )
        self._next = time.monotonic() + self._wait
        self.mark_written(step)

    def try_to_save(self, step: int, extra: dict[str, Any], spare: Iterable[int] = ()) -> None:
        """Like `save`, but if the disk refuses, only warn: another attempt follows soon."""
        try:
            self.save(step, extra, spare)
        except OperantError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            self.warn(f"{error}; training goes on, and the checkpoint is tried again after a later step")

    def mark_written(self, step: int) -> None:
        """Record that the last checkpoint is of this step, and its size for the metrics of the next step."""
        paths = [path_of(self.folder.checkpoints, kind, step) for kind in KINDS[self.options.checkpoint]]
        sizes = [file.stat().st_size for path in paths if path.is_dir() for file in path.iterdir()]
        self._written = {"checkpoint/bytes": float(sum(sizes))}
        self.last = step if all(path.is_dir() for path in paths) else None

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of a checkpoint written since the last call; empty if there is none."""
        written, self._written = self._written, {}
        return written

    def _small_parts(self) -> dict[str, Any]:
        """The states that a light checkpoint holds beside the trained weights: counters, positions, hashes."""
        large = {"policy", OPTIMIZER}
        parts = {n: p for n, p in self.state.parts.items() if n not in large and not n.startswith("shadow/")}
        return {name: part.state_dict() for name, part in parts.items()}


def write_model(policy: Policy, path: Path, best: str | None = None, made_by: Any = None) -> None:
    """Export the model to a folder, atomically; `best` becomes best.json. Raises: OperantError if the disk refuses."""
    new = path.with_name(f".{path.name}.tmp")
    with atomic_io.explained(path):
        atomic_io.remove_tree(new)
        with atomic_io.operation("write", new):
            export(policy, new, made_by=made_by)
        if best is not None:
            atomic_io.write(new / "best.json", best)
        for part in (*new.rglob("*"), new):  # transformers does not sync the files that it writes
            (atomic_io.sync_folder if part.is_dir() else atomic_io.sync)(part)
        atomic_io.replace_folder(new, path)
