"""A run in progress: its loop, one step, and what it logs.

A step changes the run as a whole or not at all. If the reward fails, the state from before the step is saved, and a
resumed run repeats that step. If the update itself fails, the run resumes from the last checkpoint.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from html import escape
from shlex import quote

from operant import distributed, machine
from operant.metrics.collect import reward_metrics
from operant.models.loading import Trained
from operant.runs.checkpoints import Best, Checkpoints, StateOfRun, error_of, restore, snapshot
from operant.runs.config import Config
from operant.runs.evaluate import Evaluation
from operant.runs.folder import RunFolder
from operant.runs.parts import PeriodicEvaluation, RunParts, calibrate
from operant.runs.scored_rollouts import as_rows
from operant.runs.signals import StopRequest
from operant.runs.trackers.notebook import link
from operant.runs.trackers.trackers import Trackers
from operant.sampling import token_pieces
from operant.storage import atomic_io
from operant.training import refused_step
from operant.training.refused_step import RefusedStep
from operant.types import OperantError, StoppedError
from operant.watchdog import Watchdog


class Observer:
    """Called during a run, on the first rank only. An exception that it raises is logged, and the run continues."""

    name = "observer"
    """Its name in the log."""

    def at_start(self, run: "Run") -> None:
        """Called before the initial policy is measured, and before the first step of a resumed run."""

    def after_step(self, run: "Run") -> None:
        """Called after every step, and after its checkpoint if one was due."""

    def at_end(self, run: "Run") -> None:
        """Called at the end of the run: it is complete or interrupted."""

    def at_failure(self, run: "Run") -> None:
        """Called before an error ends the run."""

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
        self.interrupted = False
        self.state = StateOfRun(parts)
        self.evaluation = PeriodicEvaluation(parts, folder, config.train, self.state.isolated)
        self.checkpoints = Checkpoints(self.state, config, self.evaluation, trackers.warn)
        self.observers: Sequence[Observer] = ()
        self._failed = list[Observer]()

    def __repr__(self) -> str:
        train, rewards = self.config.train, [m["reward/mean"] for m in self.metrics if "reward/mean" in m]
        reward = f", reward {rewards[0]:.3g} -> {rewards[-1]:.3g}" if rewards else ""
        return f"Run({str(self.path)!r}, {train.algorithm}, {len(self.metrics)} of {train.steps} steps{reward})"

    def _repr_html_(self) -> str:  # in a notebook
        return f"{escape(repr(self))} {link(self.folder.report)}"

    @property
    def policy(self) -> Trained:
        """The `Policy` in training."""
        return self.learner.policy

    @property
    def before(self) -> Evaluation | None:
        """The held-out tasks before training."""
        return self.evaluation.before

    @property
    def best(self) -> Best | None:
        """`metric`, `value` and `step` of the model in best/."""
        return self.checkpoints.best

    @property
    def stopped(self) -> bool:
        """Whether it has ended before its last step, or ends now: by a signal, or because its caller leaves it."""
        return self.interrupted or self.learner.progress.step < self.config.train.steps

    def train(self, stop: StopRequest) -> Iterator["Run"]:
        """Evaluate, train the remaining steps, evaluate and save; yields the run before, between and after steps."""
        self.trackers.start(self.folder.config)
        try:
            self.observe(lambda observer: observer.at_start(self))
            if not self._stop_requested(stop) and not self.evaluation.started:
                with self._watchdog("the start"):
                    calibrate(self.parts, self.config.data)
                    self.evaluation.before_training()
                    self.learner.clock.take()
            yield self
            while self.learner.progress.step < self.config.train.steps and not self._stop_requested(stop):
                with self._watchdog(f"step {self.learner.progress.step + 1}"):
                    self.step()
                    self.checkpoints.save_when_due()
                    self.observe(lambda observer: observer.after_step(self))
                yield self
        except StoppedError as error:  # in the middle of a step
            self.folder.log_message(str(error))
            self.interrupted = True
        except Exception:
            self.observe(lambda observer: observer.at_failure(self))
            raise
        except GeneratorExit:  # the caller has left its loop; other ranks meet this one at the head of theirs
            if self.stopped:
                distributed.largest(1)
            self._end()
            raise
        finally:
            self.trackers.close()
        self._end()
        yield self

    def _end(self) -> None:
        """Save what a resume needs, or finish the run."""
        with self._watchdog("the end"):
            try:
                if self.stopped:
                    self.checkpoints.save_last()
                else:
                    self._finish()
            except BaseException:
                self.observe(lambda observer: observer.at_failure(self))
                raise
            self.observe(lambda observer: observer.at_end(self))

    def step(self) -> dict[str, float]:
        """Sample tasks, play and score them, learn, evaluate, log; returns the metrics.

        Raises: OperantError; unless the update had begun, the state from before the step is restored and saved.
        """
        start, learner, ahead = time.perf_counter(), self.learner, self.parts.ahead
        with self._restored_on_error() as notes:
            rollouts, judged, counts = self.parts.play_and_score(self.config.train)
            notes += judged.notes
            for note in notes:
                self.folder.log_message(note)
            of_all = judged.padded(len(rollouts))
            metrics = learner.learn(rollouts, of_all.scores) | counts
            if ahead is not None:
                metrics |= ahead.carried()
                ahead.done()
        step = int(metrics["step"])
        metrics |= reward_metrics(judged, self.metrics[-1] if self.metrics else None)
        tracking = time.perf_counter()
        last, pieces = learner.last_step, partial(token_pieces, self.policy.tokenizer)
        assert last is not None  # set by `learn`
        judgement = (of_all.remarks, of_all.passing)
        rows = as_rows(rollouts, of_all.scores, of_all.parts, last.batch, last.places, pieces, *judgement)
        first = sum(distributed.gathered(len(rollouts))[: distributed.rank()])  # each rank counts its attempts from 0
        rows = [row | {"rollout": first + row["rollout"]} for row in rows]
        self.trackers.rollouts(step, [row for part in distributed.gathered(rows) for row in part])
        self.trackers.distributions(step, learner.distributions)
        tracked = time.perf_counter()
        failed = error_of(lambda: metrics.update(self.evaluation.after_step(step)))
        now = time.perf_counter()
        metrics |= {"time/track": tracked - tracking, "time/step": now - start} | machine.memory()
        metrics |= learner.clock.take() | self.checkpoints.written
        self.checkpoints.written = {}
        tokens = sum(len(turn.action) for rollout in rollouts for turn in rollout.turns)
        metrics["tokens/per_second"] = distributed.total_float(float(tokens)) / (now - start)
        self.metrics.append(metrics)
        self.trackers.log(step, metrics)
        self.checkpoints.export_if_best(step, metrics)
        if learner.refused is not None:
            self._handle_refusal(learner.refused, step)
        if failed is not None:  # the evaluation, whose step stands
            raise failed
        return metrics

    def _finish(self) -> None:
        """Write the last checkpoint, evaluate the held-out tasks again, and export the model.

        Raises: OperantError if the checkpoint or the model could not be written, after all the rest is done.
        """
        errors, wanted = [error_of(self.checkpoints.save_last)], self.config.train.best
        if wanted is not None and self.best is None and self.first:
            self.trackers.warn(f"best={wanted}: no step has measured that, so there is no best/")
        self.after = self.evaluation.after_training(self.trackers.warn)
        # For the export alone: a run of more steps goes on as if it had not ended.
        calibrate(self.parts, self.config.data)
        if self.first:
            errors.append(error_of(self.checkpoints.export))
        for error in filter(None, errors):
            raise error

    @contextmanager
    def _restored_on_error(self) -> Iterator[list[str]]:
        """Restore and save the state from before a step whose update has not begun. Yields a list of its notes."""
        before, notes = snapshot(self.state, self.state.of_step), list[str]()
        try:
            yield notes
        except OperantError as error:
            if not self.learner.updating:  # no weight has changed
                restore(self.state, before)
                # Ranks that write together would wait for each other, unless all of them raise this error.
                if vars(error).get("agreed") or self.state.ranks is None:
                    self.checkpoints.save_before_error()
            if notes and str(error).startswith("no reply is left"):
                raise OperantError(f"no reply is left to train on: {notes[-1]}") from error
            raise

    def _handle_refusal(self, refusal: RefusedStep, step: int) -> None:
        """Write the bundle of a refused step and warn.

        Raises: OperantError after too many refused steps in a row, with the run saved as it was before them.
        """
        path = self.path / "refused" / atomic_io.step_name(step)
        repeat = f"operant replay {quote(str(path))}"
        if self.first:
            error = error_of(lambda: refused_step.keep(path, self.learner.bundle))
            self.trackers.warn(f"step {step}: {refusal.message()}; {error or repeat}")
        if self.learner.progress.refused < refused_step.IN_A_ROW:
            return
        self.checkpoints.save_before_error()
        causes = self.observe(lambda observer: observer.likely_cause(self))
        why = next((f"Likely {cause}. " for cause in causes if cause is not None), "")
        refused = f"{self.learner.progress.refused} steps in a row were refused, the last one was step {step}"
        left = "it was before them" if refusal.whole else "they left it"
        saved = f"The run is saved as {left}; the bundle of the last one is {path}: {repeat}"
        raise OperantError(f"{refused}: {refusal.fault.message()}. {why}{saved}")

    def observe(self, call: Callable[[Observer], str | None]) -> list[str | None]:
        """Call every observer, on the first rank, and return their answers.

        An exception is logged, and the first one of each observer is a warning.
        """
        answers = list[str | None]()
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

    @contextmanager
    def _watchdog(self, item: str) -> Iterator[None]:
        """Log slow phases of `item`, and end the process after `silence_minutes` without progress."""
        lately = self.metrics[-1] if self.metrics else {}
        usual = {name.removeprefix("time/"): seconds for name, seconds in lately.items() if name.startswith("time/")}
        silence = 60 * self.config.train.silence_minutes
        log = self.folder.log_path if self.first else None  # the other ranks have a temporary folder
        with Watchdog(self.learner.clock, self.folder.log_message, log, silence, usual=usual) as dog:
            dog.item = item
            yield

    def _stop_requested(self, stop: StopRequest) -> bool:
        """Whether any rank was asked to stop: all ranks stop after the same step."""
        self.interrupted = bool(distributed.largest(int(bool(stop) or self.interrupted)))
        return self.interrupted
