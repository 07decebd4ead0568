"""Rewards made of rewards: weighted sums whose parts are kept by name, and what a reply adds to its query.

reward = weighted({"sentiment": (minus_query(sentiment), 1.0), "length": (length(20), 0.3)})
judge(reward, rollouts).parts["length"]    # as said, before the weight
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from operant.rewards.evaluate import Judged, Outcome, Total, check, judge, name_of
from operant.types import OperantError, RewardFn, Rollout


@dataclass(frozen=True)
class Weighted:
    """The weighted sum of named rewards; parts are kept by name, as they were said."""

    rewards: dict[str, tuple[RewardFn, float]]
    __name__ = "weighted"

    def __call__(self, rollouts: list[Rollout]) -> list[Total]:
        return self.judged(rollouts).scores

    def judged(self, rollouts: list[Rollout]) -> Judged:
        """A part that abstains adds nothing to its row; where all abstain the row abstains.

        Where a part failed and its sample is to be dropped, the row is: a sum without that part is another reward.
        """
        scores: list[Total] = [None] * len(rollouts)
        parts: dict[str, list[float | None]] = {}
        every: list[Judged] = []
        for name, (reward, weight) in self.rewards.items():
            said = judge(reward, rollouts, name)
            every.append(said)
            scores = [_add(s, _times(x, weight)) for s, x in zip(scores, said.scores)]
            for part, values in said.parts.items():
                parts[name if part in (name, name_of(reward)) else f"{name}/{part}"] = values
        scores = [None if any(_lost(j, i) for j in every) else score for i, score in enumerate(scores)]
        return Judged(scores, parts, _worst(every, scores), [note for j in every for note in j.notes])

    def check(self) -> None:
        for reward, _ in self.rewards.values():
            check(reward)


FAILED: tuple[Outcome, ...] = ("error", "timeout")


def _lost(judged: Judged, i: int) -> bool:
    return judged.outcome(i) in FAILED and judged.scores[i] is None


def _worst(every: list[Judged], scores: list[Total]) -> list[Outcome]:
    """Of what several rewards said of the same samples; nothing where all of them stop the run on a failure."""

    def of(i: int) -> Outcome:
        met: list[Outcome] = [o for o in FAILED for j in every if j.outcome(i) == o]
        none = scores[i] is None or all(j.outcome(i) == "abstain" for j in every)  # who abstains may be given a score
        return met[0] if met else "abstain" if none else "ok"

    return [of(i) for i in range(len(scores))] if any(j.outcomes for j in every) else []


def weighted(rewards: Mapping[str, tuple[RewardFn, float]]) -> Weighted:
    """`weighted({"sentiment": (fn, 1.0), "length": (other, 0.3)})`."""
    if not rewards:
        raise OperantError("a weighted reward without parts: give {name: (reward, weight)}")
    for name, (_, weight) in rewards.items():
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise OperantError(f"the weight {weight!r} of reward {name!r} is no finite number")
    return Weighted(dict(rewards))


def _times(score: Total, weight: float) -> Total:
    if score is None:
        return None
    return [weight * x for x in score] if isinstance(score, list) else weight * score


def _add(a: Total, b: Total) -> Total:
    """A number that meets a list lands on the last token, where a reward of the whole reply is paid."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, list) and isinstance(b, list):
        return [x + y for x, y in zip(a, b)]
    if isinstance(b, list):
        a, b = b, a
    if isinstance(a, list):
        return [*a[:-1], a[-1] + b]  # type: ignore[operator]
    return a + b  # type: ignore[operator]


@dataclass(frozen=True)
class MinusQuery:
    """score(query and reply) - score(query alone): what the reply added."""

    reward: RewardFn

    @property
    def __name__(self) -> str:
        return name_of(self.reward)

    def __call__(self, rollouts: list[Rollout]) -> list[Total]:
        return self.judged(rollouts).scores

    def judged(self, rollouts: list[Rollout]) -> Judged:
        """Each distinct query of a call is scored once. Abstaining on either side abstains."""
        first: dict[tuple[str, str], int] = {}
        where = [first.setdefault((r.task.id, r.query), len(first)) for r in rollouts]
        alone = judge(self.reward, [_query_alone(rollouts[where.index(i)]) for i in range(len(first))])
        whole = judge(self.reward, rollouts)
        if any(isinstance(score, list) for score in whole.scores):
            raise OperantError(f"reward {name_of(self.reward)!r} speaks per token: a query has none to subtract")

        def minus(xs: Any, ys: Any) -> Any:
            return [None if x is None or ys[i] is None else x - ys[i] for x, i in zip(xs, where)]

        none = [None] * len(first)
        parts = {name: minus(values, alone.parts.get(name, none)) for name, values in whole.parts.items()}
        spread = Judged(
            [alone.scores[i] for i in where], {}, [alone.outcome(i) for i in where] if alone.outcomes else []
        )
        scores = minus(whole.scores, alone.scores)
        for i in range(len(scores)):  # what a failure was given is the score, and has no query to lose
            given = next((j.scores[i] for j in (whole, spread) if j.outcomes and j.outcome(i) != "ok"), scores[i])
            scores[i] = given
        return Judged(scores, parts, _worst([whole, spread], scores), [*alone.notes, *whole.notes])

    def check(self) -> None:
        check(self.reward)


def minus_query(reward: RewardFn) -> MinusQuery:
    """Subtract from each score the reward of the query alone."""
    return MinusQuery(reward)


def _query_alone(rollout: Rollout) -> Rollout:
    turn = replace(rollout.turns[0], action=[], logprobs=None, values=None, allowed=None, states=None)
    return replace(rollout, turns=[turn], texts=[""])
