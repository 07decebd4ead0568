"""Select the replies of a step, and process their scores."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from operant import distributed
from operant.import_by_name import Lazy
from operant.metrics import collect
from operant.rewards.shaping import RunningMoments, ScoreOptions, processed
from operant.tally import Tally
from operant.types import Batch, OperantError, Rollout, Tokenizer, Total, Turn, require, shown, totals

SOMETIMES = Lazy({"games": "operant.metrics.games:of_games", "groups": "operant.objectives.groups:group_relative"})
"""Imported for steps of games, and for those that leave out equal groups."""
SELECTIONS = "top:N (a whole number), top:P% (above 0, at most 100), group:N (the best N of each prompt), or above:X"


def parse(select: str) -> tuple[str, float]:
    """Kind (count, percent, group or above) and number of a selection."""
    found = re.fullmatch(r"(top|group|above):([-+]?[\d.]+(?:e[-+]?\d+)?)(%?)", str(select))
    try:
        kind, number = (found[1] + found[3], float(found[2])) if found else ("", 0.0)
        int(number)
    except (ValueError, OverflowError):  # 1.2.3, 1e400
        kind, number = "", 0.0
    if kind in ("top", "group") and number >= 1 and number == int(number):
        return ("count" if kind == "top" else "group"), number
    if kind == "top%" and 0 < number <= 100:
        return "percent", number
    if kind == "above":
        return "above", number
    raise OperantError(f"learner.select={shown(select)}: it must be {SELECTIONS}")


def unscored_selection(select: str | None, algorithm: str) -> str:
    """What is said where a selection has nothing to go by."""
    return (
        f"learner.select={select} with algorithm={algorithm} and without a reward: replies have no score by which one "
        "is the best; pass a reward, or leave select out"
    )


@dataclass(frozen=True)
class TrainingBatch:
    """The replies that a step trains on."""

    rollouts: list[Rollout]
    """With what their world pays for training: scaled, or replaced by a penalty."""
    scores: list[Total]
    """One for each rollout: penalised, scaled and clipped, for training."""
    raw_scores: list[Total]
    """One for each rollout that was passed in, as the reward returned it."""
    places: list[int]
    """The index of each rollout among those that were passed in."""
    tally: Tally
    """The metrics of the scores."""


def select(
    rollouts: list[Rollout],
    scores: Sequence[object],
    options: ScoreOptions,
    moments: RunningMoments,
    tokenizer: Tokenizer | None,
    *,
    drop_lengths: bool = False,
    drop_equal: bool = False,
    version: int = 0,
    max_staleness: int | None = None,
    judged: bool = True,
) -> TrainingBatch:
    """Penalise, scale and clip the scores, update `moments` with them, and leave out replies without a score.

    The scores are added to the rewards that an environment paid, which are stored in the turns; the options are about
    the sum of both. Every rank must call.
    drop_lengths: also leave out replies that hit their length limit. drop_equal: also those of groups whose raw rewards
    are equal, if others are left. max_staleness: also leave out episodes with a turn that is older than this; `version`
    is that of the policy. judged: False: the scores stand for none, and are no metrics.
    """
    raw = distributed.together(lambda: finite_scores(rollouts, scores))
    raw = [None if rollout.failed else score for rollout, score in zip(rollouts, raw, strict=True)]
    trained, shaped = processed(raw, rollouts, options, moments, tokenizer)
    scored = [i for i, score in enumerate(trained) if score is not None]
    oldest = [max((age(turn, version) for turn in rollout.turns), default=0) for rollout in rollouts]
    fresh = [i for i in scored if max_staleness is None or oldest[i] <= max_staleness]
    places = [i for i in fresh if rollouts[i].count and not (drop_lengths and rollouts[i].turns[-1].end == "length")]
    if drop_equal:
        different = unequal(rollouts, raw)
        some = [i for i in places if rollouts[i].group in different]
        places = some if distributed.total_float(float(len(some))) else places
    if not distributed.total_float(float(len(places))):
        failed = distributed.total_float(float(sum(r.failed for r in rollouts)))
        raise OperantError(
            "no reply is left to train on: the reward abstained from all, or they were dropped by on_length='drop' or "
            "learner.max_staleness"
            + (f", or their world failed ({failed:.0f} episodes; log.txt has the reasons)" if failed else "")
        )
    raw_totals = [x for x in totals(raw, rollouts) if x is not None]
    trained_totals = totals(trained, shaped)
    used_totals = [x for i in places if (x := trained_totals[i]) is not None]
    groups = [r.group for r, score in zip(rollouts, raw, strict=True) if score is not None]
    tally = collect.of_scores(raw_totals, used_totals, len(rollouts), groups) if judged else Tally()
    tally.add("rollout/dropped", len(fresh) - len(places), len(rollouts))
    if max_staleness is not None:
        tally.add("rollout/too_stale", len(scored) - len(fresh), len(rollouts))
    for end, count in Counter(rollout.end for rollout in rollouts if rollout.failed).items():
        tally.add(f"rollout/world_{end}", count, 0)
    if any("game" in rollout.info for rollout in rollouts):
        tally.merge(SOMETIMES["games"](rollouts))
    return TrainingBatch([shaped[i] for i in places], [trained[i] for i in places], raw, places, tally)


def unequal(rollouts: Sequence[Rollout], scores: Sequence[Total]) -> set[int]:
    """This rank's groups whose raw rewards, of `scores` and environment, are not all equal; a group has two or more."""
    scored = [(r.group, x) for r, x in zip(rollouts, totals(scores, rollouts), strict=True) if x is not None]
    returns = torch.tensor([x for _, x in scored], dtype=torch.float64)
    gains = SOMETIMES["groups"](returns, torch.tensor([group for group, _ in scored], dtype=torch.long)).tolist()
    return {group for (group, _), gain in zip(scored, gains, strict=True) if gain}


