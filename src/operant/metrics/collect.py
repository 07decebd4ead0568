"""Collect the metrics of a step from its rollouts and batch, as sums and counts. `registry.txt` explains them."""

import math
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise, takewhile
from typing import Any

import torch
from torch import Tensor

from operant import distributed
from operant.objectives.kl import estimate
from operant.rewards.evaluate import OUTCOMES, Judged
from operant.rewards.words import is_mark, words
from operant.tally import ROUNDING, Tally
from operant.types import Batch, Outputs, Rollout

BYTES = "rollout/bytes"
"""Tally entry: bytes of text per action. It is not logged, but converts a loss to bits per byte."""
MOST = 20
"""Outcome classes that are counted apart. The others, the rarer ones, count together as `other`."""
GROUPS = 8
"""The least number of queries for `query_share`."""
BLOCKS, GRADIENTS = "blocks/", "gradients/"
"""Prefixes of tally entries: norms of the model's blocks, and histograms of the gradients of its tensors."""


def of_rollouts(rollouts: list[Rollout], *, texts: bool = True) -> Tally:
    """Return the lengths and endings of replies, and their text metrics unless `texts` is False (no tokenizer)."""
    tally = Tally()
    every = [(turn, text) for r in rollouts for turn, text in zip(r.turns, r.texts, strict=True)]
    turns = [turn for turn, _ in every if turn.action]  # the others are examples that the world has played
    lengths = [len(t.action) for t in turns]
    _mean_and_std(tally, "rollout/query_tokens", [len(t.prompt) for t in turns])
    _mean_and_std(tally, "rollout/reply_tokens", lengths)
    for end in ("stop", "length"):
        tally.mean(f"rollout/ended_{end}", [t.end == end for t in turns])
    tally.mean("rollout/ended_cut", [r.end == "cut" for r in rollouts])
    tally.mean("rollout/turns", [len(r.turns) for r in rollouts])
    pairs = [(a, b) for r in rollouts for a, b in pairwise(r.turns) if a.action]
    fresh = [b.prompt[: len(a.prompt) + len(a.action)] != [*a.prompt, *a.action] for a, b in pairs]
    tally.mean("rollout/fresh_prompts", fresh)
    for name in sorted({name for r in rollouts for name in r.info.get("numbers", ())}):
        tally.mean(f"world/{name}", [r.info["numbers"][name] for r in rollouts if name in r.info.get("numbers", ())])
    if outgrown := sum(r.end == "outgrown" for r in rollouts):
        tally.add("rollout/outgrown", outgrown, 0)
    if skipped := [turn for turn, _ in every if not turn.trained]:
        tally.add("rollout/untrained", len(skipped), 0)
        opening = [turn for r in rollouts for turn in takewhile(lambda turn: not turn.trained, r.turns)]
        tally.add("rollout/unpaid", sum(turn.reward != 0 for turn in opening), 0)
    tally.add("rollout/count", len(rollouts), 0.0)
    tally.histogram("reply_tokens", lengths)
    if texts:
        tally.merge(of_texts([text for turn, text in every if turn.action]))
        actions = sum(turn.count for turn in turns)  # choosing a whole reply is one action, as in the loss
        tally.add(BYTES, sum(map(trained_bytes, rollouts)), actions)
    return tally


def trained_bytes(rollout: Rollout) -> int:
    """The bytes of the texts that are trained on."""
    pairs = zip(rollout.turns, rollout.texts, strict=True)
    return sum(len(text.encode(errors="replace")) for turn, text in pairs if turn.count)


