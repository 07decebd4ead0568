"""When a run writes a checkpoint, of which kinds, and what happens where the disk refuses.

A checkpoint that cannot be written is said and tried again at the next occasion: the run goes on, and the last one that
is whole stays. Only that of the end has no next occasion.
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
AGAIN = 60.0
"""Seconds until a checkpoint that could not be written is tried again."""


class Saving:
    """The checkpoints of a run in progress. `warn` takes a sentence that must be seen."""

    def __init__(self, state: RunState, folder: RunFolder, options: TrainOptions, warn: Callable[[str], Any]):
        self.state, self.folder, self.options, self.warn = state, folder, options, warn
        self._wait = 60 * options.checkpoint_minutes
        self._next = time.monotonic() + self._wait
        self._written: dict[str, float] = {}
        self.last: int | None = None
        """The step whose checkpoint is the run as it stands."""

    def due(self, step: int) -> bool:
        """Whether one is to be written after this step."""
        counted = (self.options.checkpoint_every, self.options.keep_every)
        return time.monotonic() >= self._next or any(n and step % n == 0 for n in counted)

    def save(self, step: int, extra: dict[str, Any], spare: Iterable[int] = ()) -> None:
        """Write what the options ask for. Raises: OperantError where the disk refuses or a number is not finite."""
        options, kept = self.options, list(spare)
        self._next = time.monotonic() + min(self._wait, AGAIN)
        for kind in KINDS[options.checkpoint]:
            self.state.save(
                self.folder.checkpoints,
                step,
                extra | ({"small": self._small()} if kind == "light" else {}),
                kind=kind,
                lengths=self.folder.lengths(),
                keep=options.keep,
                keep_every=options.keep_every,
                spare=kept,
            )
        self._next = time.monotonic() + self._wait
        self.note(step)

    def attempt(self, step: int, extra: dict[str, Any], spare: Iterable[int] = ()) -> None:
        """As `save`; where the disk refuses, it is said, and tried again soon."""
        try:
            self.save(step, extra, spare)
        except OperantError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            self.warn(f"{error}; training goes on, and the checkpoint is tried again at the next occasion")

    def note(self, step: int) -> None:
        """The checkpoint of this step is the last one: the next step tells its bytes."""
        paths = [path_of(self.folder.checkpoints, kind, step) for kind in KINDS[self.options.checkpoint]]
        sizes = [file.stat().st_size for path in paths if path.is_dir() for file in path.iterdir()]
        self._written = {"checkpoint/bytes": float(sum(sizes))}
        self.last = step if all(path.is_dir() for path in paths) else None

    def take(self) -> dict[str, float]:
        """Metrics of the checkpoint that was written since this was last asked."""
        written, self._written = self._written, {}
        return written

    def _small(self) -> dict[str, Any]:
        """What goes along with the weights of a light checkpoint: counters, positions, hashes; no weight among them."""
        large = {"policy", OPTIMIZER}
        parts = {n: p for n, p in self.state.parts.items() if n not in large and not n.startswith("shadow/")}
        return {name: part.state_dict() for name, part in parts.items()}


def write_model(policy: Policy, path: Path, best: str | None = None) -> None:
    """The model as a folder, whole or not at all; with `best`, what it was best at. Raises: OperantError."""
    new = path.with_name(f".{path.name}.tmp")
    with atomic_io.explained(path):
        atomic_io.remove_tree(new)
        with atomic_io.operation("write", new):
            export(policy, new)
        if best is not None:
            atomic_io.write(new / "best.json", best)
        for part in (*new.rglob("*"), new):  # transformers leaves that to the system
            (atomic_io.sync_folder if part.is_dir() else atomic_io.sync)(part)
        atomic_io.replace_folder(new, path)
