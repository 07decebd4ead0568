"""A run in progress: one step of it, what is looked at on the way, and what stays.

A step changes the run as a whole or not at all: where a reward fails, the state from before the step is saved, and
`resume` plays that step again. Where the update itself fails, the last checkpoint stands.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from operant import distributed, machine
from operant.algorithms import left_out_message
from operant.metrics.rollout_table import rows
from operant.rewards import Judged, isolated_parts
from operant.runs.attempts import attempt, given
from operant.runs.build import Built
from operant.runs.checkpoint_schedule import Saving, write_model
from operant.runs.config import Config
from operant.runs.evaluate import Evaluation
from operant.runs.folder import RunFolder
from operant.runs.periodic_eval import Looks
from operant.runs.resume import decide, decided, stateful_parts
from operant.sampling import token_pieces
from operant.storage import atomic_io
from operant.storage.checkpoint import RunState
from operant.tally import Tally
from operant.trackers.trackers import Trackers
from operant.training import refused_step
from operant.training.refused_step import RefusedStep
from operant.types import OperantError, Rollout
from operant.watchdog import Watchdog

SHARE = 0.02
"""The largest part of a run's time that an observer may take: one that takes long is called less often."""


class Observer:
    """Called on the first rank alone. Whatever it raises is logged, and the run continues."""

    name = "observer"
    """What the log calls it."""

    def after_step(self, run: "Run") -> None:
        """A step has ended, and its checkpoint is written where one was due."""

    def at_end(self, run: "Run") -> None:
        """The run ends: it is complete, interrupted, or too many of its steps were refused."""

    def likely_cause(self, run: "Run") -> str | None:
        """Why steps of this run are refused, as part of a sentence; None where this observer does not know."""


class Pace:
    """Lets something happen at most every `least` seconds, and for at most a `SHARE` of the time."""

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


