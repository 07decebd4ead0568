"""What is told of a step's rollouts and batch, as sums and counts. Names and meanings: `metrics/registry.py`."""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from operant.objectives.kl import estimate
from operant.tally import Tally
from operant.types import Batch, Outputs, Rollout

BYTES = "rollout/bytes"
"""Bytes of text over the actions that they are written in; no metric, but what a loss in bits is made with."""
GROUPS = 8
"""Fewer queries than this tell nothing about queries."""
BLOCKS, GRADIENTS = "blocks/", "gradients/"
"""How numbers of the model's blocks and histograms of its tensors are called in a tally."""


def of_rollouts(rollouts: list[Rollout], *, texts: bool = True) -> Tally:
    """Lengths, how replies ended, and, unless there is no tokenizer, how they read."""
    tally = Tally()
    turns = [turn for r in rollouts for turn in r.turns]
    lengths = {
        "rollout/query_tokens": [len(t.prompt) for t in turns],
        "rollout/reply_tokens": [len(t.action) for t in turns],
    }
    for name, values in lengths.items():
        tally.mean(name, values)
        tally.spread(f"{name}_std", values)
    for end in ("stop", "length"):
        tally.mean(f"rollout/ended_{end}", [t.end == end for t in turns])
    tally.mean("rollout/ended_cut", [r.end == "cut" for r in rollouts])
    tally.mean("rollout/turns", [len(r.turns) for r in rollouts])
    tally.add("rollout/count", len(rollouts), 0.0)
    tally.histogram("reply_tokens", lengths["rollout/reply_tokens"])
    if texts:
        said = [text for r in rollouts for text in r.texts]
        tally.merge(of_texts(said))
        actions = sum(turn.count for turn in turns)  # a choice is one, as in the loss
        tally.add(BYTES, sum(len(text.encode(errors="replace")) for text in said), actions)
    return tally


def of_batch(batch: Batch, coef: float) -> Tally:
    """KL, its price, values and returns; `batch.rewards` is what was learnt from, KL already paid."""
    tally, at = Tally(), batch.actions
    if batch.raw_logprobs is None or not bool(at.any()):
        return tally  # given replies; or nothing, on this rank
    index = batch.episodes
    replies = len(batch.bootstrap)

    def per_episode(x: Tensor) -> list[float]:
        sums = torch.zeros(replies, dtype=torch.float64).index_add(0, index, torch.where(at, x, 0.0).double().sum(1))
        return sums.tolist()

    tally.mean("rollout/logprob_mean", batch.raw_logprobs, at)
    tally.histogram("logprobs", batch.raw_logprobs, at)
    tally.mean("policy/sampled_entropy", per_episode(-batch.raw_logprobs))
    if batch.ref_logprobs is not None:
        tally.mean("rollout/ref_logprob_mean", batch.ref_logprobs, at)
        tally.histogram("ref_logprobs", batch.ref_logprobs, at)
        k1 = estimate("k1", batch.raw_logprobs, batch.ref_logprobs)
        each = per_episode(k1)
        tally.mean("kl/per_reply", each)
        tally.spread("kl/per_reply_std", each)
        tally.histogram("kl_per_reply", each)
        tally.mean("kl/per_token", k1, at)
        tally.mean("kl/k3", per_episode(estimate("k3", batch.raw_logprobs, batch.ref_logprobs)))
    if batch.kl is not None:
        charged = per_episode(batch.kl)
        tally.mean("kl/paid", charged)
        tally.mean("reward/kl_penalty", [coef * k for k in charged])
        tally.spread("reward/kl_penalty_std", [coef * k for k in charged])
    paid = per_episode(batch.rewards)
    tally.mean("reward/return", paid)
    tally.spread("reward/return_std", paid)
    for name, x in (("value", batch.values), ("returns", batch.returns)):
        if x is not None:
            tally.mean(f"{name}/mean", x, at)
            tally.spread(f"{name}/std", x, at)
    if batch.values is not None:
        tally.histogram("values", batch.values, at)
    if batch.values is not None and batch.returns is not None:
        tally.mean("value/error_before", (batch.returns - batch.values) ** 2, at)
    return tally


def of_advantages(tally: Tally, batch: Batch) -> None:
    """The advantages of a minibatch as the loss uses them, whitened where that is asked for after the cut."""
    at = batch.actions & (batch.weights != 0)
    if batch.advantages is not None and bool(at.any()):
        tally.mean("policy/advantage_mean", batch.advantages, at)
        tally.spread("policy/advantage_std", batch.advantages, at)
        tally.histogram("advantages", batch.advantages, at)
        seen = set(batch.episodes[at.any(1)].tolist())
        taught = set(batch.episodes[(at & (batch.advantages != 0)).any(1)].tolist())
        tally.add("policy/advantage_zero", len(seen - taught), len(seen))


