"""A run in progress: its step, its checkpoints, its best model, and what it logs.

A step changes the run as a whole or not at all. If the reward fails, the state from before the step is saved, and a
resumed run repeats that step. If the update itself fails, the run resumes from the last checkpoint.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from operant import distributed, machine
from operant.algorithms import left_out_message
from operant.envs.isolated import IsolatedEnv
from operant.metrics.rollout_table import rows
from operant.rewards import Judged, reward_metrics
from operant.rewards.isolated import IsolatedReward, isolated_parts
from operant.runs import named_parts
from operant.runs.build import RunParts
from operant.runs.calibrate import calibrate
from operant.runs.checkpoint_schedule import CheckpointSchedule, write_model
from operant.runs.config import Config, describe
from operant.runs.evaluate import Evaluation
from operant.runs.folder import RunFolder
from operant.runs.periodic_eval import PeriodicEvaluation
from operant.runs.scored_rollouts import demonstration_rollouts, play_and_score, score
from operant.sampling import token_pieces
from operant.storage import atomic_io
from operant.storage.checkpoint import RunState
from operant.trackers.notebook import link
from operant.trackers.trackers import Trackers
from operant.training import refused_step
from operant.training.refused_step import RefusedStep
from operant.training.saved_learner import measured_modes, set_modes, stateful_parts
from operant.types import OperantError, Rollout
from operant.watchdog import Watchdog


class Observer:
    """Called during a run, on the first rank only. An exception that it raises is logged, and the run continues."""

    name = "observer"
    """Its name in the log."""

    def after_step(self, run: "Run") -> None:
        """Called after every step, and after its checkpoint if one was due."""

    def at_end(self, run: "Run") -> None:
        """Called at the end of the run: it is complete, interrupted, or too many of its steps were refused."""

    def likely_cause(self, run: "Run") -> str | None:
        """The likely cause of refused steps, as part of a sentence; None if this observer knows none."""


class Run:
    """A run in progress or complete: its folder, its parts, and its metrics so far."""

    def __init__(self, config: Config, parts: RunParts, folder: RunFolder, trackers: Trackers):
        self.config, self.parts, self.folder, self.trackers = config, parts, folder, trackers
        self.learner, self.path = parts.learner, folder.path
        self.first = distributed.rank() == 0
        """Whether this is the first rank, the only one that writes."""
        self.metrics: list[dict[str, float]] = []
        """The metrics of each step."""
        self.after: Evaluation | None = None
        """The held-out tasks after training."""
        self.best: dict[str, Any] | None = None
        """`metric`, `value` and `step` of the model in best/."""
        self.interrupted = self.started = False
        self.state = RunState()
        self.state.ranks = distributed if self.policy.shards is not None else None
        for name, part in self.learner.parts().items():
            self.state.register(name, part)
        self.state.register("tasks", parts.order)
        if (ahead := parts.ahead) is not None:
            self.state.register("ahead", ahead)
            self.state.register("shadow/ahead", ahead.kept)
        self.stateful: list[str] = []
        """Names of the parts of the state that belong to the user: of the reward, env, engine and task source."""
        learner = self.learner
        named = {"reward": parts.reward, "env": learner.env, "engine": learner.engine, "source": parts.source}
        for kind, user_object in named.items():
            for name, part in stateful_parts(kind, user_object):
                self.state.register(name, part)
                self.stateful.append(name)
        self.schedule = CheckpointSchedule(self.state, folder, config.train, trackers.warn)
        self.observers: Sequence[Observer] = ()
        self.evaluation = PeriodicEvaluation(parts, folder, config.train, self.isolated_state)
        self._new_best = False
        self._failed = list[Observer]()
        self._made_by = {"name": describe(config.train.policy), "options": config.parts.get("policy", {})}

    def __repr__(self) -> str:
        train, rewards = self.config.train, [m["reward/mean"] for m in self.metrics if "reward/mean" in m]
        reward = f", reward {rewards[0]:.3g} -> {rewards[-1]:.3g}" if rewards else ""
        return f"Run({str(self.path)!r}, {train.algorithm}, {len(self.metrics)} of {train.steps} steps{reward})"

    def _repr_html_(self) -> str:  # in a notebook
        return f"{escape(repr(self))} {link(self.folder.report)}"

    @property
    def policy(self) -> Any:
        """The `Policy` in training."""
        return self.learner.policy

    @property
    def before(self) -> Evaluation | None:
        """The held-out tasks before training."""
        return self.evaluation.before

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self) -> dict[str, float]:
        """Sample tasks, play and score them, learn, evaluate, log; returns the metrics.

        Raises: OperantError; unless the update had begun, the state from before the step is restored and saved.
        """
        start, learner = time.perf_counter(), self.learner
        ahead = self.parts.ahead
        # Steps ahead keep the tasks that were taken for them, also if this step fails.
        restored = () if ahead is not None else ("tasks",)
        before = self.state.snapshot(only=(*restored, "moments", "controller", "progress", *self.stateful))
        notes: list[str] = []
        try:
            rollouts, judged = self._play_and_score()
            notes = judged.notes
            for note in notes:
                self.folder.log_message(note)
            of_all = judged.padded(len(rollouts))
            metrics = learner.learn(rollouts, of_all.scores)
            if ahead is not None:
                metrics |= ahead.carried()
                ahead.done()
        except OperantError as error:
            if not learner.updating:  # no weight has changed
                self.state.restore(before)
                if (
                    vars(error).get("agreed") or self.state.ranks is None
                ):  # ranks that write together would wait for each other
                    self._save_before_error()
            if notes and str(error).startswith("no reply is left"):
                raise OperantError(f"no reply is left to train on: {notes[-1]}") from error
            raise
        step = int(metrics["step"])
        metrics |= reward_metrics(judged, self.metrics[-1] if self.metrics else None)
        tracking = time.perf_counter()
        self._log_rollouts(step, rollouts, of_all)
        tracked = time.perf_counter()
        metrics |= self.evaluation.after_step(step)
        now = time.perf_counter()
        metrics |= {"time/track": tracked - tracking, "time/step": now - start} | machine.memory()
        metrics |= learner.clock.take() | self.schedule.take_metrics()
        tokens = sum(len(turn.action) for rollout in rollouts for turn in rollout.turns)
        metrics["tokens/per_second"] = distributed.total_float(float(tokens)) / (now - start)
        self.metrics.append(metrics)
        self.trackers.log(step, metrics)
        self._export_if_best(metrics)
        if learner.refused is not None:
            self._handle_refusal(learner.refused, step)
        return metrics

    def _play_and_score(self) -> tuple[list[Rollout], Judged]:
        """Play and score this rank's part of a step's tasks. An error on one rank is raised on all.

        Demonstrations of the tasks follow behind the played replies, and are not judged.
        """
        train, parts, learner, ahead = self.config.train, self.parts, self.learner, self.parts.ahead
        rollouts, judged = list[Rollout](), Judged([])
        if ahead is not None:
            ahead.begin()
            rollouts, judged = distributed.together(lambda: score(learner, parts.reward, ahead.played()))
            taken = ahead.tasks()
        else:
            taken, samples = parts.order.take(train.batch // train.samples), train.samples
            if learner.algorithm.source != "data":
                sizes = {"chunks": train.reward_chunks, "samples": samples}
                rollouts, judged = distributed.together(
                    lambda: play_and_score(learner, parts.attempts(taken, samples), parts.reward, **sizes)
                )
        if (demonstrations := parts.demonstrations) is not None:
            tasks = [parts.tasks[i] for i in taken]
            rollouts = rollouts + distributed.together(lambda: demonstration_rollouts(demonstrations, tasks))
        return rollouts, judged

    def _log_rollouts(self, step: int, rollouts: list[Rollout], judged: Judged) -> None:
        """Log the replies of all ranks, and the histograms of the step."""
        last = self.learner.last_step
        assert last is not None  # set by `learn`
        text = partial(token_pieces, self.policy.tokenizer)
        own = rows(rollouts, judged.scores, judged.parts, last.batch, last.places, text, judged.remarks, judged.passing)
        self.trackers.rollouts(step, [row for part in distributed.gathered(own) for row in part])
        self.trackers.distributions(step, self.learner.distributions)

    def _handle_refusal(self, refusal: RefusedStep, step: int) -> None:
        """Write the bundle of a refused step and warn.

        Raises: OperantError after too many refused steps in a row, with the run saved as it was before them.
        """
        path = self.path / "refused" / atomic_io.step_name(step)
        if self.first:
            error = _error_of(lambda: refused_step.keep(path, self.learner.bundle))
            self.trackers.warn(f"step {step}: {refusal.message()}; {error or f'operant replay {path}'}")
        if self.learner.progress.refused < refused_step.IN_A_ROW:
            return
        self._save_before_error()
        self.observe(lambda observer: observer.at_end(self))
        causes = self.observe(lambda observer: observer.likely_cause(self))
        why = next((f"Likely {cause}. " for cause in causes if cause is not None), "")
        raise OperantError(
            f"{self.learner.progress.refused} steps in a row were refused, the last one was step {step}: "
            f"{refusal.fault.message()}. {why}"
            f"The run is saved as it was before them; the bundle of the last one is {path}: operant replay {path}"
        )

    @contextmanager
    def isolated_state(self) -> Iterator[None]:
        """Restore the state of the user's reward, environment and task source afterwards."""
        if self.parts.ahead is not None:
            self.parts.ahead.rest()
        before = self.state.snapshot(only=self.stateful)
        try:
            yield
        finally:
            self.state.restore(before)

    @contextmanager
    def watchdog(self, item: str) -> Iterator[None]:
        """Log slow phases of `item`, and end the process after `silence_minutes` without progress."""
        lately = self.metrics[-1] if self.metrics else {}
        usual = {name.removeprefix("time/"): seconds for name, seconds in lately.items() if name.startswith("time/")}
        silence = 60 * self.config.train.silence_minutes
        log = self.folder.log_path if self.first else None  # the other ranks have a temporary folder
        with Watchdog(self.learner.clock, self.folder.log_message, log, silence, usual=usual) as dog:
            dog.item = item
            yield

    # --- beginning and observing --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Evaluate the initial policy, unless the run is resumed."""
        if not self.started:
            calibrate(self.parts, self.config.data)
            self.evaluation.before_training()
            self.learner.clock.take()
            self.started = True

    @property
    def isolated(self) -> list[IsolatedReward | IsolatedEnv]:
        """The isolated parts of the reward, and the environment if it is isolated."""
        env = [self.learner.env] if isinstance(self.learner.env, IsolatedEnv) else []
        return [*isolated_parts(self.parts.reward), *env]

    def log_isolation(self) -> None:
        """Log how isolated rewards and worlds are limited here, also for the report, and what rewards have noted."""
        for note in self.parts.notes:
            self._log_note(note)
        levels = {part.__name__: part.level for part in self.isolated}
        for part in self.isolated:
            what = "world" if isinstance(part, IsolatedEnv) else "reward"
            self.folder.log_message(f"isolation of {what} {part.__name__!r}: {part.level}")
        if levels:
            self.folder.add_environment(isolation="; ".join(f"{name}: {level}" for name, level in levels.items()))

    def log_crowded(self) -> None:
        """Log a note if other processes use this machine's processor, where several threads would be slowed down."""
        learner, model = self.learner, self.learner.policy.model
        several = learner.own.threads == "auto" and machine.worth(learner.budget.tokens, machine.largest(model)) > 1
        if several and learner.policy.device.type == "cpu" and (crowd := machine.crowded()):
            self._log_note(
                f"{crowd}; --threads 1 is likely faster here, and changes the last bits of a run (docs/fast.md)"
            )

    def log_left_out(self) -> None:
        """Log the options of recipe and preset that do not apply with the chosen algorithm or world, and rows of it."""
        if self.parts.left_out:
            count = self.parts.left_out + len(self.parts.tasks)
            self._log_note(
                f"{self.parts.left_out} of {count} rows are left out: their labels teach "
                f"{self.config.train.algorithm} nothing, as equal labels, or a single reply, are no pair"
            )
        for source, names in self.config.left_out.items():
            kind = source.rpartition(", ")[2]
            kind = kind if kind in named_parts.KINDS else "algorithm"
            self._log_note(left_out_message(source, names, f"{kind}={getattr(self.config.train, kind)}"))

    def _log_note(self, text: str) -> None:
        self.folder.log_message(text)
        self.trackers.note(text)

    def observe(self, call: Callable[[Observer], Any]) -> list[Any]:
        """Call every observer, on the first rank, and return their answers.

        An exception is logged, and the first one of each observer is a warning.
        """
        answers = []
        for observer in self.observers if self.first else ():
            try:
                answers.append(call(observer))
            except Exception as error:
                text = f"the {observer.name} failed: {type(error).__name__}: {error}"
                if observer in self._failed:
                    self.folder.log_message(text)
                else:
                    self._failed.append(observer)
                    self.trackers.warn(f"{text} (later failures are in log.txt alone)")
        return answers

    # --- checkpoints and models ---------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint. Raises: OperantError if that fails."""
        self._write(self.schedule.save)

    def save_last(self) -> None:
        """Write a checkpoint of the current step, unless there is one. Raises: OperantError if that fails."""
        if self.schedule.last != self.learner.progress.step:
            self.save()

    def complete(self) -> None:
        """Write a checkpoint of the current step, unless all its kinds exist: a kill may have come between two."""
        if self.schedule.last != self.learner.progress.step:
            self._write(self.schedule.try_to_save)

    def save_when_due(self) -> None:
        """Write a checkpoint after a step, if one is due. Training goes on if the disk refuses it."""
        due = self._new_best or self.schedule.due(self.learner.progress.step)
        if due if self.state.ranks is None else distributed.largest(int(due)):
            self._write(self.schedule.try_to_save)
            self._new_best = False

    def _save_before_error(self) -> None:
        """Save before an error ends the run. If that fails too, warn, so that the first error is the one raised."""
        try:
            self.save()
        except OperantError as error:
            self.trackers.warn(f"the state from before the step could not be saved either: {error}")

    def _write(self, write: Callable[..., None]) -> None:
        """Write a checkpoint with the function `write` of the schedule, on the first rank; divided weights, on all."""
        if not self.first and self.state.ranks is None:
            return
        with self.learner.timing("checkpoint"):
            extra = self.evaluation.state_dict() | {"best": self.best, "started": self.started}
            extra |= {"decided": measured_modes(self.learner)}
            # Strict JSON turns NaN, such as the mean of no scores, into null: a checkpoint refuses NaN and infinity.
            spare = [self.best["step"]] if self.best is not None else []
            write(self.learner.progress.step, json.loads(atomic_io.strict_json(extra)), spare)

    def resume(self, path: Path, *, fresh_optimizer: bool = False) -> int:
        """Load a checkpoint into the run; returns its step. Raises: OperantError if it does not fit."""
        step, extra = self.state.load(path, self.folder.log_message, fresh_optimizer=fresh_optimizer)
        for name, state in (extra.get("small") or {}).items():
            if name in self.state.parts:
                self.state.parts[name].load_state_dict(state)
        self.evaluation.load_state_dict(extra)
        self.best = extra.get("best")
        self.started = extra.get("started", True)
        set_modes(self.learner, extra.get("decided") or {})
        self.policy.version = step
        self.learner.engine.sync(self.policy, step)
        self.schedule.mark_written(step)
        if fresh_optimizer:
            self.schedule.last = None
        return step

    def _export_if_best(self, metrics: Mapping[str, float]) -> None:
        """Export the model to best/ if the metric of the option `best` is better than ever before."""
        wanted = self.config.train.best
        if wanted is None or not self.first:
            return
        name, sign = wanted.removeprefix("-"), -1 if wanted.startswith("-") else 1
        value = metrics.get(name)
        if value is None or not math.isfinite(value):
            return
        if self.best is not None and sign * value <= sign * self.best["value"]:
            return
        best = {"metric": name, "value": value, "step": int(metrics["step"])}
        error = _error_of(lambda: write_model(self.policy, self.folder.best, json.dumps(best), self._made_by))
        if error is not None:
            self.trackers.warn(f"{error}; training goes on without the best model of step {best['step']}")
            return
        self.best, self._new_best = best, True

    def finish(self) -> None:
        """Write the last checkpoint, evaluate the held-out tasks again, and export the model.

        Raises: OperantError if the checkpoint or the model could not be written, after all the rest is done.
        """
        errors = [_error_of(self.save_last)]
        self.after = self.evaluation.evaluate()
        labels = self.parts.evaluator.judged_labels() if self.parts.evaluator is not None else None
        # For the export alone: a run of more steps goes on as if it had not ended.
        calibrate(self.parts, self.config.data)
        if self.first:
            if self.after is not None:
                both = {k: e.as_plain() if e else None for k, e in (("before", self.before), ("after", self.after))}
                content = json.dumps(both | ({"labels": labels} if labels else {}), indent=1)
                error = _error_of(lambda: atomic_io.write(self.path / "evaluation.json", content))
                if error is not None:
                    self.trackers.warn(str(error))
            with self.learner.timing("export"):
                errors.append(_error_of(lambda: write_model(self.policy, self.folder.export, None, self._made_by)))
        for error in errors:
            if error is not None:
                raise error


def _error_of(work: Callable[[], object]) -> OperantError | None:
    """Call `work`; return the OperantError that it raised, or None."""
    try:
        work()
    except OperantError as error:
        return error
    return None
