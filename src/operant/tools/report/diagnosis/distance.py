"""Rules about the KL distance between policy and reference, and about its penalty."""

from itertools import pairwise

from operant.tools.report.diagnosis.history import RECENT, Finding, History, finding, number, percent
from operant.tools.report.diagnosis.progress import progress

HIGH = 10.0
"""Nats per reply: the end of the registry's healthy range. The demo learns at 7 to 9, the letters task without a
penalty ends at 200."""
HIGH_PER_TOKEN = 0.05
"""Nats per token. A reply of 500 tokens exceeds 10 nats while each of its tokens is nearly as under the reference."""
FAR = 13.0
"""Nats per reply at which a KL that is paid for is reported. The letters recipe rises to 12 and stays there, so a KL
that has passed 10 and is still rising proves nothing."""
CHEAP = 0.05
"""A penalty below this share of the scores' spread has no effect."""
UNLIKELY = 1.0
"""Nats per token by which replies became less likely under the reference. The healthy demo loses 0.4 at most, the
letters task without a penalty 5."""
LEAP, EARLY = 1.5, 3
"""Nats per token within one of the first `EARLY` steps, which is faster than any penalty acts. The demo moves 0.08, the
letters task without a penalty 0.14, a learning rate ten times the demo's 1.6."""
USUAL_RATE = 3e-4
"""The learning rate that is proposed at most after such a leap: a tenth of one that is far off is far off too."""
LOST = 0.5
"""The entropy is low when it is below this share of its first value."""
OFF, MOVED, PATIENCE = 1.2, 1.01, 10
"""KL was off its target by this factor for so many steps, and the price moved by less than that one. At 1.2 the
controller moves as fast as it can: by 1 % in 10 steps of a run of 9,000, if the horizon is that of the run."""
DROWNED = 2.0
"""Times the scores' spread by which the KL penalty varies. The demo stays below 0.8; at 2 the penalty dominates the
training signal."""


def high_kl(history: History) -> Finding | None:
    """KL is penalised, but very high, or far above the controller's target."""
    kl, target = _excessive_kl(history), _target(history)
    if kl is None or unpaid(history):
        return None
    earlier = history.values("kl/per_reply")[-2 * RECENT : -RECENT]
    rising = bool(earlier) and kl > 1.1 * sum(earlier) / len(earlier)
    missed = target is not None and kl > 2 * target
    if kl < FAR and not missed:
        return None
    _, coef = price(history)
    return finding(
        "high_kl",
        history.since("kl/per_reply", lambda x: x > min(HIGH, 2 * (target or HIGH))),
        kl=number(kl),
        rising=" and still rising" if rising else "",
        beyond=", beyond the usual 0 to 10" if kl > HIGH else "",
        missed=f"{' and' if kl > HIGH else ','} far above its target of {number(target)}" if missed else "",
        cause=f"a nat costs {number(coef)} and the reward is worth more than that" if coef else "it costs too little",
        higher_price=higher_kl_option(history),
    )


def slow_price(history: History) -> Finding | None:
    target, kl, prices = _target(history), history.last("kl/per_reply", PATIENCE), history.last("kl/coef", PATIENCE)
    if target is None or len(kl) < PATIENCE or len(prices) < PATIENCE or not prices[0]:
        return None
    low, high = min(kl) / target, max(kl) / target
    if not (low > OFF or high < 1 / OFF) or not 1 / MOVED < prices[-1] / prices[0] < MOVED:
        return None
    since = history.since("kl/per_reply", lambda x: not 1 / OFF <= x / target <= OFF)
    ends = {"target": number(target), "before": number(prices[0]), "after": number(prices[-1])}
    return finding("slow_price", since, kl=number(sum(kl) / PATIENCE), steps=PATIENCE, **ends)


def leap(history: History) -> Finding | None:
    """One of the first steps moved the policy very far. The size of the step is the reason, not reward or penalty."""
    jumps = [b - a for a, b in pairwise(history.values("kl/per_token")[: EARLY + 1])]
    if max(jumps, default=0.0) < LEAP:
        return None
    at, rate, per_reply = jumps.index(max(jumps)), history.first("update/lr"), history.values("kl/per_reply")
    if len(per_reply) <= at + 1:
        return None
    return finding(
        "leap",
        history.step if len(history.metrics) <= at + 1 else int(history.metrics[at + 1].get("step", at + 2)),
        rise=number(per_reply[at + 1] - per_reply[at]),
        which=("1st", "2nd", "3rd")[at],
        rate=f": a learning rate of {number(rate)}" if rate else "",
        remedy=f"`--optimizer.lr {min(rate / 10, USUAL_RATE):g}`" if rate else "`--optimizer.lr` a tenth",
    )


def unpaid_kl(history: History) -> Finding | None:
    kl = _excessive_kl(history)
    if kl is None or not unpaid(history):
        return None
    since = history.since("kl/per_reply", lambda x: x > HIGH)
    return finding("unpaid_kl", since, kl=number(kl), **kl_advice(history))


