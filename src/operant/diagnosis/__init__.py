"""What is wrong with a run, in plain sentences: evidence, likely cause, what to do.

    history = read_history("runs/x")          # or latest(learner), which knows more of the newest replies
    findings = diagnose(history)              # or diagnose(learner)
    print(verdict(history, findings))
    for finding in findings:
        print(finding.message, finding.cause, finding.remedy)

A rule is a small pure function from a `History` to a `Finding` or None. Its thresholds stand at the head of its file,
with the reason; all are silent on the healthy demo, over five seeds and at every step.
"""

from collections.abc import Callable
from typing import Any

from operant.diagnosis import distance, rewards, sampling, supervised, texts, updates
from operant.diagnosis.history import Finding, History, read_history
from operant.diagnosis.latest import latest
from operant.diagnosis.verdict import verdict

__all__ = ["RULES", "Finding", "History", "diagnose", "latest", "read_history", "verdict"]

RULES: tuple[Callable[[History], Finding | None], ...] = (
    updates.not_finite,
    distance.leap,
    sampling.other_sampler,
    rewards.constant,
    rewards.no_advantage,
    texts.empty,
    texts.one_word,
    texts.signs,
    distance.unlikely_text,
    updates.scoring,
    distance.drowned,
    distance.unpaid_kl,
    distance.high_kl,
    distance.unmeasured,
    texts.repetition,
    texts.diversity,
    texts.length,
    updates.entropy,
    updates.ratio,
    updates.clipping,
    updates.refused,
    rewards.query_decides,
    rewards.abstains,
    updates.critic,
    rewards.flat,
    rewards.saturated,
    sampling.declared_otherwise,
    supervised.overfits,
)
"""In the order in which findings of one level are told."""
OF_GIVEN = (updates.not_finite, updates.refused, supervised.overfits)
"""Those that hold for runs on given replies, whose lengths, texts and likelihood are not the policy's."""

EXPLAINS: dict[str, frozenset[str]] = {
    "empty": frozenset({"length", "entropy", "diversity", "critic", "saturated", "one_word", "constant", "drowned"}),
    "one_word": frozenset({"repetition", "diversity", "entropy", "unmeasured", "critic", "saturated"}),
    "repetition": frozenset({"diversity"}),
    "leap": frozenset(
        {"high_kl", "unpaid_kl", "drowned", "entropy", "critic", "saturated", "constant", "no_advantage"}
    ),
    "drowned": frozenset({"high_kl", "critic", "flat"}),
    "constant": frozenset({"critic", "flat", "no_advantage"}),
    "negative_kl": frozenset({"flat"}),
    "unmeasured": frozenset({"entropy"}),
}
"""What need not be told once the first is: it follows from it, or has the same remedy."""
_LEVELS = ("problem", "warning", "note")


def diagnose(of: History | Any) -> list[Finding]:
    """What looks wrong in a history, or with a `Learner` or `Run` so far, worst first; empty where nothing does."""
    history = of if isinstance(of, History) else latest(of)
    rules = OF_GIVEN if supervised.given(history) else RULES
    found = [finding for rule in rules if (finding := rule(history)) is not None]
    names = {finding.name for finding in found}
    explained = {name for cause in names for name in EXPLAINS.get(cause, ())}
    told = [finding for finding in found if finding.name not in explained]
    return sorted(told, key=lambda finding: _LEVELS.index(finding.level))
