"""How samples that a reward failed on are handled: drop the sample, give it a score, or stop the run.

A reward may answer (ok), return None (abstain), fail (error) or not answer in time (timeout). An isolated reward
(`isolated.py`) drops failed samples by default; any other reward stops the run, unless `Tolerant` wraps it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from operant.bounds import bounded, check_bounds
from operant.rewards.evaluate import CallFailure, Judged, Outcome, SampleResult, Total, call, judged_of, sample_of
from operant.rewards.wrapper import Wrapper
from operant.types import OperantError, RewardFn, Rollout

__all__ = ["IsolationOptions"]

Handling = str | float
"""drop | stop | the score that the sample gets instead."""
HANDLINGS = "drop, stop, or a finite number"


def _is_handling(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return number or value in ("drop", "stop")


@dataclass(frozen=True)
class IsolationOptions:
    """Options of rewards that may fail. Those about time, memory and processes concern `isolated:` rewards alone.

    Isolated worlds use `timeout`, `memory_gb`, `processes`, `level`, `on_error` and `on_timeout` (docs/worlds.md).
    Raises: OperantError for a value out of range.
    """

    timeout: float = bounded(60.0, above=0, below=math.inf)
    """Seconds for a whole batch, which is judged within `timeout` + 2 s. The first call, with all samples, may take
    half of it; samples of a call that failed are judged again, one at a time, in the other half."""
    sample_timeout: float | None = bounded(None, above=0, below=math.inf)
    """Seconds for a sample that is judged alone; none: at least a quarter of the time left of `timeout`."""
    memory_gb: float | None = bounded(4.0, above=0, below=math.inf)
    """Address space of each of its processes, in GB; none: no limit (needed by a reward that uses CUDA)."""
    processes: int = bounded(512, at_least=1)
    """Processes and threads that it may have, if the system can count them."""
    workers: int = bounded(1, at_least=1)
    """Worker processes, each of which judges a part of the batch; the samples of a prompt stay together."""
    each: bool = False
    """Judge one sample at a time from the start; all of `timeout` is then for that."""
    again: bool = True
    """Judge samples alone after a failure; false if a score depends on the other samples of the batch."""
    retries: int = bounded(0, at_least=0)
    """Times that a call in which the reward raised or died is repeated, as long as `timeout` allows: for rewards that
    ask a server."""
    retry_seconds: float = bounded(1.0, above=0, below=math.inf)
    """Seconds before the first repetition; before each further one twice as many."""
    on_error: float | str | None = bounded(None, fits=_is_handling, rule=HANDLINGS)
    """A sample on which the reward raised, died or returned something unusable: drop, stop, or the score that it gets;
    none: an isolated reward drops it, any other stops the run."""
    on_timeout: float | str = bounded("drop", fits=_is_handling, rule=HANDLINGS)
    """A sample that was not judged in time: drop, stop, or a score."""
    on_abstain: float | str = bounded("drop", fits=_is_handling, rule=HANDLINGS)
    """A sample for which the reward returned None: drop, stop, or a score."""
    level: str = "auto"
    """How an isolated reward is ended: pid namespace | sub-reaper | process group; auto: the strongest allowed here."""

    def __post_init__(self) -> None:
        check_bounds(self, "isolation")

    def handling(self, outcome: Outcome, default: Handling) -> Handling:
        """How a sample with this outcome is handled; `default` applies to an error without `on_error`."""
        chosen = {"error": self.on_error, "timeout": self.on_timeout, "abstain": self.on_abstain}[outcome]
        return default if chosen is None else chosen


def apply_policy(
    results: Sequence[SampleResult], rollouts: list[Rollout], name: str, options: IsolationOptions, default: Handling
) -> Judged:
    """The scores of a batch, in which failed samples are handled as `options` say; `default`: without `on_error`."""
    scores: list[Total] = []
    for result, rollout in zip(results, rollouts, strict=True):
        if result.outcome == "ok":
            scores.append(result.total)
            continue
        handling = options.handling(result.outcome, default)
        if handling == "stop":
            why = _reason(result, rollout)
            raise OperantError(f"reward {name!r} {why}; fix the reward, or set on_{result.outcome} to drop or a score")
        scores.append(None if handling == "drop" else float(handling))
    notes = []
    for outcome in ("error", "timeout"):
        if failed := [i for i, result in enumerate(results) if result.outcome == outcome]:
            handling = options.handling(outcome, default)
            done = "left out" if handling == "drop" else f"given the score {handling:g}"
            first = _reason(results[failed[0]], rollouts[failed[0]])
            notes.append(f"{outcome}: {len(failed)} of {len(results)} samples {done}: reward {name!r} {first}")
    return replace(judged_of(results, scores, name), outcomes=[result.outcome for result in results], notes=notes)


def _reason(result: SampleResult, rollout: Rollout) -> str:
    """Why a sample has no score, and which sample it is."""
    reason, sample = result.reason or "returned None", sample_of(rollout)
    problem, semicolon, remedy = reason.partition("; return ")
    return reason if sample in reason else f"{problem} while judging {sample}{semicolon}{remedy}"


class Tolerant(Wrapper):
    """A reward of the run's own process whose failures need not stop the run. It cannot be timed out."""

    def __init__(self, reward: RewardFn, options: IsolationOptions):
        self.reward, self.options = reward, options

    def judged(self, rollouts: list[Rollout]) -> Judged:
        """Judge the batch; samples of a call that failed are judged again one at a time."""
        results = self._results(rollouts, again=self.options.again)
        return apply_policy(results, rollouts, self.__name__, self.options, "stop")

    def _results(self, rollouts: list[Rollout], again: bool) -> list[SampleResult]:
        try:
            return call(self.reward, rollouts, self.__name__)
        except CallFailure as failure:
            if again:
                return [result for rollout in rollouts for result in self._results([rollout], again=False)]
            return [failure.result] * len(rollouts)
