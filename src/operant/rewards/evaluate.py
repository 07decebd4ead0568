"""From the answers of a reward to scores that are safe to train on.

A reward is untrusted code: it may raise, abstain or answer nonsense. Every answer passes through `check_answer`, so a
score is a finite float, a list of finite floats (one per action token of the rollout), or None (the rollout is left
out). One sample's outcome is a `SampleResult`, a batch's is a `Judged`.

    judged = judge(reward, rollouts)
    judged.scores                # [0.81, None, ...]
    judged.parts["sentiment"]    # [0.92, None, ...]: as that part returned it, before its weight
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from operant.rollouts.totals import Total
from operant.sandbox.serialise import as_list
from operant.tally import Tally
from operant.types import OperantError, RewardFn, Rollout

Outcome = Literal["ok", "error", "timeout", "abstain"]
"""The outcome of judging a sample: a score, a failure, no answer in time, or None from the reward."""
OUTCOMES: tuple[Outcome, ...] = ("ok", "error", "timeout", "abstain")
"""Every `Outcome`."""
WORLD = "world"
"""Name of the reward's part that the environment pays."""


@dataclass(frozen=True)
class SampleResult:
    """The result of judging one sample."""

    outcome: Outcome
    """Whether the sample has a score, and if not, why."""
    total: Total = None
    """The score; None if there is none."""
    parts: dict[str, float | None] = field(default_factory=dict)
    """By name, before weights; per-token numbers are summed."""
    reason: str = ""
    """Of an error or timeout: the rest of a sentence that begins with the reward's name."""


@dataclass(frozen=True)
class Judged:
    """The checked answers of a reward for a batch of rollouts."""

    scores: list[Total]
    """One total per rollout: None abstains; a list has one number per action token, over all its turns."""
    parts: dict[str, list[float | None]] = field(default_factory=dict)
    """By name, one value per rollout, before weights; per-token numbers are summed."""
    outcomes: list[Outcome] = field(default_factory=list)
    """One per rollout if failures are tolerated (`failure_policy.py`); empty if they end the run."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the log: which samples failed, and how that was handled."""

    @property
    def abstained(self) -> list[bool]:
        """Which rollouts have no score and are left out."""
        return [score is None for score in self.scores]

    def outcome(self, i: int) -> Outcome:
        """The outcome of rollout `i`."""
        return self.outcomes[i] if self.outcomes else "abstain" if self.scores[i] is None else "ok"

    def report(self, tally: Tally) -> None:
        """Add the mean, spread and abstentions of each named part to `tally`, and the count of each outcome."""
        for outcome in OUTCOMES if self.outcomes else ():
            tally.add(f"reward/outcome/{outcome}", self.outcomes.count(outcome), 0)
        for name, values in self.parts.items():
            known = [value for value in values if value is not None]
            tally.mean(f"reward/{name}/mean", known)
            tally.spread(f"reward/{name}/std", known)
            tally.add(f"reward/{name}/abstained", len(values) - len(known), len(values))


class CallFailure(Exception):
    """A call of a reward failed as a whole: it raised, timed out, or did not return one entry per rollout."""

    def __init__(self, reason: str, outcome: Outcome = "error"):
        super().__init__(reason)
        self.result = SampleResult(outcome, reason=reason)
        """The result of every sample of the call."""


def name_of(reward: Any) -> str:
    """The reward's name in metrics and messages."""
    return getattr(reward, "__name__", None) or type(reward).__name__


def judge(reward: RewardFn | None, rollouts: list[Rollout], name: str | None = None, *, pays: bool = False) -> Judged:
    """Call `reward` on `rollouts` and check every answer.

    With `pays`, the environment's reward is added as the part "world". Without a reward, only the environment pays; if
    it does not pay either, no rollout gets a score.

    Raises: OperantError that names the reward, the sample and the remedy, for an exception inside the reward, a wrong
    number of answers, NaN, infinity, a string, or a per-token list of the wrong length.
    """
    if pays:
        judged = judge(reward, rollouts, name) if reward is not None else Judged([0.0] * len(rollouts))
        if WORLD in judged.parts:
            raise OperantError(f"a part of the reward is named {WORLD!r}, the name of the environment's pay: rename it")
        return replace(judged, parts={**judged.parts, WORLD: [rollout.paid for rollout in rollouts]})
    if reward is None:
        return Judged([None] * len(rollouts))
    if not rollouts:
        return Judged([])
    if hasattr(reward, "judged"):
        return reward.judged(rollouts)
    name = name or name_of(reward)
    try:
        results = call(reward, rollouts, name)
    except CallFailure as failure:
        error = failure.__cause__
        raise OperantError(f"reward {name!r} {failure} {_explain(reward, rollouts, error)}") from error
    for result in results:
        if result.outcome == "error":
            raise OperantError(f"reward {name!r} {result.reason}")
    return Judged([result.total for result in results], parts_by_name(results, name))


def check(reward: RewardFn) -> None:
    """Load what the reward needs (a model, a package), so that a mistake shows before training and not during it."""
    if hasattr(reward, "check"):
        reward.check()


