"""What came of each sample, and what is done about it: drop the sample, give it a score, or stop the run.

A reward may answer (ok), not wish to judge (abstain), fail (error) or not come back (timeout). An isolated reward
(`isolation.py`) drops what failed unless told otherwise; any other stops the run, and `Tolerant` is what changes that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from operant.rewards.evaluate import Judged, Outcome, Total, checked_answer, miscounted, name_of, sample_of
from operant.sandbox.serialise import listed
from operant.types import OperantError, RewardFn, Rollout

Fate = str | float
"""drop | stop | the score that is given."""


@dataclass(frozen=True)
class IsolationOptions:
    """Of rewards that may misbehave. What is said of time, memory and processes is for `isolated:` rewards."""

    timeout: float = 60.0
    """Seconds for a whole batch: it is judged within `timeout` + 2 s. Asked about all samples at once, a reward has
    half of them; what failed is asked again, one sample at a time, in the other half."""
    sample_timeout: float | None = None
    """Seconds for a sample that is judged alone; none: a quarter of what is left of `timeout`, anew for each."""
    memory_gb: float | None = 4.0
    """Address space of each of its processes; none: not limited (a reward that uses CUDA needs that)."""
    processes: int = 512
    """Processes and threads that it may have, where the system can count them."""
    workers: int = 1
    """Processes that judge side by side, each a part of the batch; the samples of a prompt stay together."""
    each: bool = False
    """Judge one sample at a time from the start: `timeout` is then all for that."""
    again: bool = True
    """Judge samples alone after a failure; false where a score depends on the other samples of the batch."""
    on_error: float | str | None = None
    """A sample on which the reward raised, died or answered nonsense: drop it, stop, or the score that it gets; none:
    an isolated reward drops it, any other stops the run."""
    on_timeout: float | str = "drop"
    """A sample that was not judged in time: drop, stop, or a score."""
    on_abstain: float | str = "drop"
    """A sample for which the reward returned None: drop, stop, or a score."""
    level: str = "auto"
    """pid namespace | sub-reaper | process group: how an isolated reward is ended; auto: the strongest allowed here."""

    def __post_init__(self) -> None:
        fates = ("on_error", "on_timeout", "on_abstain")
        checks = [(n, _is_fate(getattr(self, n)) or (n == "on_error" and self.on_error is None), FATES) for n in fates]
        above = ("timeout", "sample_timeout", "memory_gb")
        checks += [(n, (v := getattr(self, n)) is None or 0 < v < math.inf, "above 0") for n in above]
        checks += [(n, getattr(self, n) >= 1, "at least 1") for n in ("workers", "processes")]
        for name, good, rule in checks:
            if not good:
                raise OperantError(f"isolation.{name}={getattr(self, name)!r}: it must be {rule}")

    def fate(self, outcome: Outcome, unless: Fate) -> Fate:
        """What happens to a sample with this outcome; `unless` it is said, for an error."""
        on = {"error": self.on_error, "timeout": self.on_timeout, "abstain": self.on_abstain}[outcome]
        return unless if on is None else on


FATES = "drop, stop, or a finite number"


def _is_fate(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return number or value in ("drop", "stop")


@dataclass(frozen=True)
class Said:
    """What came of one sample."""

    outcome: Outcome
    total: Total = None
    parts: dict[str, float | None] = field(default_factory=dict)
    why: str = ""
    """Where it failed: the rest of a sentence that begins with the reward's name."""


def checked(answer: Any, rollout: Rollout, name: str) -> Said:
    """One answer of a reward as what came of it."""
    try:
        total, parts = checked_answer(answer, rollout, name)
    except OperantError as error:
        return Said("error", why=str(error).removeprefix(f"reward {name!r} "))
    return Said("abstain" if total is None else "ok", total, parts)


def settled(
    said: Sequence[Said], rollouts: list[Rollout], name: str, options: IsolationOptions, unless: Fate
) -> Judged:
    """Each sample's fate as a score. Raises: OperantError where one of them is to stop the run."""
    scores = [_score(one, rollout, name, options, unless) for one, rollout in zip(said, rollouts, strict=True)]
    named: dict[str, None] = {part: None for one in said for part in one.parts}
    parts = {part: [one.parts.get(part) for one in said] for part in named} or {name: [None] * len(said)}
    return Judged(scores, parts, [one.outcome for one in said], _notes(said, rollouts, name, options, unless))


def _score(one: Said, rollout: Rollout, name: str, options: IsolationOptions, unless: Fate) -> Total:
    if one.outcome == "ok":
        return one.total
    fate = options.fate(one.outcome, unless)
    if fate == "stop":
        raise OperantError(
            f"reward {name!r} {_told(one, rollout)}; mend the reward, or set on_{one.outcome} to drop or a score"
        )
    return None if fate == "drop" else float(fate)


def _told(one: Said, rollout: Rollout) -> str:
    why = one.why or "returned None"
    sample = sample_of(rollout)
    return why if sample in why else f"{why} while judging {sample}"


def _notes(
    said: Sequence[Said], rollouts: list[Rollout], name: str, options: IsolationOptions, unless: Fate
) -> list[str]:
    """A sentence for each kind of failure, with its first sample."""
    notes, failures = [], ("error", "timeout")
    for outcome in failures:
        which = [i for i, one in enumerate(said) if one.outcome == outcome]
        if which:
            fate = options.fate(outcome, unless)
            done = "left out" if fate == "drop" else f"given {fate:g}" if isinstance(fate, float) else f"given {fate}"
            first = _told(said[which[0]], rollouts[which[0]])
            notes.append(f"{outcome}: {len(which)} of {len(said)} samples {done}: reward {name!r} {first}")
    return notes


class Tolerant:
    """A reward of this process whose failures have a fate other than to stop the run. It cannot be timed out."""

    def __init__(self, reward: RewardFn, options: IsolationOptions):
        self.reward, self.options = reward, options
        self.__name__ = name_of(reward)

    def __call__(self, rollouts: list[Rollout]) -> list[Total]:
        return self.judged(rollouts).scores

    def judged(self, rollouts: list[Rollout]) -> Judged:
        """What failed for the batch is asked again one sample at a time."""
        said = self._ask(rollouts)
        if said is None and self.options.again:
            alone = [self._ask([rollout]) or self._failed([rollout]) for rollout in rollouts]
            said = [one for ones in alone for one in ones]
        return settled(said or self._failed(rollouts), rollouts, self.__name__, self.options, "stop")

    def check(self) -> None:
        getattr(self.reward, "check", lambda: None)()

    def _ask(self, rollouts: list[Rollout]) -> list[Said] | None:
        """None where the reward has failed as a whole; `_why` then says how."""
        try:
            answer = self.reward(rollouts)
            answers = listed(answer)
        except OperantError:
            raise
        except Exception as error:
            self._why = f"raised {type(error).__name__}: {error}"
            return None
        if answers is None or len(answers) != len(rollouts):
            self._why = miscounted(answer, answers, rollouts)
            return None
        return [checked(one, rollout, self.__name__) for one, rollout in zip(answers, rollouts)]

    def _failed(self, rollouts: list[Rollout]) -> list[Said]:
        return [Said("error", why=self._why) for _ in rollouts]
