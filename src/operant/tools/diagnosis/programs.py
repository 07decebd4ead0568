"""A rule about programs: a ladder of outcomes that pays for short wrong ones."""

from operant.tools.diagnosis.history import RECENT, Finding, History, percent
from operant.types import OUTCOMES

FEWER = 0.2
"""Errors have become rarer by at least this share of all programs. In a probe of 0.34M parameters, compile errors fell
by 0.59."""
PASSED = 0.25
"""Of that fall, programs that pass have taken less than this share: in the probe 0.03. A policy that learns to program
turns its errors into passes."""
SHORTER = 0.85
"""The replies have at most this share of the tokens that they had."""


def short_programs(history: History) -> Finding | None:
    """Programs compile or run to their end more often because they are shorter, and they are wrong."""
    last = history.metrics[-1] if history.metrics else {}
    # In a weighted sum of rewards, the classes have the name of their part in front.
    broken = next((name for name in last if name.startswith("outcome/") and name.endswith(OUTCOMES[0])), None)
    steps = [m for m in history.metrics if broken in m and m.get("rollout/reply_tokens")]
    if broken is None or len(steps) < 2 * RECENT:
        return None
    both = [steps[:RECENT], steps[-RECENT:]]

    def means(name: str) -> tuple[float, float]:
        before, after = (sum(m.get(name) or 0.0 for m in part) / RECENT for part in both)
        return before, after

    prefix = broken.removesuffix(OUTCOMES[0])
    *kinds, wrong, passed = (means(prefix + name) for name in OUTCOMES)
    rarer = {name: kind for name, kind in zip(OUTCOMES, kinds, strict=False) if kind[1] < kind[0]}
    tokens, what = means("rollout/reply_tokens"), " or a ".join(rarer)
    before, after = (sum(kind[i] for kind in rarer.values()) for i in (0, 1))
    fall = before - after
    if fall < FEWER or wrong[1] - wrong[0] < fall / 2 or passed[1] - passed[0] >= PASSED * fall:
        return None
    if tokens[1] > SHORTER * tokens[0]:
        return None
    return Finding(
        "short_programs",
        "warning",
        f"Programs with a {what} went from {percent(before)} to {percent(after)}, but wrong ones from "
        f"{percent(wrong[0])} to {percent(wrong[1])}, and {percent(passed[1])} pass ({percent(passed[0])} before): "
        f"programs have become shorter, from {tokens[0]:.1f} to {tokens[1]:.1f} tokens, and not better.",
        f"the ladder of outcomes pays more for a program that runs and is wrong than for one with a {what}, and the "
        "easiest such program is a short one",
        "pay for tests that pass (`--reward.kind passed` or `--reward.kind fraction`), learn from right programs, too "
        "(`--algorithm coderl`), or begin with easier problems, some of which are solved",
        (*(prefix + name for name in rarer), "rollout/reply_tokens"),
        history.step,
    )