def of_batch(batch: Batch, coef: float) -> Tally:
    """Return the metrics of KL, its penalty, values and returns.

    `batch.rewards` are those that were trained on, with the KL penalty subtracted. coef: the KL coefficient.
    """
    tally, at = Tally(), batch.actions
    if batch.raw_logprobs is None or not bool(at.any()):  # demonstrations, or a rank without replies
        return tally

    def per_episode(x: Tensor) -> list[float]:
        sums = torch.zeros(len(batch.bootstrap), dtype=torch.float64)
        return sums.index_add(0, batch.episodes, torch.where(at, x, 0.0).double().sum(1)).tolist()

    tally.mean("rollout/logprob_mean", batch.raw_logprobs, at)
    tally.histogram("logprobs", batch.raw_logprobs, at)
    tally.mean("policy/sampled_entropy", per_episode(-batch.raw_logprobs))
    if batch.ref_logprobs is not None:
        tally.mean("rollout/ref_logprob_mean", batch.ref_logprobs, at)
        tally.histogram("ref_logprobs", batch.ref_logprobs, at)
        k1 = estimate("k1", batch.raw_logprobs, batch.ref_logprobs)
        per_reply = per_episode(k1)
        _mean_and_std(tally, "kl/per_reply", per_reply)
        tally.histogram("kl_per_reply", per_reply)
        tally.mean("kl/per_token", k1, at)
        tally.mean("kl/k3", per_episode(estimate("k3", batch.raw_logprobs, batch.ref_logprobs)))
    if batch.kl is not None:
        charged = per_episode(batch.kl)
        tally.mean("kl/paid", charged)
        _mean_and_std(tally, "reward/kl_penalty", [coef * k for k in charged])
    _mean_and_std(tally, "reward/return", per_episode(batch.rewards))
    for name, x in (("value", batch.values), ("returns", batch.returns)):
        if x is not None:
            tally.mean(f"{name}/mean", x, at)
            tally.spread(f"{name}/std", x, at)
    if batch.values is not None:
        tally.histogram("values", batch.values, at)
    if batch.values is not None and batch.returns is not None:
        tally.mean("value/error_before", (batch.returns - batch.values) ** 2, at)
    return tally


def of_given(batch: Batch) -> Tally:
    """Return the metrics of demonstrations beside the policy's own replies; none if the step has only one of both."""
    tally = Tally()
    if batch.demonstrated is not None and batch.logprobs is not None:
        at = batch.actions & batch.demonstrated[:, None]
        tally.add("given/count", float(batch.episodes[at.any(1)].unique().numel()), 0.0)
        tally.mean("given/logprob", batch.logprobs, at)
    return tally


def _mean_and_std(tally: Tally, name: str, values: Sequence[float]) -> None:
    tally.mean(name, values)
    tally.spread(f"{name}_std", values)


def of_advantages(tally: Tally, batch: Batch) -> None:
    """Add the advantages of a minibatch as the loss uses them, after any whitening. Every rank must call."""
    if batch.advantages is None:
        return
    at = batch.actions & (batch.weights != 0)
    sizes = torch.where(at, batch.advantages.abs(), 0.0)
    # What is 0 on one rank may be rounding on several, which sum in another order.
    least = ROUNDING * distributed.largest_float(float(sizes.max()) if sizes.numel() else 0.0)
    if bool(at.any()):
        tally.mean("policy/advantage_mean", batch.advantages, at)
        tally.spread("policy/advantage_std", batch.advantages, at)
        tally.histogram("advantages", batch.advantages, at)
        episodes = set(batch.episodes[at.any(1)].tolist())
        nonzero = set(batch.episodes[(sizes > least).any(1)].tolist())
        tally.add("policy/advantage_zero", len(episodes - nonzero), len(episodes))


def of_scores(raw: list[float], used: list[float], asked: int, groups: Sequence[int]) -> Tally:
    """Return the metrics of the scores.

    raw: total of reward and environment, one per judged reply. used: the same after scaling. asked: number of replies
    that the reward received. groups: the group of each raw score, for what is measured over all ranks: all must call.
    """
    tally = Tally()
    for name, scores in (("reward/", raw), ("reward/scaled_", used)):
        tally.mean(f"{name}mean", scores)
        tally.spread(f"{name}std", scores)
    for score in raw:
        tally.extreme("reward/max", score)
        tally.extreme("reward/min", score)
    tally.add("reward/abstained", asked - len(raw), asked)
    tally.histogram("reward", raw)
    parts = distributed.gathered([*zip(raw, groups, strict=True)])
    known = [(score, (rank, group)) for rank, part in enumerate(parts) for score, group in part]
    if known and (share := query_share(*zip(*known, strict=True))) is not None:
        tally.add("reward/query_share", share)
    return tally


