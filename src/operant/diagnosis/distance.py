"""How far the policy has gone from the reference, and what that costs it."""

from itertools import pairwise

from operant.diagnosis.history import RECENT, Finding, History, number, percent
from operant.diagnosis.progress import progress

HIGH = 10.0
"""Nats a reply: the end of the registry's band. The demo learns at 7 to 9, the letters without a price end at 200."""
HIGH_PER_TOKEN = 0.05
"""Nats a token: a reply of 500 tokens goes beyond 10 nats while each of its tokens is nearly the reference's."""
CHEAP = 0.05
"""Of the scores' spread: a penalty below this decides nothing."""
UNLIKELY = 1.0
"""Nats a token that replies became unlikelier under the reference. The healthy demo loses 0.4 at most on its way, the
letters without a price 5."""
LEAP, EARLY = 1.5, 3
"""Nats a token within one of so many first steps: no price acts as fast. The demo moves 0.08, the letters without a
price 0.14, a learning rate ten times the demo's 1.6."""
LOST = 0.5
"""Share of the entropy that is left."""
DROWNED = 2.0
"""Times the scores' spread that the KL penalty varies by. The demo stays below 0.8; at 2 the penalty is what is trained
on."""


def high_kl(history: History) -> Finding | None:
    """Paid, and still far away and going further; or far above the controller's target."""
    kl, target = _far(history), _target(history)
    if kl is None or unpaid(history):
        return None
    held = history.values("kl/per_reply")
    earlier = held[-2 * RECENT : -RECENT]
    rising = bool(earlier) and kl > 1.1 * sum(earlier) / len(earlier)
    missed = target is not None and kl > 2 * target
    if not rising and kl < 2 * HIGH and not missed:
        return None
    says = f"KL is {number(kl)} nats a reply" + (" and still rising" if rising else "") + ", beyond the usual 0 to 10"
    says += f" and far above its target of {number(target)}." if missed and target is not None else "."
    _, coef = price(history)
    return Finding(
        "high_kl",
        "warning",
        says,
        f"a nat costs {number(coef)} and the reward is worth more than that" if coef else "it costs too little",
        f"{dearer(history)}, or fewer or smaller steps: `--optimizer.lr`, `--steps`",
        ("kl/per_reply", "kl/coef", "reward/kl_penalty"),
        history.since("kl/per_reply", lambda x: x > HIGH),
    )


def leap(history: History) -> Finding | None:
    """A step that took the policy far away at once: no reward and no price is the reason, the step is."""
    held = history.values("kl/per_token")[: EARLY + 1]
    jumps = [b - a for a, b in pairwise(held)]
    far = max(jumps, default=0.0)
    if far < LEAP:
        return None
    at, rate = jumps.index(far), history.first("update/lr")
    told = history.values("kl/per_reply")
    return Finding(
        "leap",
        "problem",
        f"KL rose by {number(told[at + 1] - told[at])} nats a reply in one step, the {_ordinal(at + 1)}.",
        "the steps are far too large" + (f": a learning rate of {number(rate)}" if rate else ""),
        f"`--optimizer.lr {number(rate / 10)}`" if rate else "`--optimizer.lr` a tenth",
        ("kl/per_reply", "update/lr"),
        history.step if len(history.metrics) <= at + 1 else int(history.metrics[at + 1].get("step", at + 2)),
    )


def _ordinal(number: int) -> str:
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number, 'th') }"


def unpaid_kl(history: History) -> Finding | None:
    """Far away, and it costs nothing."""
    kl = _far(history)
    if kl is None or not unpaid(history):
        return None
    cause, remedy = leash(history)
    says = f"KL has reached {number(kl)} nats a reply, and next to nothing is paid for it."
    since = history.since("kl/per_reply", lambda x: x > HIGH)
    return Finding("unpaid_kl", "warning", says, cause, remedy, ("kl/per_reply", "reward/kl_penalty"), since)


def unmeasured(history: History) -> Finding | None:
    """No reference, and the policy has become much surer of itself."""
    first, now = history.first("policy/entropy"), history.recent("policy/entropy")
    if history.values("kl/per_reply") or not first or now is None or now > LOST * first:
        return None
    return Finding(
        "unmeasured",
        "warning",
        f"The policy has lost {percent(1 - now / first)} of its entropy, and nothing measures how far it has gone.",
        "there is no reference, so neither is KL measured nor anything paid for leaving the language",
        f"`--reference copy` and {dearer(history)}; or read replies: `operant report RUN --serve`",
        ("policy/entropy",),
        history.since("policy/entropy", lambda x: x < LOST * first),
    )


