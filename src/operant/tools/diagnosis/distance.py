"""Rules about the KL distance between policy and reference, and about its penalty."""

from itertools import pairwise

from operant.tools.diagnosis.history import RECENT, Finding, History, number, percent
from operant.tools.diagnosis.progress import progress

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
    message = f"KL is {number(kl)} nats a reply{' and still rising' if rising else ''}, beyond the usual 0 to 10"
    message += f" and far above its target of {number(target)}." if missed and target is not None else "."
    _, coef = price(history)
    return Finding(
        "high_kl",
        "warning",
        message,
        f"a nat costs {number(coef)} and the reward is worth more than that" if coef else "it costs too little",
        f"{higher_kl_option(history)}, or fewer or smaller steps: `--optimizer.lr`, `--steps`",
        ("kl/per_reply", "kl/coef", "reward/kl_penalty"),
        history.since("kl/per_reply", lambda x: x > HIGH),
    )


def slow_price(history: History) -> Finding | None:
    """KL has been off its target on one side, and the price that shall correct it has hardly moved."""
    target, kl = _target(history), history.values("kl/per_reply")[-PATIENCE:]
    prices = history.values("kl/coef")[-PATIENCE:]
    if target is None or len(kl) < PATIENCE or len(prices) < PATIENCE or not prices[0]:
        return None
    low, high = min(kl) / target, max(kl) / target
    if not (low > OFF or high < 1 / OFF) or not 1 / MOVED < prices[-1] / prices[0] < MOVED:
        return None
    return Finding(
        "slow_price",
        "warning",
        f"KL has been {number(sum(kl) / PATIENCE)} nats a reply for {PATIENCE} steps, off its target of "
        f"{number(target)}, and the price has only gone from {number(prices[0])} to {number(prices[-1])}.",
        "kl.horizon is far too long for this run: the controller corrects over more replies than there are",
        "leave `kl.horizon` out, so that it follows the length of the run, or set it to a few times the batch",
        ("kl/per_reply", "kl/coef"),
        history.since("kl/per_reply", lambda x: not 1 / OFF <= x / target <= OFF),
    )


def leap(history: History) -> Finding | None:
    """One of the first steps moved the policy very far. The size of the step is the reason, not reward or penalty."""
    jumps = [b - a for a, b in pairwise(history.values("kl/per_token")[: EARLY + 1])]
    if max(jumps, default=0.0) < LEAP:
        return None
    at, rate = jumps.index(max(jumps)), history.first("update/lr")
    per_reply = history.values("kl/per_reply")
    lower = min(rate / 10, USUAL_RATE) if rate else None
    return Finding(
        "leap",
        "problem",
        f"KL rose by {number(per_reply[at + 1] - per_reply[at])} nats a reply in one step, the "
        f"{('1st', '2nd', '3rd')[at]}.",
        "the steps are far too large" + (f": a learning rate of {number(rate)}" if rate else ""),
        f"`--optimizer.lr {lower:g}`" if lower else "`--optimizer.lr` a tenth",
        ("kl/per_reply", "update/lr"),
        history.step if len(history.metrics) <= at + 1 else int(history.metrics[at + 1].get("step", at + 2)),
    )


def unpaid_kl(history: History) -> Finding | None:
    """KL is high and costs nothing."""
    kl = _excessive_kl(history)
    if kl is None or not unpaid(history):
        return None
    message = f"KL has reached {number(kl)} nats a reply, and next to nothing is paid for it."
    since = history.since("kl/per_reply", lambda x: x > HIGH)
    return Finding("unpaid_kl", "warning", message, *kl_advice(history), ("kl/per_reply", "reward/kl_penalty"), since)


def unmeasured(history: History) -> Finding | None:
    """There is no reference model, and the policy has lost much of its entropy."""
    first, now = history.first("policy/entropy"), history.recent("policy/entropy")
    if history.values("kl/per_reply") or not first or now is None or now > LOST * first:
        return None
    remedy = f"`--reference copy` and {higher_kl_option(history)}; or read replies: `operant report RUN --serve`"
    if history.option("env"):  # a policy that plays well is sure of its commands, and far from a model of language
        remedy = "compare the games that it wins before and after; if they are fewer, `--loss.entropy-coef 0.01`"
    return Finding(
        "unmeasured",
        "warning",
        f"The policy has lost {percent(1 - now / first)} of its entropy, and nothing measures how far it has moved.",
        "there is no reference model, so KL is neither measured nor penalised",
        remedy,
        ("policy/entropy",),
        history.since("policy/entropy", lambda x: x < LOST * first),
    )


