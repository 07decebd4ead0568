"""Did the reward rise: before against now, with what noise explains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from operant.diagnosis.history import RECENT, History

ERRORS = 3.0
"""Standard errors that a change has to have to be called one."""
LEARNED = 0.5
"""Of the replies' spread at the start: the demo's controls, whose rewards are shuffled, have drifted by
0.4 for a while, so less than this is no proof of learning."""
REPLIES = 64
"""The start is as many first steps as this takes: one step in the demo, several where batches are small."""


@dataclass(frozen=True)
class Progress:
    """A score before training and now: `Progress("held-out reward", 0.55, 0.92, 0.02, 0.24)`."""

    what: str
    before: float
    after: float
    error: float
    """Standard error of the change; 0 where it cannot be told."""
    spread: float
    """Of the replies' scores at the start."""
    falls: bool = False
    """Whether lower is better, as of a loss."""

    @property
    def rise(self) -> float:
        """How much better it has become."""
        return self.before - self.after if self.falls else self.after - self.before

    @property
    def beyond_noise(self) -> bool:
        """Whether sampling alone would hardly have changed the score so much."""
        return abs(self.rise) > max(ERRORS * self.error, 1e-9)

    @property
    def learned(self) -> bool:
        """Whether the score rose by more than a run without a signal drifts."""
        return self.rise > 0 and self.beyond_noise and self.rise >= LEARNED * self.spread


def progress(history: History) -> Progress | None:
    """On held-out tasks where they were judged before and after; else evaluations, probes, the replies trained on.

    Of given replies it is their loss that is trained on.
    """
    if history.values("supervised/loss"):
        return _supervised(history)
    spread = history.first("reward/std") or history.recent("reward/std") or 0.0
    return _held_out(history.evaluation, spread) or _repeated(history, spread) or _trained_on(history, spread)


def _supervised(history: History) -> Progress:
    """The loss of given replies: of held-out ones before and after, or of the first steps and the last."""
    before, after = history.evaluation.get("before") or {}, history.evaluation.get("after") or {}
    if before.get("loss") is not None and after.get("loss") is not None:
        pairs = zip(before.get("given", ()), after.get("given", ()))
        apart = [b["nats"] / b["tokens"] - a["nats"] / a["tokens"] for a, b in pairs if a["tokens"]]
        error = _spread(apart) / len(apart) ** 0.5 if apart else 0.0
        return Progress("held-out loss", before["loss"], after["loss"], error, 0.0, falls=True)
    if (first := history.first("evaluate/loss_before")) is not None and (now := history.recent("evaluate/loss", 1)):
        return Progress("held-out loss", first, now, 0.0, 0.0, falls=True)
    losses = history.values("supervised/loss")
    early, late = losses[:RECENT], losses[-RECENT:]
    error = (_spread(early) ** 2 / len(early) + _spread(late) ** 2 / len(late)) ** 0.5
    return Progress("loss", _mean(early), _mean(late), error, 0.0, falls=True)


def _held_out(evaluation: Mapping[str, Any], spread: float) -> Progress | None:
    """Both sides answered the same tasks, so their differences have less noise than the two means."""
    before, after = evaluation.get("before"), evaluation.get("after")
    if not before or not after or before.get("mean") is None or after.get("mean") is None:
        return None
    old, new = ([r.get("score") for r in side.get("replies", ())] for side in (before, after))
    apart = [b - a for a, b in zip(old, new) if a is not None and b is not None]
    error = _spread(apart) / len(apart) ** 0.5 if apart else 0.0
    return Progress("held-out reward", before["mean"], after["mean"], error, _spread(_numbers(old)) or spread)


def _repeated(history: History, spread: float) -> Progress | None:
    """The same queries with the same random numbers, asked before training and again and again."""
    for name, what, queries in (("evaluate/reward", "held-out reward", 64), ("probe/reward", "probe reward", 32)):
        told = [m for m in history.metrics if m.get(name) is not None]
        before = history.first(f"{name}_before")
        if told and before is not None:
            wide = history.first("evaluate/reward_std") if name == "evaluate/reward" else None
            error = (wide or spread) * (2 / queries) ** 0.5
            return Progress(what, before, float(told[-1][name]), error, wide or spread)
    return None


def _trained_on(history: History, spread: float) -> Progress | None:
    told = [m for m in history.metrics if m.get("reward/mean") is not None]
    if not told:
        return None
    count = told[0].get("rollout/count") or REPLIES
    first = told[: min(max(1, -(-REPLIES // int(count))), RECENT)]
    last = told[-RECENT:]
    before, after = _mean([m["reward/mean"] for m in first]), _mean([m["reward/mean"] for m in last])
    error = sum(_error(part) ** 2 for part in (first, last)) ** 0.5
    return Progress("reward", before, after, error, spread)


def _error(part: Sequence[Mapping[str, Any]]) -> float:
    """Standard error of the mean of some steps' rewards."""
    each = [(m.get("reward/std") or 0.0) ** 2 / (m.get("rollout/count") or REPLIES) for m in part]
    return sum(each) ** 0.5 / len(part)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _spread(values: Sequence[float]) -> float:
    return (sum((x - _mean(values)) ** 2 for x in values) / len(values)) ** 0.5 if values else 0.0


def _numbers(values: Sequence[Any]) -> list[float]:
    return [float(x) for x in values if x is not None]
