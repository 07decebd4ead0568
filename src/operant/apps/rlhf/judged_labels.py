"""How a reward model judges held-out labels: by labeller, by its confidence, and where it errs most.

    {"of": 612, "right": 401.5,                                       # a tie of the scores counts half
     "labellers": [{"name": "anna", "of": 300, "right": 201.0}, ...],
     "calibration": [{"from": 0.5, "to": 0.6, "of": 212, "right": 0.53, "confidence": 0.55}, ...],
     "worst": [{"labeller": "anna", "query": str, "better": str, "worse": str | None, "scores": [0.1, 1.9]}, ...]}

A judgement is a pair of replies to one prompt of which a person preferred one, or a single reply that was called good
or bad. The model's confidence is the probability that it gives its own choice: the sigmoid of the difference of the two
scores, or of the one score.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp
from statistics import fmean

from operant.types import Rollout

BINS = 5
"""Intervals of confidence, from 0.5 to 1."""
WORST, LONGEST = 12, 600
"""Judgements that are listed, and characters of a text."""


@dataclass(frozen=True)
class JudgedLabel:
    """A label and what the model thinks of it; `gap` is how far it agrees, and below 0 where it disagrees."""

    labeller: str
    gap: float
    query: str
    better: str
    worse: str | None
    """None: a single reply."""
    scores: tuple[float, ...]
    good: bool = True
    """What a single reply was called."""

    @property
    def right(self) -> float:
        """1.0 if the model agrees, 0.5 if its scores are equal."""
        return 1.0 if self.gap > 0 else 0.5 if self.gap == 0 else 0.0

    @property
    def confidence(self) -> float:
        """The probability that the model gives its own choice, at least 0.5."""
        return 1 / (1 + exp(-abs(self.gap)))


def judgements(rollouts: Sequence[Rollout], scores: Sequence[float], *, single: bool) -> Iterator[JudgedLabel]:
    """The judgements of labelled demonstrations, which are in the order of their tasks, with the score of each.

    single: labels are 1 for a good and 0 for a bad reply, and replies are not compared.
    """
    of_tasks: dict[int, list[int]] = {}
    for i, rollout in enumerate(rollouts):
        of_tasks.setdefault(rollout.group, []).append(i)
    for places in of_tasks.values():
        label = {i: sum(turn.reward for turn in rollouts[i].turns) for i in places}
        who, query = str(rollouts[places[0]].task.target or "unnamed"), rollouts[places[0]].query
        if single:
            for i in places:
                gap = scores[i] if label[i] > 0 else -scores[i]
                yield JudgedLabel(who, gap, query, rollouts[i].reply, None, (scores[i],), label[i] > 0)
        for i, j in ((i, j) for i in places for j in places if label[i] > label[j] and not single):
            both = scores[i], scores[j]
            yield JudgedLabel(who, both[0] - both[1], query, rollouts[i].reply, rollouts[j].reply, both)


def summary(found: Sequence[JudgedLabel]) -> dict[str, object]:
    """The dict above. Lists are empty where there is nothing to list."""
    of_labellers, bins = dict[str, list[JudgedLabel]](), dict[int, list[JudgedLabel]]()
    for one in found:
        of_labellers.setdefault(one.labeller, []).append(one)
        bins.setdefault(min(int((one.confidence - 0.5) * 2 * BINS), BINS - 1), []).append(one)
    wrong = sorted((one for one in found if one.gap < 0), key=lambda one: one.gap)[:WORST]
    return {
        "of": len(found),
        "right": sum(one.right for one in found),
        "labellers": [
            {"name": name, "of": len(mine), "right": sum(one.right for one in mine)}
            for name, mine in sorted(of_labellers.items())
        ],
        "calibration": [
            {"from": 0.5 + k * 0.5 / BINS, "to": 0.5 + (k + 1) * 0.5 / BINS, "of": len(inside)}
            | {"right": fmean(one.right for one in inside), "confidence": fmean(one.confidence for one in inside)}
            for k, inside in sorted(bins.items())
        ],
        "worst": [
            {"labeller": one.labeller, "query": one.query[-LONGEST:], "better": one.better[:LONGEST]}
            | {"worse": one.worse and one.worse[:LONGEST], "scores": list(one.scores), "good": one.good}
            for one in wrong
        ],
    }
