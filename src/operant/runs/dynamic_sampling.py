"""Dynamic sampling: prompts whose replies all score alike teach nothing, and others are drawn (arXiv:2503.14476)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from operant import distributed
from operant.data import Order
from operant.objectives.advantages import group_relative
from operant.rewards import Judged, totals
from operant.rollouts.play import Attempts
from operant.runs.scored_rollouts import join_judgements
from operant.types import Rollout

Play = Callable[[Sequence[int], Attempts], tuple[list[Rollout], Judged]]
"""Plays and judges this rank's part of the tasks with these indices."""


@dataclass
class Drawn:
    """What was drawn for the prompts of a step, on all ranks."""

    prompts: int
    thrown: list[str]
    """The ids of the tasks that were thrown away, in the order in which they were drawn."""
    alike: int = 0
    """Prompts that stay although their replies score alike."""

    def metrics(self) -> dict[str, float]:
        return {"redraw/prompts": float(self.prompts), "redraw/alike": float(self.alike)}


def play_until_scores_differ(play: Play, order: Order, count: int, rounds: int) -> tuple[list[Rollout], Judged, Drawn]:
    """Play `count` prompts, and up to `rounds` times others in the place of those whose replies have equal totals.

    Those of the last round stay as they are, so that a step always has as many replies. A task that comes again in
    another round has a group of its own and other random numbers.
    """
    attempts, drawn = Attempts(), Drawn(count, [])
    rollouts, judged = play(order.take(count), attempts)
    for left in reversed(range(rounds + 1)):
        mine = alike(rollouts, judged)
        found = [task for part in distributed.gathered([(r.place, r.task.id) for r in mine]) for task in part]
        if not found or not left:
            drawn.alike = len(found)
            break
        drawn.thrown += [task for _, task in sorted(found)]
        drawn.prompts += len(found)
        attempts.begin_groups()
        more, said = play(order.take(len(found)), attempts)
        groups = {rollout.group for rollout in mine}
        kept = [i for i, rollout in enumerate(rollouts) if rollout.group not in groups]
        rollouts, judged = [rollouts[i] for i in kept] + more, join_judgements([judged.at(kept), said])
    return rollouts, judged, drawn


def alike(rollouts: Sequence[Rollout], judged: Judged) -> list[Rollout]:
    """The first rollout of each group whose replies have equal totals, up to rounding; one that abstained has none."""
    known = [
        (r, total) for r, total in zip(rollouts, totals(judged.scores, rollouts), strict=True) if total is not None
    ]
    numbers = {group: n for n, group in enumerate(dict.fromkeys(rollout.group for rollout, _ in known))}
    groups = torch.tensor([numbers[rollout.group] for rollout, _ in known], dtype=torch.long)
    gaps = group_relative(torch.tensor([total for _, total in known], dtype=torch.float64), groups)
    differ = {known[i][0].group for i in gaps.nonzero().flatten().tolist()}
    firsts = {rollout.group: rollout for rollout in reversed(rollouts)}
    return [firsts[group] for group in dict.fromkeys(r.group for r in rollouts) if group not in differ]
