"""One object that both samples and scores, and the counters that its random numbers come from.

Whatever `Sampling` does to the logits before a token is drawn (temperature, stop tokens that may not come yet, a mask
over the vocabulary), it does again when the token is scored, so a ratio with unchanged weights is 1. What cuts the
distribution (top-k, top-p, min-p) is refused in training unless `truncation="stored"`: then the ids that could be
drawn travel with every action.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from operant.types import OperantError, shown

BLOCK = 256
"""Tokens of the vocabulary whose probability is summed first, in drawing."""
STREAMS = {"train": 1, "evaluate": 2, "probe": 3}


NONE = -1
"""As a stop token: none, not even the model's own, as TRL's `eos_token_id=-1`."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. The default is pure sampling: the policy's own distribution."""

    temperature: float = 1.0
    """Divides the logits, in sampling and in every score."""
    max_tokens: int = 32
    """The task's own length limit, in tokens of the reply."""
    min_tokens: int = 0
    """Stop tokens are masked, for policy and reference alike, until the reply has this many tokens."""
    fixed_length: bool = False
    """Always `max_tokens` tokens: nothing stops a reply, as in Ziegler et al. (2019)."""
    stop_tokens: tuple[int, ...] = ()
    """Ids that end a reply; they belong to it. Empty: the policy's own end-of-sequence token; -1 alone: none."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end a reply: the ids keep the whole last token, the text is cut before the string."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens that together have this probability; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the likeliest; 0 keeps all."""
    truncation: str | None = None
    """`stored` allows top-k, top-p and min-p in training: the allowed ids of each action travel along."""
    banned: tuple[int, ...] = ()
    """Ids that are never drawn and have probability 0 in every score."""
    choice: str = "mean"
    """Among given replies, one is drawn in proportion to exp(score / temperature). Its score is the mean of its tokens'
    log-probs (the stop token behind it counts); with sum, long replies are hardly ever tried."""

    def __post_init__(self) -> None:
        for name in ("stop_tokens", "stop_strings", "banned"):
            value = getattr(self, name)
            alone = isinstance(value, (int, str)) and not isinstance(value, bool)
            object.__setattr__(self, name, (value,) if alone else tuple(value or ()))
        checks = [
            # Below, logits are so large that float32 has no digits left for log-probs.
            ("temperature", self.temperature >= 1e-3, "must be at least 0.001; top_k=1 is greedy decoding"),
            ("max_tokens", self.max_tokens >= 1, "must be at least 1: every reply has an action"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"must lie in 0..max_tokens={self.max_tokens}"),
            ("top_k", self.top_k >= 0, "must be 0 (off) or a number of tokens"),
            ("top_p", 0 < self.top_p <= 1, "must lie in (0, 1]; 1 is off"),
            ("min_p", 0 <= self.min_p < 1, "must lie in [0, 1); 0 is off"),
            ("truncation", self.truncation in (None, "stored"), "must be None or 'stored'"),
            ("choice", self.choice in ("mean", "sum"), "must be mean or sum"),
            ("stop_strings", all(self.stop_strings), "must not hold an empty string"),
        ]
        for name, good, rule in checks:
            if not good:
                raise OperantError(f"sampling.{name}={getattr(self, name)!r}: it {rule}")

    @property
    def truncates(self) -> bool:
        """Whether some tokens that the policy could say are never drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def untouched(self) -> bool:
        """Whether `adjust` does nothing to the logits."""
        return self.temperature == 1 and not self.banned and not (self.min_tokens and self.stops)

    @property
    def stops(self) -> frozenset[int]:
        return frozenset() if self.fixed_length else frozenset(self.stop_tokens) - {NONE}

    @property
    def distribution(self) -> tuple[Any, ...]:
        """What log-probs depend on: equal for two samplings under which every reply has the same ones."""
        early = (self.min_tokens, self.stops) if self.min_tokens and self.stops else ()
        return self.temperature, self.banned, early, self.truncates, self.choice

    @property
    def plain(self) -> "Sampling":
        """Without temperature and masks: how given replies are scored."""
        return replace(self, temperature=1.0, min_tokens=0, banned=(), top_k=0, top_p=1.0, min_p=0.0, truncation=None)

    @property
    def of_options(self) -> "Sampling":
        """How the tokens of an option are scored: its length is given, and the temperature is the choice's."""
        return replace(self.plain, banned=self.banned)

    @property
    def terminator(self) -> int | None:
        """What ends an option, so that one that is the beginning of another is told from it; None: nothing stops."""
        return min(self.stops, default=None)

    def for_training(self) -> "Sampling":
        """Refuse what would make ratios and KL wrong; returns self."""
        if self.truncates and self.truncation != "stored":
            raise OperantError(
                f"sampling.{self._cuts()}: truncated sampling gives a biased ratio and a negative KL in training; "
                "use top_k=0, top_p=1, min_p=0, or truncation='stored' to carry the allowed tokens along"
            )
        return self

    def warning(self) -> str | None:
        """What this sampling does to the KL estimate, in a sentence; None where it is unbiased."""
        if not self.truncates:
            return None
        return (
            f"replies come from a distribution truncated by {self._cuts()}, and KL is measured between the whole ones: "
            "its estimate is biased and may be negative"
        )

    def check_ids(self, vocabulary: int) -> None:
        """Raises: OperantError for ids that a model of so many tokens has not, or where none is left to draw."""
        for name, ids in (("stop_tokens", set(self.stop_tokens) - {NONE}), ("banned", self.banned)):
            check_ids(tuple(ids), vocabulary, f"sampling.{name}")
        early = self.stops if self.min_tokens else frozenset()
        if len(early | set(self.banned)) >= vocabulary:
            raise OperantError(
                f"sampling.banned={shown(self.banned)} leaves none of {vocabulary} ids to draw; ban fewer"
            )

    def _cuts(self) -> str:
        on = {"top_k": self.top_k > 0, "top_p": self.top_p < 1, "min_p": self.min_p > 0}
        return ", ".join(f"{name}={getattr(self, name)}" for name in on if on[name])

    def adjust(self, logits: Tensor, places: Tensor | int) -> Tensor:
        """Scale and mask `logits` [N, V] for the tokens at `places` [N] of their replies; float32 at least, not cut."""
        out = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.temperature != 1:
            out = out / self.temperature
        if self.banned:
            out = out.index_fill(-1, torch.tensor(self.banned, device=out.device), -torch.inf)
        if self.min_tokens and self.stops:
            early = torch.as_tensor(places, device=out.device) < self.min_tokens
            columns = torch.zeros(out.shape[-1], dtype=torch.bool, device=out.device)
            columns[list(self.stops)] = True
            out = out.masked_fill(early.reshape(-1, 1) & columns, -torch.inf)
        return out

    def kept(self, adjusted: Tensor) -> Tensor | None:
        """[N, V] bool: the tokens that can be drawn; None where nothing is truncated."""
        if not self.truncates:
            return None
        keep = torch.ones_like(adjusted, dtype=torch.bool)
        if self.top_k:
            best = adjusted.topk(min(self.top_k, adjusted.shape[-1]), dim=-1)
            keep = torch.zeros_like(keep).scatter(-1, best.indices, True)
        probs = adjusted.masked_fill(~keep, -torch.inf).softmax(-1)  # of what top-k has left, as transformers cuts
        if self.top_p < 1:
            ordered, order = probs.sort(dim=-1, descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered
            keep &= torch.zeros_like(keep).scatter(-1, order, before < self.top_p)
        if self.min_p:
            keep &= probs >= self.min_p * probs.max(-1, keepdim=True).values
        return keep & adjusted.isfinite()

    @staticmethod
    def draw(scores: Tensor, uniforms: Tensor, work: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Ids [N] at `uniforms` [N] (float64) of softmax(scores [N, V]) by inverse CDF, and their log-probs [N].

        In two levels: the block of the vocabulary, then the token within it; only sums of blocks are float64.
        `work` [N, V] float32 is written over, where it is given.
        """
        top = scores.amax(-1, keepdim=True)
        mass = torch.sub(scores, top, out=work).exp_()
        sums = _sums(mass)
        block, share, total = _pick(sums, uniforms)
        columns = block * BLOCK + torch.arange(BLOCK, device=scores.device)
        inside = mass.gather(-1, columns.clamp(max=mass.shape[-1] - 1)).masked_fill_(columns >= mass.shape[-1], 0)
        # Where scores are NaN any token is as good, but one of the vocabulary; the step will be refused.
        ids = (block * BLOCK + _pick(inside, share.squeeze(-1))[0]).clamp_(max=scores.shape[-1] - 1)
        logprobs = scores.gather(-1, ids) - top - total.log().to(scores)
        return ids.squeeze(-1), logprobs.squeeze(-1)


def _sums(mass: Tensor) -> Tensor:
    """[N, V] -> [N, blocks]"""
    whole = mass.shape[-1] // BLOCK * BLOCK
    parts = [mass[:, :whole].unflatten(-1, (whole // BLOCK, BLOCK)).sum(-1)] if whole else []
    if whole < mass.shape[-1]:
        parts.append(mass[:, whole:].sum(-1, keepdim=True))
    return torch.cat(parts, -1)


def _pick(mass: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the cumulative `mass` [N, K] passes `uniforms` [N]: the index, how far into it, the whole mass; [N, 1]."""
    cumulative = mass.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    wanted = uniforms.to(cumulative)[:, None] * total
    index = torch.searchsorted(cumulative, wanted, right=True)
    # A product that rounds up to the whole mass would fall past the end: take the last that has any.
    index = torch.minimum(index, torch.searchsorted(cumulative, total, right=False)).clamp_(max=mass.shape[-1] - 1)
    own = mass.gather(-1, index).double()
    return index, (wanted - (cumulative.gather(-1, index) - own)) / own, total


# --- random numbers from counters -------------------------------------------------------------------------------------


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele et al., 2014) on uint64."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def counter(*parts: int | str) -> int:
    """A 64-bit number that depends on every part and on nothing else: not on the process, the order or the batch."""
    state = np.zeros(1, dtype=np.uint64)
    for part in parts:
        if isinstance(part, str):
            part = int.from_bytes(blake2b(part.encode(), digest_size=8).digest(), "little")
        state = _mix(state ^ np.uint64(int(part) & 0xFFFFFFFFFFFFFFFF))
    return int(state[0])


def task_key(seed: int, stream: str, step: int, task_id: str, sample: int = 0, turn: int = 0) -> int:
    """The counter of one reply. `stream` keeps training, evaluation and probes apart; the last two stay at step 0."""
    if stream != "train":
        step = 0
    return counter(seed, STREAMS[stream], step, task_id, sample, turn)


def uniforms(keys: Sequence[int] | np.ndarray, place: int | np.ndarray) -> Tensor:
    """float64 [N] in [0, 1): the random number of each key [N] at a place of its reply."""
    start = np.asarray(keys, dtype=np.uint64)
    bits = _mix(start ^ _mix(np.broadcast_to(np.asarray(place, dtype=np.uint64), start.shape).copy()))
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def check_ids(ids: Sequence[int], vocabulary: int, what: str) -> None:
    """Raises: OperantError where `ids` hold one that a model of so many tokens has not."""
    if ids and (min(ids) < 0 or max(ids) >= vocabulary):
        odd = next(token for token in ids if not 0 <= token < vocabulary)
        raise OperantError(
            f"{what} holds the id {shown(odd)}, and the model has 0 to {vocabulary - 1}: "
            "do tokenizer and model belong together?"
        )


# --- stop strings and text --------------------------------------------------------------------------------------------


class StopTable:
    """Which tokens could complete a stop string, so that only replies that end in one are decoded and looked at."""

    def __init__(self, tokenizer: Any, strings: tuple[str, ...]):
        self.tokenizer, self.strings = tokenizer, strings
        self.flags = np.zeros(len(tokenizer), dtype=bool)
        for token in range(len(tokenizer)):
            self.flags[token] = self._could_end(tokenizer.decode([token]))

    def _could_end(self, piece: str) -> bool:
        # A piece alone may lose its leading space, and half a character decodes as U+FFFD: both are looked at.
        pieces = (piece, " " + piece)
        return "\ufffd" in piece or any(
            s in p or any(p.startswith(s[k:]) for k in range(len(s))) for s in self.strings for p in pieces
        )

    def ends(self, action: Sequence[int], min_tokens: int = 0) -> bool:
        """Whether the reply's text now holds a stop string that was not complete before `min_tokens` tokens."""
        if action[-1] < len(self.flags) and not self.flags[action[-1]]:
            return False
        early = len(self.tokenizer.decode(list(action[: min_tokens - 1]))) if min_tokens > 1 else 0
        return _stop_place(self.tokenizer.decode(list(action)), self.strings, early) is not None


def _stop_place(text: str, strings: Sequence[str], early: int) -> int | None:
    """Where the first stop string begins in `text`; those that lie within its first `early` characters do not count."""
    places = [text.find(s, max(0, early - len(s) + 1)) for s in strings]
    return min((p for p in places if p >= 0), default=None)


_tables: dict[tuple[int, tuple[str, ...]], StopTable] = {}


def stop_table(tokenizer: Any, strings: tuple[str, ...]) -> StopTable:
    """The table of a tokenizer and its stop strings, made once."""
    key = (id(tokenizer), strings)
    if key not in _tables or _tables[key].tokenizer is not tokenizer:
        _tables[key] = StopTable(tokenizer, strings)
    return _tables[key]


def reply_text(tokenizer: Any, prompt: Sequence[int], action: Sequence[int], sampling: Sampling) -> str:
    """The reply as text: without its stop token, cut before a stop string."""
    ids = list(action[:-1] if action and action[-1] in sampling.stops else action)
    # Decoded behind its prompt, so that a leading space that a tokenizer drops at the start of a text is kept.
    before = tokenizer.decode(list(prompt), skip_special_tokens=True)

    def said(some: list[int]) -> str:
        whole = tokenizer.decode(list(prompt) + some, skip_special_tokens=True)
        return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(some, skip_special_tokens=True)

    text = said(ids)
    if sampling.fixed_length or not sampling.stop_strings:
        return text
    early = len(said(ids[: sampling.min_tokens - 1])) if sampling.min_tokens > 1 else 0
    return text[: _stop_place(text, sampling.stop_strings, early)]


def token_pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each id, as it stands inside a text; half a character shows as U+FFFD. Ids without a tokenizer."""
    if tokenizer is None:
        return [f" {token}" for token in ids]
    return [_piece(tokenizer, token) for token in ids]


_pieces: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()


def _piece(tokenizer: Any, token: int) -> str:
    known = _pieces.setdefault(tokenizer, {})
    if token not in known:
        once, twice = tokenizer.decode([token]), tokenizer.decode([token, token])
        # Some tokenizers drop the space before the first word of a text: the second one has kept it.
        known[token] = twice[len(once) :] if twice.startswith(once) else once
    return known[token]
