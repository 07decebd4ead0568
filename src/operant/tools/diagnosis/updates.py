"""Rules about the update of the weights: collapse, too large steps, a bad critic, NaN and infinity, overfitting."""

import math
from statistics import fmean

from operant.metrics.registry import METRICS
from operant.tools.diagnosis.distance import higher_kl_option
from operant.tools.diagnosis.history import Finding, History, number, percent

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
    """The entropy has collapsed."""
    first, now = history.first("policy/entropy"), history.recent("policy/entropy", STEPS)
    if not first or now is None or now > COLLAPSED * first:
        return None
    return Finding(
        "entropy",
        "warning",
        f"Entropy has fallen from {number(first)} to {number(now)} nats a token.",
        "the policy generates nearly the same whatever the random numbers: the steps are too large or KL too cheap",
        f"`--optimizer.lr` a third, {higher_kl_option(history)}, or `--loss.entropy_coef 0.01`",
        ("policy/entropy",),
        history.since("policy/entropy", lambda x: x <= COLLAPSED * first),
    )


def ratio(history: History) -> Finding | None:
    """New and old policy differ too much within one step."""
    said = {
        "policy/ratio_max": ("reached", max),
        "policy/ratio_min": ("fell to", min),
        "policy/ratio_std": ("had a spread of", fmean),
    }
    found = {name: history.values(name)[-STEPS:] for name in said}
    odd = [name for name, last in found.items() if last and all(map(METRICS[name].unhealthy, last))]
    if not odd:
        return None
    # Only what is beyond its range: a number of the healthy ones beside it would be read as the fault.
    clauses = [
        f"{said[name][0]} {number(said[name][1](found[name]))} (healthy: {METRICS[name].healthy})" for name in odd
    ]
    message = f"Within one step the ratio of new to old token probabilities {' and '.join(clauses)}."
    return Finding(
        "ratio",
        "warning",
        message,
        "the update goes too far for the replies that it learns from",
        "`--optimizer.lr` a third, `--update.epochs 1`, or stop early with `--update.target_kl 0.02`",
        tuple(said),
        history.since(odd[0], METRICS[odd[0]].unhealthy),
    )


def clipping(history: History) -> Finding | None:
    """Clipping removes a large part of the update."""
    share = history.recent("policy/clip_fraction", STEPS)
    if share is None or share < CLIPPED:
        return None
    return Finding(
        "clipping",
        "warning",
        f"{percent(share)} of the tokens are clipped.",
        "the steps are too large: clipping removes most of their effect",
        "`--optimizer.lr` a third, or fewer `--update.epochs`",
        ("policy/clip_fraction", "policy/approx_kl"),
        history.since("policy/clip_fraction", lambda x: x > CLIPPED),
    )


def no_step(history: History) -> Finding | None:
    """The line search of the trust region accepted no length, so the weights stayed as they were."""
    accepted = history.values("trust/accepted")
    if not accepted or accepted[-1] > 0:
        return None
    refused = sum(x == 0 for x in accepted)
    return Finding(
        "no_step",
        "warning",
        f"The line search accepted no step in {refused} of {len(accepted)} training steps, nor in the last.",
        "the Fisher matrix is of too few replies, so that the direction goes too far, or the surrogate is flat",
        "`--update.fisher_share 1`, a higher `--update.damping`, more `--update.backtracks`, or a larger `--batch`",
        ("trust/accepted", "trust/kl"),
        history.since("trust/accepted", lambda x: x == 0),
    )


def critic(history: History) -> Finding | None:
    """The critic predicts worse than the mean return."""
    values = history.values("value/explained_variance")
    last = values[-JUDGED:]
    if len(values) < WARM_UP + JUDGED:
        return None
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
    """Sampling and training disagree about the log-prob of a token."""
    gap = max(history.values("rollout/logprob_gap")[-3:], default=0.0)
    if gap < GAP:
        return None
    if gap > HALF:
        level, cause = "problem", "the engine generates with other weights, precision or sampling than training uses"
        remedy = "`--learner.rescore true` takes training's own log-probs; an engine of your own must load the weights "
        remedy += "in `sync`"
    else:
        level, cause = "note", "half precision does that (below 0.05); in float32 it would be a fault"
        remedy = "nothing in bfloat16; in float32 `operant doctor`, and `--learner.rescore true`"
    return Finding(
        "scoring",
        level,
        f"Log-probs differ by up to {number(gap)} nats between sampling and training with the same weights.",
        cause,
        remedy,
        ("rollout/logprob_gap",),
        history.since("rollout/logprob_gap", lambda x: x > GAP),
    )


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
    message = " and ".join(clauses)
    return Finding(
        "not_finite",
        "problem",
        f"{message[0].upper()}{message[1:]}.",
        "scores or steps so large that float arithmetic overflows",
        "`operant replay` with the run's refused/step-... shows which value, in which reply; `--score.clip 5`, "
        "`--optimizer.lr` a tenth, `--optimizer.max_grad_norm 1`; the weights are those of before",
        ("update/refused", "update/grad_norm", "loss/total"),
        refused_steps[0] if refused_steps else history.step,
    )


def refused(history: History) -> Finding | None:
    """Optimizer steps were refused because their ratios were too large."""
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


def overfits(history: History) -> Finding | None:
    """The held-out loss rises while the training loss keeps falling."""
    name = "evaluate/preference/loss" if history.loss == "preference/loss" else "evaluate/loss"
    losses = [(int(m.get("step", 0)), m[name]) for m in history.metrics if m.get(name) is not None]
    if len(losses) < 3:
        return None
    step, least = min(losses, key=lambda pair: pair[1])
    now = losses[-1][1]
    if now <= RISEN * least:
        return None
    return Finding(
        "overfits",
        "warning",
        f"The held-out loss was lowest at step {step}, {number(least)}, and is {number(now)} now.",
        "the model memorises the rows: there are few of them, or it has seen them too often",
        f"`--steps {step}`, or `--best -{name}` keeps the best model; more rows, or a lower `--optimizer.lr`",
        (name, history.loss),
        step,
    )


def guesses(history: History) -> Finding | None:
    """Held-out labels are not predicted better than by chance, or than by the length of the replies."""
    measured = (history.evaluation.get("after") or {}).get("metrics") or {}
    right, longer = (
        measured.get(name, history.recent(f"evaluate/{name}", 1))
        for name in ("preference/accuracy", "preference/longer_is_better")
    )
    if right is None or right > max(0.5, longer or 0.5) + ABOVE_CHANCE:
        return None
    length = f"; preferring the longer reply gets {percent(longer)}" if longer is not None else ""
    return Finding(
        "guesses",
        "warning",
        f"{percent(right)} of the held-out pairs are put into the right order, where chance gets 50 %{length}.",
        "the labels are noisy or few, or the model is too small to see what they are about",
        "more labels, or a larger `--trunk`; see how far labellers agree (`operant label FILE --agreement`); and "
        "train nothing against this model",
        ("evaluate/preference/accuracy", "preference/accuracy"),
        history.step,
    )
