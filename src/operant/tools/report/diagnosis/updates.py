"""Rules about the update of the weights: collapse, too large steps, a bad critic, NaN and infinity, overfitting."""

import math
from statistics import fmean

from operant.metrics.registry import METRICS
from operant.tools.report.diagnosis.distance import higher_kl_option
from operant.tools.report.diagnosis.history import Finding, History, capitalised, finding, number, percent, too_large

STEPS = 3
"""The current value of a metric of the update is its mean over this many steps."""
COLLAPSED = 0.25
"""Share of the first step's entropy. The demo keeps 0.85."""
WARM_UP, JUDGED = 20, 10
"""A critic begins at zero and needs some steps to warm up; then this many steps are averaged."""
WORSE = -0.2
"""Explained variance. With random rewards (the demo's controls) the mean of ten steps goes down to -0.09."""
GAP, HALF = 1e-3, 0.05
"""Nats. The registry: below 0.0001 in float32, below 0.05 in bfloat16."""
CLIPPED = 0.3
"""The end of the registry's healthy range."""
ABOVE_CHANCE = 0.02
"""A share of right pairs that is no further above that of chance or length is a guess."""
RISEN = 1.02
"""The held-out loss is rising when it is above this many times its lowest value."""


def entropy(history: History) -> Finding | None:
    first, now = history.first("policy/entropy"), history.recent("policy/entropy", STEPS)
    if not first or now is None or now > COLLAPSED * first:
        return None
    since = history.since("policy/entropy", lambda x: x <= COLLAPSED * first)
    return finding("entropy", since, first=number(first), now=number(now), higher_price=higher_kl_option(history))


def ratio(history: History) -> Finding | None:
    said = {
        "policy/ratio_max": ("reached", max),
        "policy/ratio_min": ("fell to", min),
        "policy/ratio_std": ("had a spread of", fmean),
    }
    found = {name: history.last(name, STEPS) for name in said}
    odd = [name for name, last in found.items() if last and all(map(METRICS[name].unhealthy, last))]
    if not odd:
        return None
    # Only what is beyond its range: a number of the healthy ones beside it would be read as the fault.
    clauses = [f"{said[n][0]} {number(said[n][1](found[n]))} (healthy: {METRICS[n].healthy})" for n in odd]
    since = history.since(odd[0], METRICS[odd[0]].unhealthy)
    return finding("ratio", since, evidence=" and ".join(clauses))


def clipping(history: History) -> Finding | None:
    return too_large(history, "clipping", "policy/clip_fraction", CLIPPED, STEPS)


def no_step(history: History) -> Finding | None:
    accepted = history.values("trust/accepted")
    if not accepted or accepted[-1] > 0:
        return None
    since = history.since("trust/accepted", lambda x: x == 0)
    return finding("no_step", since, refused=sum(x == 0 for x in accepted), steps=len(accepted))


def critic(history: History) -> Finding | None:
    values, last = history.values("value/explained_variance"), history.last("value/explained_variance", JUDGED)
    if len(values) < WARM_UP + JUDGED:
        return None
    mean = sum(last) / len(last)
    if mean > WORSE or sum(x < 0 for x in last) < JUDGED - 2:
        return None
    since = history.since("value/explained_variance", lambda x: x < 0)
    return finding("critic", since, mean=mean, steps=JUDGED)


def scoring(history: History) -> Finding | None:
    gap = max(history.last("rollout/logprob_gap", 3), default=0.0)
    if gap < GAP:
        return None
    if gap > HALF:
        level, cause = "problem", "the engine generates with other weights, precision or sampling than training uses"
        remedy = "`--learner.rescore true` takes training's own log-probs; an engine of your own must load the weights "
        remedy += "in `sync`"
    else:
        level, cause = "note", "half precision does that (below 0.05); in float32 it would be a fault"
        remedy = "nothing in bfloat16; in float32 `operant doctor`, and `--learner.rescore true`"
    since = history.since("rollout/logprob_gap", lambda x: x > GAP)
    return finding("scoring", since, level=level, gap=number(gap), cause=cause, remedy=remedy)


def not_finite(history: History) -> Finding | None:
    """A metric is NaN or infinity, or optimizer steps were refused because of one."""
    refused_steps = [int(m.get("step", i)) for i, m in enumerate(history.metrics, 1) if m.get("update/refused")]
    count = sum(x > 0 for x in history.values("update/refused"))
    newest = history.metrics[-1] if history.metrics else {}
    # A value that was not finite is null on disk, and NaN or infinity in memory.
    bad = [name for name, x in newest.items() if x is None or (isinstance(x, float) and not math.isfinite(x))]
    clauses = []
    if count:
        clauses.append(f"{count} step{'s were' if count > 1 else ' was'} refused because of NaN or infinity")
    if bad:
        clauses.append(f"{', '.join(bad[:3])} {'is' if len(bad) == 1 else 'are'} NaN or infinity")
    if not clauses:
        return None
    begun = refused_steps[0] if refused_steps else history.step
    return finding("not_finite", begun, evidence=capitalised(" and ".join(clauses)))


def refused(history: History) -> Finding | None:
    share = history.recent("policy/skipped_steps") or 0.0
    if share < 1e-9:
        return None
    limit = history.option("update.ratio_threshold")
    since = history.since("policy/skipped_steps", lambda x: x > 0)
    return finding("refused", since, share=percent(share), limit=f" of {number(limit)}" if limit else "")


def overfits(history: History) -> Finding | None:
    name = "evaluate/preference/loss" if history.loss == "preference/loss" else "evaluate/loss"
    losses = [(int(m.get("step", 0)), m[name]) for m in history.metrics if m.get(name) is not None]
    if len(losses) < 3:
        return None
    (step, least), now = min(losses, key=lambda pair: pair[1]), losses[-1][1]
    if now <= RISEN * least:
        return None
    return finding("overfits", step, least=number(least), now=number(now), metric=name, loss=history.loss)


def guesses(history: History) -> Finding | None:
    measured = (history.evaluation.get("after") or {}).get("metrics") or {}
    right, longer = (
        measured.get(name, history.recent(f"evaluate/{name}", 1))
        for name in ("preference/accuracy", "preference/longer_is_better")
    )
    if right is None or right > max(0.5, longer or 0.5) + ABOVE_CHANCE:
        return None
    length = f"; preferring the longer reply gets {percent(longer)}" if longer is not None else ""
    why = "the labels are noisy or few, or the model is too small to see what they are about"
    if right > 0.5 + ABOVE_CHANCE:
        why = "the longer reply is the better one in most pairs, so that its length may be all that the model judges by"
    return finding("guesses", history.step, right=percent(right), length=length, why=why)
