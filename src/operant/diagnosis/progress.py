"""Did the reward rise? Compares the scores before training and now: is the difference larger than noise?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from operant.diagnosis.history import RECENT, History

ERRORS = 3.0
"""A change counts if it is larger than this many standard errors."""
LEARNED = 0.5
"""The score has risen clearly if it rose by this share of the replies' spread at the start. The demo's controls, whose
rewards are shuffled, have drifted by 0.4 for a while."""
REPLIES = 64
"""The start is the first steps that have this many replies: one step in the demo, several with small batches."""


@dataclass(frozen=True)
class RewardChange:
    """A score before training and now: `RewardChange("held-out reward", 0.55, 0.92, 0.02, 0.24)`."""

    label: str
    before: float
    after: float
    error: float
    """The standard error of the change; 0 if unknown."""
    spread: float
    """The standard deviation of the replies' scores at the start."""
    falls: bool = False
    """Whether lower is better, as for a loss."""

    @property
    def rise(self) -> float:
        """The improvement."""
        return self.before - self.after if self.falls else self.after - self.before

    @property
    def beyond_noise(self) -> bool:
        """Whether the change is larger than sampling noise."""
        return abs(self.rise) > max(ERRORS * self.error, 1e-9)

    @property
    def learned(self) -> bool:
        """Whether the score rose by more than a run without a signal drifts."""
        return self.rise > 0 and self.beyond_noise and self.rise >= LEARNED * self.spread


def progress(history: History) -> RewardChange | None:
    """Return the change of the best available score, or None if there is none.

    Held-out tasks come first, if they were evaluated before and after training; then evaluations and probes during
    training; then the replies that were trained on. A supervised run is measured by its loss.
    """
    if history.supervised:
        return _supervised(history)
    spread = history.first("reward/std") or history.recent("reward/std") or 0.0
    return _held_out(history.evaluation, spread) or _repeated(history, spread) or _training_reward(history, spread)


def _supervised(history: History) -> RewardChange:
    """Compare held-out losses before and after training, or the losses of the first and the last steps."""
    before, after = history.evaluation.get("before") or {}, history.evaluation.get("after") or {}
    if before.get("loss") is not None and after.get("loss") is not None:
        pairs = zip(before.get("given", ()), after.get("given", ()))
        changes = [b["nats"] / b["tokens"] - a["nats"] / a["tokens"] for a, b in pairs if a["tokens"]]
        return RewardChange("held-out loss", before["loss"], after["loss"], _standard_error(changes), 0.0, falls=True)
    if (first := history.first("evaluate/loss_before")) is not None and (now := history.recent("evaluate/loss", 1)):
        return RewardChange("held-out loss", first, now, 0.0, 0.0, falls=True)
    losses = history.values("supervised/loss")
    early, late = losses[:RECENT], losses[-RECENT:]
    error = (_spread(early) ** 2 / len(early) + _spread(late) ** 2 / len(late)) ** 0.5
    return RewardChange("loss", _mean(early), _mean(late), error, 0.0, falls=True)


def _held_out(evaluation: Mapping[str, Any], spread: float) -> RewardChange | None:
    """Compare the held-out scores task by task: both sides have the same tasks, so their differences vary less."""
    before, after = evaluation.get("before"), evaluation.get("after")
    if not before or not after or before.get("mean") is None or after.get("mean") is None:
        return None
    old, new = ([r.get("score") for r in side.get("replies", ())] for side in (before, after))
    changes = [b - a for a, b in zip(old, new) if a is not None and b is not None]
    old_spread = _spread([float(x) for x in old if x is not None])
    error = _standard_error(changes)
    return RewardChange("held-out reward", before["mean"], after["mean"], error, old_spread or spread)


def _repeated(history: History, spread: float) -> RewardChange | None:
    """Compare evaluations, or else probes, with those before training: same queries, same random numbers."""
    for name, label, queries in (("evaluate/reward", "held-out reward", 64), ("probe/reward", "probe reward", 32)):
        scores = [m[name] for m in history.metrics if m.get(name) is not None]
        before = history.first(f"{name}_before")
        if scores and before is not None:
            wide = (history.first("evaluate/reward_std") if name == "evaluate/reward" else None) or spread
            return RewardChange(label, before, float(scores[-1]), wide * (2 / queries) ** 0.5, wide)
    return None


def _training_reward(history: History, spread: float) -> RewardChange | None:
    """Compare the mean rewards of the first and the last steps."""
    steps = [m for m in history.metrics if m.get("reward/mean") is not None]
    if not steps:
        return None
    count = steps[0].get("rollout/count") or REPLIES
    first, last = steps[: min(max(1, -(-REPLIES // int(count))), RECENT)], steps[-RECENT:]
    before, after = (_mean([m["reward/mean"] for m in part]) for part in (first, last))
    error = sum(_error_of_mean_reward(part) ** 2 for part in (first, last)) ** 0.5
    return RewardChange("reward", before, after, error, spread)


def _error_of_mean_reward(steps: Sequence[Mapping[str, Any]]) -> float:
    errors = [(m.get("reward/std") or 0.0) ** 2 / (m.get("rollout/count") or REPLIES) for m in steps]
    return sum(errors) ** 0.5 / len(steps)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _spread(values: Sequence[float]) -> float:
    """Return the (biased) standard deviation, 0 for no values."""
    if not values:
        return 0.0
    mean = _mean(values)
    return (sum((x - mean) ** 2 for x in values) / len(values)) ** 0.5


def _standard_error(values: Sequence[float]) -> float:
    return _spread(values) / len(values) ** 0.5 if values else 0.0
