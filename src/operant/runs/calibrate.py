"""Sets gain and bias of a reward model, before the first step and after the last one."""

from dataclasses import replace

from operant.data import DataOptions, load_tasks
from operant.models.reward_model import ENOUGH, LABELS, NONE, RewardModel
from operant.runs.build import RunParts


def calibrate(parts: RunParts, data: DataOptions) -> None:
    """Make the scores of replies have mean 0 and variance 1: the labelled ones, or those of the file in `normalise`.

    A policy that is no reward model is left alone.
    Raises: OperantError for a file that cannot be read, or equal scores.
    """
    policy, demonstrations, tasks = parts.learner.policy, parts.demonstrations, parts.tasks
    if not isinstance(policy, RewardModel) or demonstrations is None or policy.normalise == NONE:
        return
    if policy.normalise != LABELS:
        tasks = load_tasks(policy.normalise, None, replace(data, limit=ENOUGH), with_replies=True)
    rows = list[list[int]]()
    for task in tasks:
        rows += [rollout.turns[0].prompt + rollout.turns[0].action for rollout in demonstrations.rollouts([task])]
        if len(rows) >= ENOUGH:
            break
    policy.calibrate(rows[:ENOUGH])
