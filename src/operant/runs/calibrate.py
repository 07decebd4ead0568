"""Sets the scale of a policy that judges replies, before the first step and after the last one."""

from dataclasses import replace

from operant.data import DataOptions, load_tasks
from operant.models.base import ReadingPolicy
from operant.runs.build import RunParts

ENOUGH = 256
"""Replies whose mean and variance are measured, as in Ziegler et al. (2019)."""


def calibrate(parts: RunParts, data: DataOptions) -> None:
    """Make the scores of replies have mean 0 and variance 1: the labelled ones, or those of a file of its own.

    A policy without such a scale is left alone.
    Raises: OperantError for a file that cannot be read, or equal scores.
    """
    policy, demonstrations, tasks = parts.learner.policy, parts.demonstrations, parts.tasks
    if not isinstance(policy, ReadingPolicy) or policy.calibrated_on is None or demonstrations is None:
        return
    if policy.calibrated_on != "labels":
        tasks = load_tasks(policy.calibrated_on, None, replace(data, limit=ENOUGH), with_replies=True)
    rows = list[list[int]]()
    for task in tasks:
        rows += [rollout.turns[0].prompt + rollout.turns[0].action for rollout in demonstrations.rollouts([task])]
        if len(rows) >= ENOUGH:
            break
    policy.calibrate(rows[:ENOUGH])