def unmeasured(history: History) -> Finding | None:
    first, now = history.first("policy/entropy"), history.recent("policy/entropy")
    known = history.values("kl/per_reply") or history.values("kl/per_token")  # other libraries may log the second alone
    if known or not first or now is None or now > LOST * first:
        return None
    remedy = f"`--reference copy` and {higher_kl_option(history)}; or read replies: `operant report RUN --serve`"
    if history.option("env"):  # a policy that plays well is sure of its commands, and far from a model of language
        remedy = "compare the games that it wins before and after; if they are fewer, `--loss.entropy-coef 0.01`"
    since = history.since("policy/entropy", lambda x: x < LOST * first)
    return finding("unmeasured", since, share=percent(1 - now / first), remedy=remedy)


def unlikely_text(history: History) -> Finding | None:
    first, now = history.first("rollout/ref_logprob_mean"), history.recent("rollout/ref_logprob_mean")
    score = progress(history)
    if first is None or now is None or score is None or not score.learned or now > first - UNLIKELY:
        return None
    since = history.since("rollout/ref_logprob_mean", lambda x: x < first - UNLIKELY)
    rise = {"before": number(score.before), "after": number(score.after)}
    return finding("unlikely_text", since, first=first, now=now, **rise, **kl_advice(history))


def drowned(history: History) -> Finding | None:
    penalty, scores = history.recent("reward/kl_penalty_std"), history.recent("reward/scaled_std")
    if penalty is None or not scores or history.trained_steps < RECENT:
        return None
    # A policy that has learned gets similar, high scores. Their spread at the start is then the measure.
    score = progress(history)
    if score is not None and score.learned:
        scores = max(scores, history.first("reward/scaled_std") or 0.0)
    if penalty < DROWNED * scores:
        return None
    coef = history.recent("kl/coef", 1) or 0.0
    since = history.since("reward/kl_penalty_std", lambda x: x > DROWNED * scores)
    found = {"penalty": number(penalty), "scores": number(scores), "coef": number(coef)}
    return finding("drowned", since, lower=coef * scores / penalty / 2, **found)


def price(history: History) -> tuple[str, float]:
    """Return the option that charges KL and its current value, 0 if unknown.

    It is `kl.loss_coef` if the loss has a KL term or the method takes KL there only, else `kl.coef`.
    """
    in_loss = history.recent("kl/loss_coef", 1) or 0.0
    grouped = history.option("advantage.scale") is not None  # advantages in units of their group's spread
    return ("kl.loss_coef", in_loss) if in_loss or grouped else ("kl.coef", history.recent("kl/coef", 1) or 0.0)


def higher_kl_option(history: History) -> str:
    name, coef = price(history)
    return f"a higher `--{name}`" if _unknown_price(history) else f"`--{name} {number(2 * coef) if coef else 0.1}`"


def _unknown_price(history: History) -> bool:
    """Whether KL is logged, and not what is paid for it, as in logs of other libraries."""
    paid = any(map(history.values, ("kl/coef", "kl/loss_coef", "reward/kl_penalty")))
    return not paid and bool(history.values("kl/per_reply"))


def unpaid(history: History) -> bool:
    """Return whether the KL penalty is tiny beside the spread of the scores, and the loss has no KL term."""
    if _unknown_price(history):
        return False
    paid, loss = history.recent("reward/kl_penalty") or 0.0, history.recent("kl/loss_coef", 1)
    spread = history.first("reward/scaled_std") or history.first("reward/std") or 1.0
    return not loss and paid < CHEAP * spread


def kl_advice(history: History) -> dict[str, str]:
    """Return `kl_cause`, which lets the policy move away from the reference, and `kl_remedy`, for `finding`."""
    (name, coef), higher = price(history), higher_kl_option(history)
    if (found := leap(history) or drowned(history)) is not None:
        cause, remedy = found.cause, found.remedy
    elif not history.values("kl/per_reply"):
        cause, remedy = "there is no reference model that KL refers to", f"`--reference copy` and {higher}"
    elif _unknown_price(history):
        cause, remedy = "KL costs too little for this reward", higher
    elif not coef:
        cause, remedy = f"moving away from the reference costs nothing ({name} is 0)", higher
    else:
        cause, remedy = f"{name}={number(coef)} is too low for this reward", higher
    return {"kl_cause": cause, "kl_remedy": remedy}


def _target(history: History) -> float | None:
    return float(history.option("kl.target", 0)) or None if history.option("kl.control") == "adaptive" else None


def _excessive_kl(history: History) -> float | None:
    """Return KL per reply if it is beyond the healthy range, or beyond twice the controller's target; else None."""
    kl, per_token = history.recent("kl/per_reply"), history.recent("kl/per_token")
    if kl is None or (per_token is not None and per_token < HIGH_PER_TOKEN):
        return None
    return kl if kl > HIGH or kl > 2 * (_target(history) or HIGH) else None
