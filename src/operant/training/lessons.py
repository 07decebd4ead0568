"""What a step learns from: which replies, with what score; what it was made of, and how far training has come."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from operant import distributed
from operant.metrics import collect
from operant.rewards.evaluate import Total, totals
from operant.rewards.shaping import RunningMoments, ScoreOptions, processed
from operant.sampling import Sampling
from operant.tally import Tally
from operant.types import Batch, OperantError, Rollout, shown


@dataclass(frozen=True)
class Lesson:
    """The replies that are learnt from."""

    rollouts: list[Rollout]
    scores: list[Any]
    """One a rollout, as it is trained on."""
    given: list[Total]
    """One a rollout of all, as it was given."""
    places: list[int]
    """Where each rollout stood among all."""
    tally: Tally
    """What is told of the scores."""


@dataclass(frozen=True)
class Learnt:
    """What the last step learnt from."""

    rollouts: list[Rollout]
    scores: Sequence[Any]
    """One a rollout, as given."""
    batch: Batch
    kept: list[int]
    """Which rollouts the batch was made of, in order."""
    sampling: Sampling


def choose(
    rollouts: list[Rollout],
    scores: Sequence[Any],
    options: ScoreOptions,
    moments: RunningMoments,
    tokenizer: Any,
    *,
    drop_lengths: bool = False,
) -> Lesson:
    """Penalties, scale, clip; whoever abstains is left out. The moments take the scores in. Every rank must call.

    What the world paid stands in the turns, and `scores` are what comes on top.
    Raises: OperantError, on every rank, for a number of scores that is not that of the rollouts, a score that is not
    finite, or where nothing is left on any rank.
    """
    given = distributed.together(lambda: _checked(rollouts, scores))
    trained = processed(given, rollouts, options, moments, tokenizer)
    judged = [i for i, s in enumerate(trained) if s is not None]
    places = [i for i in judged if not (drop_lengths and rollouts[i].turns[-1].end == "length")]
    if not distributed.total_float(float(len(places))):
        raise OperantError("no reply is left to learn from: all abstained, or were dropped by on_length='drop'")
    tally = collect.of_scores(
        _known(given, rollouts), _known(trained, rollouts, places), len(rollouts), _groups(given, rollouts)
    )
    tally.add("rollout/dropped", len(judged) - len(places), len(rollouts))
    return Lesson([rollouts[i] for i in places], [trained[i] for i in places], given, places, tally)


def unjudged(rollouts: list[Rollout]) -> Lesson:
    """All of some given replies, which nobody judges. Raises: OperantError, on every rank, where there are none."""
    if not distributed.total_float(float(len(rollouts))):
        raise OperantError("no replies to learn from: the lists are empty")
    count = len(rollouts)
    return Lesson(rollouts, [0.0] * count, [None] * count, list(range(count)), Tally())


def _checked(rollouts: list[Rollout], scores: Sequence[Any]) -> list[Total]:
    if len(rollouts) != len(scores):
        raise OperantError(f"{len(scores)} rewards for {len(rollouts)} replies: give one for each, None to abstain")
    return [_number(s, r) for s, r in zip(scores, rollouts, strict=True)]


def _known(scores: Sequence[Total], rollouts: list[Rollout], places: Sequence[int] | None = None) -> list[float]:
    """The totals of those that were judged, or of those at `places`."""
    whole = totals(scores, rollouts)
    picked = whole if places is None else [whole[i] for i in places]
    return [x for x in picked if x is not None]


def _groups(scores: Sequence[Total], rollouts: list[Rollout]) -> list[int]:
    return [r.group for r, s in zip(rollouts, scores, strict=True) if s is not None]


def _number(score: Any, rollout: Rollout) -> Total:
    if score is None:
        return None
    plain = score.tolist() if hasattr(score, "tolist") else score
    try:
        numbers = [float(s) for s in plain] if isinstance(plain, (list, tuple)) else float(plain)
    except (TypeError, ValueError):
        raise OperantError(
            f"the reward of {rollout.task.id!r} is {shown(score)}: give a number, one number per action token, or None"
        ) from None
    for x in numbers if isinstance(numbers, list) else [numbers]:
        if x != x or abs(x) == float("inf"):
            raise OperantError(
                f"the reward of {rollout.task.id!r} is {x}: rewards must be finite; give None to leave a reply out"
            )
    return numbers


class Progress:
    """How many steps and episodes have been learnt from; and how many steps in a row, up to now, were refused."""

    def __init__(self) -> None:
        self.step, self.episodes, self.refused = 0, 0, 0

    def share(self, total: int | None) -> float:
        """In [0, 1]; 0 where the end is unknown."""
        return min(self.step / total, 1.0) if total else 0.0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "episodes": self.episodes, "refused": self.refused}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.episodes, self.refused = state["step"], state["episodes"], state.get("refused", 0)
