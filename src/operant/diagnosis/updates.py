"""How the weights move: collapse, steps that are too large, a critic that misleads, numbers that are none."""

from collections.abc import Mapping

from operant.diagnosis.distance import dearer
from operant.diagnosis.history import Finding, History, number, percent
from operant.metrics.registry import METRICS

COLLAPSED = 0.25
"""Of the first step's entropy. The demo keeps 0.85."""
WARM_UP, JUDGED = 20, 10
"""A critic begins at zero and knows nothing for some steps; then this many are looked at together."""
WORSE = -0.2
"""Explained variance. Where there is nothing to know (the demo's controls) ten steps' mean goes down to -0.09."""
GAP, HALF = 1e-3, 0.05
"""Nats. The registry: below 0.0001 in float32, below 0.05 in bfloat16."""
CLIPPED = 0.3
"""The registry's band."""


def entropy(history: History) -> Finding | None:
    """The policy has become sure of everything."""
    first, now = history.first("policy/entropy"), history.recent("policy/entropy", 3)
    if not first or now is None or now > COLLAPSED * first:
        return None
    return Finding(
        "entropy",
        "warning",
        f"Entropy has fallen from {number(first)} to {number(now)} nats a token.",
        "the policy says nearly the same whatever the random numbers are: the steps are too large or KL too cheap",
        f"`--optimizer.lr` a third, {dearer(history)}, or `--loss.entropy_coef 0.01`",
        ("policy/entropy",),
        history.since("policy/entropy", lambda x: x <= COLLAPSED * first),
    )


def ratio(history: History) -> Finding | None:
    """New and old policy differ too much within one step."""
    highs, lows = history.values("policy/ratio_max")[-3:], history.values("policy/ratio_min")[-3:]
    spread = history.recent("policy/ratio_std", 3)
    high, low = max(highs, default=1.0), min(lows, default=1.0)
    odd = [
        n
        for n, x in (("max", high), ("min", low), ("std", spread))
        if x is not None and METRICS[f"policy/ratio_{n}"].unhealthy(x)
    ]
    if not odd:
        return None
    says = f"Within one step a token's probability changed up to {number(high)} and down to {number(low)} times the old"
    says += f" (spread {number(spread)})." if spread is not None else "."
    name = f"policy/ratio_{odd[0]}"
    return Finding(
        "ratio",
        "warning",
        says,
        "the update goes too far for the replies that it learns from",
        "`--optimizer.lr` a third, `--update.epochs 1`, or stop early with `--update.target_kl 0.02`",
        ("policy/ratio_max", "policy/ratio_min", "policy/ratio_std"),
        history.since(name, METRICS[name].unhealthy),
    )


def clipping(history: History) -> Finding | None:
    """Clipping holds much of the update back."""
    share = history.recent("policy/clip_fraction", 3)
    if share is None or share < CLIPPED:
        return None
    return Finding(
        "clipping",
        "warning",
        f"{percent(share)} of the tokens are clipped.",
        "the steps are too large: most of what they would change is held back",
        "`--optimizer.lr` a third, or fewer `--update.epochs`",
        ("policy/clip_fraction", "policy/approx_kl"),
        history.since("policy/clip_fraction", lambda x: x > CLIPPED),
    )


def critic(history: History) -> Finding | None:
    """The critic knows less than the mean return."""
    held = history.values("value/explained_variance")
    if len(held) < WARM_UP + JUDGED:
        return None
    last = held[-JUDGED:]
    mean = sum(last) / len(last)
    if mean > WORSE or sum(x < 0 for x in last) < JUDGED - 2:
        return None
    return Finding(
        "critic",
        "warning",
        f"The critic is worse than the mean: explained variance {mean:.2f} over the last {JUDGED} steps.",
        "it cannot follow the returns: they are large or jump, or it learns too slowly",
        "`--score.normalise true`, `--loss.value_clip none`, a higher `--loss.value_coef`, or a critic of its own: "
        "`--value.critic copy`",
        ("value/explained_variance", "value/loss"),
        history.since("value/explained_variance", lambda x: x < 0),
    )


def scoring(history: History) -> Finding | None:
    """Sampling and training disagree about a token's log-prob."""
    gap = max(history.values("rollout/logprob_gap")[-3:], default=0.0)
    if gap < GAP:
        return None
    return Finding(
        "scoring",
        "problem" if gap > HALF else "note",
        f"Log-probs differ by up to {number(gap)} nats between sampling and training with the same weights.",
        "the engine speaks with other weights, another precision or another sampling than are trained"
        if gap > HALF
        else "half precision does that (below 0.05); in float32 it would be a fault",
        "`--learner.rescore true` takes training's own; an engine of your own must load the weights in `sync`"
        if gap > HALF
        else "nothing in bfloat16; in float32 `operant doctor`, and `--learner.rescore true`",
        ("rollout/logprob_gap",),
        history.since("rollout/logprob_gap", lambda x: x > GAP),
    )


def not_finite(history: History) -> Finding | None:
    """Numbers that are none, and optimizer steps that were refused."""
    count = sum(x > 0 for x in history.values("update/refused"))
    null = _nulls(history.metrics[-1]) if history.metrics else []
    if not count and not null:
        return None
    what = [f"{count} step{'s were' if count > 1 else ' was'} refused: a number was not finite"] * bool(count)
    what += [f"{', '.join(null[:3])} {'is' if len(null) == 1 else 'are'} not finite"] * bool(null)
    says = " and ".join(what)
    return Finding(
        "not_finite",
        "problem",
        f"{says[0].upper()}{says[1:]}.",
        "scores or steps so large that float arithmetic overflows",
        "`operant replay` with the run's refused/step-... says which number, in which reply; `--score.clip 5`, "
        "`--optimizer.lr` a tenth, `--optimizer.max_grad_norm 1`; the weights are those of before",
        ("update/refused", "update/grad_norm", "loss/total"),
        next(
            (int(m.get("step", i)) for i, m in enumerate(history.metrics, 1) if m.get("update/refused")),
            history.step,
        ),
    )


def refused(history: History) -> Finding | None:
    """Optimizer steps refused for their ratios."""
    share = history.recent("policy/skipped_steps") or 0.0
    if share < 1e-9:
        return None
    limit = history.option("update.ratio_threshold")
    return Finding(
        "refused",
        "warning",
        f"{percent(share)} of the optimizer steps were refused: their mean ratio was beyond the threshold"
        + (f" of {number(limit)}." if limit else "."),
        "earlier minibatches of the same step had already moved the policy too far",
        "`--optimizer.lr` a third, or `--update.epochs 1`",
        ("policy/skipped_steps", "policy/ratio_mean"),
        history.since("policy/skipped_steps", lambda x: x > 0),
    )


def _nulls(metrics: Mapping[str, object]) -> list[str]:
    """Names whose number was not finite: null on disk, NaN or infinite in memory."""
    return [n for n, x in metrics.items() if x is None or (isinstance(x, float) and x - x != 0)]
