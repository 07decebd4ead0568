"""Transformations of scores between the reward and the trainer: penalties, running scale, clipping.

A score is the whole of what an attempt is paid: what its world paid and what a reward adds to it. All transformations
are off by default. They are applied in this order:
1. the text that the reward sees ends at the first truncate token, and replies without one get a penalty instead of
   their score (Ziegler et al., 2019);
2. replies that hit the length limit get the missing-stop penalty, in the reward's own units, and replies that come
   near to it the overlong penalty (arXiv:2503.14476, equation 13);
3. the running mean of scores is subtracted, and they are divided by their running standard deviation (as TRL's
   `use_score_scaling` and `use_score_norm`), and clipped.

The pay of a world stays on the turns that earned it: a penalty instead of the score replaces all of it, a division
divides each turn's, and what is added or subtracted is so on the episode's last action.

    options, moments = ScoreOptions(scale=True, clip=3.0, missing_stop=-1.0), RunningMoments()
    judged = judge(reward, as_seen(rollouts, options, tokenizer, sampling))
    used, rollouts = processed(judged.scores, rollouts, options, moments, tokenizer)   # for training
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import dropwhile

from operant import distributed
from operant.bounds import bounded, check_bounds
from operant.rollouts.collate import action_rewards
from operant.sampling import Sampling, reply_text
from operant.tally import ROUNDING
from operant.types import OperantError, Rollout, Tokenizer, Total, require

EPS = 1.1920928955078125e-07
"""Machine epsilon of float32, which TRL adds to the standard deviation."""


@dataclass(frozen=True)
class ScoreOptions:
    """How scores are transformed; by default they are not."""

    scale: bool = False
    """Divide by the running standard deviation of all scores so far."""
    normalise: bool = False
    """`scale` and `centre` together."""
    centre: bool = False
    """Subtract the running mean of all scores so far, this step's included; with `scale`, before dividing."""
    clip: float | None = bounded(None, above=0, below=math.inf)
    """Clip scores to -clip..clip, after scaling."""
    missing_stop: float | None = bounded(None, fits=math.isfinite, rule="finite")
    """Penalty of a reply that hit the length limit."""
    missing_stop_mode: str = bounded("replace", choices=("replace", "add"))
    """`replace` the score by `missing_stop`, or `add` it."""
    overlong_tokens: int = bounded(0, at_least=0)
    """A reply loses score for each of its tokens among the last so many before its limit; 0: for none."""
    overlong_penalty: float = bounded(1.0, fits=math.isfinite, rule="finite")
    """What a reply loses that reaches its limit."""
    truncate_token: int | str | None = None
    """The reward sees the reply up to and with the first such token at position >= `truncate_after`."""
    truncate_after: int = bounded(0, at_least=0)
    """In tokens from the start of the reply, which is 0."""
    truncate_penalty: float = bounded(-1.0, fits=math.isfinite, rule="finite")
    """Replaces the score of a reply without that token."""

    def __post_init__(self) -> None:
        check_bounds(self, "score")


