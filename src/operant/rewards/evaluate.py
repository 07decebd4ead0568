"""From the answers of a reward to scores that are safe to train on.

A reward is untrusted code: it may raise, abstain or answer nonsense. Every answer passes through `check_answer`, so a
score is a finite float, a list of finite floats (one per action token of the rollout), or None (the rollout is left
out). One sample's outcome is a `SampleResult`, a batch's is a `Judged`.

    judged = judge(reward, rollouts)
    judged.scores                # [0.81, None, ...]
    judged.parts["sentiment"]    # [0.92, None, ...]: as that part returned it, before its weight
    judged.remark(0).message     # what the reward said beside the score, if it returned a `Judgement`
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, TypeVar

from operant.rollouts.answers import heard
from operant.sandbox import reward_call
from operant.sandbox.serialise import FIELDS, is_judgement
from operant.types import Judgement, OperantError, RewardFn, Rollout, Total, describe_error, name_of, require, shown

Value = TypeVar("Value")
Outcome = Literal["ok", "error", "timeout", "abstain", "unjudged"]
"""The outcome of judging a sample: a score, a failure, no answer in time, None from the reward; or it was not judged,
because its world had failed."""
OUTCOMES: tuple[Outcome, ...] = ("ok", "error", "timeout", "abstain")
"""The outcomes that are counted."""
WORLD = "world"
"""Name of the reward's part that the environment pays."""
LONGEST = 1000
"""Characters of a message that are kept."""
LARGEST = 1e18
"""The largest size of a score: its square, summed over a batch, is a float32."""


class Remark(NamedTuple):
    """What was said about a rollout beside its score."""

    classes: tuple[str, ...] = ()
    """The outcome's class, if there is one; in a weighted sum one for each part that names one: `tests/passed`."""
    message: str = ""

    def under(self, name: str) -> "Remark":
        return Remark(tuple(f"{name}/{c}" for c in self.classes), self.message and f"{name}: {self.message}")


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
    remark: Remark = field(default_factory=Remark)
    """What a `Judgement` says beside its score."""


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
    remarks: list[Remark] = field(default_factory=list)
    """One per rollout; empty if the reward said nothing beside its scores."""
    passing: list[list[float] | None] = field(default_factory=list)
    """One per rollout: after each action token, a critic's probability that the program passes; empty without one."""

    def outcome(self, i: int) -> Outcome:
        """The outcome of rollout `i`."""
        return self.outcomes[i] if self.outcomes else "abstain" if self.scores[i] is None else "ok"

    def remark(self, i: int) -> Remark:
        """What the reward said about rollout `i`."""
        return self.remarks[i] if self.remarks else Remark()

    def at(self, places: Sequence[int | None]) -> "Judged":
        """The answers at these places, one for each of other rollouts; None: a rollout that is not judged."""

        def taken(values: Sequence[Value], unjudged: Value) -> list[Value]:
            return [unjudged if i is None else values[i] for i in places]

        return replace(
            self,
            scores=taken(self.scores, None),
            parts={name: taken(values, None) for name, values in self.parts.items()},
            outcomes=taken(self.outcomes, "unjudged") if self.outcomes else [],
            remarks=taken(self.remarks, Remark()) if self.remarks else [],
            passing=taken(self.passing, None) if self.passing else [],
        )

    def padded(self, count: int) -> "Judged":
        """The same for `count` rollouts, of which the last ones, demonstrations, are not judged."""
        return self.at([*range(len(self.scores)), *[None] * (count - len(self.scores))])


OF_A_LIST = re.compile(r"'list' object has no attribute '\w+'|list indices must be integers or slices, not str")
"""What Python says to a reward that takes the list of rollouts for one rollout, or for a text."""


class CallFailure(Exception):
    """A call of a reward failed as a whole: it raised, timed out, or did not return one entry per rollout."""

    def __init__(self, reason: str, outcome: Outcome = "error"):
        if odd := OF_A_LIST.search(reason):
            gets = " (it gets the list of all replies, and returns a score for each)"
            reason = reason[: odd.end()] + gets + reason[odd.end() :]
        super().__init__(reason)
        self.result = SampleResult(outcome, reason=reason)
        """The result of every sample of the call."""


