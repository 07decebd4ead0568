"""The objects that a run consists of, and what they do together in a step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from operant import distributed
from operant.data import DataOptions, Order, load_tasks
from operant.models.base import ReadingPolicy
from operant.rewards import Judged
from operant.rollouts.demonstrations import Demonstrations
from operant.runs.ahead import Ahead
from operant.runs.config import TrainOptions
from operant.runs.evaluate import Evaluator, Probes
from operant.runs.scored_rollouts import demonstration_rollouts, play_and_score, score
from operant.training.learner import Learner
from operant.types import RewardFn, Rollout, Task

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

    def attempts(self, indices: Sequence[int], samples: int) -> list[Task]:
        """What is played of the tasks with these indices: each so often, and a text without a prompt has an opening."""
        tasks = [self.tasks[i] for i in indices]
        if self.demonstrations is not None:
            tasks = [self.demonstrations.opening(task) for task in tasks]
        return [task for task in tasks for _ in range(samples)]

    def play_and_score(self, train: TrainOptions) -> tuple[list[Rollout], Judged]:
        """Play and score this rank's part of a step's tasks. An error on one rank is raised on all.

        Demonstrations of the tasks follow behind the played replies, and are not judged.
        """
        learner, ahead = self.learner, self.ahead
        rollouts, judged = list[Rollout](), Judged([])
        if ahead is not None:
            ahead.begin()
            rollouts, judged = distributed.together(lambda: score(learner, self.reward, ahead.played()))
            taken = ahead.tasks()
        else:
            taken, samples = self.order.take(train.batch // train.samples), train.samples
            if learner.algorithm.source != "data":
                sizes = {"chunks": train.reward_chunks, "samples": samples}
                rollouts, judged = distributed.together(
                    lambda: play_and_score(learner, self.attempts(taken, samples), self.reward, **sizes)
                )
        if (demonstrations := self.demonstrations) is not None:
            tasks = [self.tasks[i] for i in taken]
            rollouts = rollouts + distributed.together(lambda: demonstration_rollouts(demonstrations, tasks))
        return rollouts, judged

    def ahead_by(self, train: TrainOptions) -> "RunParts":
        """These parts, with what generates ahead if the options say so. Raises: OperantError if it cannot."""
        if not (train.rollouts_ahead or train.partial_rollout_tokens):
            return self
        attempts = partial(self.attempts, samples=train.samples)
        sizes = (train.rollouts_ahead, train.partial_rollout_tokens, train.batch // train.samples)
        return replace(self, ahead=Ahead(self.learner, self.order, self.reward, *sizes, attempts))


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
