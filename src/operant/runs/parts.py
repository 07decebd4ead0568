"""The objects that a run consists of, and what they do together: a step's rollouts and scores, and the evaluations.

Evaluation does not change the training.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from operant import distributed
from operant.data import DataOptions, Order, load_tasks
from operant.data.demonstrations import Demonstrations
from operant.data.recorded import RecordedReplies
from operant.metrics.evaluation import NOTHING, chosen
from operant.models.base import ReadingPolicy
from operant.rewards import Judged
from operant.rollouts.play import Attempts
from operant.runs.ahead import Ahead
from operant.runs.config import TrainOptions
from operant.runs.evaluate import Evaluation, Evaluator
from operant.runs.folder import RunFolder, of_scores
from operant.runs.scored_rollouts import (
    Probes,
    demonstration_rollouts,
    greedy_replies,
    join_judgements,
    play_and_score,
    score,
    solved_often,
    without_variance,
)
from operant.storage import atomic_io
from operant.training.learner import Learner
from operant.types import OperantError, RewardFn, Rollout, Task, shown

CALIBRATED = 256
"""Replies whose mean and variance are measured, as in Ziegler et al. (2019)."""


@dataclass(frozen=True)
class RunParts:
    """The objects that a run consists of."""

    learner: Learner
    source: Any
    """What the tasks were read from."""
    tasks: list[Task]
    order: Order
    reward: RewardFn | None
    """None if only the environment pays, or if the algorithm trains on demonstrations."""
    held_out: list[Task]
    evaluator: Evaluator | None
    """None without held-out tasks."""
    probes: Probes | None
    """None without probe prompts."""
    demonstrations: Demonstrations | None = None
    """Turns demonstrated replies into rollouts; None if the policy generates the replies."""
    left_out: int = 0
    """Number of rows whose labels teach the method nothing, such as equal ones; they are not among `tasks`."""
    notes: tuple[str, ...] = ()
    """Sentences of rewards for the log, such as which reference solutions fail their own tests."""
    ahead: Ahead | None = None
    """Plays the rollouts of later steps; None: each step plays its own."""
    recorded: RecordedReplies | None = None
    """What was generated elsewhere, which the steps train on; None: it is played."""

    def attempts(self, indices: Sequence[int], samples: int) -> list[Task]:
        """What is played of the tasks with these indices: each so often, and a text without a prompt has an opening."""
        tasks = [self.tasks[i] for i in indices]
        if self.demonstrations is not None:
            tasks = [self.demonstrations.opening(task) for task in tasks]
        return [task for task in tasks for _ in range(samples)]

    def play_and_score(self, train: TrainOptions) -> tuple[list[Rollout], Judged, dict[str, float]]:
        """Play and score this rank's part of a step's tasks, and count those that were drawn again. An error on one
        rank is raised on all.

        Demonstrations of the tasks follow behind the played replies, and are not judged.
        """
        learner, ahead = self.learner, self.ahead
        rollouts, judged, counts = list[Rollout](), Judged([]), dict[str, float]()
        if ahead is not None:
            ahead.begin()
            rollouts, judged = distributed.together(lambda: score(learner, self.reward, ahead.played()))
            taken = ahead.tasks()
        else:
            taken = self.order.take(train.batch // train.samples)
            if (recorded := self.recorded) is not None:  # each group is taken once
                tasks = [self.tasks[i] for i in dict.fromkeys(taken)]
                mine = distributed.deal([task.id for task in tasks])
                greedy = distributed.together(lambda: greedy_replies(learner, tasks, self.reward, mine))
                played = recorded.at([task.id for task in tasks], mine), greedy
                rollouts, judged = distributed.together(lambda: score(learner, self.reward, played, pays=recorded.paid))
            elif learner.algorithm.source != "data":
                rollouts, judged, counts = self._play_rounds(taken, train)
        if (demonstrations := self.demonstrations) is not None:
            tasks = [self.tasks[i] for i in taken]
            rollouts = rollouts + distributed.together(lambda: demonstration_rollouts(demonstrations, tasks))
        return rollouts, judged, counts

    def _play_rounds(self, taken: list[int], train: TrainOptions) -> tuple[list[Rollout], Judged, dict[str, float]]:
        """Play and score tasks; `train.redraw` times, replace those whose rewards are equal by the next ones."""
        attempts, samples, used = Attempts(), train.samples, len(taken)
        rollouts, judged, notes = list[Rollout](), Judged([]), list[str]()
        ids, thrown, redrawn = list[str](), list[str](), 0
        sizes: dict[str, Any] = {"chunks": train.reward_chunks, "samples": samples, "attempts": attempts}
        for left in range(train.redraw, -1, -1):
            tasks = self.attempts(taken, samples)
            more, scores = distributed.together(partial(play_and_score, self.learner, tasks, self.reward, **sizes))
            if more:  # a rank without replies does not know the parts of the reward
                judged = join_judgements([judged, scores]) if rollouts else scores
            rollouts, notes = rollouts + more, notes + scores.notes
            if train.retire is not None:
                solved = solved_often(more, scores, train.retire)
                self.order.retire((i for i, task in enumerate(self.tasks) if task.id in solved), used)
            if not left:
                break
            ids += [task.id for task in tasks]
            equal = without_variance(rollouts, judged, self.learner.between_turns)
            kept = [task for task in ids if task not in equal]
            if not equal or {self.tasks[i].id for i in self.order.left} <= {*kept}:
                break
            places = [i for i, rollout in enumerate(rollouts) if rollout.task.id not in equal]
            rollouts, judged = [rollouts[i] for i in places], judged.at(places)
            for task in tasks:
                attempts.next(task)
            taken, wanted = list[int](), (len(ids) - len(kept)) // samples
            while len(taken) < wanted:  # without the ids that the step has: so no group comes to two ranks
                taken += [i for i in self.order.take(1) if self.tasks[i].id not in kept]
            ids, thrown, redrawn = kept, [*thrown, *equal], redrawn + len(taken)
        if thrown:
            named = ", ".join(map(shown, thrown))
            notes.insert(0, f"redraw: {redrawn} prompts were replaced, as their replies had equal rewards: {named}")
        counts = {"rollout/redrawn": float(redrawn), "rollout/drawn_per_used": (used + redrawn) / used}
        counts = counts if train.redraw else {}
        counts |= {"rollout/retired": float(len(self.order.retired))} if train.retire is not None else {}
        return rollouts, replace(judged, notes=notes), counts


class PeriodicEvaluation:
    """Evaluates held-out tasks and probe prompts before training, every few steps, and after the last step.

    isolated_state: a context manager that restores the state of the reward, the environment and the task source.
    """

    def __init__(
        self,
        parts: RunParts,
        folder: RunFolder,
        options: TrainOptions,
        isolated_state: Callable[[], AbstractContextManager[None]],
    ):
        self.parts, self.folder, self.options, self.isolated_state = parts, folder, options, isolated_state
        self.before: Evaluation | None = None
        """The held-out tasks before training."""
        self.probed: dict[str, float] = {}
        """Metrics of the probe prompts that are measured only before training."""
        self._latest: tuple[int, Evaluation] | None = None
        """The latest evaluation of the held-out tasks, and its step."""
        self.started = False
        """Whether the initial policy has been evaluated."""

    def before_training(self) -> None:
        """Evaluate the initial policy; also measure the reference and how much of the score the prompt determines."""
        self.before, self.started = self.evaluate(), True
        first, probes = self.probe(0), self.parts.probes
        if probes is None or distributed.largest(int("probe/reward" not in first)):
            return  # also where another rank has none, as what follows is for all
        self.probed["probe/reward_before"] = first["probe/reward"]
        try:
            with self.isolated_state():
                reference, share = probes.ask_reference(), probes.query_share()
            self.probed |= share
            if reference is not None:
                rows, metrics = reference
                self.probed |= metrics
                self.folder.probes(None, rows)
        except OperantError as error:
            self.folder.log_message(f"the reference's answers to the probe prompts were left out: {error}")

    def after_step(self, step: int) -> dict[str, float]:
        """Evaluate held-out tasks and probe prompts if they are due after this step, and return their metrics."""
        options, metrics, last = self.options, {}, step >= self.options.steps
        if options.evaluate_every and (last or step % options.evaluate_every == 0):
            metrics |= evaluation.metrics() if (evaluation := self.evaluate()) is not None else {}
            metrics |= self.before.as_before() if self.before is not None else {}
        if last or step % options.probe_every == 0:
            metrics |= self.probe(step)
        return metrics | self.probed if step == 1 else metrics

    def after_training(self, warn: Callable[[str], object]) -> Evaluation | None:
        """Evaluate the held-out tasks, and write `evaluation.json`. warn: is told if the disk refuses it."""
        after, evaluator = self.evaluate(), self.parts.evaluator
        if after is None or evaluator is None:
            return None
        labels = evaluator.judged_labels()
        results = {"before": self.before.as_plain() if self.before else None, "after": after.as_plain()}
        if distributed.rank() == 0:
            try:
                content = json.dumps(results | ({"labels": labels} if labels else {}), indent=1)
                atomic_io.write(self.folder.path / "evaluation.json", content)
            except OperantError as error:
                warn(str(error))
        return after

    def evaluate(self) -> Evaluation | None:
        """Evaluate the held-out tasks, with the same random numbers every time; None if there are no such tasks."""
        step = self.parts.learner.progress.step
        if self.parts.evaluator is not None and (self._latest is None or self._latest[0] != step):
            with self.isolated_state():
                self._latest = step, (found := self.parts.evaluator())
            if self.before is not None and not self.before.is_of(found):  # a file that was changed meanwhile
                self.before = None
                self.folder.log_message("the held-out tasks are others than before training, which is left out")
        return self._latest[1] if self._latest is not None else None

    def probe(self, step: int) -> dict[str, float]:
        """Answer the probe prompts, write the answers and return their metrics. An error of the reward is logged."""
        if (probes := self.parts.probes) is None:
            return {}
        try:
            with self.isolated_state():
                rows, metrics = probes.ask()
            self.folder.probes(step, rows)
            return metrics | self.probed
        except OperantError as error:
            self.folder.log_message(f"the probe prompts of step {step} were left out: {error}")
            return {}

    def changed(self, changes: Mapping[str, tuple[object, object]]) -> bool:
        """Leave out what was measured before training in another way, and return whether anything was.

        changes: the old and the new value of options, by name.
        """
        found = sorted(filter(of_scores, changes))
        old, new = map(chosen, changes.get("evaluation.metrics", (None, None)))
        found += [f"metric {name}" for name, how in old.items() if new.get(name) != how]
        if found and (self.before is not None or self.probed):
            scores = of_scores(found[0])
            self.before = None if scores or self.before is None else replace(self.before, measured=NOTHING)
            self.probed = {} if scores else self.probed
            self.folder.log_message(f"{', '.join(found)} changed: held-out results from before training are left out")
        return bool(found)

    def state_dict(self) -> dict[str, object]:
        """The evaluation before training, as plain data."""
        return {"before": self.before and self.before.as_plain(), "probed": self.probed, "started": self.started}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; further keys are ignored."""
        self.before = Evaluation.from_plain(state["before"]) if state["before"] is not None else None
        self.probed = state.get("probed") or {}
        self.started = state.get("started", True)


def calibrate(parts: RunParts, data: DataOptions) -> None:
    """Make the scores of replies have mean 0 and variance 1: the labelled ones, or those of a file of its own.

    A policy without such a scale is left alone.
    Raises: OperantError for a file that cannot be read, or equal scores.
    """
    policy, demonstrations, tasks = parts.learner.policy, parts.demonstrations, parts.tasks
    if not isinstance(policy, ReadingPolicy) or policy.calibrated_on is None or demonstrations is None:
        return
    if policy.calibrated_on != "labels":
        tasks = load_tasks(policy.calibrated_on, None, replace(data, limit=CALIBRATED), with_replies=True)
    rows = list[list[int]]()
    for task in tasks:
        rows += [rollout.turns[0].prompt + rollout.turns[0].action for rollout in demonstrations.rollouts([task])]
        if len(rows) >= CALIBRATED:
            break
    policy.calibrate(rows[:CALIBRATED])