def judge(reward: RewardFn | None, rollouts: list[Rollout], name: str | None = None, *, pays: bool = False) -> Judged:
    """Call `reward` on `rollouts` and check every answer.

    With `pays`, the environment's reward is added as the part "world". Without a reward, only the environment pays; if
    it does not pay either, no rollout gets a score. Episodes whose world failed are not judged and get no score.

    Raises: OperantError that names the reward, the sample and the remedy, for an exception inside the reward, a wrong
    number of answers, NaN, infinity, a string, or a per-token list of the wrong length.
    """
    if any(rollout.failed for rollout in rollouts):
        played = [i for i, rollout in enumerate(rollouts) if not rollout.failed]
        judged = judge(reward, [rollouts[i] for i in played], name, pays=pays)
        place = {i: number for number, i in enumerate(played)}
        failures = Counter((r.end, str(r.info.get("failure", "no reason was given"))) for r in rollouts if r.failed)
        notes = [
            f"{end}: {count} of {len(rollouts)} episodes left out: "
            + (sentence if sentence.startswith("the ") else f"the world {sentence.removeprefix('world ')}")
            for (end, sentence), count in failures.most_common(10)
        ]
        return replace(judged.at([place.get(i) for i in range(len(rollouts))]), notes=judged.notes + notes)
    if pays:
        judged = judge(reward, rollouts, name) if reward is not None else Judged([0.0] * len(rollouts))
        if WORLD in judged.parts:
            raise OperantError(f"a part of the reward is named {WORLD!r}, the name of the environment's pay: rename it")
        judged = replace(judged, parts=judged.parts | {WORLD: [r.paid for r in rollouts]})
        left = [rollout.info.get("judgement") for rollout in rollouts]
        left = [Judgement(**j) if isinstance(j, Mapping) and [*j] == FIELDS else j for j in left]  # another process's
        unpaid = [replace(j, score=0.0) if isinstance(j, Judgement) else None for j in left]  # the world has paid it
        if not any(j is not None for j in unpaid):
            return judged
        said = judge(lambda _: unpaid, rollouts, WORLD)
        parts = {f"{WORLD}/{part}": values for part, values in said.parts.items() if part != WORLD}
        remarks = [said.remark(i) for i in range(len(rollouts))]
        if reward is not None:
            remarks = [joined_remarks([judged.remark(i), remark.under(WORLD)]) for i, remark in enumerate(remarks)]
        return replace(judged, parts=judged.parts | parts, remarks=remarks)
    if reward is None or not rollouts:
        return Judged([None] * len(rollouts))
    if hasattr(reward, "judged"):
        return reward.judged(rollouts)
    name = name or name_of(reward)
    try:
        results = call(reward, rollouts, name)
    except CallFailure as failure:
        error = failure.__cause__
        raise OperantError(f"reward {name!r} {failure} {_explain(reward, rollouts, error)}") from error
    for result in results:
        require(result.outcome != "error", f"reward {name!r} {result.reason}")
    return judged_of(results, [result.total for result in results], name)


def check_greedy(reward: RewardFn, rollouts: list[Rollout], known: Mapping[str, object]) -> None:
    """Raises: OperantError for a task whose greedy reply is not known."""
    if missing := [rollout.task.id for rollout in rollouts if rollout.task.id not in known]:
        lacks = f"has none to task {missing[0]!r}: a run plays them; elsewhere call its see_greedy(rollouts) first"
        raise OperantError(f"reward {name_of(reward)!r} compares with the policy's greedy replies, and {lacks}")


def check(reward: RewardFn) -> None:
    """Load what the reward needs (a model, a package), so that a mistake shows before training and not during it."""
    if hasattr(reward, "check"):
        reward.check()


def judged_of(results: Sequence[SampleResult], scores: list[Total], name: str) -> Judged:
    """The results of several samples with their scores. If there are no parts, the reward is its own part."""
    names = dict.fromkeys(part for result in results for part in result.parts)
    parts = {part: [result.parts.get(part) for result in results] for part in names} or {name: [None] * len(results)}
    remarks = [result.remark for result in results]
    return Judged(scores, parts, remarks=remarks if any(map(any, remarks)) else [])


def joined_remarks(remarks: Sequence[Remark]) -> Remark:
    classes = tuple(c for remark in remarks for c in remark.classes)
    return Remark(classes, "\n".join(remark.message for remark in remarks if remark.message))


# --- one reward -------------------------------------------------------------------------------------------------------


def call(reward: RewardFn, rollouts: list[Rollout], name: str) -> list[SampleResult]:
    """Call `reward` once and check its answers, one result per rollout.

    Raises: CallFailure if there are no answers to check; OperantError if the reward itself raised one.
    """
    try:
        with heard(f"reward {name!r}", "fix the reward; isolated: before its name runs it in a process of its own"):
            returned: Any = reward_call.call(reward, rollouts)
            answers = reward_call.as_list(returned)  # a generator fails only when it is read
    except OperantError:
        raise
    except (Exception, SystemExit) as error:  # a reward that calls sys.exit does not end the run without a word
        raise CallFailure(f"raised {describe_error(error)}") from error
    if answers is None or len(answers) != len(rollouts):
        what = "None" if returned is None else f"one {type(returned).__name__}"
        what = what if answers is None else f"{len(answers)} scores"
        raise CallFailure(f"returned {what} for {len(rollouts)} rollouts")
    return [check_answer(answer, rollout, name) for answer, rollout in zip(answers, rollouts)]