def unlikely_text(history: History) -> Finding | None:
    """The reward rises while what is said becomes text that the reference would hardly say."""
    first, now, score = (
        history.first("rollout/ref_logprob_mean"),
        history.recent("rollout/ref_logprob_mean"),
        progress(history),
    )
    if first is None or now is None or score is None or not score.learned or now > first - UNLIKELY:
        return None
    cause, remedy = leash(history)
    return Finding(
        "unlikely_text",
        "problem",
        f"The reward rose from {number(score.before)} to {number(score.after)} while a token's log-prob under the "
        f"reference fell from {first:.1f} to {now:.1f}.",
        f"the policy exploits the reward with text that the reference would hardly write: {cause}",
        remedy,
        ("reward/mean", "rollout/ref_logprob_mean"),
        history.since("rollout/ref_logprob_mean", lambda x: x < first - UNLIKELY),
    )


def drowned(history: History) -> Finding | None:
    """The KL penalty varies more between replies than the scores do."""
    penalty, now = history.recent("reward/kl_penalty_std"), history.recent("reward/scaled_std")
    if penalty is None or not now or history.trained < RECENT:
        return None
    # Where the reward was learnt, scores differ little because they are all high: then the start is the measure.
    score = progress(history)
    learned = score is not None and score.learned
    scores = max(now, history.first("reward/scaled_std") or 0.0) if learned else now
    if penalty < DROWNED * scores:
        return None
    coef = history.recent("kl/coef", 1) or 0.0
    return Finding(
        "drowned",
        "warning",
        f"The KL penalty varies by {number(penalty)} between replies, the scores by {number(scores)}.",
        f"the KL coefficient of {number(coef)} is too high: its noise is what the policy learns from",
        f"`--kl.coef {coef * scores / penalty / 2:.1g}`",
        ("reward/kl_penalty_std", "reward/scaled_std"),
        history.since("reward/kl_penalty_std", lambda x: x > DROWNED * scores),
    )


# --- what KL costs ----------------------------------------------------------------------------------------------------


def price(history: History) -> tuple[str, float]:
    """The option that charges KL, in the loss where that is done or the method takes it there alone, and its value now.

    0 where that is nothing or not known.
    """
    in_loss = history.recent("kl/loss_coef", 1) or 0.0
    grouped = history.option("advantage.scale") is not None  # advantages in units of their group's spread
    return ("kl.loss_coef", in_loss) if in_loss or grouped else ("kl.coef", history.recent("kl/coef", 1) or 0.0)


def dearer(history: History) -> str:
    """The command-line option that doubles the price of KL, or sets one."""
    name, coef = price(history)
    return f"`--{name} {number(2 * coef) if coef else 0.1}`"


def unpaid(history: History) -> bool:
    """Whether KL costs next to nothing beside how much the scores differ, and nothing in the loss."""
    paid, loss = history.recent("reward/kl_penalty") or 0.0, history.recent("kl/loss_coef", 1)
    spread = history.first("reward/scaled_std") or history.first("reward/std") or 1.0
    return not loss and paid < CHEAP * spread


def leash(history: History) -> tuple[str, str]:
    """Why nothing holds the policy to its language, and the option that does."""
    name, coef = price(history)
    if (jump := leap(history)) is not None:
        return jump.cause, jump.remedy
    if (noise := drowned(history)) is not None:
        return noise.cause, noise.remedy
    if not history.values("kl/per_reply"):
        return "there is no reference that KL could be paid to", f"`--reference copy` and {dearer(history)}"
    if not coef:
        return f"nothing is paid for leaving the reference ({name} is 0)", dearer(history)
    return f"{name}={number(coef)} is too low for this reward", dearer(history)


def _target(history: History) -> float | None:
    return float(history.option("kl.target", 0)) or None if history.option("kl.control") == "adaptive" else None


def _far(history: History) -> float | None:
    """KL a reply where it is beyond the band (or twice its target); None where it is not."""
    kl, each = history.recent("kl/per_reply"), history.recent("kl/per_token")
    if kl is None or (each is not None and each < HIGH_PER_TOKEN):
        return None
    return kl if kl > HIGH or kl > 2 * (_target(history) or HIGH) else None
