"""What a run on given replies does: it fits them, or learns them by heart."""

from operant.diagnosis.history import Finding, History, number

ABOVE = 1.02
"""Of its lowest value: a held-out loss above it has turned."""


def given(history: History) -> bool:
    """Whether the run learns from given replies: their texts say nothing about the policy."""
    return bool(history.values("supervised/loss"))


def overfits(history: History) -> Finding | None:
    """The held-out loss has turned and rises, while the other one goes on falling."""
    held = [(int(m.get("step", 0)), m["evaluate/loss"]) for m in history.metrics if m.get("evaluate/loss") is not None]
    if len(held) < 3:
        return None
    step, least = min(held, key=lambda pair: pair[1])
    now = held[-1][1]
    if now <= ABOVE * least:
        return None
    return Finding(
        "overfits",
        "warning",
        f"The held-out loss was lowest at step {step}, {number(least)}, and is {number(now)} now.",
        "the model learns the rows by heart: there are few of them, or it has seen them too often",
        f"`--steps {step}`, or `--best -evaluate/loss` keeps the best model; more rows, or a lower `--optimizer.lr`",
        ("evaluate/loss", "supervised/loss"),
        step,
    )
