"""Rule for supervised runs: does the model overfit its demonstrations?"""

from operant.diagnosis.history import Finding, History, number

ABOVE = 1.02
"""The held-out loss is rising when it is above this many times its lowest value."""


def overfits(history: History) -> Finding | None:
    """The held-out loss rises while the training loss keeps falling."""
    losses = [
        (int(m.get("step", 0)), m["evaluate/loss"]) for m in history.metrics if m.get("evaluate/loss") is not None
    ]
    if len(losses) < 3:
        return None
    step, least = min(losses, key=lambda pair: pair[1])
    now = losses[-1][1]
    if now <= ABOVE * least:
        return None
    return Finding(
        "overfits",
        "warning",
        f"The held-out loss was lowest at step {step}, {number(least)}, and is {number(now)} now.",
        "the model memorises the rows: there are few of them, or it has seen them too often",
        f"`--steps {step}`, or `--best -evaluate/loss` keeps the best model; more rows, or a lower `--optimizer.lr`",
        ("evaluate/loss", "supervised/loss"),
        step,
    )