class Run:
    """A run in progress or done: its folder, what it is made of, and its metrics so far."""

    def __init__(self, config: Config, built: Built, folder: RunFolder, trackers: Trackers):
        self.config, self.built, self.folder, self.trackers = config, built, folder, trackers
        self.learner, self.path = built.learner, folder.path
        self.first = distributed.rank() == 0
        """Of several ranks, the one that writes."""
        self.metrics: list[dict[str, float]] = []
        self.after: Evaluation | None = None
        self.best: dict[str, Any] | None = None
        """Of the model in best/: `metric`, `value`, `step`."""
        self.interrupted = self.started = False
        self.state = RunState()
        for name, part in self.learner.parts().items():
            self.state.register(name, part)
        self.state.register("tasks", built.order)
        sources = {"reward": built.reward, "env": self.learner.env, "source": config.train.tasks}
        self.stateful = [name for source, thing in sources.items() for name, _ in self._registered(source, thing)]
        """Names of those parts of the state that are the user's own: a reward, a world or a source that changes."""
        self.saving = Saving(self.state, folder, config.train, trackers.warn)
        self.observers: Sequence[Observer] = ()
        self.looks = Looks(built, folder, config.train, self._aside)
        self._best_moved = False

    def _registered(self, source: str, thing: Any) -> list[tuple[str, Any]]:
        return [(name, self.state.register(name, part)) for name, part in stateful_parts(source, thing)]

    @contextmanager
    def watched(self, item: str) -> Iterator[None]:
        """While this lasts, the log tells what is slow, and a silence ends the process, where one was declared."""
        lately = self.metrics[-1] if self.metrics else {}
        usual = {name.removeprefix("time/"): seconds for name, seconds in lately.items() if name.startswith("time/")}
        silence = 60 * self.config.train.silence_minutes
        log = self.folder.log_path if self.first else None  # of the others the folder is a scratch one
        with Watchdog(self.learner.clock, self.folder.say, log, silence, usual=usual) as dog:
            dog.item = item
            yield

    @property
    def policy(self) -> Any:
        return self.learner.policy

    @property
    def before(self) -> Evaluation | None:
        """The held-out tasks, judged before training."""
        return self.looks.before

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """A look beside the training: a reward that changes is afterwards what it was before."""
        held = self.state.snapshot(only=self.stateful)
        try:
            yield
        finally:
            self.state.restore(held)

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self) -> dict[str, float]:
        """Play, judge, learn, track. Raises: OperantError with the state from before the step saved."""
        start, learner = time.perf_counter(), self.learner
        before = self.state.snapshot(only=("tasks", "moments", "controller", "progress", *self.stateful))
        try:
            rollouts, judged = self._attempt()
            for note in judged.notes:
                self.folder.say(note)
            metrics = learner.learn(rollouts, judged.scores)
        except OperantError:
            if not learner.updating:  # no weight has moved
                self.state.restore(before)
                self._save_what_is()
            raise
        metrics |= _parts(judged)
        self._track(metrics, rollouts, judged, start)
        if learner.refused is not None:
            self._heed(learner.refused, int(metrics["step"]))
        return metrics

    def _heed(self, refusal: RefusedStep, step: int) -> None:
        """A refused step leaves a bundle. Raises: OperantError where too many were refused in a row, all saved."""
        path = self.path / "refused" / atomic_io.step_name(step)
        if self.first:
            told = _tried(lambda: refused_step.keep(path, self.learner.bundle))
            self.trackers.warn(f"step {step}: {refusal.message()}; {told or f'operant replay {path}'}")
        if self.learner.progress.refused < refused_step.IN_A_ROW:
            return
        self._save_what_is()
        self.observe(lambda observer: observer.at_end(self))
        causes = self.observe(lambda observer: observer.likely_cause(self))
        why = next((f"Likely {cause}. " for cause in causes if cause is not None), "")
        raise OperantError(
            f"{self.learner.progress.refused} steps in a row were refused, at last step {step}: "
            f"{refusal.fault.message()}. {why}"
            f"The run is saved as it was before them; the last one lies in {path}: operant replay {path}"
        )

    def _save_what_is(self) -> None:
        """Before an error ends the run: another one must not take its place."""
        try:
            self.save()
        except OperantError as error:
            self.trackers.warn(f"nor could the state from before the step be saved: {error}")

    def _attempt(self) -> tuple[list[Rollout], Judged]:
        """This rank's rollouts of a step, judged; what fails on one rank is raised on all."""
        train, built = self.config.train, self.built
        picked = [built.tasks[i] for i in built.order.take(train.batch // train.samples)]
        if (demonstrations := built.demonstrations) is not None:
            return distributed.together(lambda: given(demonstrations, picked))
        tasks = [task for task in picked for _ in range(train.samples)]
        cut = {"chunks": train.reward_chunks, "samples": train.samples}
        return distributed.together(lambda: attempt(self.learner, tasks, built.reward, **cut))

    def _track(self, metrics: dict[str, float], rollouts: list[Rollout], judged: Judged, start: float) -> None:
        begun, step, learner = time.perf_counter(), int(metrics["step"]), self.learner
        last = learner.last_step
        assert last is not None  # by the step that this is about
        pieces = _pieces(learner.policy.tokenizer)
        mine = rows(rollouts, judged.scores, judged.parts, last.batch, last.places, pieces)
        self.trackers.rollouts(step, [row for part in distributed.gathered(mine) for row in part])
        self.trackers.distributions(step, learner.distributions)
        looked = time.perf_counter()
        metrics |= self.looks.after(step)
        now = time.perf_counter()
        metrics |= {"time/track": looked - begun, "time/step": now - start} | machine.memory()
        metrics |= learner.clock.take() | self.saving.take()
        tokens = sum(len(turn.action) for rollout in rollouts for turn in rollout.turns)
        metrics["tokens/per_second"] = distributed.total_float(float(tokens)) / (now - start)
        self.metrics.append(metrics)
        self.trackers.log(step, metrics)
        self._keep_best(metrics)

    # --- what is told -------------------------------------------------------------------------------------------------

    def tell_isolation(self) -> None:
        """How isolated rewards are ended and limited on this machine, in the log and for the report."""
        levels = {reward.__name__: reward.level for reward in isolated_parts(self.built.reward)}
        for name, level in levels.items():
            self.folder.say(f"isolation of reward {name!r}: {level}")
            self.folder.know(isolation="; ".join(f"{n}: {text}" for n, text in levels.items()))

    def tell_crowded(self) -> None:
        """That other processes compute here, where threads that wait for each other would lose to them."""
        learner, model = self.learner, self.learner.policy.model
        several = learner.own.threads == "auto" and machine.worth(learner.budget.tokens, machine.largest(model)) > 1
        if several and learner.policy.device.type == "cpu" and (crowd := machine.crowded()):
            text = f"{crowd}; --threads 1 is likely faster here, and changes the last bits of a run (docs/fast.md)"
            self.folder.say(text)
            self.trackers.note(text)

    def tell_left_out(self) -> None:
        """Which options of recipe and preset do not go with the chosen method, in the log and on the console."""
        for source, names in self.config.left_out.items():
            text = left_out_message(source, names, self.config.train.algorithm)
            self.folder.say(text)
            self.trackers.note(text)

    def start(self) -> None:
        """The first looks, before any step."""
        if not self.started:
            self.looks.first()
            self.learner.clock.take()
            self.started = True

    def observe(self, call: Callable[[Observer], Any]) -> list[Any]:
        """Call every observer, on the first rank; returns their answers. What one raises is logged."""
        answers = []
        for observer in self.observers if self.first else ():
            try:
                answers.append(call(observer))
            except Exception as error:
                self.folder.say(f"the {observer.name} failed: {type(error).__name__}: {error}")
        return answers

    # --- what stays ---------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint. Raises: OperantError where that cannot be done."""
        self._write(self.saving.save)

    def save_last(self) -> None:
        """A checkpoint of the run as it stands, where there is none yet. Raises: OperantError as `save`."""
        if self.saving.last != self.learner.progress.step:
            self.save()

    def complete(self) -> None:
        """Write the checkpoint that was gone on from anew, where a kill came between its two kinds."""
        if self.saving.last != self.learner.progress.step:
            self._write(self.saving.attempt)

    def save_when_due(self) -> None:
        """After a step: a checkpoint, where one is due. A disk that refuses it stops nothing."""
        if self._best_moved or self.saving.due(self.learner.progress.step):
            self._write(self.saving.attempt)
            self._best_moved = False

    def _write(self, write: Callable[..., None]) -> None:
        step = self.learner.progress.step
        if self.first:
            with self.learner.timing("checkpoint"):
                spare = [self.best["step"]] if self.best is not None else []
                write(step, self._extra(), spare)

    def _extra(self) -> dict[str, Any]:
        told = self.looks.as_plain() | {"best": self.best, "started": self.started}
        # A mean over nothing is told as nothing: no number that is not finite reaches a checkpoint.
        return json.loads(atomic_io.strict_json(told | {"decided": decided(self.learner)}))

    def go_on(self, path: Path, *, fresh_optimizer: bool = False) -> int:
        """Put a checkpoint back; returns its step. Raises: OperantError where it does not fit."""
        step, extra = self.state.load(path, self.folder.say, fresh_optimizer=fresh_optimizer)
        for name, state in (extra.get("small") or {}).items():
            if name in self.state.parts:
                self.state.parts[name].load_state_dict(state)
        self.looks.go_on(extra)
        self.best = extra.get("best")
        self.started = extra.get("started", True)
        decide(self.learner, extra.get("decided") or {})
        self.policy.version = step
        self.learner.engine.sync(self.policy, step)
        self.saving.note(step)
        if fresh_optimizer:
            self.saving.last = None
        return step

    def _keep_best(self, metrics: Mapping[str, float]) -> None:
        """Export the model into best/ where the metric that was asked for has never been better."""
        wanted = self.config.train.best
        if wanted is None or not self.first:
            return
        name, sign = wanted.removeprefix("-"), -1 if wanted.startswith("-") else 1
        value = metrics.get(name)
        if value is None or value - value != 0 or (self.best is not None and sign * value <= sign * self.best["value"]):
            return
        best = {"metric": name, "value": value, "step": int(metrics["step"])}
        try:
            write_model(self.policy, self.folder.best, json.dumps(best))
        except OperantError as error:
            self.trackers.warn(f"{error}; training goes on without the best model of step {best['step']}")
            return
        self.best, self._best_moved = best, True

    def finish(self) -> None:
        """The last checkpoint, the held-out tasks again, the exported model.

        Raises: OperantError where the checkpoint or the model could not be written, once all else is done.
        """
        failed = [_tried(self.save_last)]
        self.after = self.looks.evaluate()
        if self.first:
            if self.after is not None and (error := _tried(self._write_comparison)) is not None:
                self.trackers.warn(str(error))
            with self.learner.timing("export"):
                failed.append(_tried(lambda: write_model(self.policy, self.folder.export)))
        for error in failed:
            if error is not None:
                raise error

    def _write_comparison(self) -> None:
        told = {k: e.as_plain() if e else None for k, e in (("before", self.before), ("after", self.after))}
        atomic_io.write(self.path / "evaluation.json", json.dumps(told, indent=1))


def _tried(work: Callable[[], object]) -> OperantError | None:
    """What the work ran into."""
    try:
        work()
    except OperantError as error:
        return error
    return None


def _parts(judged: Judged) -> dict[str, float]:
    """Over all ranks: means of the reward's named parts, where it has several, and how many samples failed."""
    tally = Tally()
    judged.report(tally)
    told = distributed.pool(tally).result()  # every rank, whatever its samples came to
    several = sum(name.endswith("/abstained") for name in told) > 1
    return {name: value for name, value in told.items() if several or name.startswith("reward/outcome/")}


def _pieces(tokenizer: Any) -> Callable[[list[int]], list[str]]:
    return lambda ids: token_pieces(tokenizer, ids)
