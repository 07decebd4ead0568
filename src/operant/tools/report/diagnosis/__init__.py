"""Find what is wrong with a run. Every finding has a message with the evidence, the likely cause and a remedy.

    history = read_history("runs/x")          # or latest(learner), which has more data on the newest replies
    findings = diagnose(history)              # or diagnose(learner)
    print(verdict(history, findings))
    for finding in findings:
        print(finding.message, finding.cause, finding.remedy)

A rule is a small pure function from a `History` to a `Finding` or None. Its thresholds are at the top of its file, with
the reason; what it says is in `findings.toml`. No rule reports anything on the healthy demo, at any step of five seeds.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from operant.tools.report.diagnosis import distance, rewards, sampling, texts, updates
from operant.tools.report.diagnosis.history import FINDINGS, Finding, History, latest, read_history
from operant.tools.report.diagnosis.verdict import short_verdict, verdict

if TYPE_CHECKING:
    from operant.runs.ahead import Learner
    from operant.runs.run import Run

__all__ = ["RULES", "Finding", "History", "diagnose", "latest", "read_history", "short_verdict", "verdict"]

RULES: tuple[Callable[[History], Finding | None], ...] = (
    updates.not_finite,
    distance.leap,
    sampling.other_sampler,
    rewards.outgrown,
    rewards.verifier,
    rewards.constant,
    rewards.no_advantage,
    rewards.empty,
    rewards.invalid,
    rewards.copied,
    rewards.never_won,
    texts.short_programs,
    texts.empty,
    texts.one_word,
    texts.signs,
    distance.unlikely_text,
    updates.scoring,
    distance.drowned,
    distance.unpaid_kl,
    distance.high_kl,
    distance.slow_price,
    distance.unmeasured,
    texts.repetition,
    texts.diversity,
    texts.length,
    updates.entropy,
    updates.ratio,
    updates.clipping,
    updates.no_step,
    updates.refused,
    rewards.query_decides,
    rewards.abstains,
    updates.critic,
    rewards.flat,
    rewards.saturated,
    sampling.declared_otherwise,
    sampling.evaluated_otherwise,
    updates.overfits,
    updates.guesses,
)
"""All rules. Findings of the same level are reported in this order."""
RULES_OF_TEXTS = (texts.empty, texts.one_word, texts.signs, texts.repetition, texts.diversity, texts.length)
"""Rules for replies that are prose; the commands of a game are short, and few of them are in use."""
SUPERVISED_RULES = (updates.not_finite, updates.refused, updates.overfits, updates.guesses)
"""The rules for supervised runs, where the replies come from the data set and not from the policy."""

EXPLAINS = {name: frozenset(entry.get("explains", ())) for name, entry in FINDINGS.items()}
"""Findings that are not reported beside the named one: they follow from it, or have the same remedy."""
PERSISTS = 3
"""Problems and warnings are reported once their rule finds them in this many steps in a row."""
_LEVELS = ("problem", "warning", "note")


def diagnose(source: "History | Learner | Run") -> list[Finding]:
    """Return the findings for a history, or for a `Learner` or `Run` so far, worst first; empty if there are none.

    A problem or warning that only the newest step shows is not reported yet, unless it is reported `at_once`: the next
    steps might deny it.
    """
    history = source if isinstance(source, History) else latest(source)
    metrics = history.metrics
    earlier = [replace(history, metrics=metrics[: len(metrics) - back]) for back in range(1, PERSISTS)]
    found = list[Finding]()
    for rule in SUPERVISED_RULES if history.supervised else RULES:
        one = None if history.plays and rule in RULES_OF_TEXTS else rule(history)
        if one is None:
            continue
        now = one.level == "note" or FINDINGS[one.name].get("at_once")
        if now or all(cut.metrics and rule(cut) for cut in earlier):
            found.append(one)
    explained = {name for cause in found for name in EXPLAINS[cause.name]}
    return sorted((f for f in found if f.name not in explained), key=lambda f: _LEVELS.index(f.level))