def select_both(rollouts: list[Rollout], scores: Sequence[object], **known: object) -> TrainingBatch:
    """Select the policy's own replies as `select` does, `known` being its arguments, and all demonstrations.

    Each demonstration is a group of its own, so that no reply is compared with it.
    """
    own = [i for i, rollout in enumerate(rollouts) if not rollout.demonstrated]
    given = [i for i, rollout in enumerate(rollouts) if rollout.demonstrated]
    chosen = select([rollouts[i] for i in own], [scores[i] for i in own], **known)
    raw: list[Total] = [None] * len(rollouts)
    for i, score in zip(own, chosen.raw_scores, strict=True):
        raw[i] = score
    alone = -1 - distributed.rank() - distributed.world() * torch.arange(len(given))
    # They get places that no reply has; those of branches are above -2 ** 40.
    below = [None if (place := rollouts[i].place) is None else -(1 << 40) - place for i in given]
    apart = [replace(rollouts[i], group=n, place=at) for i, n, at in zip(given, alone.tolist(), below, strict=True)]
    scored, places = [*chosen.scores, *([0.0] * len(given))], [own[i] for i in chosen.places] + given
    return TrainingBatch(chosen.rollouts + apart, scored, raw, places, chosen.tally)


def select_all(rollouts: list[Rollout]) -> TrainingBatch:
    """Select all demonstrations, which have no scores. Raises: OperantError on every rank if there are none."""
    require(distributed.total_float(float(len(rollouts))), "no replies to train on: the lists are empty")
    count = len(rollouts)
    return TrainingBatch(rollouts, [0.0] * count, [None] * count, list(range(count)), Tally())


def finite_scores(rollouts: Sequence[Rollout], scores: Sequence[object]) -> list[Total]:
    """One number, or one for each action, or None for each rollout. Raises: OperantError for anything else."""
    if len(rollouts) != len(scores):
        raise OperantError(f"{len(scores)} rewards for {len(rollouts)} replies: give one for each, None to abstain")
    return [_finite(score, rollout) for score, rollout in zip(scores, rollouts, strict=True)]


def _finite(score: Any, rollout: Rollout) -> Total:
    """The score as a number, one number per action token, or None."""
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


def age(turn: Turn, version: int) -> int:
    """Versions between the weights that generated a turn and `version`; 0 for replies from elsewhere, without any."""
    return version - turn.version if turn.logprobs is not None else 0


def with_staleness(batch: Batch, rollouts: Sequence[Rollout], version: int) -> Batch:
    """Add the age of every action to a collated batch, unless all are current."""
    ages = [torch.tensor([age(turn, version) for turn in rollout.turns]) for rollout in rollouts]
    if not any(bool(of_turns.any()) for of_turns in ages):
        return batch
    table = torch.nn.utils.rnn.pad_sequence(ages, batch_first=True)
    found = table[batch.episodes[:, None], batch.turns.clamp(min=0)]
    return batch.with_(staleness=torch.where(batch.actions, found, 0))
