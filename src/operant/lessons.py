"""What a step learns from: which replies, with what score; what it was made of, and how far training has come."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from operant import measure
from operant.rewards.scaling import RunningMoments, ScoreOptions, processed
from operant.sampling import Sampling, token_pieces
from operant.tally import Tally
from operant.tracking.diagnosis import History
from operant.tracking.rows import rows
from operant.types import Batch, OperantError, Rollout


@dataclass(frozen=True)
class Lesson:
    """The replies that are learnt from."""

    rollouts: list[Rollout]
    scores: list[Any]
    """One a rollout, as it is trained on."""
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


def looked_back(
    learnt: Learnt | None, metrics: Sequence[dict[str, float]], config: dict[str, Any], tokenizer: Any
) -> History:
    """The metrics of the last steps, and the replies of the last one, as a diagnosis reads them."""
    if learnt is None:
        return History([], [], config=config)
    pieces = partial(token_pieces, tokenizer) if tokenizer is not None else None
    told = rows(learnt.rollouts, learnt.scores, None, learnt.batch, learnt.kept, pieces)
    info = learnt.rollouts[0].info if learnt.rollouts else {}
    declared, foreign = info.get("declared", {}), "declared" in info
    return History(list(metrics), told, config=config, declared=declared, foreign=foreign)


def choose(
    rollouts: list[Rollout],
    scores: Sequence[Any],
    options: ScoreOptions,
    moments: RunningMoments,
    tokenizer: Any,
    *,
    drop_lengths: bool = False,
    world: bool = False,
) -> Lesson:
    """Penalties, scale, clip; whoever abstains is left out. The moments take the scores in.

    `world`: the rewards are in the turns, and `scores` are what comes on top. Raises: OperantError for a number of
    scores that is not that of the rollouts, a score that is not finite, or where nothing is left.
    """
    if len(rollouts) != len(scores):
        raise OperantError(f"{len(scores)} rewards for {len(rollouts)} replies: give one for each, None to abstain")
    totals = [_number(s, r) for s, r in zip(scores, rollouts, strict=True)]
    trained = processed(totals, rollouts, options, moments, tokenizer)
    places = [i for i, s in enumerate(trained) if s is not None]
    if drop_lengths:
        places = [i for i in places if rollouts[i].turns[-1].end != "length"]
    if not places:
        raise OperantError("no reply is left to learn from: all abstained, or were dropped by on_length='drop'")
    kept, used = [rollouts[i] for i in places], [trained[i] for i in places]
    return Lesson(kept, used, places, _told(rollouts, totals, kept, used, world))


def _told(rollouts: list[Rollout], totals: list[Any], kept: list[Rollout], used: list[Any], world: bool) -> Tally:
    abstained = sum(s is None for s in totals)
    if world:
        paid = [sum(t.reward for t in r.turns) for r in kept]
        return measure.of_scores(paid, paid, abstained)
    groups = [r.group for r, s in zip(rollouts, totals, strict=True) if s is not None]
    return measure.of_scores(_sums(totals), _sums(used), abstained, groups)


def _sums(scores: list[Any]) -> list[float]:
    return [sum(s) if isinstance(s, list) else s for s in scores if s is not None]


def _number(score: Any, rollout: Rollout) -> float | list[float] | None:
    if score is None:
        return None
    numbers = [float(s) for s in score] if isinstance(score, (list, tuple)) else float(score)
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
