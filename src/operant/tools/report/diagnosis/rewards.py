"""Rules about the reward: its verifier fails, or it is constant, depends on the prompt, abstains, does not rise, or is
already maximal; and about worlds of many turns: episodes that outgrow the context, commands that are not understood,
empty or copied from the prompt, and games never won."""

from operant.tools.report.diagnosis.history import Finding, History, counted, finding, number, percent, too_large
from operant.tools.report.diagnosis.progress import DRIFTED, progress

EQUAL = 1e-6
"""A spread below this share of the score is rounding."""
SATURATED = 0.1
"""The reward is saturated if its spread is below this share of the first step's. The demo keeps 0.25."""
QUERY = 0.8
"""Share of the scores' variance that the prompt explains; the end of the registry's healthy range."""
ABSTAINED = 0.1
"""Share of unjudged replies; the end of the registry's healthy range."""
PATIENCE = 30
"""A missing rise is reported after this many steps. The demo has risen by half after 5."""
LASTS, LONGEST = 3, 10
"""Equal scores, with which a sparse reward begins, are reported after a tenth of the run: from 3 to 10 steps."""
MOVED = 1.0
"""Nats of KL per reply. Below it the policy has hardly changed, so a flat reward proves nothing."""
INVALID = 0.5
"""Share of commands that the game does not understand, from which on the policy hardly plays."""
COPIED = 0.5
"""Share of commands that stand in the prompt as they are."""
EMPTY = 0.1
"""Share of empty commands; the end of the registry's healthy range."""
OUTGROWN = 0.5
"""Share of a step's episodes that end for lack of room, from which on the policy learns to fill its context."""
WARM_START = (
    "a warm start on walkthroughs (`operant play WORLD --player walkthrough --split train --games 200 --record "
    "demos.jsonl` with the `--env.*` options of this run, then `operant train sft --policy MODEL --tasks demos.jsonl`)"
)


def verifier(history: History) -> Finding | None:
    last = history.metrics[-1] if history.metrics else {}
    # In a weighted sum of rewards, the classes have the name of their part in front.
    for part in dict.fromkeys(name.rpartition("/")[0] for name in last if name.startswith("outcome/")):
        names = (f"{part}/crash", f"{part}/hang")
        crash, hang = (last.get(name) or 0.0 for name in names)
        if crash + hang >= 1 - EQUAL:
            since = history.since(names[0] if crash else names[1], lambda x: x > 0)
            return finding("verifier", since, metrics=("reward/mean", *names), crash=percent(crash), hang=percent(hang))
    return None


def constant(history: History) -> Finding | None:
    wait = _wait(history)
    spreads, mean = history.last("reward/std", wait), history.recent("reward/mean", 1)
    if not spreads or mean is None or not _equal(spreads, mean):
        return None
    learned = (score := progress(history)) is not None and score.learned
    highest = max(history.values("reward/max"), default=mean)
    # A reward that distinguished replies before and now gives all of them its highest score is saturated.
    if learned or (max(history.values("reward/std")) > EQUAL and mean >= highest):
        return _nothing_left(history, f"Every reply now scores {number(mean)}")
    if len(spreads) < wait:
        return None
    since = history.since("reward/std", lambda x: x <= EQUAL * max(abs(mean), 1e-3))
    return finding("constant", since, score=number(mean))


def _equal(spreads: list[float], mean: float) -> bool:
    return max(spreads) <= EQUAL * max(abs(mean), 1e-3)


