"""Did the reward rise? Compares the scores before training and now: is the difference larger than noise?

Of text games the share that is won counts, once one was won, and their reward before that.

Each change has an interval by Student's t. Held-out tasks are compared one by one, before and after, with the same
random numbers: 95 %. What is looked at after every step, probes and the rewards of training, has many chances to look
like a rise, so its interval is that of 99.7 %; rewards of training are also compared with their noise between steps.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from statistics import fmean, pstdev, stdev
from typing import Any

from operant.tools.report.diagnosis.history import RECENT, History, number, percent
from operant.tools.report.diagnosis.intervals import t_quantile

EARLY = 2 * RECENT
"""With fewer steps there is no verdict on learning: the first and the last `RECENT` steps, which are compared, would be
partly the same ones."""
LEARNED, DRIFTED = 0.5, 0.25
"""The score has risen clearly if it rose by the first share of the replies' spread at the start. Below the second, a
run without a signal moves as far: the demo's controls, whose rewards are shuffled, by 0.22 in the end."""
CONFIDENCE, OFTEN = 0.95, 0.997
"""Of the interval of a change that is looked at once, and of one that is looked at after every step."""
WON = 0.5
"""The largest spread that wins, which are 0 or 1, can have. It stands for the spread of games of which all are lost."""
REPLIES, PROBES = 64, 32
"""The start is the first steps that have this many replies: one step in the demo, several with small batches, which the
verdict names. Fewer probes than these say less than the replies that were trained on."""


