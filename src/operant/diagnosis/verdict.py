"""One honest sentence: did it learn, did it stay sane."""

from collections.abc import Sequence

from operant.diagnosis.history import Finding, History, number
from operant.diagnosis.progress import Progress, progress
from operant.diagnosis.rewards import PATIENCE

EARLY = 10
"""Steps before which nothing is said of learning."""


def verdict(history: History, findings: Sequence[Finding]) -> str:
    """The sentence that stands above everything else; `findings` as `diagnose` gave them, worst first."""
    score, steps = progress(history), history.trained
    worst = next((f for f in findings if f.level != "note" and f.name != "flat"), None)  # `flat` is this very sentence
    if score is None:
        return "No step is finished yet."
    if steps < EARLY:
        early = f"Too early to say ({steps} step{'s' * (steps != 1)})."
        return f"{early} {worst.message}" if worst is not None else early
    told = f"{score.what} {number(score.before)} -> {number(score.after)} in {steps} steps"
    kl = history.recent("kl/per_reply")
    told += f" at {kl:.1f} nats of KL" if kl is not None else ""
    if score.learned:
        return _learned(told, worst)
    return _not_learned(score, told, steps, worst)


def _learned(told: str, worst: Finding | None) -> str:
    if worst is None:
        return f"It learned: {told}, and nothing looks wrong."
    if worst.level == "problem":
        return f"{told[0].upper()}{told[1:]}, but do not trust it: {_within(worst.message)}"
    return f"It learned: {told}, but look at this: {_within(worst.message)}"


def _not_learned(score: Progress, told: str, steps: int, worst: Finding | None) -> str:
    also = f" {worst.message}" if worst is not None else ""
    if score.beyond_noise and score.rise > 0:
        return f"It learned a little: {told}; a run without a signal may drift as far, so watch it longer.{also}"
    if score.beyond_noise and -score.rise > score.spread / 4:
        return f"It got worse: {told}.{also}"
    word = "has not learned yet" if steps < PATIENCE else "did not learn"
    return f"It {word}: {told}, which is within noise.{also}"


def _within(says: str) -> str:
    """A sentence after a colon: `KL` stays, `The` does not."""
    return says if says[:2].isupper() else says[0].lower() + says[1:]
