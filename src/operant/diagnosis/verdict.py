"""The verdict on a run in one sentence: did it learn, and can the result be trusted?"""

from collections.abc import Sequence

from operant.diagnosis.history import RECENT, Finding, History, number
from operant.diagnosis.progress import progress
from operant.diagnosis.rewards import PATIENCE

EARLY = 10
"""With fewer steps, the verdict makes no statement about learning."""


def verdict(history: History, findings: Sequence[Finding]) -> str:
    """Return the verdict of a run in one sentence.

    findings: the result of `diagnose`, worst first.
    """
    score, steps = progress(history), history.trained_steps
    worst = next((f for f in findings if f.level != "note" and f.name != "flat"), None)  # the verdict covers `flat`
    also = f" {worst.message}" if worst is not None else ""
    if score is None:
        return "No step is finished yet."
    if steps < EARLY:
        return f"Too early to say ({steps} step{'s' * (steps != 1)}).{also}"
    change = f"{score.label} {number(score.before)} -> {number(score.after)} in {steps} steps"
    kl = history.recent("kl/per_reply")
    change += f" at {kl:.1f} nats of KL (mean of the last {RECENT} steps)" if kl is not None else ""
    if score.learned:
        if worst is None:
            return f"It learned: {change}, and nothing looks wrong."
        # After the colon, `KL` stays in capitals and `The` does not.
        message = worst.message if worst.message[:2].isupper() else worst.message[0].lower() + worst.message[1:]
        if worst.level == "problem":
            return f"{change[0].upper()}{change[1:]}, but do not trust it: {message}"
        return f"It learned: {change}, but look at this: {message}"
    if score.beyond_noise and score.rise > 0:
        return f"It learned a little: {change}; a run without a signal may drift as far, so watch it longer.{also}"
    if score.beyond_noise and -score.rise > score.spread / 4:
        return f"It got worse: {change}.{also}"
    return (
        f"It {'has not learned yet' if steps < PATIENCE else 'did not learn'}: {change}, which is within noise.{also}"
    )