class RunningMoments:
    """Count, mean and variance of every score seen, on all ranks, as in TRL's `RunningMoments`."""

    def __init__(self) -> None:
        self.count, self.mean, self.var = 0.0, 0.0, 1.0

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 1 (no scaling) for fewer than two scores, or if they differ only by rounding."""
        spread = math.sqrt(self.var * self.count / (self.count - 1)) if self.count > 1 else 1.0
        return spread if spread > ROUNDING * abs(self.mean) else 1.0

    def update(self, values: Sequence[float]) -> None:
        """Merge in a batch, exactly (Chan et al., 1979). Every rank must call this, even without values."""
        count = distributed.total_float(float(len(values)))
        if count == 0:
            return
        mean = distributed.total_float(math.fsum(values)) / count
        square = distributed.total_float(math.fsum((v - mean) ** 2 for v in values))
        gap, both = mean - self.mean, self.count + count
        self.var = (self.var * self.count + square + gap**2 * self.count * count / both) / both
        self.mean, self.count = self.mean + gap * count / both, both

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "var": self.var}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.count, self.mean, self.var = state["count"], state["mean"], state["var"]


def processed(
    scores: Sequence[Total],
    rollouts: Sequence[Rollout],
    options: ScoreOptions,
    moments: RunningMoments,
    tokenizer: Tokenizer | None,
) -> tuple[list[Total], list[Rollout]]:
    """The scores, and the rollouts with the pay of their world, for training: penalties, running scale, clip.

    Updates `moments`; a score of None stays None.
    """
    found = [True] * len(rollouts)
    if options.truncate_token is not None:
        token = _token(options.truncate_token, tokenizer)
        found = [first_at(r.ids, token, options.truncate_after) is not None for r in rollouts]
    used = penalised(scores, rollouts, found, options)
    replaces = options.missing_stop_mode == "replace"
    gone = [not has or (replaces and _misses_stop(r, options)) for r, has in zip(rollouts, found, strict=True)]
    shaped = [_with_pay(r, 0.0) if replaced else r for r, replaced in zip(rollouts, gone, strict=True)]
    if options.scale or options.normalise or options.centre:
        pays = [_pay_of(r) for r in shaped]
        moments.update([_summed(s, pay) for s, pay in zip(used, pays, strict=True) if s is not None])
        if options.normalise or options.centre:
            used = [centred(s, moments, pay) for s, pay in zip(used, pays, strict=True)]
    if options.scale or options.normalise:
        used = [scaled(s, moments) for s in used]
        shaped = [_with_pay(r, 1 / (moments.std + EPS)) for r in shaped]
    if options.clip is not None:
        used = [clipped(s, options.clip, r) for s, r in zip(used, shaped, strict=True)]
    return used, shaped


def as_seen(
    rollouts: list[Rollout], options: ScoreOptions, tokenizer: Tokenizer | None, sampling: Sampling
) -> list[Rollout]:
    """The rollouts as the reward sees them, with text up to the truncate token; all token ids stay, for training."""
    if options.truncate_token is None:
        return rollouts
    token, seen = _token(options.truncate_token, tokenizer), []
    # The truncate token belongs to the text, even if it is a stop token.
    sampling = replace(sampling, stop_tokens=tuple(t for t in sampling.stop_tokens if t != token))
    for rollout in rollouts:
        cut = first_at(rollout.ids, token, options.truncate_after)
        if cut is not None:
            text = reply_text(tokenizer, rollout.turns[-1].prompt, rollout.ids[: cut + 1], sampling)
            rollout = replace(rollout, texts=[*rollout.texts[:-1], text])
        seen.append(rollout)
    return seen


def first_at(ids: Sequence[int], token: int, after: int) -> int | None:
    """The first position >= `after` of `token`, or None."""
    return next((i for i in range(after, len(ids)) if ids[i] == token), None)


def penalised(
    scores: Sequence[Total], rollouts: Sequence[Rollout], found: Sequence[bool], options: ScoreOptions
) -> list[Total]:
    """Scores after the penalties; None stays None."""
    out = []
    for total, rollout, has_token in zip(scores, rollouts, found):
        if total is not None and _misses_stop(rollout, options):
            total = _pay(total, options.missing_stop or 0.0, replaces=options.missing_stop_mode == "replace")
        if total is not None and options.overlong_tokens and rollout.sampling is not None:  # else no limit is known
            longest, most = max((len(turn.action) for turn in rollout.turns), default=0), options.overlong_tokens
            over = min(max(longest - (rollout.sampling.max_tokens - most), 0), most) / most
            total = _pay(total, -options.overlong_penalty * over, replaces=False)
        if total is not None and not has_token:
            total = _pay(total, options.truncate_penalty, replaces=True)
        out.append(total)
    return out


def centred(total: Total, moments: RunningMoments, pay: float = 0.0) -> Total:
    """The score less the mean of the sum of score and `pay`, or less that sum if the two differ only by rounding; of a
    per-token score, the last token is lowered."""
    if total is None:
        return None
    whole, mean = _summed(total, pay), moments.mean
    return _pay(total, -(mean if abs(whole - mean) > ROUNDING * abs(mean) else whole), replaces=False)


def scaled(total: Total, moments: RunningMoments) -> Total:
    if total is None:
        return None
    return [x / (moments.std + EPS) for x in total] if isinstance(total, list) else total / (moments.std + EPS)


def clipped(total: Total, limit: float, rollout: Rollout | None = None) -> Total:
    """Clip the sum of a score and the pay of its rollout's world to -limit..limit, and return the score in it.

    Of a per-token score, the sum at each token is clipped.
    """
    if total is None:
        return None
    if not isinstance(total, list):
        pay = _pay_of(rollout) if rollout is not None else 0.0
        return min(max(total + pay, -limit), limit) - pay
    fits = rollout is not None and rollout.count == len(total)
    paid = action_rewards(rollout, 0.0) if fits else [0.0] * len(total)
    return [min(max(x + pay, -limit), limit) - pay for x, pay in zip(total, paid, strict=True)]


def _summed(total: float | list[float], pay: float) -> float:
    """A score as one number, with the pay of the world."""
    return (math.fsum(total) if isinstance(total, list) else total) + pay


def _pay(total: float | list[float], amount: float, *, replaces: bool) -> float | list[float]:
    """Add `amount` to a score, or replace the score by it; of a per-token score, on the last token."""
    if not isinstance(total, list):
        return amount if replaces else total + amount
    return [*([0.0] * (len(total) - 1) if replaces else total[:-1]), amount if replaces else total[-1] + amount]


def _misses_stop(rollout: Rollout, options: ScoreOptions) -> bool:
    return options.missing_stop is not None and any(turn.end == "length" for turn in rollout.turns[-1:])


def _with_pay(rollout: Rollout, factor: float) -> Rollout:
    """The rollout with the pay of its world times `factor`."""
    if not any(turn.reward for turn in rollout.turns):
        return rollout
    return replace(rollout, turns=[replace(turn, reward=turn.reward * factor) for turn in rollout.turns])


def _pay_of(rollout: Rollout) -> float:
    """What the world pays in training: without the pay of turns before the first that is trained on."""
    return math.fsum(turn.reward for turn in dropwhile(lambda turn: not turn.trained, rollout.turns))


def _token(token: int | str | None, tokenizer: Tokenizer | None) -> int:
    if isinstance(token, int):
        return token
    ids = tokenizer.encode(token, add_special_tokens=False)
    what = f"score.truncate_token={token!r} is {len(ids)} tokens for this tokenizer"
    require(len(ids) == 1, f"{what}; give a single token, or its id")
    return ids[0]


def check_token_scores(rollouts: list[Rollout], scores: Sequence[object] | None, name: str) -> None:
    """Raises: OperantError if every reply of several tokens has a single number: it would reach the last one alone."""
    judged = [0.0] * len(rollouts) if scores is None else scores
    of_replies = zip(rollouts, judged, strict=False)
    long = [score for r, score in of_replies if not r.demonstrated and score is not None and r.count > len(r.turns)]
    if long and not any(isinstance(score, (list, tuple)) or getattr(score, "ndim", 0) for score in long):
        given = f"algorithm {name} with advantage.gamma=0 and a reward of one number a reply"
        why = "only the last token of each would learn from it; set advantage.gamma=1 (--advantage.gamma 1), or take"
        raise OperantError(f"{given}: {why} a reward that pays each token, such as --reward critic:RUN")
