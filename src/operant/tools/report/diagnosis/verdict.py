"""The verdict on a run in one sentence: did it learn, and can the result be trusted?"""

from collections.abc import Sequence
from typing import Literal

from operant.tools.report.diagnosis.history import FINDINGS, RECENT, Finding, History, counted, number
from operant.tools.report.diagnosis.progress import DRIFTED, EARLY, RewardChange, progress
from operant.tools.report.diagnosis.rewards import MOVED, PATIENCE

Outcome = Literal[
    "nothing yet", "too early", "relative", "learned", "may have learned", "got worse", "no rise yet", "did not learn"
]
FEW = 15
"""Degrees of freedom below which an interval is wide for want of held-out tasks."""
_SEEN = "Is what the reward asks for in the prompt, and does any reply get it?"


def outcome(history: History, score: RewardChange | None) -> Outcome:
    """Classify what the scores show about learning. score: the result of `progress`."""
    if score is None:
        return "nothing yet"
    if history.trained_steps < EARLY and not (history.supervised and score.held_out):
        return "too early"
    if score.relative:
        return "relative"
    if score.learned:
        return "learned"
    if score.beyond_noise and abs(score.rise) > DRIFTED * score.spread:
        return "may have learned" if score.rise > 0 else "got worse"
    return "no rise yet" if history.trained_steps < PATIENCE else "did not learn"


def verdict(history: History, findings: Sequence[Finding]) -> str:
    """Return the verdict of a run in one sentence. findings: the result of `diagnose`, worst first."""
    score, steps = progress(history), history.trained_steps
    worst, result = _worst(findings), outcome(history, score)
    also = f" {worst.message}" if worst is not None else ""
    if score is None:
        return "No step is finished yet." if not steps else "No step is finished since the reward was changed."
    if result == "too early":
        return f"Too early to say ({counted(steps, 'step')}).{also}"
    if result == "relative":
        same = f"The mean reward is {number(score.after)} in every step, so it compares replies with each other"
        return f"{same} and cannot show learning: let people or a judge compare models (`operant eval --label`).{also}"
    change = f"{score.text} in {counted(steps, 'step')}"
    kl = history.kl
    change += f" at {kl:z.1f} nats of KL (mean of the last {RECENT} steps)" if kl is not None else ""
    if result == "learned":
        if worst is None:
            return f"It learned: {change}, and nothing looks wrong."
        # After the colon, `KL` stays in capitals and `The` does not.
        message = worst.message if worst.message[:2].isupper() else worst.message[0].lower() + worst.message[1:]
        if worst.level == "problem":
            return f"{change[0].upper()}{change[1:]}, but do not trust it: {message}"
        return f"It learned: {change}, but look at this: {message}"
    if result == "may have learned":
        return f"It may have learned a little: {change}; a run without a signal may drift as far, so watch it.{also}"
    if result == "got worse":
        return f"It got worse: {change}.{also}"
    replies = (history.evaluation.get("after") or {}).get("replies", ())
    if not also and score.error == 0 == score.rise and len({row.get("score") for row in replies}) < 2:
        also = f" {FINDINGS['constant']['message'].format(score=number(score.after))} {_SEEN}"
    if not also and score.held_out and score.freedom < FEW and not score.beyond_noise:
        also = f" {score.freedom + 1} held-out tasks are few to tell: give more."
    why = "no more than a run without a signal drifts" if score.beyond_noise else "within noise"
    rate = history.recent("update/lr")
    if not also and kl is not None and rate and abs(kl) < MOVED:
        also = f" The policy has hardly moved: try a higher `--optimizer.lr` than {number(rate)}."
    learned = "has not learned yet" if result == "no rise yet" else "did not learn"
    return f"It {learned}: {change}, which is {why}.{also}"


def short_verdict(history: History, findings: Sequence[Finding]) -> str:
    """Return the verdict in a few words: `learned`, `learned; but length`, `do not trust: one word`."""
    worst, result = _worst(findings), outcome(history, progress(history))
    name = worst.name.replace("_", " ") if worst is not None else ""
    if worst is not None and worst.level == "problem":
        return f"do not trust: {name}"
    return f"{result}, but {name}" if name else result


def _worst(findings: Sequence[Finding]) -> Finding | None:
    return next((f for f in findings if f.level != "note" and f.name != "flat"), None)