def parts_by_name(results: Sequence[SampleResult], name: str) -> dict[str, list[float | None]]:
    """The parts of several samples, each with one value per sample. If there are none, the reward is its own part."""
    names = dict.fromkeys(part for result in results for part in result.parts)
    return {part: [result.parts.get(part) for result in results] for part in names} or {name: [None] * len(results)}


# --- one reward -------------------------------------------------------------------------------------------------------


def call(reward: RewardFn, rollouts: list[Rollout], name: str) -> list[SampleResult]:
    """Call `reward` once and check its answers, one result per rollout.

    Raises: CallFailure if there are no answers to check; OperantError if the reward itself raised one.
    """
    try:
        returned: Any = reward(rollouts)
        answers = as_list(returned)  # a generator fails only when it is read
    except OperantError:
        raise
    except Exception as error:
        raise CallFailure(f"raised {type(error).__name__}: {error}") from error
    if answers is None or len(answers) != len(rollouts):
        what = f"{len(answers)} scores" if answers is not None else f"a {type(returned).__name__}"
        raise CallFailure(f"returned {what} for {len(rollouts)} rollouts")
    return [check_answer(answer, rollout, name) for answer, rollout in zip(answers, rollouts)]


def _explain(reward: RewardFn, rollouts: list[Rollout], error: BaseException | None) -> str:
    """The samples and the remedy of a failed call; `error` is the exception, if the reward raised one."""
    first = f"the first {sample_of(rollouts[0])}"
    if error is None:
        return f"({first}); return a list with one entry per rollout, None for those that it does not judge"
    culprit = _culprit(reward, rollouts, error)
    samples = sample_of(culprit) if culprit else f"{len(rollouts)} rollouts, {first}"
    return f"while judging {samples}; fix the reward, or let it return None for samples that it cannot judge"


def _culprit(reward: RewardFn, rollouts: list[Rollout], error: BaseException) -> Rollout | None:
    """The sample on which the reward fails, found by halving; None if the failure does not happen again."""

    def fails(some: list[Rollout]) -> bool:
        try:
            as_list(reward(some))
        except Exception as again:
            return type(again) is type(error) and str(again) == str(error)
        return False

    while len(rollouts) > 1:
        half = len(rollouts) // 2
        rollouts = rollouts[:half] if fails(rollouts[:half]) else rollouts[half:]
    return rollouts[0] if fails(rollouts) else None


# --- one answer -------------------------------------------------------------------------------------------------------

REMEDY = "return a finite float, or None to leave the sample out"


class _Refused(Exception):
    """An answer that is not allowed: what was returned, and the remedy."""


def check_answer(answer: Any, rollout: Rollout, name: str) -> SampleResult:
    """The result of one sample from the reward's answer; an answer that is not allowed has the outcome `error`."""
    try:
        return _read_answer(answer, rollout, name)
    except _Refused as refused:
        returned, remedy = refused.args
        return SampleResult("error", reason=f"returned {returned[:120]} for {sample_of(rollout)}; {remedy}")


def _read_answer(answer: Any, rollout: Rollout, name: str) -> SampleResult:
    answer = answer.tolist() if hasattr(answer, "tolist") else answer
    if answer is None:
        return SampleResult("abstain")
    if isinstance(answer, Mapping):
        parts = {str(k): None if v is None else _number(v, f" as its part {str(k)!r}") for k, v in answer.items()}
        known = [value for value in parts.values() if value is not None]
        return SampleResult("ok", _sum(known), parts) if known else SampleResult("abstain", parts=parts)
    if isinstance(answer, Sequence) and not isinstance(answer, (str, bytes)):
        numbers = [_number(value) for value in answer]
        count = sum(turn.count for turn in rollout.turns)
        if len(numbers) != count:
            wrong = f"{len(numbers)} numbers where the rollout has {count} action tokens"
            raise _Refused(wrong, "return one float, or one number per action token")
        return SampleResult("ok", numbers, {name: _sum(numbers)})
    number = _number(answer)
    return SampleResult("ok", number, {name: number})


def _sum(numbers: list[float]) -> float:
    try:
        return math.fsum(numbers)
    except OverflowError:
        raise _Refused("numbers with an infinite sum", "return smaller ones") from None


def _number(value: Any, place: str = "") -> float:
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, (int, float)):
        raise _Refused(f"{repr(value)[:80]}, a {type(value).__name__},{place}".removesuffix(","), REMEDY)
    try:
        number = float(value)
    except OverflowError:  # an integer may be larger than any float
        number = math.inf
    if not math.isfinite(number):
        raise _Refused(f"{number}{place}", REMEDY)
    return number


def sample_of(rollout: Rollout) -> str:
    """The sample's task, query and reply, for a message."""
    query, reply = (repr(text if len(text) <= 60 else text[:57] + "...") for text in (rollout.query, rollout.reply))
    return f"task {rollout.task.id!r} (query {query}, reply {reply})"