def unlikely_text(history: History) -> Finding | None:
    """The reward rises while the replies become very unlikely under the reference."""
    first, now = history.first("rollout/ref_logprob_mean"), history.recent("rollout/ref_logprob_mean")
    score = progress(history)
    if first is None or now is None or score is None or not score.learned or now > first - UNLIKELY:
        return None
    cause, remedy = kl_advice(history)
    return Finding(
        "unlikely_text",
        "problem",
        f"The reward rose from {number(score.before)} to {number(score.after)} while a token's log-prob under the "
        f"reference fell from {first:.1f} to {now:.1f}.",
        f"the policy exploits the reward with text that is very unlikely under the reference: {cause}",
        remedy,
        ("reward/mean", "rollout/ref_logprob_mean"),
        history.since("rollout/ref_logprob_mean", lambda x: x < first - UNLIKELY),
    )


def drowned(history: History) -> Finding | None:
    """The KL penalty varies more between replies than the scores do."""
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
    return Finding(
        "drowned",
        "warning",
        f"The KL penalty varies by {number(penalty)} between replies, the scores by {number(scores)}.",
        f"the KL coefficient of {number(coef)} is too high: the policy learns from its noise",
        f"`--kl.coef {coef * scores / penalty / 2:.1g}`",
        ("reward/kl_penalty_std", "reward/scaled_std"),
        history.since("reward/kl_penalty_std", lambda x: x > DROWNED * scores),
    )


# --- the price of KL --------------------------------------------------------------------------------------------------


def price(history: History) -> tuple[str, float]:
    """Return the option that charges KL and its current value, 0 if unknown.

    It is `kl.loss_coef` if the loss has a KL term or the method takes KL there only, else `kl.coef`.
    """
    in_loss = history.recent("kl/loss_coef", 1) or 0.0
    grouped = history.option("advantage.scale") is not None  # advantages in units of their group's spread
    return ("kl.loss_coef", in_loss) if in_loss or grouped else ("kl.coef", history.recent("kl/coef", 1) or 0.0)


def higher_kl_option(history: History) -> str:
    """Return the command-line option that doubles the price of KL, or sets one."""
    name, coef = price(history)
    return f"`--{name} {number(2 * coef) if coef else 0.1}`"


def unpaid(history: History) -> bool:
    """Return whether the KL penalty is tiny beside the spread of the scores, and the loss has no KL term."""
    paid, loss = history.recent("reward/kl_penalty") or 0.0, history.recent("kl/loss_coef", 1)
    spread = history.first("reward/scaled_std") or history.first("reward/std") or 1.0
    return not loss and paid < CHEAP * spread


def kl_advice(history: History) -> tuple[str, str]:
    """Return the cause that lets the policy move away from the reference, and the remedy."""
    name, coef = price(history)
    if (finding := leap(history) or drowned(history)) is not None:
        return finding.cause, finding.remedy
    if not history.values("kl/per_reply"):
        return "there is no reference model that KL refers to", f"`--reference copy` and {higher_kl_option(history)}"
    if not coef:
        return f"moving away from the reference costs nothing ({name} is 0)", higher_kl_option(history)
    return f"{name}={number(coef)} is too low for this reward", higher_kl_option(history)


def _target(history: History) -> float | None:
    return float(history.option("kl.target", 0)) or None if history.option("kl.control") == "adaptive" else None


def _excessive_kl(history: History) -> float | None:
    """Return KL per reply if it is beyond the healthy range, or beyond twice the controller's target; else None."""
    kl, per_token = history.recent("kl/per_reply"), history.recent("kl/per_token")
    if kl is None or (per_token is not None and per_token < HIGH_PER_TOKEN):
        return None
    return kl if kl > HIGH or kl > 2 * (_target(history) or HIGH) else None
