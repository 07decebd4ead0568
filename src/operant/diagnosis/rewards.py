"""What the reward says: too little, always the same, mostly about the query; and whether it rises at all."""

from operant.diagnosis.history import RECENT, Finding, History, number, percent
from operant.diagnosis.progress import progress

EQUAL = 1e-6
"""Of a score: spreads below it are rounding."""
SATURATED = 0.1
"""Of the first step's spread. The demo, which has gone far, keeps 0.25."""
QUERY = 0.8
"""Share of the scores' variance; the registry's band."""
ABSTAINED = 0.1
"""The registry's band."""
PATIENCE = 30
"""Steps without a rise before that is told: the demo has risen by half after 5."""
MOVED = 1.0
"""Nats a reply: less, and the policy has hardly tried anything else."""


def constant(history: History) -> Finding | None:
    """Every reply gets the same score."""
    spreads, mean = history.values("reward/std")[-3:], history.recent("reward/mean", 1)
    if not spreads or mean is None or max(spreads) > EQUAL * max(abs(mean), 1e-3):
        return None
    learned = (score := progress(history)) is not None and score.learned
    highest = max(history.values("reward/max"), default=mean)
    if learned or (max(history.values("reward/std")) > EQUAL and mean >= highest):  # it did see the reply, and is full
        return _full(history, f"Every reply now scores {number(mean)}")
    return Finding(
        "constant",
        "problem",
        f"Every reply scores {number(mean)}, so there is nothing to learn from.",
        "the reward does not see the reply, is too hard to ever give more, or failed in silence",
        "read replies and scores (`operant report RUN --serve`); try the reward on texts that must score high and low; "
        "begin with easier tasks",
        ("reward/std", "reward/mean"),
        history.since("reward/std", lambda x: x <= EQUAL * max(abs(mean), 1e-3)),
    )


def no_advantage(history: History) -> Finding | None:
    """Steps in which no reply was better or worse than expected."""
    zero = history.values("policy/advantage_zero")[-RECENT:]
    count = sum(share == 1 for share in zero)
    if not count:
        return None
    steps = "the last step" if len(zero) == 1 else f"{count} of the last {len(zero)} steps"
    return Finding(
        "no_advantage",
        "problem" if count == len(zero) else "warning",
        f"In {steps} every advantage was 0: no reply was better than those that it is compared with.",
        "the replies to one query all got the same score, or there was only one of each",
        "more `--samples` to a prompt, tasks that are neither always solved nor never, or a reward with more values",
        ("policy/advantage_zero", "reward/std"),
        history.since("policy/advantage_zero", lambda x: x == 1),
    )


def saturated(history: History) -> Finding | None:
    """Nearly all replies score as high as any."""
    first, now, mean = history.first("reward/std"), history.recent("reward/std"), history.recent("reward/mean")
    score, most = progress(history), max(history.values("reward/max")[-RECENT:], default=None)
    if not first or now is None or mean is None or most is None or score is None or not score.learned:
        return None
    if now > SATURATED * first or now <= EQUAL * abs(mean) or most - mean > first:
        return None
    return _full(history, f"Scores differ by {number(now)} only ({number(first)} at first), all near {number(most)}")


def _full(history: History, what: str) -> Finding:
    first = history.first("reward/std") or 0.0
    return Finding(
        "saturated",
        "note",
        f"{what}: there is nothing left to learn from this reward.",
        "the policy has found what it pays most for",
        "stop here (`--steps`), go back to an earlier checkpoint if the replies read worse, or ask for more: harder "
        "tasks, a second reward",
        ("reward/std", "reward/max"),
        history.since("reward/std", lambda x: x <= SATURATED * first),
    )


def query_decides(history: History) -> Finding | None:
    """The score depends mostly on what was asked."""
    name = "reward/query_share" if history.values("reward/query_share") else "probe/query_share"
    share = history.recent(name)
    if share is None or share < QUERY:
        return None
    reward = history.option("reward")
    named = reward if isinstance(reward, str) and not reward.startswith("<") else "NAME"
    return Finding(
        "query_decides",
        "warning",
        f"The query explains {percent(share)} of the differences between scores.",
        "the reward judges what was asked more than what was answered, which is noise to the policy",
        f"subtract the query's own score: `--reward minus_query:{named}` (from Python, `minus_query(reward)`)",
        (name,),
        history.since(name, lambda x: x >= QUERY),
    )


def abstains(history: History) -> Finding | None:
    """The reward will not judge many replies."""
    share = history.recent("reward/abstained")
    if share is None or share < ABSTAINED:
        return None
    return Finding(
        "abstains",
        "warning",
        f"The reward would not judge {percent(share)} of the replies; nothing is learnt from them.",
        "the reward returned None for them",
        "see which in `operant report RUN --serve` (an empty score); give them a low score instead where they are bad",
        ("reward/abstained",),
        history.since("reward/abstained", lambda x: x >= ABSTAINED),
    )


def flat(history: History) -> Finding | None:
    """The policy moves, and the reward does not rise."""
    kl, score = history.recent("kl/per_reply"), progress(history)
    if kl is None or score is None or history.trained < PATIENCE or kl < MOVED:
        return None
    if score.learned or (score.rise > 0 and score.beyond_noise):
        return None
    return Finding(
        "flat",
        "warning",
        f"In {history.trained} steps the policy moved {number(kl)} nats and the {score.what} did not rise: "
        f"{number(score.before)} before, {number(score.after)} now.",
        "the reward does not depend on the replies, its noise is too large for this batch, or the learning rate is "
        "too high",
        "look whether good replies score high (`operant report RUN --serve`); then `--batch` twice as large, or "
        "`--optimizer.lr` a third",
        ("reward/mean", "kl/per_reply"),
        history.step,
    )
