"""The checkpoints of a run, its best model and its export: when they are written, and what a resume restores.

If a checkpoint cannot be written, a warning is logged, training goes on, the last complete checkpoint stays, and the
next attempt follows soon. If the last checkpoint of a run cannot be written, the run ends with an error.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TypedDict

from operant import distributed
from operant.models.loading import export
from operant.runs.config import Config, describe
from operant.runs.parts import PeriodicEvaluation, RunParts
from operant.storage import atomic_io
from operant.storage.checkpoint import OPTIMIZER, RunState
from operant.storage.checkpoint_store import Retention, path_of, prune
from operant.training.saved_learner import measured_modes, set_modes, stateful_parts
from operant.types import OperantError

KINDS = {"resume": ("resume",), "light": ("light",), "both": ("resume", "light")}
RETRY = 60.0
"""Seconds until a checkpoint that could not be written is tried again."""


class Best(TypedDict):
    """Of which step the model in best/ is, and why."""

    metric: str
    value: float
    step: int


class StateOfRun(RunState):
    """Everything that changes in a run: the learner's parts, the order of the tasks, and what belongs to the user."""

    def __init__(self, parts: RunParts):
        super().__init__()
        learner, ahead = parts.learner, parts.ahead
        self.ranks = distributed if learner.policy.shards is not None else None
        for name, part in learner.parts().items():
            self.register(name, part)
        self.register("tasks", parts.order)
        if ahead is not None:
            self.register("ahead", ahead)
            self.register("shadow/ahead", ahead.kept)
        self.stateful: list[str] = []
        """Names of the parts that belong to the user: of the reward, env, engine and task source."""
        of_user = {"reward": parts.reward, "env": learner.env, "engine": learner.engine, "source": parts.source}
        for kind, user_object in of_user.items():
            for name, part in stateful_parts(kind, user_object):
                self.register(name, part)
                self.stateful.append(name)
        # Steps ahead keep the tasks that were taken for them, also if the step that trains on them fails.
        tasks = ("tasks",) if ahead is None else ()
        self.of_step = (*tasks, "moments", "controller", "progress", *self.stateful)
        """Names of the parts that a step changes before its update."""
        self._ahead = ahead

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Restore the state of the user's reward, environment and task source afterwards."""
        if self._ahead is not None:
            self._ahead.rest()
        before = snapshot(self, self.stateful)
        try:
            yield
        finally:
            restore(self, before)


def snapshot(state: RunState, only: Iterable[str]) -> dict[str, object]:
    """A copy of the states of these parts, for `restore`."""
    return {name: deepcopy(state.parts[name].state_dict()) for name in only}


def restore(state: RunState, before: Mapping[str, object]) -> None:
    """Restore a snapshot. The parts get copies, so that it can be restored again."""
    for name, of_part in before.items():
        state.parts[name].load_state_dict(deepcopy(of_part))