@dataclass(frozen=True)
class RewardChange:
    """A score before training and now: `RewardChange("held-out reward", 0.55, 0.92, 0.02, 0.24, 255)`."""

    label: str
    before: float
    after: float
    error: float | None
    """The standard error of the change; None if unknown."""
    spread: float
    """The standard deviation of the replies' scores at the start."""
    freedom: int = 1000
    """Degrees of freedom of the error."""
    falls: bool = False
    """Whether lower is better, as for a loss."""
    confidence: float = CONFIDENCE
    share: bool = False
    """Whether it is a share, such as that of games won, which is written in per cent."""
    relative: bool = False
    """Whether its mean is the same in every step, as where replies to a prompt are ranked: it shows no learning."""
    steps: tuple[str, str] = ("", "")
    """Of a mean over steps, which steps these are, as in `in steps 8 to 12`: the mean itself was never printed."""

    @property
    def held_out(self) -> bool:
        """Whether it was measured once before and once after training."""
        return self.label.startswith("held-out") and self.confidence == CONFIDENCE

    @property
    def rise(self) -> float:
        return self.before - self.after if self.falls else self.after - self.before

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval of the change; None if its error is unknown."""
        if self.error is None:
            return None
        half, change = t_quantile(self.freedom, self.confidence) * self.error, self.after - self.before
        return change - half, change + half

    @property
    def beyond_noise(self) -> bool:
        """Whether the interval of the change does not contain 0."""
        return self.interval is not None and (self.interval[0] > 1e-9 or self.interval[1] < -1e-9)

    @property
    def learned(self) -> bool:
        """Whether the score rose by more than a run without a signal drifts."""
        return self.rise > 0 and self.beyond_noise and self.rise >= LEARNED * self.spread

    @property
    def text(self) -> str:
        """The change with its interval: `held-out reward 0.556 -> 0.912 (+0.33 to +0.38, 95 %)`."""
        write = percent if self.share else number
        first, last = self.steps
        text = f"{self.label} {write(self.before)}{first} -> {write(self.after)}{last}"
        if self.interval is None or not math.isfinite(sum(self.interval)):
            return text
        low, high = self.interval
        if self.share:  # no share is outside of 0..1
            low, high = max(low, -self.before), min(high, 1 - self.before)
            return f"{text} ({100 * low:+.0f} to {100 * high:+.0f} points, {100 * self.confidence:g} %)"
        half = (high - low) / 2
        digits = max(0, -math.floor(math.log10(half))) if half > 0 else 3
        digits += not round(low, digits) or not round(high, digits)
        return f"{text} ({low:+.{digits}f} to {high:+.{digits}f}, {100 * self.confidence:g} %)"


@lru_cache(1)  # several findings of a diagnosis ask for it
def progress(history: History) -> RewardChange | None:
    """Return the change of the best available score, or None if there is none.

    Held-out tasks come first, if they were evaluated before and after training; then evaluations and probes during
    training; then the replies that were trained on. A supervised run is measured by its loss.
    """
    if history.supervised:
        return _supervised(history)
    if history.rescored:
        history = replace(history, metrics=[m for m in history.metrics if m.get("step", 0) > history.rescored])
    spread = history.first("reward/std") or history.recent("reward/std") or 0.0
    won = any(history.values("game/won")) or bool(_won(history.evaluation.get("after") or {}))
    spread = WON if won else spread
    found = _held_out(history.evaluation, spread, won) or _repeated(history, spread, won)
    return found or _training_reward(history, spread, won)


def _won(judged: Mapping[str, Any]) -> float | None:
    return judged.get("metrics", {}).get("game/won")


def _supervised(history: History) -> RewardChange:
    before, after = history.evaluation.get("before") or {}, history.evaluation.get("after") or {}
    rights = [end.get("metrics", {}).get("preference/accuracy") for end in (before, after)]
    pairs = after.get("pairs") or after.get("labelled") or (history.evaluation.get("labels") or {}).get("of")
    if None not in rights and pairs:
        error, (early, late) = (sum(right * (1 - right) for right in rights) / pairs) ** 0.5, rights
        return RewardChange("held-out pairs in the right order", early, late, error, 0.0, max(pairs - 1, 1), share=True)
    if before.get("loss") is not None and after.get("loss") is not None:
        known = [(b["nats"] - a["nats"], a["tokens"]) for b, a in zip(before.get("given", ()), after.get("given", ()))]
        # The error of a ratio of sums: nats over tokens.
        tokens = sum(count for _, count in known)
        fall = sum(nats for nats, _ in known) / tokens if tokens else 0.0
        rests = [nats - fall * count for nats, count in known]
        error = stdev(rests) * len(rests) ** 0.5 / tokens if len(rests) > 1 and tokens else None
        return RewardChange("held-out loss", before["loss"], after["loss"], error, 0.0, max(len(rests) - 1, 1), True)
    steps = [m for m in history.metrics if m.get(history.loss) is not None]
    losses = [m[history.loss] for m in steps]
    early, late = losses[:RECENT], losses[-RECENT:]
    error, freedom = _noise_of_steps(losses, len(early), len(late))
    ends = _span(steps[:RECENT]), _span(steps[-RECENT:])
    return RewardChange("loss", fmean(early), fmean(late), error, 0.0, freedom, True, OFTEN, steps=ends)


def _held_out(evaluation: Mapping[str, Any], spread: float, won: bool) -> RewardChange | None:
    """Compare the held-out scores task by task: both sides have the same tasks, so their differences vary less."""
    before, after = (evaluation.get(when) or {} for when in ("before", "after"))
    first, last = (_won(judged) if won else judged.get("mean") for judged in (before, after))
    if first is None or last is None:
        return None
    old, new = ([_won(r) if won else r.get("score") for r in judged.get("replies", ())] for judged in (before, after))
    changes: dict[Any, list[float]] = {}
    for i, (score, reply, now) in enumerate(zip(old, after.get("replies", ()), new)):
        if score is not None and now is not None:
            changes.setdefault(reply.get("task", i), []).append(now - score)
    means = [fmean(each) for each in changes.values()]  # several replies to one task are no independent evidence
    error = stdev(means) / len(means) ** 0.5 if len(means) > 1 else None
    known = [float(x) for x in old if x is not None]
    old_spread, freedom = pstdev(known) if known else 0.0, max(len(means) - 1, 1)
    label = "held-out success rate" if won else "held-out reward"
    return RewardChange(label, first, last, error, old_spread or spread, freedom, share=won)


def _repeated(history: History, spread: float, won: bool) -> RewardChange | None:
    """Compare evaluations, or else probes, with those before training: same queries, same random numbers.

    Only their means are known here, so the error is that of two independent samples, which is larger.
    """
    held_out = len((history.evaluation.get("before") or {}).get("replies", ())) or REPLIES
    probes = int(history.first("probe/count") or history.option("probes") or PROBES)
    known = [("evaluate/reward", "held-out reward", held_out), ("probe/reward", "probe reward", probes)]
    for name, label, queries in [("evaluate/game/won", "held-out success rate", held_out)] if won else known:
        scores = [m[name] for m in history.metrics if m.get(name) is not None]
        before = history.first(f"{name}_before")
        if scores and before is not None and queries >= PROBES:
            wide = (history.first(f"{name}_std") if name.startswith("evaluate/") else None) or spread
            error, freedom = wide * (2 / queries) ** 0.5, 2 * queries - 2
            return RewardChange(label, before, float(scores[-1]), error, wide, freedom, confidence=OFTEN, share=won)
    return None


def _training_reward(history: History, spread: float, won: bool) -> RewardChange | None:
    name = "game/won" if won else "reward/mean"
    steps = [m for m in history.metrics if m.get(name) is not None]
    if not steps:
        return None
    count = max(int(steps[0].get("rollout/count") or REPLIES), 1)
    first, last = steps[: min(max(1, -(-REPLIES // count)), RECENT)], steps[-RECENT:]
    before, after = (fmean([m[name] for m in part]) for part in (first, last))
    error, freedom = _noise_of_steps([m[name] for m in steps], len(first), len(last))
    # The replies of a group, or of one step, share queries and weights: the noise of steps may be larger than theirs.
    variance = 0.0
    for part in (first, last):
        of_steps = [m["game/won"] * (1 - m["game/won"]) if won else (m.get("reward/std") or 0.0) ** 2 for m in part]
        summed = sum(x / (m.get("rollout/count") or REPLIES) for x, m in zip(of_steps, part))
        variance += (summed**0.5 / len(part)) ** 2
    label, error = "success rate" if won else "reward", max(error or 0.0, variance**0.5)
    ends, means = (_span(first), _span(last)), [m[name] for m in steps]
    # Rewards of one prompt's replies differ, and yet their mean is the same in each step.
    of_prompts = {(row.get("task"), row.get("reward")) for row in history.rows if row.get("reward") is not None}
    differ = len(of_prompts) > len({task for task, _ in of_prompts})
    same = not won and differ and spread > 0 and max(means) - min(means) <= 1e-6 * spread
    return RewardChange(label, before, after, error, spread, freedom, False, OFTEN, won, same, ends)


def _span(steps: Sequence[Mapping[str, object]]) -> str:
    first, last = (f"{m['step']:.0f}" if "step" in m else "?" for m in (steps[0], steps[-1]))
    return f" in step {first}" if len(steps) == 1 else f" in steps {first} to {last}"


def _noise_of_steps(values: Sequence[float], first: int, last: int) -> tuple[float | None, int]:
    """The standard error of mean(values[-last:]) - mean(values[:first]), and its degrees of freedom.

    The noise of one step is half the mean squared difference of successive steps, which a slow trend hardly changes
    (von Neumann, 1941); this estimate has about 2/3 of the degrees of freedom of the usual one.
    """
    if len(values) < 3:
        return None, 1
    noise = sum((b - a) ** 2 for a, b in pairwise(values)) / (2 * (len(values) - 1))
    return (noise * (1 / first + 1 / last)) ** 0.5, max(2 * (len(values) - 1) // 3, 1)