def _explain(reward: RewardFn, rollouts: list[Rollout], error: BaseException | None) -> str:
    """The samples and the remedy of a failed call; `error` is the exception, if the reward raised one.

    The sample on which the reward fails is found by halving, if the failure happens again.
    """
    first = f"the first {sample_of(rollouts[0])}"
    if error is None:
        return f"({first}); return a list with one entry per rollout, None for those that it does not judge"

    def fails(some: list[Rollout]) -> bool:
        try:
            reward_call.as_list(reward_call.call(reward, some))
        except (Exception, SystemExit) as again:
            return type(again) is type(error) and str(again) == str(error)
        return False

    suspects = rollouts
    while len(suspects) > 1:
        half = len(suspects) // 2
        suspects = suspects[:half] if fails(suspects[:half]) else suspects[half:]
    samples = sample_of(suspects[0]) if fails(suspects) else f"{len(rollouts)} rollouts, {first}"
    fix = "fix the reward, or let it return None for samples that it cannot judge"
    more = "--isolation.on-error drop leaves them out, and isolated: before its name survives crashes too"
    return f"while judging {samples}; {fix}; {more}"


# --- one answer -------------------------------------------------------------------------------------------------------

REMEDY = "return a finite float, or None to leave the sample out"


class _Refused(Exception):
    """An answer that is not allowed: what was returned, and the remedy."""


def check_answer(answer: object, rollout: Rollout, name: str) -> SampleResult:
    """The result of one sample from the reward's answer; an answer that is not allowed has the outcome `error`."""
    try:
        return _read_answer(answer, rollout, name)
    except _Refused as refused:
        returned, remedy = refused.args
        return SampleResult("error", reason=f"returned {returned[:120]} for {sample_of(rollout)}; {remedy}")


def _read_answer(answer: Any, rollout: Rollout, name: str) -> SampleResult:
    answer = answer.tolist() if hasattr(answer, "tolist") else answer
    if isinstance(answer, Judgement):
        return read_judgement(answer, rollout, name)
    if answer is None:
        return SampleResult("abstain")
    if isinstance(answer, Mapping):
        parts = {str(k): None if v is None else _number(v, f" as its part {str(k)!r}") for k, v in answer.items()}
        known = [value for value in parts.values() if value is not None]
        return SampleResult("ok", _sum(known), parts) if known else SampleResult("abstain", parts=parts)
    if isinstance(answer, Sequence) and not isinstance(answer, (str, bytes)):
        numbers = [_number(value) for value in answer]
        if len(numbers) != rollout.count:
            wrong = f"{len(numbers)} numbers where the rollout has {rollout.count} action tokens"
            raise _Refused(wrong, "return one float, or one number per action token")
        return SampleResult("ok", numbers or 0.0, {name: _sum(numbers)})  # an episode may have no action
    number = _number(answer)
    return SampleResult("ok", number, {name: number})


def read_judgement(answer: Judgement, rollout: Rollout, name: str) -> SampleResult:
    if not is_judgement(answer):
        others = ", ".join(f.name for f in fields(answer) if f.name not in FIELDS)
        wrong = f"a {type(answer).__name__} with the fields {others}, which a Judgement does not have"
        raise _Refused(wrong, "put numbers into parts, and text into message")
    score, parts, outcome, message = (getattr(answer, field_name) for field_name in FIELDS)
    numbers = "its score is a number, one number per action token, or None; its parts have names"
    short = "an outcome is a text of at most 40 printable characters; put details into message"
    named = isinstance(outcome, str) and len(outcome) <= 40 and outcome.isprintable()
    for what, good, remedy in (
        ("parts", isinstance(parts, Mapping), numbers),
        ("score", not isinstance(score, (Mapping, Judgement)), numbers),
        ("outcome", named, short),
        ("message", isinstance(message, str), "give a text"),
    ):
        if not good:
            kind = f", of type {type(message).__name__}" if what == "message" else ""
            raise _Refused(f"a Judgement whose {what} is {shown(getattr(answer, what), 60)}{kind}", remedy)
    if name in parts:
        raise _Refused(f"a part {name!r}, which is the name of the reward and its score", "name the part otherwise")
    result = _read_answer(score, rollout, name)
    numbers = {str(k): None if v is None else _number(v, f" as its part {str(k)!r}") for k, v in parts.items()}
    cut = message if len(message) <= LONGEST else message[: LONGEST - 3] + "..."
    return replace(result, parts=result.parts | numbers, remark=Remark((outcome,) if outcome else (), cut))


def _sum(numbers: list[float]) -> float:
    try:
        return math.fsum(numbers)
    except OverflowError:
        raise _Refused("numbers with an infinite sum", "return smaller ones") from None


def _number(value: Any, place: str = "") -> float:
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, (int, float)):
        raise _Refused(f"{repr(value)[:80]}, of type {type(value).__name__},{place}".removesuffix(","), REMEDY)
    try:
        number = float(value)
    except OverflowError:  # an integer may be larger than any float
        number = math.inf
    if not math.isfinite(number):
        raise _Refused(f"{number}{place}", REMEDY)
    if abs(number) > LARGEST:
        why = f"numbers beyond {LARGEST:g} overflow in float32 when they are squared; divide the reward by a constant"
        raise _Refused(f"{number:g}{place}", why)
    return number


def sample_of(rollout: Rollout) -> str:
    """The sample's task, query and reply, for a message."""
    query, reply = (repr(text if len(text) <= 60 else text[:57] + "...") for text in (rollout.query, rollout.reply))
    return f"task {rollout.task.id!r} (query {query}, reply {reply})"