def query_share(scores: Sequence[float], groups: Sequence[Hashable]) -> float | None:
    """Return the share of the scores' variance that the query explains.

    None if fewer than `GROUPS` queries have two or more scores. It is the intraclass correlation of a one-way layout,
    1 - (variance within groups) / (whole variance), from the unbiased mean squares (Shrout and Fleiss, 1979, ICC(1,1)
    with unequal groups), and at least 0.
    """
    by_group: dict[Hashable, list[float]] = {}
    for score, group in zip(scores, groups, strict=True):
        by_group.setdefault(group, []).append(score)
    several = [x for x in by_group.values() if len(x) > 1]
    n, count = sum(map(len, several)), len(several)
    if count < GROUPS:
        return None
    means, grand = [sum(x) / len(x) for x in several], sum(map(sum, several)) / n
    within = sum((v - m) ** 2 for x, m in zip(several, means) for v in x) / (n - count)
    between = sum(len(x) * (m - grand) ** 2 for x, m in zip(several, means)) / (count - 1)
    size = (n - sum(len(x) ** 2 for x in several) / n) / (count - 1)
    whole = between + (size - 1) * within
    return max((between - within) / whole, 0.0) if whole else None


def distributions(tally: Tally) -> dict[str, object]:
    """Return the histograms, the norms by block and the gradients by tensor of a step, ready for JSON."""
    parts: dict[str, dict[str, Any]] = {"histograms": {}, "blocks": {}, "gradients": {}}
    for name, histogram in tally.histograms.items():
        part = "gradients" if name.startswith(GRADIENTS) else "histograms"
        parts[part][name.removeprefix(GRADIENTS)] = histogram.as_plain()
    for name, norm in tally.result().items():
        if name.startswith(BLOCKS):
            _, kind, block = name.split("/", 2)
            parts["blocks"].setdefault(kind, {})[block] = norm
    return {name: part for name, part in parts.items() if part}


_BLANK = " \t\n\r.,;:…"
"""A reply of only these characters is empty."""
_COMMON = frozenset(".,;:'\"-()?!’‘“”")


def is_blank(text: str) -> bool:
    """Return whether a reply has only spaces and simple punctuation."""
    return not text.strip(_BLANK)


def of_texts(texts: Sequence[str]) -> Tally:
    """Return the `text/...` metrics: empty replies, repetition, diversity, signs."""
    tally = Tally()
    by_reply = [words(text) for text in texts]
    tally.mean("text/empty", list(map(is_blank, texts)))
    trigrams = [list(zip(x, x[1:], x[2:])) for x in by_reply if len(x) > 2]
    tally.mean("text/repeated", [1 - len(set(x)) / len(x) for x in trigrams])
    flat = [word for x in by_reply for word in x]
    tally.things("text/distinct_1", flat)
    tally.things("text/distinct_2", (pair for x in by_reply for pair in pairwise(x)))
    tally.things("text/top_word", flat)
    characters = "".join(texts)
    if characters:
        # U+FFFD stands for the bytes of a cut character.
        emojis = sum(c >= "\u2600" and c != "\ufffd" and unicodedata.category(c) == "So" for c in characters)
        others = sum(not (c.isalnum() or c.isspace() or c in _COMMON or is_mark(c)) for c in characters)
        for name, count in (("exclamations", characters.count("!")), ("emojis", emojis), ("non_letters", others)):
            tally.add(f"text/{name}", count, len(characters))
    return tally


