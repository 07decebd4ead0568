"""Find what is wrong with a run. Every finding has a message with the evidence, the likely cause and a remedy.

    history = read_history("runs/x")          # or latest(learner), which has more data on the newest replies
    findings = diagnose(history)              # or diagnose(learner)
    print(verdict(history, findings))
    for finding in findings:
        print(finding.message, finding.cause, finding.remedy)

A rule is a small pure function from a `History` to a `Finding` or None. Its thresholds are at the top of its file, with
the reason. No rule reports anything on the healthy demo, at any step of five seeds.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from operant.tools.diagnosis import distance, games, programs, rewards, sampling, texts, updates
from operant.tools.diagnosis.history import Finding, History, latest, read_history
from operant.tools.diagnosis.verdict import short_verdict, verdict

__all__ = ["RULES", "Finding", "History", "diagnose", "latest", "read_history", "short_verdict", "verdict"]

RULES: tuple[Callable[[History], Finding | None], ...] = (
    updates.not_finite,
    distance.leap,
    sampling.other_sampler,
    games.outgrown,
    rewards.constant,
    rewards.no_advantage,
    games.empty,
    games.invalid,
    games.copied,
    games.never_won,
    programs.short_programs,
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

EXPLAINS: dict[str, frozenset[str]] = {
    "outgrown": frozenset({"constant", "no_advantage", "never_won"}),
    "empty_commands": frozenset({"invalid_commands", "copied_commands", "never_won", "constant", "no_advantage"}),
    "copied_commands": frozenset({"invalid_commands", "never_won"}),
    "invalid_commands": frozenset({"never_won"}),
    "empty": frozenset({"length", "entropy", "diversity", "critic", "saturated", "one_word", "constant", "drowned"}),
    "short_programs": frozenset({"length"}),
    "one_word": frozenset({"repetition", "diversity", "entropy", "unmeasured", "critic", "saturated"}),
    "repetition": frozenset({"diversity"}),
    "leap": frozenset(
        {"high_kl", "unpaid_kl", "drowned", "entropy", "critic", "saturated", "constant", "no_advantage"}
    ),
    "drowned": frozenset({"high_kl", "critic", "flat"}),
    "constant": frozenset({"critic", "flat", "no_advantage", "never_won", "no_step"}),
    "no_advantage": frozenset({"no_step"}),
    "negative_kl": frozenset({"flat"}),
    "unmeasured": frozenset({"entropy"}),
}
"""Findings that are not reported beside the named one: they follow from it, or have the same remedy."""
AT_ONCE = (
    *(updates.not_finite, updates.refused, distance.leap, sampling.declared_otherwise, updates.overfits),
    updates.guesses,
    *(rewards.constant, rewards.no_advantage, sampling.other_sampler, updates.scoring, updates.no_step),
    *(games.outgrown, rewards.flat, games.never_won, updates.critic, updates.ratio),
)
"""Rules that report what has happened, such as refused steps or scores that are all equal, so that a run that cannot
learn says so at its first step; and, in the last line, those that wait for more steps themselves."""
PERSISTS = 3
"""The problems and warnings of the other rules are reported once their rule finds them in this many steps in a row."""
_LEVELS = ("problem", "warning", "note")


def diagnose(source: History | Any) -> list[Finding]:
    """Return the findings for a history, or for a `Learner` or `Run` so far, worst first; empty if there are none.

    A problem or warning that only the newest step shows is not reported yet: the next steps might deny it.
    """
    history = source if isinstance(source, History) else latest(source)
    rules = SUPERVISED_RULES if history.supervised else RULES
    rules = [rule for rule in rules if not (history.plays and rule in RULES_OF_TEXTS)]
    found = [
        f for rule in rules if (f := rule(history)) is not None and (f.level == "note" or _persists(rule, history))
    ]
    explained = {name for cause in found for name in EXPLAINS.get(cause.name, ())}
    return sorted((f for f in found if f.name not in explained), key=lambda f: _LEVELS.index(f.level))


def _persists(rule: Callable[[History], Finding | None], history: History) -> bool:
    """Whether the rule has found something in each of the last `PERSISTS` steps, or needs only one."""
    cuts = (replace(history, metrics=history.metrics[: len(history.metrics) - back]) for back in range(1, PERSISTS))
    return rule in AT_ONCE or all(cut.metrics and rule(cut) is not None for cut in cuts)
