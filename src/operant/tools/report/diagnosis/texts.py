"""Rules about the text of the replies: empty, one repeated word, signs, repetition, diversity, length.

Each text metric is compared with its usual value: that of the first step's replies, and of the reference's if they are
known. The values of the healthy demo are given with the thresholds.
"""

from collections import Counter

from operant.metrics import collect
from operant.rewards.words import top_word
from operant.tools.report.diagnosis.distance import kl_advice
from operant.tools.report.diagnosis.history import RECENT, Finding, History, finding, number, percent
from operant.tools.report.diagnosis.progress import progress
from operant.types import OUTCOMES

STEPS = 3
"""The current value of a text metric is its mean over this many steps."""
EMPTY = 0.1
"""Share of empty replies above the usual share; the demo has none."""
MOSTLY = 0.5
"""Share of empty replies above which the remaining text is too little to count signs in."""
ONE_WORD = 0.25
"""Share of all words. `the` is 4 to 11 % of the demo's."""
ONE_TOKEN = 0.4
"""Share of all tokens, for spam without spaces; punctuation is 5 to 10 % of English."""
TIMES = 2.0
"""A spammed word has at least this many times its usual share."""
COMMAND = 4
"""Replies of fewer tokens at the start are commands. Few are in use, so that a good policy repeats them."""
SIGNS = 0.02
"""Share of characters above three times the usual. The demo has at most 0.25 % of each kind; `!!!` at the end of every
reply of twenty words is 3 %."""
REPEATED = 0.2
"""Share of repeated trigrams above the usual; the demo's is below 0.3 %."""
DISTINCT = 0.5
"""Diversity is low below this share of the usual number of different word pairs. The demo keeps 83 %, the letters task
without a penalty 0.5 %."""
LONGER, SHORTER = 1.5, 0.5
"""Times the length of the first step's replies; the demo stays between 0.97 and 1.01."""
FEWER = 0.2
"""Errors have become rarer by at least this share of all programs. In a probe of 0.34M parameters, compile errors fell
by 0.59."""
PASSED = 0.25
"""Of that fall, programs that pass have taken less than this share: in the probe 0.03. A policy that learns to program
turns its errors into passes."""
SHORTENED = 0.85
"""The replies have at most this share of the tokens that they had."""


def empty(history: History) -> Finding | None:
    if (spreads := history.values("reward/std")) and not any(spreads):
        return None  # equal scores for all replies are the cause, and the rule `constant` reports them
    now, usual = history.recent("text/empty", STEPS), history.usual("text/empty")
    if now is not None and history.rows and all(map(collect.is_blank, history.texts)):
        now = 1.0  # all replies of the newest step are empty, so no other text metric can confirm it
    if now is None or now < EMPTY:
        return None
    longer = f"`--sampling.min_tokens {min(5, history.option('sampling.max_tokens', 5))}`"
    cost = max(history.values("reward/kl_penalty"), default=0.0)
    spread = history.first("reward/scaled_std") or history.first("reward/std") or 0.0
    if usual and now < max(usual) + EMPTY:
        cause, remedy = "the model itself ended that many before training", longer
    elif cost > spread > 0:
        cause = f"the KL coefficient is too high: a reply paid up to {number(cost)} where scores differ by "
        cause += f"{number(spread)}, so an empty reply, which costs next to nothing, is best"
        coef = history.recent("kl/coef", 1) or 0.0
        remedy = f"`--kl.coef {number(coef / 4)}`; {longer} only hides it"
    else:
        scores: dict[bool, list[float]] = {True: [], False: []}  # of empty replies, and of the others
        for row in history.rows:
            if row.get("reward") is not None:
                scores[collect.is_blank(str(row.get("reply") or ""))].append(float(row["reward"]))
        blank, others = (sum(of) / len(of) if of else 0.0 for of in scores.values())
        cause = "an empty reply is paid as well as another"
        if all(scores.values()) and blank > others:
            cause = "the reward prefers empty replies: "
            cause += f"empty replies score {number(blank)}, the others {number(others)}"
        remedy = f"let the reward give empty replies its lowest score, or {longer}"
    since = history.since("text/empty", lambda x: x > EMPTY)
    return finding("empty", since, share=percent(now), cause=cause, remedy=remedy)


def one_word(history: History) -> Finding | None:
    commands = (history.first("rollout/reply_tokens") or COMMAND) < COMMAND
    if commands or max(history.values("rollout/turns"), default=1) > 1:
        return None
    share, usual = history.recent("text/top_word", STEPS), history.usual("text/top_word")
    if share is not None and share > ONE_WORD and (not usual or share > TIMES * max(usual)):
        word, newest = top_word(history.texts)
        named = repr(word) if word and newest > ONE_WORD else "one and the same"
        evidence = f"{percent(share)} of the words are {named}"
    elif (spam := _spammed_token(history)) is not None:
        evidence = f"{percent(spam[1])} of the tokens are {spam[0]}"
    else:
        return None
    since, liked = history.since("text/top_word", lambda x: x > ONE_WORD), _reward_cause(history, "the reward likes it")
    return finding("one_word", since, evidence=evidence, liked=liked, **kl_advice(history))


def _reward_cause(history: History, cause: str) -> str:
    score = progress(history)
    if score is None or (score.rise > 0 and score.beyond_noise):
        return cause
    return "the reward did not rise with it, so the policy drifted there"


