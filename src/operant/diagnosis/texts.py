"""What the replies look like: silence, one word over and over, signs, repetition, length.

Each is measured against what was usual before training: the first step's replies, and the reference's where they are
known. The healthy demo's numbers stand beside the thresholds.
"""

from collections import Counter
from collections.abc import Callable

from operant.diagnosis.distance import leash
from operant.diagnosis.history import Finding, History, number, percent
from operant.diagnosis.progress import progress
from operant.metrics import collect

EMPTY = 0.1
"""Share of empty replies beyond what was usual; the demo has none."""
MOSTLY = 0.5
"""Share of empty replies beyond which what is left is too little text to count signs in."""
ONE_WORD = 0.25
"""Share of all words. `the` is 4 to 11 % of the demo's."""
ONE_TOKEN = 0.4
"""Share of all tokens, for spam without spaces; punctuation is 5 to 10 % of English."""
TIMES = 2.0
"""How many times the usual share a spammed word has."""
SIGNS = 0.02
"""Share of characters beyond three times the usual. The demo has at most 0.25 % of each kind; `!!!` at the end of every
reply of twenty words is 3 %."""
REPEATED = 0.2
"""Share of trigrams said before, beyond what was usual; the demo's is below 0.3 %."""
DISTINCT = 0.5
"""Of the different word pairs that were usual. The demo keeps 83 %, the letters without a price 0.5 %."""
LONGER, SHORTER = 1.5, 0.5
"""Times the length of the first step's replies; the demo stays between 0.97 and 1.01."""


def _now(history: History, name: str) -> float | None:
    return history.recent(name, 3)


def empty(history: History) -> Finding | None:
    """Replies without any text."""
    now, usual = _now(history, "text/empty"), history.usual("text/empty")
    if now is not None and history.rows and all(map(collect.says_nothing, history.texts)):
        now = 1.0  # where nothing at all is said, there is no text to measure
    if now is None or now < EMPTY:
        return None
    says, curves = (
        f"{percent(now)} of the replies are empty.",
        ("text/empty", "rollout/reply_tokens", "reward/kl_penalty"),
    )
    if usual and now < max(usual) + EMPTY:
        cause, remedy = "the model itself ended that many before training", "`--sampling.min_tokens 5`"
    elif (cost := _cost(history)) is not None:
        cause = f"the KL coefficient is too high: {cost}, so silence, which costs next to nothing, is best"
        coef = history.recent("kl/coef", 1) or 0.0
        remedy = f"`--kl.coef {number(coef / 4)}`; `--sampling.min_tokens 5` only hides it"
    else:
        told = _silence(history)
        cause = f"the reward prefers silence: {told}" if told else "ending at once is paid as well as a reply"
        remedy = "let the reward give empty replies its lowest score, or `--sampling.min_tokens 5`"
    return Finding("empty", "problem", says, cause, remedy, curves, history.since("text/empty", lambda x: x > EMPTY))


def _cost(history: History) -> str | None:
    """What KL took from a reply where it took the most, if that is more than scores differ by."""
    paid = max(history.values("reward/kl_penalty"), default=0.0)
    spread = history.first("reward/scaled_std") or history.first("reward/std") or 0.0
    return f"a reply paid up to {number(paid)} where scores differ by {number(spread)}" if paid > spread > 0 else None


def _silence(history: History) -> str | None:
    """The scores of empty replies beside the others'."""
    scored = [
        (collect.says_nothing(str(r.get("reply") or "")), float(r["reward"]))
        for r in history.rows
        if r.get("reward") is not None
    ]
    silent, spoken = [x for is_empty, x in scored if is_empty], [x for is_empty, x in scored if not is_empty]
    if not silent or not spoken:
        return None
    return f"empty replies score {number(sum(silent) / len(silent))}, the others {number(sum(spoken) / len(spoken))}"


def one_word(history: History) -> Finding | None:
    """One word, or one token, over and over."""
    share, usual = _now(history, "text/top_word"), history.usual("text/top_word")
    odd = share is not None and share > ONE_WORD and (not usual or share > TIMES * max(usual))
    word, newest = collect.top_word(history.texts)
    token = None if odd else _one_token(history)
    if not odd and token is None:
        return None
    what = (
        f"{percent(share)} of the words are {word!r}." if share is not None and odd and word and newest > ONE_WORD
        else f"{percent(share)} of the words are one and the same." if share is not None and odd
        else f"{percent(token[1])} of the tokens are {token[0]}." if token else ""
    )  # fmt: skip
    cause, remedy = leash(history)
    cause = f"{_liked(history, 'the reward likes it')}, and {cause}"
    since = history.since("text/top_word", lambda x: x > ONE_WORD)
    return Finding("one_word", "problem", what, cause, remedy, ("text/top_word", "text/distinct_1"), since)


def _liked(history: History, so: str) -> str:
    """That the reward made it so, unless the reward has not risen with it."""
    score = progress(history)
    if score is None or (score.rise > 0 and score.beyond_noise):
        return so
    return "the reward did not rise with it, so the policy drifted there"