def of_scores(raw: list[float], used: list[float], asked: int, groups: Sequence[int] = ()) -> Tally:
    """Totals as reward and world gave them, and as they were used; `asked`: how many were to be judged.

    groups: of each raw total, where they are known.
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
    share = query_share(raw, groups) if groups else None
    if share is not None:
        tally.add("reward/query_share", share)
    return tally


def query_share(scores: Sequence[float], groups: Sequence[int]) -> float | None:
    """The share of the scores' variance that the query explains; None where fewer than `GROUPS` were attempted twice.

    The intraclass correlation of a one-way layout, 1 - (variance within groups) / (whole variance), from the unbiased
    mean squares (Shrout and Fleiss, 1979, ICC(1,1) with unequal groups); cut at 0.
    """
    held: dict[int, list[float]] = {}
    for score, group in zip(scores, groups, strict=True):
        held.setdefault(group, []).append(score)
    several = [x for x in held.values() if len(x) > 1]
    n, count = sum(map(len, several)), len(several)
    if count < GROUPS:
        return None
    means, grand = [sum(x) / len(x) for x in several], sum(map(sum, several)) / n
    within = sum((v - m) ** 2 for x, m in zip(several, means) for v in x) / (n - count)
    between = sum(len(x) * (m - grand) ** 2 for x, m in zip(several, means)) / (count - 1)
    size = (n - sum(len(x) ** 2 for x in several) / n) / (count - 1)
    whole = between + (size - 1) * within
    return max((between - within) / whole, 0.0) if whole else None


def distributions(tally: Tally) -> dict[str, Any]:
    """Histograms, norms by block and gradients by tensor, as a file holds them."""
    plain = {name: h.as_plain() for name, h in tally.histograms.items()}
    blocks: dict[str, dict[str, float]] = {}
    for name, x in tally.result().items():
        if name.startswith(BLOCKS):
            _, kind, block = name.split("/", 2)
            blocks.setdefault(kind, {})[block] = x
    told = {
        "histograms": {name: h for name, h in plain.items() if not name.startswith(GRADIENTS)},
        "blocks": blocks,
        "gradients": {name.removeprefix(GRADIENTS): h for name, h in plain.items() if name.startswith(GRADIENTS)},
    }
    return {name: held for name, held in told.items() if held}


# --- texts ------------------------------------------------------------------------------------------------------------

_WORD = re.compile(r"\w+")
_SILENT = " \t\n\r.,;:…"
"""A reply of nothing else says nothing."""
_COMMON = frozenset(".,;:'\"-()?!’‘“”")


def words(text: str) -> list[str]:
    """Lower-cased runs of letters, digits and underscores."""
    return _WORD.findall(text.lower())


def says_nothing(text: str) -> bool:
    """Whether nothing is left of a reply without spaces and full stops."""
    return not text.strip(_SILENT)


def of_texts(texts: Sequence[str]) -> Tally:
    """What replies look like as text: empty, monotonous, full of signs. Names: `text/...` in the registry."""
    tally = Tally()
    said = [words(text) for text in texts]
    tally.mean("text/empty", list(map(says_nothing, texts)))
    tally.mean("text/repeated", [_repeated(x) for x in said if len(x) > 2])
    flat = [word for x in said for word in x]
    pairs = [pair for x in said for pair in pairwise(x)]
    for name, things in (("1", flat), ("2", pairs)):
        if things:
            tally.add(f"text/distinct_{name}", len(set(things)), len(things))
    if flat:
        tally.add("text/top_word", Counter(flat).most_common(1)[0][1], len(flat))
    characters = "".join(texts)
    if characters:
        signs = {
            "text/exclamations": characters.count("!"),
            "text/emojis": sum(map(_is_emoji, characters)),
            "text/non_letters": sum(map(_is_odd, characters)),
        }
        for name, count in signs.items():
            tally.add(name, count, len(characters))
    return tally


def top_word(texts: Sequence[str]) -> tuple[str, float]:
    """The commonest word of all texts, and its share of their words; ("", 0.0) where there are none."""
    flat = [word for text in texts for word in words(text)]
    if not flat:
        return "", 0.0
    word, count = Counter(flat).most_common(1)[0]
    return word, count / len(flat)


def _repeated(said: Sequence[str]) -> float:
    """Share of a reply's word trigrams that it has said before."""
    trigrams = list(zip(said, said[1:], said[2:]))
    return 1 - len(set(trigrams)) / len(trigrams)


def _is_emoji(c: str) -> bool:
    return c >= "\u2600" and unicodedata.category(c) == "So"


def _is_odd(c: str) -> bool:
    return not (c.isalnum() or c.isspace() or c in _COMMON)


def of_likelihood(tally: Tally, batch: Batch, out: Outputs) -> None:
    """How the drawn tokens' log-probs compare with what the policy's own entropy predicts; weights unchanged.

    Where tokens are drawn from the policy, log-prob + entropy has expectation 0 at every token, whatever came before:
    a sum over tokens is a martingale, so its standard error is known and a wrong sampler shows within a step.
    """
    if batch.allowed is None:
        excess = out.logprobs.detach() + out.entropy.detach()
        tally.mean("rollout/likelihood_gap", excess, batch.actions)
        tally.spread("rollout/likelihood_z", excess, batch.actions)


def finish(tally: Tally) -> dict[str, float]:
    """The metrics of pooled sums, and what follows from several of them. Numbers of blocks are no metrics."""
    metrics = {name: x for name, x in tally.result().items() if not name.startswith(BLOCKS)}
    if "rollout/likelihood_z" in metrics:  # so far the spread
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