def _wait(history: History) -> int:
    """The number of steps with equal scores that are reported; all steps of a shorter run."""
    total = int(history.option("steps") or LASTS)
    return max(1, min(total, max(LASTS, min(LONGEST, total // 10))))


def no_advantage(history: History) -> Finding | None:
    """In most steps no reply was better or worse than expected. A single one between others proves nothing."""
    zero, name = history.last("preference/unpaired"), "preference/unpaired"
    lacks = "no prompt had a better and a worse reply, which make a pair"
    if not zero:
        zero, name = history.last("policy/advantage_zero"), "policy/advantage_zero"
        lacks = "every advantage was 0: no reply was better or worse than those it is compared with"
    spreads, mean = history.values("reward/std"), history.recent("reward/mean", 1)
    if 0 < len(spreads) < _wait(history) and _equal(spreads, mean or 0.0):  # which is what `constant` waits for
        return None
    count = sum(share == 1 for share in zero)
    if 2 * count <= len(zero):
        return None
    steps = "the last step" if len(zero) == 1 else f"{count} of the last {len(zero)} steps"
    level, since = "problem" if count == len(zero) else "warning", history.since(name, lambda x: x == 1)
    return finding("no_advantage", since, level=level, steps=steps, lacks=lacks, metric=name)


def saturated(history: History) -> Finding | None:
    first, now, mean = history.first("reward/std"), history.recent("reward/std"), history.recent("reward/mean")
    score, highest = progress(history), max(history.last("reward/max"), default=None)
    if not first or now is None or mean is None or highest is None or score is None or not score.learned:
        return None
    if now > SATURATED * first or now <= EQUAL * abs(mean) or highest - mean > first:
        return None
    evidence = f"Scores differ by {number(now)} only ({number(first)} at first), all near {number(highest)}"
    return _nothing_left(history, evidence)


def _nothing_left(history: History, evidence: str) -> Finding:
    """Return the finding that the reward is saturated, shared by `constant` and `saturated`."""
    first = history.first("reward/std") or 0.0
    since = history.since("reward/std", lambda x: x <= SATURATED * first)
    return finding("saturated", since, evidence=evidence)


def query_decides(history: History) -> Finding | None:
    name = "reward/query_share" if history.values("reward/query_share") else "probe/query_share"
    reward = history.option("reward")
    named = reward if isinstance(reward, str) and not reward.startswith("<") else "NAME"
    return too_large(history, "query_decides", name, QUERY, reward=named, metric=name)


def abstains(history: History) -> Finding | None:
    return too_large(history, "abstains", "reward/abstained", ABSTAINED)


def flat(history: History) -> Finding | None:
    kl, score = history.recent("kl/per_reply"), progress(history)
    if kl is None or score is None or score.relative or history.trained_steps < PATIENCE or kl < MOVED:
        return None
    if score.beyond_noise and score.rise > DRIFTED * score.spread:
        return None
    change = {"label": score.label, "before": number(score.before), "after": number(score.after)}
    return finding("flat", history.step, steps=history.trained_steps, kl=number(kl), **change)


def outgrown(history: History) -> Finding | None:
    last = history.metrics[-1] if history.metrics else {}
    ended, played = last.get("rollout/outgrown", 0), last.get("rollout/count", 0)
    if not ended or ended < OUTGROWN * played:
        return None
    since = history.since("rollout/outgrown", lambda x: x > 0)
    return finding("outgrown", since, ended=number(ended), played=counted(played, "episode"))


def invalid(history: History) -> Finding | None:
    share = history.recent("actions/valid")
    if share is None or share > 1 - INVALID:
        return None
    since = history.since("actions/valid", lambda x: x <= 1 - INVALID)
    return finding("invalid_commands", since, share=percent(1 - share), warm_start=WARM_START)


def copied(history: History) -> Finding | None:
    valid = history.recent("actions/valid")
    if valid is not None and valid > 1 - INVALID:
        return None  # a command that the game understands may well stand in the prompt: listed, or given before
    return too_large(history, "copied_commands", "actions/copied_from_prompt", COPIED, warm_start=WARM_START)


def empty(history: History) -> Finding | None:
    return too_large(history, "empty_commands", "actions/empty", EMPTY)


def never_won(history: History) -> Finding | None:
    rates = [*history.values("game/won"), *history.values("evaluate/game/won")]
    steps = len(history.values("game/won"))
    if steps < PATIENCE or any(rates):
        return None
    games, score = sum(history.values("rollout/count")), history.recent("game/score")
    reached = f", and the mean score is {percent(score)} of the largest" if score is not None else ""
    counts = {"games": number(games), "steps": steps, "reached": reached}
    return finding("never_won", history.step, warm_start=WARM_START, **counts)