class Checkpoints:
    """Writes and loads the checkpoints of a run, and exports its models. `warn` shows a warning to the user."""

    def __init__(
        self, state: StateOfRun, config: Config, evaluation: PeriodicEvaluation, warn: Callable[[str], object]
    ):
        self.state, self.learner, self.folder = state, evaluation.parts.learner, evaluation.folder
        self.options, self.evaluation, self.warn = config.train, evaluation, warn
        self.best: Best | None = None
        """The model in best/."""
        self._new_best, self._wait = False, 60 * config.train.checkpoint_minutes
        self._next = time.monotonic() + self._wait
        self.written: dict[str, float] = {}
        """The metrics of a checkpoint that no step has logged."""
        self._last: int | None = None
        """The step of the last checkpoint that has all kinds; None if there is none."""
        self._made_by = {"name": describe(config.train.policy), "options": config.parts.get("policy", {})}

    def save(self, *, to_go_on: bool = False) -> None:
        """Write a checkpoint of each kind, on the first rank; of divided weights, on all.

        to_go_on: if the disk refuses, only warn, for another attempt follows soon.
        Raises: OperantError if the disk refuses, or for NaN or infinity.
        """
        if distributed.rank() and self.state.ranks is None:
            return
        with self.learner.clock.timing("checkpoint"):
            extra = self.evaluation.state_dict() | {"best": self.best, "decided": measured_modes(self.learner)}
            # Strict JSON turns NaN, such as the mean of no scores, into null: a checkpoint refuses NaN and infinity.
            extra = json.loads(atomic_io.strict_json(extra))
            try:
                self._write(self.learner.progress.step, extra)
            except OperantError as error:
                if not (to_go_on and isinstance(error.__cause__, OSError)):
                    raise
                self.warn(f"{error}; training goes on, and the checkpoint is tried again after a later step")

    def save_last(self, *, to_go_on: bool = False) -> None:
        """Write a checkpoint of the current step, unless all its kinds exist. Raises: OperantError as `save`."""
        if self._last != self.learner.progress.step:
            self.save(to_go_on=to_go_on)
        elif not distributed.rank():  # a kill may have come before the last save deleted what is not kept
            with atomic_io.explained(self.folder.checkpoints, "delete old checkpoints in"):
                prune(self.folder.checkpoints, self.learner.progress.step, self._retention())

    def _retention(self) -> Retention:
        spare = () if self.best is None else (self.best["step"],)
        return Retention(self.options.keep, self.options.keep_every, frozenset(spare))

    def save_when_due(self) -> None:
        """Write a checkpoint after a step, if one is due. Training goes on if the disk refuses it."""
        counted, step = (self.options.checkpoint_every, self.options.keep_every), self.learner.progress.step
        due = self._new_best or time.monotonic() >= self._next or any(n and step % n == 0 for n in counted)
        if due if self.state.ranks is None else distributed.largest(int(due)):
            self.save(to_go_on=True)
            self._new_best = False

    def save_before_error(self) -> None:
        """Save before an error ends the run. If that fails too, warn, so that the first error is the one raised."""
        if (error := error_of(self.save)) is not None:
            self.warn(f"the state from before the step could not be saved either: {error}")

    def _write(self, step: int, extra: dict[str, object]) -> None:
        self._next, folder = time.monotonic() + min(self._wait, RETRY), self.folder
        for kind in KINDS[self.options.checkpoint]:
            own = dict(extra)
            if kind == "light":  # beside the trained weights: counters, positions, hashes
                small = [n for n in self.state.parts if n not in ("policy", OPTIMIZER) and not n.startswith("shadow/")]
                own["small"] = {name: self.state.parts[name].state_dict() for name in small}
            lengths, retention = folder.lengths(), self._retention()
            self.state.save(folder.checkpoints, step, own, kind=kind, lengths=lengths, retention=retention)
        self._next = time.monotonic() + self._wait
        self._mark_written(step)

    def _mark_written(self, step: int) -> None:
        paths = [path_of(self.folder.checkpoints, kind, step) for kind in KINDS[self.options.checkpoint]]
        sizes = [file.stat().st_size for path in paths if path.is_dir() for file in path.iterdir()]
        self.written = {"checkpoint/bytes": float(sum(sizes))}
        self._last = step if all(path.is_dir() for path in paths) else None

    def resume(self, path: Path, *, fresh_optimizer: bool = False) -> int:
        """Load a checkpoint into the run; returns its step. Raises: OperantError if it does not fit."""
        learner = self.learner
        step, extra = self.state.load(path, self.folder.log_message, fresh_optimizer=fresh_optimizer)
        small = extra.get("small") or {}
        restore(self.state, {name: state for name, state in small.items() if name in self.state.parts})
        for name, copied in learner.copies.items() if "small" in extra else ():
            if name != "reference":  # a light checkpoint lacks the others, which follow the policy
                copied.follow(learner.policy)
        self.evaluation.load_state_dict(extra)
        self.best = extra.get("best")
        set_modes(learner, extra.get("decided") or {})
        learner.policy.version = step
        learner.engine.sync(learner.policy, step)
        self._mark_written(step)
        if fresh_optimizer:
            self._last = None
        return step

    def export_if_best(self, step: int, metrics: Mapping[str, float]) -> None:
        """Export the model to best/ if the metric of the option `best` is better than ever before."""
        wanted = self.options.best
        if wanted is None or distributed.rank():
            return
        name, sign = wanted.removeprefix("-"), -1 if wanted.startswith("-") else 1
        value = metrics.get(name, math.nan)
        best = self.best if self.best and self.best["metric"] == name else None
        if not math.isfinite(value) or (best is not None and sign * value <= sign * best["value"]):
            return
        best = Best(metric=name, value=value, step=step)
        if (error := error_of(lambda: self._export(self.folder.best, best))) is not None:
            self.warn(f"{error}; training goes on without the best model of step {step}")
            return
        self.best, self._new_best = best, True

    def export(self) -> None:
        """Export the model to export/. Raises: OperantError if the disk refuses."""
        with self.learner.clock.timing("export"):
            self._export(self.folder.export)

    def _export(self, path: Path, best: Best | None = None) -> None:
        """Export the model to a folder, atomically; `best` becomes best.json."""
        new = path.with_name(f".{path.name}.tmp")
        with atomic_io.explained(path):
            atomic_io.remove_tree(new)
            with atomic_io.operation("write", new):
                export(self.learner.policy, new, made_by=self._made_by)
            if best is not None:
                atomic_io.write(new / "best.json", json.dumps(best))
            for part in (*new.rglob("*"), new):  # transformers does not sync the files that it writes
                (atomic_io.sync_folder if part.is_dir() else atomic_io.sync)(part)
            atomic_io.replace_folder(new, path)


def error_of(work: Callable[[], object]) -> OperantError | None:
    """Call `work`; return the OperantError that it raised, or None."""
    try:
        work()
    except OperantError as error:
        return error
    return None
