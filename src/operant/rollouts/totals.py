"""What an attempt is worth as a whole: the score of the reward and the pay of the world."""

from collections.abc import Sequence

from operant.types import Rollout

Total = float | list[float] | None
"""A score as a reward returns it: a number, one number per action token, or None if the reward abstained."""


def totals(scores: Sequence[Total], rollouts: Sequence[Rollout]) -> list[float | None]:
    """One number per rollout: its score (summed over tokens) plus the environment's pay; None if it abstained."""
    summed = [sum(score) if isinstance(score, list) else score for score in scores]
    return [None if score is None else score + r.paid for score, r in zip(summed, rollouts, strict=True)]