def _spammed_token(history: History) -> tuple[str, float] | None:
    """Return the most common token and its share if that is far above the usual; it finds spam without spaces."""
    ids = [i for row in history.rows for i in (row.get("ids") or ())]
    usual = [i for row in history.reference for i in (row.get("ids") or ())]
    first, now = history.first("policy/entropy"), history.recent("policy/entropy", STEPS)
    if not ids or not first or now is None or now > 0.5 * first:  # a policy that keeps its entropy does not spam
        return None
    token, count = Counter(ids).most_common(1)[0]
    usual_share = usual.count(token) / len(usual) if usual else 0.0
    if count / len(ids) < max(ONE_TOKEN, TIMES * usual_share):
        return None
    for row in history.rows:
        pieces, own = row.get("tokens"), list(row.get("ids") or ())
        if pieces is not None and len(pieces) == len(own) and token in own:
            return repr(pieces[own.index(token)]), count / len(ids)
    return f"token id {token}", count / len(ids)


def signs(history: History) -> Finding | None:
    if (history.recent("text/empty", STEPS) or 0.0) > MOSTLY:  # the few characters of the others prove nothing
        return None
    names = {"exclamations": "exclamation marks", "emojis": "emojis", "non_letters": "unusual symbols"}
    characters = sum(map(len, history.texts))
    clauses = {}
    for name, plural in names.items():
        metric = f"text/{name}"
        now, usual = history.recent(metric, STEPS), max(history.usual(metric), default=0.0)
        # If few characters were counted, the usual share is known only to within 3 of them.
        if now is not None and now > 3 * (usual + (3 / characters if characters else 0.0)) + SIGNS:
            clauses[metric] = f"{percent(now)} of the characters are {plural} ({percent(usual)} before)"
    if not clauses:
        return None
    since = history.since(next(iter(clauses)), lambda x: x > SIGNS)
    liked = _reward_cause(history, "the reward likes them more than any reader would")
    evidence = " and ".join(clauses.values())
    return finding("signs", since, metrics=tuple(clauses), evidence=evidence, liked=liked, **kl_advice(history))


def repetition(history: History) -> Finding | None:
    now, usual = history.recent("text/repeated", STEPS), max(history.usual("text/repeated"), default=0.0)
    if now is None or now < usual + REPEATED:
        return None
    since = history.since("text/repeated", lambda x: x > usual + REPEATED)
    return finding("repetition", since, now=percent(now), usual=percent(usual), **kl_advice(history))


def diversity(history: History) -> Finding | None:
    now, usual = history.recent("text/distinct_2", STEPS), min(history.usual("text/distinct_2"), default=0.0)
    if now is None or now > DISTINCT * usual:
        return None
    since = history.since("text/distinct_2", lambda x: x < DISTINCT * usual)
    return finding("diversity", since, now=percent(now), usual=percent(usual), **kl_advice(history))


def length(history: History) -> Finding | None:
    first, now = history.first("rollout/reply_tokens"), history.recent("rollout/reply_tokens")
    if not first or now is None or SHORTER * first < now < LONGER * first:
        return None
    at_limit = history.recent("rollout/ended_length") or 0.0
    longer = now > first
    return finding(
        "length",
        history.since("rollout/reply_tokens", lambda x: not SHORTER * first < x < LONGER * first),
        first=first,
        now=now,
        limit=f", and {percent(at_limit)} of them end at the length limit" if at_limit > 0.5 else "",
        cause="longer replies" if longer else "shorter replies, or KL does: every token may cost some",
        at_most="<=" * longer,
        usual=max(round(first), 1),
        end="max" if longer else "min",
    )


def short_programs(history: History) -> Finding | None:
    """Programs compile or run to their end more often because they are shorter, and they are wrong."""
    last = history.metrics[-1] if history.metrics else {}
    # In a weighted sum of rewards, the classes have the name of their part in front.
    broken = next((name for name in last if name.startswith("outcome/") and name.endswith(OUTCOMES[0])), None)
    steps = [m for m in history.metrics if broken in m and m.get("rollout/reply_tokens")]
    if broken is None or len(steps) < 2 * RECENT:
        return None
    both = [steps[:RECENT], steps[-RECENT:]]

    def means(name: str) -> tuple[float, float]:
        before, after = (sum(m.get(name) or 0.0 for m in part) / RECENT for part in both)
        return before, after

    prefix = broken.removesuffix(OUTCOMES[0])
    *kinds, wrong, passed = (means(prefix + name) for name in OUTCOMES)
    rarer = {name: kind for name, kind in zip(OUTCOMES, kinds, strict=False) if kind[1] < kind[0]}
    tokens, what = means("rollout/reply_tokens"), " or a ".join(rarer)
    before, after = (sum(kind[i] for kind in rarer.values()) for i in (0, 1))
    fall = before - after
    if fall < FEWER or wrong[1] - wrong[0] < fall / 2 or passed[1] - passed[0] >= PASSED * fall:
        return None
    if tokens[1] > SHORTENED * tokens[0]:
        return None
    shares = {"before": before, "after": after, "wrong_before": wrong[0], "wrong": wrong[1]}
    shares |= {"passed_before": passed[0], "passed": passed[1]}
    known = {"errors": what, "tokens_before": tokens[0], "tokens": tokens[1]}
    known |= {name: percent(share) for name, share in shares.items()}
    metrics = (*(prefix + name for name in rarer), "rollout/reply_tokens")
    return finding("short_programs", history.step, metrics=metrics, **known)
