"""A run in progress: one step of it, what is looked at on the way, and what stays.

A step changes the run as a whole or not at all: where a reward fails, the state from before the step is saved, and
`resume` plays that step again. Where the update itself fails, the last checkpoint stands.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from operant import bundle, distributed, files, machine
from operant.algorithms import left_out_says
from operant.attempts import attempt, given
from operant.build import Built
from operant.bundle import Refusal
from operant.checkpoint import RunState
from operant.config import Config
from operant.evaluate import Evaluation
from operant.looks import Looks
from operant.options import values
from operant.resume import decide, decided, guests
from operant.rewards import Judged, isolated_parts
from operant.run import RunFolder
from operant.sampling import token_pieces
from operant.saving import Saving, write_model
from operant.tally import Tally
from operant.tracking.diagnosis import Finding, diagnose, latest
from operant.tracking.report import write_report
from operant.tracking.rows import rows
from operant.tracking.sink import Trackers
from operant.types import OperantError, Rollout
from operant.watchdog import Watchdog

REPORT_SECONDS, DIAGNOSIS_SECONDS = 20.0, 2.0
"""The report is written and the run diagnosed at most this often while it goes on."""
SHARE = 0.02
"""Of the time that either may take: where it takes long, it is done less often."""


class Pace:
    """Something that is done now and then: at most every `least` seconds, and for a `SHARE` of the time."""

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
        self.guests = [name for source, thing in sources.items() for name, _ in self._registered(source, thing)]
        """Names of those parts of the state that are the user's own: a reward, a world or a source that changes."""
        self.saving = Saving(self.state, folder, config.train, trackers.warn)
        self._reports, self._diagnoses = Pace(REPORT_SECONDS), Pace(DIAGNOSIS_SECONDS)
        self.looks = Looks(built, folder, config.train, self._aside)
        self._told: set[str] = set()
        self._best_moved = False

    def _registered(self, source: str, thing: Any) -> list[tuple[str, Any]]:
        return [(name, self.state.register(name, guest)) for name, guest in guests(source, thing)]

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
        held = self.state.snapshot(only=self.guests)
        try:
            yield
        finally:
            self.state.restore(held)

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self) -> dict[str, float]:
        """Play, judge, learn, track. Raises: OperantError with the state from before the step saved."""
        start, learner = time.perf_counter(), self.learner
        before = self.state.snapshot(only=("tasks", "moments", "controller", "progress", *self.guests))
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

    def _heed(self, refusal: Refusal, step: int) -> None:
        """A refused step leaves a bundle. Raises: OperantError where too many were refused in a row, all saved."""
        path = self.path / "refused" / files.step_name(step)
        if self.first:
            told = _tried(lambda: bundle.keep(path, self.learner.bundle))
            self.trackers.warn(f"step {step}: {refusal.says()}; {told or f'operant replay {path}'}")
        if self.learner.progress.refused < bundle.IN_A_ROW:
            return
        self._save_what_is()
        self.report()
        found = next((f for f in self.diagnose() if f.name == "not_finite"), None)
        why = f"{found.cause}; try {found.remedy}" if found else "the numbers are no more"
        raise OperantError(
            f"{self.learner.progress.refused} steps in a row were refused, at last step {step}: "
            f"{refusal.fault.says()}. Likely {why}. "
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
        learnt = learner.learnt
        assert learnt is not None  # by the step that this is about
        pieces = _pieces(learner.policy.tokenizer)
        mine = rows(rollouts, judged.scores, judged.parts, learnt.batch, learnt.kept, pieces)
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
        self._say_findings()

    # --- what is told -------------------------------------------------------------------------------------------------

    def tell_isolation(self) -> None:
        """How isolated rewards are ended and limited on this machine, in the log and for the report."""
        levels = {guest.__name__: guest.level for guest in isolated_parts(self.built.reward)}
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
            text = left_out_says(source, names, self.config.train.algorithm)
            self.folder.say(text)
            self.trackers.note(text)

    def start(self) -> None:
        """The first looks, before any step."""
        if not self.started:
            self.looks.first()
            self.learner.clock.take()
            self.started = True

    def diagnose(self) -> list[Finding]:
        """What looks wrong by now, worst first."""
        lately = latest(self.learner)
        config = {**lately.config, **values(self.config.train)}
        reference = self.folder.reference_probes()
        return diagnose(replace(lately, metrics=self.metrics, reference=reference, config=config))

    def _say_findings(self) -> None:
        """New findings, in the log and on the console. A diagnosis that fails stops nothing."""
        last = bool(self.metrics) and self.metrics[-1]["step"] >= self.config.train.steps
        if not self.first or (not self._diagnoses.due and not last):
            return
        try:
            with self._diagnoses:
                found = self.diagnose()
        except Exception as error:
            found = []
            self.folder.say(f"the diagnosis failed: {type(error).__name__}: {error}")
        for finding in found:
            if finding.name not in self._told and finding.level != "note":
                self._told.add(finding.name)
                text = f"{finding.level}: {finding.says} {finding.remedy}"
                self.folder.say(text)
                self.trackers.note(text)

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
        """After a step: a checkpoint and the report, now and then. A disk that refuses them stops nothing."""
        if self._best_moved or self.saving.due(self.learner.progress.step):
            self._write(self.saving.attempt)
            self._best_moved = False
        if self._reports.due and self.first:
            self.report()

    def _write(self, write: Callable[..., None]) -> None:
        step = self.learner.progress.step
        if self.first:
            with self.learner.timing("checkpoint"):
                spare = [self.best["step"]] if self.best is not None else []
                write(step, self._extra(), spare)

    def _extra(self) -> dict[str, Any]:
        told = self.looks.as_plain() | {"best": self.best, "started": self.started}
        # A mean over nothing is told as nothing: no number that is not finite reaches a checkpoint.
        return json.loads(files.strict_json(told | {"decided": decided(self.learner)}))

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

    def report(self) -> Path | None:
        """Write the report; a report that fails is told in the log and stops nothing."""
        try:
            with self._reports, self.learner.timing("report"):
                return write_report(self.path)
        except Exception as error:
            self.folder.say(f"the report could not be written: {type(error).__name__}: {error}")
            return None

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
        """The last checkpoint, the held-out tasks again, the exported model, the report.

        Raises: OperantError where the checkpoint or the model could not be written, once all else is done.
        """
        failed = [_tried(self.save_last)]
        self.after = self.looks.evaluate()
        if self.first:
            if self.after is not None and (error := _tried(self._write_comparison)) is not None:
                self.trackers.warn(str(error))
            with self.learner.timing("export"):
                failed.append(_tried(lambda: write_model(self.policy, self.folder.export)))
            self.report()
        for error in failed:
            if error is not None:
                raise error

    def _write_comparison(self) -> None:
        told = {k: e.as_plain() if e else None for k, e in (("before", self.before), ("after", self.after))}
        files.write(self.path / "evaluation.json", json.dumps(told, indent=1))


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
