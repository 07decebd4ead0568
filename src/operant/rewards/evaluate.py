"""From what a reward said to numbers that may be trained on.

A reward is a guest: it may raise, abstain, or answer nonsense. `judge` is the door: what comes through it is a finite
float, a list of finite floats (one per action token of the attempt), or None (the attempt is left out).

    judged = judge(reward, rollouts)
    judged.scores                # [0.81, None, ...]
    judged.parts["sentiment"]    # [0.92, None, ...] as the part said it, before its weight
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from operant.sandbox.serialise import listed
from operant.tally import Tally
from operant.types import OperantError, RewardFn, Rollout

Total = float | list[float] | None
Outcome = Literal["ok", "error", "timeout", "abstain"]
"""What came of judging a sample: a score, a failure, no answer in time, no wish to judge it."""
OUTCOMES: tuple[Outcome, ...] = ("ok", "error", "timeout", "abstain")


@dataclass(frozen=True)
class Judged:
    """What a reward said of some rollouts, checked."""

    scores: list[Total]
    """The totals: None abstains; a list has one number per action token, of all its replies."""
    parts: dict[str, list[float | None]] = field(default_factory=dict)
    """By name, as said: before weights; a part that spoke per token is summed."""
    outcomes: list[Outcome] = field(default_factory=list)
    """One a rollout, where failures are lived with (`outcomes.py`); empty where they end the run."""
    notes: list[str] = field(default_factory=list)
    """Sentences for the log: what failed, and what was done about it."""

    @property
    def abstained(self) -> list[bool]:
        """Which rollouts are to be dropped: nobody judged them."""
        return [score is None for score in self.scores]

    def outcome(self, i: int) -> Outcome:
        """Of rollout `i`."""
        return self.outcomes[i] if self.outcomes else "abstain" if self.scores[i] is None else "ok"

    def report(self, tally: Tally) -> None:
        """Count the mean, spread and abstentions of each named part into `tally`, and the outcomes."""
        for outcome in OUTCOMES if self.outcomes else ():
            tally.add(f"reward/outcome/{outcome}", self.outcomes.count(outcome), 0)
        for name, values in self.parts.items():
            said = [v for v in values if v is not None]
            tally.mean(f"reward/{name}/mean", said)
            tally.spread(f"reward/{name}/std", said)
            tally.add(f"reward/{name}/abstained", len(values) - len(said), len(values))


def name_of(reward: Any) -> str:
    """What a reward is called in metrics and messages."""
    return getattr(reward, "__name__", None) or type(reward).__name__


WORLD = "world"
"""How the part of a reward that the world has paid is called."""


def judge(reward: RewardFn | None, rollouts: list[Rollout], name: str | None = None, *, pays: bool = False) -> Judged:
    """Ask `reward` about `rollouts`, and check every answer.

    `pays`: the world pays, too; that is a part of its own. Without a reward the world is the only payer, and where it
    pays nothing either, every reply is left unjudged.

    Raises: OperantError that names the reward, the sample and the remedy, for an exception inside the reward, a wrong
    number of answers, NaN, infinity, a string, or a per-token list of the wrong length.
    """
    if pays:
        judged = judge(reward, rollouts, name) if reward is not None else Judged([0.0] * len(rollouts))
        if WORLD in judged.parts:
            raise OperantError(f"a part of the reward is called {WORLD!r}, as what the world pays is: rename it")
        return replace(judged, parts={**judged.parts, WORLD: [rollout.paid for rollout in rollouts]})
    if reward is None:
        return Judged([None] * len(rollouts))
    name = name or name_of(reward)
    if not rollouts:
        return Judged([])
    if hasattr(reward, "judged"):
        return reward.judged(rollouts)
    answers = _ask(reward, rollouts, name)
    checked = [checked_answer(answer, rollout, name) for answer, rollout in zip(answers, rollouts)]
    named: dict[str, None] = {part: None for _, said in checked for part in said}
    parts = {part: [said.get(part) for _, said in checked] for part in named}
    return Judged([total for total, _ in checked], parts or {name: [None] * len(rollouts)})


def check(reward: RewardFn) -> None:
    """Load what the reward needs (a model, a package), so that a mistake shows before training and not during it."""
    if hasattr(reward, "check"):
        reward.check()


def totals(scores: Sequence[Total], rollouts: Sequence[Rollout]) -> list[float | None]:
    """One number a rollout: its score (of every token together) and what its world paid; None where it abstained."""
    summed = [sum(score) if isinstance(score, list) else score for score in scores]
    return [None if score is None else score + r.paid for score, r in zip(summed, rollouts, strict=True)]


# --- one reward -------------------------------------------------------------------------------------------------------


def _ask(reward: RewardFn, rollouts: list[Rollout], name: str) -> list[Any]:
    try:
        said: Any = reward(rollouts)
        answers = listed(said)
    except OperantError:
        raise
    except Exception as error:
        culprit = _culprit(reward, rollouts, error)
        whose = sample_of(culprit) if culprit else f"{len(rollouts)} rollouts, the first {sample_of(rollouts[0])}"
        raise OperantError(
            f"reward {name!r} raised {type(error).__name__}: {error} while judging {whose}; "
            "mend the reward, or let it return None for samples that it cannot judge"
        ) from error
    if answers is None or len(answers) != len(rollouts):
        raise OperantError(
            f"reward {name!r} {miscounted(said, answers, rollouts)} (the first: {sample_of(rollouts[0])}); "
            "return a list with one entry a rollout, None for those that it does not judge"
        )
    return answers


def miscounted(said: Any, answers: list[Any] | None, rollouts: list[Rollout]) -> str:
    """What a reward has returned instead of one entry a rollout."""
    what = f"{len(answers)} scores" if answers is not None else f"a {type(said).__name__}"
    return f"returned {what} for {len(rollouts)} rollouts"


def _culprit(reward: RewardFn, rollouts: list[Rollout], error: Exception) -> Rollout | None:
    """The sample that the reward fails on, by halving; None where the failure does not come back."""

    def fails(some: list[Rollout]) -> bool:
        try:
            listed(reward(some))  # a generator fails only when it is read
        except Exception as again:
            return type(again) is type(error) and str(again) == str(error)
        return False

    while len(rollouts) > 1:
        half = len(rollouts) // 2
        rollouts = rollouts[:half] if fails(rollouts[:half]) else rollouts[half:]
    return rollouts[0] if fails(rollouts) else None


def checked_answer(answer: Any, rollout: Rollout, name: str) -> tuple[Total, dict[str, float | None]]:
    """One answer as (total, parts). Raises: OperantError for what may not be said."""
    answer = answer.tolist() if hasattr(answer, "tolist") else answer
    if answer is None:
        return None, {}
    if isinstance(answer, Mapping):
        parts = {str(k): None if v is None else _number(v, rollout, f"{name}/{k}") for k, v in answer.items()}
        said = [v for v in parts.values() if v is not None]
        return (_sum(said, rollout, name) if said else None), parts
    if isinstance(answer, Sequence) and not isinstance(answer, (str, bytes)):
        numbers = [_number(v, rollout, name) for v in answer]
        count = sum(turn.count for turn in rollout.turns)
        if len(numbers) != count:
            wrong = f"{len(numbers)} numbers where the attempt has {count} action tokens"
            raise _refused(name, wrong, rollout, "return one float, or one number per action token")
        return numbers, {name: _sum(numbers, rollout, name)}
    number = _number(answer, rollout, name)
    return number, {name: number}


def _sum(numbers: list[float], rollout: Rollout, name: str) -> float:
    try:
        return math.fsum(numbers)
    except OverflowError:
        raise _refused(name, "numbers with an infinite sum", rollout, "return smaller ones") from None


def _number(value: Any, rollout: Rollout, name: str) -> float:
    remedy = "return a finite float, or None to leave the sample out"
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, (int, float)):
        raise _refused(name, f"{repr(value)[:80]}, a {type(value).__name__}", rollout, remedy)
    try:
        number = float(value)
    except OverflowError:  # a whole number may be larger than any float
        number = math.inf
    if not math.isfinite(number):
        raise _refused(name, str(number), rollout, remedy)
    return number


def _refused(name: str, said: str, rollout: Rollout, remedy: str) -> OperantError:
    return OperantError(f"reward {name!r} returned {said[:120]} for {sample_of(rollout)}; {remedy}")


def sample_of(rollout: Rollout) -> str:
    """A sample in words, for a message."""
    return f"task {rollout.task.id!r} (query {_short(rollout.query)}, reply {_short(rollout.reply)})"


def _short(text: str, limit: int = 60) -> str:
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")