def of_likelihood(tally: Tally, batch: Batch, out: Outputs, at: Tensor) -> None:
    """Add the mean of log-prob + entropy over the drawn tokens, and its spread, to `tally`; for unchanged weights.

    at: [B, T] bool: the actions of current turns.

    If tokens are drawn from the policy, log-prob + entropy has expectation 0 at every token, for any context. A sum
    over tokens is then a martingale, so its standard error is known and a wrong sampler shows within one step.
    """
    if batch.allowed is not None:
        ids, offsets = batch.allowed
        tally.add("policy/allowed_tokens", float(len(ids)), float((offsets.diff() > 0).sum()))
    else:
        excess = out.logprobs.detach() + out.entropy.detach()
        tally.mean("rollout/likelihood_gap", excess, at)
        tally.spread("rollout/likelihood_z", excess, at)


def finish(tally: Tally) -> dict[str, float]:
    """Return the metrics of a pooled tally, with those that are computed from others; without the norms of blocks."""
    metrics = {name: x for name, x in tally.result().items() if not name.startswith(BLOCKS)}
    if "rollout/likelihood_z" in metrics:  # until here it is the spread
        spread, count = metrics.pop("rollout/likelihood_z"), tally.sums["rollout/likelihood_gap"][1]
        if spread:
            metrics["rollout/likelihood_z"] = metrics["rollout/likelihood_gap"] / spread * count**0.5
    size = metrics.pop(BYTES, 0.0)
    if "supervised/loss" in metrics and size:
        metrics["supervised/bits_per_byte"] = metrics["supervised/loss"] / math.log(2) / size
    variance = metrics.get("returns/std", 0.0) ** 2
    for name, error in (("explained_variance", "error_before"), ("explained_variance_fitted", "error")):
        if f"value/{error}" in metrics and variance:
            metrics[f"value/{name}"] = 1 - metrics[f"value/{error}"] / variance
    return metrics


def of_judged(judged: Judged) -> Tally:
    """Return the mean, spread and abstentions of each named part, and the count of each outcome and class.

    An outcome here is that of judging: a score, an error, a timeout, an abstention. The class is the reward's own.
    """
    tally = Tally()
    for name, count in Counter(c for remark in judged.remarks for c in remark.classes).items():
        tally.add(f"outcome/{name}", count, 0)
    for outcome in OUTCOMES if judged.outcomes else ():
        tally.add(f"reward/outcome/{outcome}", judged.outcomes.count(outcome), 0)
    for name, values in judged.parts.items():
        known = [value for value in values if value is not None]
        tally.mean(f"reward/{name}/mean", known)
        tally.spread(f"reward/{name}/std", known)
        tally.add(f"reward/{name}/abstained", len(values) - len(known), len(values))
    return tally


def reward_metrics(judged: Judged, before: Mapping[str, float] | None = None) -> dict[str, float]:
    """The metrics of the reward's named parts, if there are several, and of outcomes, over all ranks.

    before: the metrics of the step before, whose outcome classes are counted again. Every rank must call.
    """
    metrics = distributed.pool(of_judged(judged)).result()
    count = distributed.total_float(float(len(judged.scores)))
    several = sum(name.endswith("/abstained") for name in metrics) > 1
    counts = {name.removeprefix("outcome/"): n for name, n in metrics.items() if name.startswith("outcome/")}
    known = [name.removeprefix("outcome/") for name in before or () if name.startswith("outcome/")]
    kept = {n: x for n, x in metrics.items() if n.startswith("reward/" if several else "reward/outcome/")}
    return kept | {f"outcome/{name}": share for name, share in outcome_shares(counts, count, known).items()}


def outcome_shares(counts: Mapping[str, float], total: float, known: Iterable[str] = ()) -> dict[str, float]:
    """The share of `total` samples in each outcome class: of the `known` ones, then of the most frequent.

    At most `MOST` classes are named; the shares of all others are added up as `other`.
    """
    ranked = dict.fromkeys([*known, *sorted(counts, key=lambda name: (-counts[name], name))])
    named = [name for name in ranked if name != "other"][:MOST]
    shares = {name: counts.get(name, 0.0) / (total or 1.0) for name in named}
    rest = sum(n for name, n in counts.items() if name not in shares)
    return shares | ({"other": rest / total} if rest or "other" in ranked else {})