def _one_token(history: History) -> tuple[str, float] | None:
    """The commonest token and its share, where that is far from usual: text may be spammed without a space."""
    ids = [i for row in history.rows for i in (row.get("ids") or ())]
    known = [i for row in history.reference for i in (row.get("ids") or ())]
    first, now = history.first("policy/entropy"), history.recent("policy/entropy", 3)
    if (
        not ids or not first or now is None or now > 0.5 * first
    ):  # a policy that was undecided and still is spams nothing
        return None
    token, count = Counter(ids).most_common(1)[0]
    usual = known.count(token) / len(known) if known else 0.0
    if count / len(ids) < max(ONE_TOKEN, TIMES * usual):
        return None
    return _spelled(history, token), count / len(ids)


def _spelled(history: History, token: int) -> str:
    for row in history.rows:
        pieces, ids = row.get("tokens"), row.get("ids") or []
        if pieces is not None and len(pieces) == len(ids) and token in ids:
            return repr(pieces[list(ids).index(token)])
    return f"number {token}"


# --- against what was usual -------------------------------------------------------------------------------------------


def signs(history: History) -> Finding | None:
    """Exclamation marks, emojis, characters that are no letters: what reward models often like."""
    names = {"exclamations": "exclamation marks", "emojis": "emojis", "non_letters": "no letters"}
    told = {f"text/{name}": _beyond(history, f"text/{name}") for name in names}
    odd = {name: pair for name, pair in told.items() if pair is not None}
    if not odd or (_now(history, "text/empty") or 0.0) > MOSTLY:  # the few characters of the others tell nothing
        return None
    pieces = [
        f"{percent(now)} of the characters are {names[name[5:]]} ({percent(old)} before)"
        for name, (now, old) in odd.items()
    ]
    cause, remedy = leash(history)
    name = next(iter(odd))
    return Finding(
        "signs",
        "problem",
        f"{' and '.join(pieces)}.",
        f"{_liked(history, 'the reward likes them more than any reader would')}, and {cause}",
        f"{remedy}, or a reward that does not see them",
        tuple(odd),
        history.since(name, lambda x: x > SIGNS),
    )


def _beyond(history: History, name: str) -> tuple[float, float] | None:
    """A share now and what was usual, where it is far beyond that."""
    now, usual = _now(history, name), max(history.usual(name), default=0.0)
    seen = sum(map(len, history.texts))  # where few characters were read, what is usual is known only to 3 of them
    return (now, usual) if now is not None and now > 3 * (usual + (3 / seen if seen else 0.0)) + SIGNS else None


def repetition(history: History) -> Finding | None:
    """The same phrases again and again within a reply."""
    now, usual = _now(history, "text/repeated"), max(history.usual("text/repeated"), default=0.0)
    if now is None or now < usual + REPEATED:
        return None
    says = f"{percent(now)} of a reply's word trigrams repeat earlier ones ({percent(usual)} before)."
    return _monotonous(history, "repetition", says, "text/repeated", lambda x: x > usual + REPEATED)


def diversity(history: History) -> Finding | None:
    """All replies say the same."""
    now, usual = _now(history, "text/distinct_2"), min(history.usual("text/distinct_2"), default=0.0)
    if now is None or now > DISTINCT * usual:
        return None
    says = f"Different word pairs over all replies have gone from {percent(usual)} to {percent(now)}."
    return _monotonous(history, "diversity", says, "text/distinct_2", lambda x: x < DISTINCT * usual)


def _monotonous(history: History, name: str, says: str, curve: str, odd: Callable[[float], bool]) -> Finding:
    cause, remedy = leash(history)
    remedy = f"{remedy}, or take it from the reward: `repetition` with a weight"
    return Finding(
        name, "warning", says, f"the reward does not mind, and {cause}", remedy, (curve,), history.since(curve, odd)
    )


def length(history: History) -> Finding | None:
    """Replies have become much longer or shorter."""
    first, now = history.first("rollout/reply_tokens"), history.recent("rollout/reply_tokens")
    if not first or now is None or SHORTER * first < now < LONGER * first:
        return None
    limit = history.recent("rollout/ended_length") or 0.0
    says = f"Replies have gone from {first:.1f} to {now:.1f} tokens"
    says += f", and {percent(limit)} of them end at the length limit." if limit > 0.5 else "."
    grown = now > first
    usual = max(round(first), 1)
    return Finding(
        "length",
        "warning",
        says,
        "the reward pays for longer replies"
        if grown
        else "the reward pays for shorter replies, or KL does: every token may cost some",
        f"add a reward for length: `length:{'<=' * grown}{usual}` with a weight; or "
        f"`--sampling.{'max' if grown else 'min'}_tokens {usual}`",
        ("rollout/reply_tokens", "rollout/ended_length"),
        history.since("rollout/reply_tokens", lambda x: not SHORTER * first < x < LONGER * first),
    )
