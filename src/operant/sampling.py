"""One object that both samples and scores tokens; random numbers from counters; stop strings; prompts to ids.

Whatever `Sampling` does to the logits before a token is drawn (temperature, stop tokens that are masked at the start of
a reply, banned tokens), it does again when the token is scored, so a ratio with unchanged weights is 1. Truncation
(top-k, top-p, min-p) is refused in training unless `truncation="stored"`: each action then stores the ids that could be
drawn.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from operant.bounds import bounded, check_bounds
from operant.types import End, OperantError, Tokenizer, TrainablePolicy, require, shown, with_defaults

BLOCK = 256
"""Drawing a token first draws a block of this many tokens of the vocabulary, then a token within it."""
STREAMS = {"train": 1, "evaluate": 2, "probe": 3}
"""Uses of random numbers that are independent of each other."""

NONE = -1
"""As a stop token, this means no stop token at all, not even the model's own (TRL's `eos_token_id=-1`)."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. The default is pure sampling: the policy's own distribution.

    Raises: OperantError for a value out of range.
    """

    # Below the least, logits are so large that float32 has no digits left for log-probs.
    temperature: float = bounded(1.0, at_least=1e-3, rule="at least 0.001; top_k=1 is greedy decoding")
    """Divides the logits, in sampling and in every score."""
    max_tokens: int = bounded(32, at_least=1, rule="at least 1: every reply has an action")
    """The task's own length limit, in tokens of the reply."""
    min_tokens: int = 0
    """Stop tokens are masked, for policy and reference alike, until the reply has this many tokens."""
    fixed_length: bool = False
    """Every reply has `max_tokens` tokens: nothing stops it, as in Ziegler et al. (2019)."""
    stop_tokens: tuple[int, ...] = ()
    """Ids that end a reply and are part of it. Empty: the policy's own end-of-sequence token. -1 alone: none."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end a reply. The ids keep the whole last token; the text is cut before the string."""
    top_k: int = bounded(0, at_least=0, rule="0 (off) or a number of tokens")
    """Draw only from the k most likely tokens; 0: from all."""
    top_p: float = bounded(1.0, above=0, at_most=1, rule="in (0, 1]; 1 is off")
    """Draw only from the most likely tokens that together have this probability; 1: from all."""
    top_p_least: int = bounded(1, at_least=1, rule="at least 1 token")
    """The smallest number of tokens that `top_p` leaves (`min_tokens_to_keep`)."""
    keep_stops: bool = False
    """Stop tokens can be drawn however unlikely they are: top-k, top-p and min-p do not remove them; greedy
    decoding (top_k 1) does."""
    min_p: float = bounded(0.0, at_least=0, below=1, rule="in [0, 1); 0 is off")
    """Draw only from tokens that are at least this likely relative to the most likely one; 0: from all."""
    truncation: str | None = bounded(None, choices=("stored",), rule="None or 'stored'")
    """`stored` allows top-k, top-p and min-p in training: each action then stores the ids that could be drawn."""
    guidance: float = 0.0
    """Adds this times the Q of each token to its logit, of a policy that has Q values; 0: the language model alone."""
    only_text: bool = False
    """Bans what is no text by itself, in tokens other than stop tokens: parts of a character, control characters,
    white space alone, special tokens. A reply can then be printed and pasted."""
    banned: tuple[int, ...] = ()
    """Ids that are never drawn and have probability 0 in every score."""
    choice: str = bounded("mean", choices=("mean", "sum"))
    """How an option is scored where the environment offers options; one is drawn in proportion to
    exp(score / temperature). mean: the mean log-prob of its tokens, with the stop token after it. sum: their sum, with
    which long options are hardly ever drawn."""

    def __post_init__(self) -> None:
        for name in ("stop_tokens", "stop_strings", "banned"):
            value = getattr(self, name)
            alone = isinstance(value, (int, str)) and not isinstance(value, bool)
            object.__setattr__(self, name, (value,) if alone else tuple(value or ()))
        check_bounds(self, "sampling")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise OperantError(f"sampling.min_tokens={self.min_tokens}: it must lie in 0..max_tokens={self.max_tokens}")
        if not all(self.stop_strings):
            raise OperantError(f"sampling.stop_strings={self.stop_strings!r}: it must not hold an empty string")

    @property
    def truncates(self) -> bool:
        """Whether some tokens that the policy gives a probability are never drawn."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def stops(self) -> frozenset[int]:
        """The ids that end a reply."""
        return frozenset() if self.fixed_length else frozenset(self.stop_tokens) - {NONE}

    @property
    def distribution(self) -> tuple[object, ...]:
        """The settings that log-probs depend on. If two samplings agree in them, every reply has equal log-probs."""
        early = (self.min_tokens, self.stops) if self.min_tokens and self.stops else ()
        return self.temperature, self.banned, early, self.truncates, self.choice, self.guidance

    @property
    def plain(self) -> "Sampling":
        """This sampling without temperature, masks, truncation and guidance; demonstrations are scored so."""
        bare = replace(self, temperature=1.0, min_tokens=0, banned=(), top_k=0, top_p=1.0, min_p=0.0, truncation=None)
        return replace(bare, guidance=0.0) if self.guidance else bare

    @property
    def of_options(self) -> "Sampling":
        """The sampling that scores the tokens of an option. Temperature applies to the choice, not to its tokens."""
        return replace(self.plain, banned=self.banned, guidance=self.guidance)

    @property
    def terminator(self) -> int | None:
        """The token that is put after an option, so that it differs from a longer one that begins with it; or None."""
        return min(self.stops, default=None)

    def of(self, policy: TrainablePolicy) -> "Sampling":
        """This sampling with what a policy decides: its stop tokens, if there are none, and what `only_text` bans.

        Raises: OperantError for `only_text` or stop strings, and a policy without a tokenizer.
        """
        if policy.tokenizer is None and self.stop_strings and not self.fixed_length:
            raise OperantError("sampling.stop_strings need a tokenizer, and the policy has none: give it one")
        own = self if self.stop_tokens else replace(self, stop_tokens=policy.stop_tokens)
        if not self.only_text:
            return own
        if policy.tokenizer is None:
            raise OperantError("sampling.only_text needs a tokenizer, and the policy has none: save one in its folder")
        odd = {*range(policy.vocabulary)} - {*text_tokens(policy.tokenizer)} - own.stops
        return replace(own, banned=tuple(sorted({*self.banned, *odd})))

    def for_training(self) -> "Sampling":
        """Return self. Raises: OperantError for truncation that would make ratios and KL wrong."""
        if self.truncates and self.truncation != "stored":
            if self.top_k == 1:
                why = "a greedy reply is no sample, and training needs samples to compare"
                how = "sample (do_sample=True, top_k=0), and decode greedily in evaluation alone"
                what = f"do_sample=False (sampling.top_k=1): {why}: {how}"
                raise OperantError(f"{what}: evaluation.sampling={{top_k: 1}}")
            why = "truncated sampling gives a biased ratio and a negative KL in training"
            how = "use top_k=0, top_p=1, min_p=0, or truncation='stored' to store the allowed tokens"
            raise OperantError(f"sampling.{self._truncation_options()}: {why}; {how}")
        return self

    def warning(self) -> str | None:
        """A sentence on how truncation biases the KL estimate; None without truncation."""
        if not self.truncates:
            return None
        kl = "KL is measured between the untruncated ones: its estimate is biased and may be negative"
        return f"replies come from a distribution truncated by {self._truncation_options()}, and {kl}"

    def check_ids(self, vocabulary: int) -> None:
        """Raises: OperantError for ids outside a vocabulary of this size, or if no id is left to draw."""
        for name, ids in (("stop_tokens", set(self.stop_tokens) - {NONE}), ("banned", self.banned)):
            check_ids(tuple(ids), vocabulary, f"sampling.{name}")
        early = self.stops if self.min_tokens else frozenset()
        if len(early | set(self.banned)) >= vocabulary:
            raise OperantError(f"sampling.banned={shown(self.banned)} leaves none of {vocabulary} ids; ban fewer")

    def _truncation_options(self) -> str:
        on = {"top_k": self.top_k > 0, "top_p": self.top_p < 1, "min_p": self.min_p > 0}
        return ", ".join(f"{name}={getattr(self, name)}" for name in on if on[name])

    def adjust(self, logits: Tensor, places: Tensor | int) -> Tensor:
        """Scale and mask `logits` [N, V] for the tokens at positions `places` [N] of their replies, without truncation.

        Returns [N, V] in float32, or in the dtype of the logits if that is wider.
        """
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
        """[N, V] bool: the tokens that can be drawn; None without truncation. `adjusted`: logits from `adjust`."""
        if not self.truncates:
            return None
        keep = torch.ones_like(adjusted, dtype=torch.bool)
        if self.top_k:
            best = adjusted.topk(min(self.top_k, adjusted.shape[-1]), dim=-1)
            keep = torch.zeros_like(keep).scatter(-1, best.indices, True)
        probs = adjusted.masked_fill(~keep, -torch.inf).softmax(-1)  # over what top-k leaves, as transformers does
        if self.top_p < 1:
            ordered, order = probs.sort(dim=-1, descending=True, stable=True)
            within = ordered.cumsum(-1) - ordered < self.top_p
            within[..., : self.top_p_least] = True
            keep &= torch.zeros_like(keep).scatter(-1, order, within)
        if self.min_p:
            keep &= probs >= self.min_p * probs.max(-1, keepdim=True).values
        if self.keep_stops and self.top_k != 1:  # that is greedy
            keep[..., list(self.stops)] = True
        return keep & adjusted.isfinite()

    @staticmethod
    def draw(scores: Tensor, uniforms: Tensor, work: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Draw from softmax(scores [N, V]) by inverse CDF; returns ids [N] and their log-probs [N].

        `uniforms` [N]: float64 random numbers in [0, 1). `work` [N, V] float32: a buffer that is overwritten.
        A draw has two levels, the block of the vocabulary and the token within it; only sums of blocks are float64.
        """
        top = scores.amax(-1, keepdim=True)
        mass = torch.sub(scores, top, out=work).exp_()
        whole = mass.shape[-1] // BLOCK * BLOCK
        sums = [mass[:, :whole].unflatten(-1, (whole // BLOCK, BLOCK)).sum(-1)] if whole else []
        if whole < mass.shape[-1]:
            sums.append(mass[:, whole:].sum(-1, keepdim=True))
        block, share, total = _pick(torch.cat(sums, -1), uniforms)
        columns = block * BLOCK + torch.arange(BLOCK, device=scores.device)
        inside = mass.gather(-1, columns.clamp(max=mass.shape[-1] - 1)).masked_fill_(columns >= mass.shape[-1], 0)
        # If scores are NaN any id will do, as long as it is in the vocabulary: the step will be refused.
        ids = (block * BLOCK + _pick(inside, share.squeeze(-1))[0]).clamp_(max=scores.shape[-1] - 1)
        logprobs = scores.gather(-1, ids) - top - total.log().to(scores)
        return ids.squeeze(-1), logprobs.squeeze(-1)


def _pick(mass: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find where the cumulative `mass` [N, K] passes `uniforms` [N].

    Returns the index, the share of its mass that lies before that point, and the total mass, each [N, 1].
    """
    cumulative = mass.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    wanted = uniforms.to(cumulative)[:, None] * total
    index = torch.searchsorted(cumulative, wanted, right=True)
    # A product that rounds up to the total mass would fall past the end: take the last index that has any mass.
    index = torch.minimum(index, torch.searchsorted(cumulative, total, right=False)).clamp_(max=mass.shape[-1] - 1)
    own = mass.gather(-1, index).double()
    return index, (wanted - (cumulative.gather(-1, index) - own)) / own, total


# --- random numbers from counters -------------------------------------------------------------------------------------

WORD = 0xFFFFFFFFFFFFFFFF
Bits = TypeVar("Bits", int, np.ndarray)


def _mix(x: Bits) -> Bits:
    """The finaliser of SplitMix64 (Steele et al., 2014) of an int below 2 ** 64, or of an array of uint64."""
    x = (x + 0x9E3779B97F4A7C15) & WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


def counter(*parts: int | str) -> int:
    """Hash the parts to a 64-bit number. It does not depend on the process, the order of calls or the batch."""
    state = 0
    for part in parts:
        if isinstance(part, str):
            part = int.from_bytes(blake2b(part.encode(), digest_size=8).digest(), "little")
        state = _mix(state ^ (int(part) & WORD))
    return state


def task_key(seed: int, stream: str, step: int, task_id: str, sample: int = 0, turn: int = 0) -> int:
    """The random-number key of one reply. Evaluation and probe replies have the same key at every step."""
    return counter(seed, STREAMS[stream], step if stream == "train" else 0, task_id, sample, turn)


def uniforms(keys: Sequence[int] | np.ndarray, place: int | np.ndarray) -> Tensor:
    """float64 [N] in [0, 1): the random number of each key [N] at position `place` of its reply."""
    start = np.asarray(keys, dtype=np.uint64)
    bits = _mix(start ^ _mix(np.broadcast_to(np.asarray(place, dtype=np.uint64), start.shape).copy()))
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def check_ids(ids: Sequence[int], vocabulary: int, what: str) -> None:
    """Raises: OperantError for an id that is not in the vocabulary. The message begins with `what`."""
    if ids and (min(ids) < 0 or max(ids) >= vocabulary):
        odd = next(token for token in ids if not 0 <= token < vocabulary)
        has = f"the model has 0 to {vocabulary - 1}: is this its tokenizer?"
        raise OperantError(f"{what} holds the id {shown(odd)}, but {has}")


# --- stop strings and text --------------------------------------------------------------------------------------------


class StopTable:
    """The tokens that could complete a stop string, so that only replies that end in one of them are decoded."""

    def __init__(self, tokenizer: Any, strings: tuple[str, ...]):
        self.tokenizer, self.strings = tokenizer, strings
        self.flags = np.zeros(len(tokenizer), dtype=bool)
        """[V] whether each token could complete a stop string."""
        for token in range(len(tokenizer)):
            piece = tokenizer.decode([token])
            # A token decoded alone may lose its leading space, and half a character decodes as U+FFFD.
            pieces = (piece, " " + piece, piece.removeprefix("##"))  # which BERT's tokens have inside of a word
            self.flags[token] = "\ufffd" in piece or any(
                s in p or any(p.startswith(s[k:]) for k in range(len(s))) for s in strings for p in pieces
            )

    def ends(self, action: Sequence[int], min_tokens: int = 0) -> bool:
        """Whether the reply's text contains a stop string that was not complete before `min_tokens` tokens."""
        if action[-1] < len(self.flags) and not self.flags[action[-1]]:
            return False
        early = len(self.tokenizer.decode(list(action[: min_tokens - 1]))) if min_tokens > 1 else 0
        return _find_stop(self.tokenizer.decode(list(action)), self.strings, early) is not None


def _find_stop(text: str, strings: Sequence[str], early: int) -> int | None:
    """Index in `text` of the first stop string, or None. Those within the first `early` characters do not count."""
    places = [text.find(s, max(0, early - len(s) + 1)) for s in strings]
    return min((p for p in places if p >= 0), default=None)


_tables: dict[tuple[int, tuple[str, ...]], StopTable] = {}


def stop_table(tokenizer: Tokenizer | None, strings: tuple[str, ...]) -> StopTable:
    """The `StopTable` of a tokenizer and stop strings, made once and reused."""
    key = (id(tokenizer), strings)
    if key not in _tables or _tables[key].tokenizer is not tokenizer:
        _tables[key] = StopTable(tokenizer, strings)
    return _tables[key]


def reply_end(tokenizer: Tokenizer | None, action: list[int], sampling: Sampling) -> End:
    """Why a reply ended: `length` if it has `max_tokens` tokens and does not end in a stop token or string."""
    if len(action) < sampling.max_tokens or action[-1] in sampling.stops:
        return "stop"
    strings = () if sampling.fixed_length or tokenizer is None else sampling.stop_strings
    return "stop" if strings and stop_table(tokenizer, strings).ends(action, sampling.min_tokens) else "length"


def reply_text(tokenizer: Tokenizer | None, prompt: Sequence[int], action: Sequence[int], sampling: Sampling) -> str:
    """The reply as text, without its stop token and cut before a stop string."""
    ids = list(action[:-1] if action and action[-1] in sampling.stops else action)
    # It is decoded together with its prompt: some tokenizers drop a leading space at the start of a text.
    before = tokenizer.decode(list(prompt), skip_special_tokens=True)

    def decode(some: list[int]) -> str:
        whole = tokenizer.decode(list(prompt) + some, skip_special_tokens=True)
        return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(some, skip_special_tokens=True)

    text = decode(ids)
    if sampling.fixed_length or not sampling.stop_strings:
        return text
    early = len(decode(ids[: sampling.min_tokens - 1])) if sampling.min_tokens > 1 else 0
    return text[: _find_stop(text, sampling.stop_strings, early)]


@dataclass
class ReplyText:
    """The text of a growing reply.

    text = ReplyText(tokenizer, prompt_ids, sampling)
    for token in engine.stream(prompt_ids, sampling, key):
        print(text.add(token), end="")        # the new text that no later token can change, maybe none
    print(text.rest())
    """

    tokenizer: Any
    prompt: list[int]
    sampling: Sampling
    action: list[int] = field(default_factory=list)
    shown: str = ""

    @property
    def whole(self) -> str:
        """The reply so far."""
        return reply_text(self.tokenizer, self.prompt, self.action, self.sampling)

    def add(self, token: int) -> str:
        """Append a token. Half a character, a space at the end and the beginning of a stop string wait."""
        self.action.append(token)
        text = self.whole.rstrip("\ufffd \n")
        strings = () if self.sampling.fixed_length else self.sampling.stop_strings
        begun = max((k for s in strings for k in range(1, len(s)) if text.endswith(s[:k])), default=0)
        text = text[: len(text) - begun]
        if not text.startswith(self.shown):
            return ""
        new, self.shown = text[len(self.shown) :], text
        return new

    def rest(self) -> str:
        """The text that waited. If a token has changed text that was shown, the whole reply on a new line."""
        whole = self.whole
        return whole[len(self.shown) :] if whole.startswith(self.shown) else f"\n{whole}"


def text_tokens(tokenizer: Tokenizer | None) -> list[int]:
    """The ids whose tokens are text by themselves, of which any row can be printed and pasted."""
    special = set(tokenizer.all_special_ids)
    pieces = ((token, tokenizer.decode([token])) for token in range(len(tokenizer)) if token not in special)
    return [token for token, piece in pieces if piece.strip() and piece.isprintable() and "\ufffd" not in piece]


_pieces: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()


def token_pieces(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str]:
    """The text of each token as it reads inside a longer text; half a character is U+FFFD.

    Without a tokenizer, the ids themselves as text.
    """
    if tokenizer is None:
        return [f" {token}" for token in ids]
    known = _pieces.setdefault(tokenizer, {})
    for token in set(ids) - known.keys():
        once, twice = tokenizer.decode([token]), tokenizer.decode([token, token])
        # Some tokenizers drop the space before the first word of a text, but not before the second.
        known[token] = twice[len(once) :] if twice.startswith(once) else once
    return [known[token] for token in ids]


# --- prompts: the only place where chat templates are used ------------------------------------------------------------


def encode_prompt(
    tokenizer: Tokenizer | None, prompt: str | Sequence[Mapping[str, object]] | Sequence[int], tools: object = None
) -> list[int]:
    """Token ids of a prompt: ids unchanged, text with the tokenizer's special tokens, messages by its chat template.

    `tools`: the functions that an answer may call, for the template.
    """
    ids = [token for token in prompt if isinstance(token, int)] if isinstance(prompt, list) else []
    if isinstance(prompt, list) and len(ids) == len(prompt):
        return ids
    if tokenizer is None:
        raise OperantError("the policy has no tokenizer: give prompts as token ids, or Policy(model, tokenizer)")
    if isinstance(prompt, str):
        begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        return encode_text(tokenizer, prompt) or begin
    return list(_templated(tokenizer, prompt, True, tools=tools, tokenize=True, return_dict=True)["input_ids"])


def render(
    tokenizer: Tokenizer | None, messages: Sequence[Mapping[str, object]], *, prompting: bool, tools: object = None
) -> str:
    """The text that the chat template makes of messages. `prompting`: end it where an answer begins.

    Raises: OperantError if there is no template, or if it fails.
    """
    return _templated(tokenizer, messages, prompting, tools=tools, tokenize=False)


class PlainTokenizer:
    """Parts that some tokenizers lack, with the values that then hold."""

    all_special_ids: Sequence[int] = ()
    backend_tokenizer: Any = None
    bos_token: str | None = None
    chat_template: str | None = None
    response_template: str | None = None
    unk_token_id: int | None = None
    get_vocab: Callable[[], dict[str, int]] = dict


def template_of(tokenizer: object) -> str | None:
    """The chat template of a tokenizer; None if it has none."""
    return with_defaults(tokenizer, PlainTokenizer).chat_template


def _templated(tokenizer: Tokenizer | None, messages: object, prompting: bool, **kwargs: object) -> Any:
    how = "give text, or a template (--model.chat-template, docs/tasks.md)"
    require(template_of(tokenizer), f"the task is a list of messages, and the tokenizer has no chat template: {how}")
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=prompting, **kwargs)
    except Exception as error:  # a template is code, and may raise anything
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise OperantError(f"the chat template fails on {shown(messages)} ({why}): correct one of them") from error


def encode_text(tokenizer: Tokenizer, text: str, **kwargs: object) -> list[int]:
    """Token ids of a text. Raises: OperantError for one that the tokenizer refuses."""
    try:
        return list(tokenizer(text, **kwargs)["input_ids"])
    except (TypeError, UnicodeError) as error:
        raise OperantError(f"{shown(text)} cannot be encoded (half a surrogate pair?): correct the text") from error


def encode_more(tokenizer: Tokenizer | None, text: str) -> list[int]:
    """Token ids of a text that continues a conversation, without special tokens."""
    if text and tokenizer is None:
        raise OperantError(f"the policy has no tokenizer for {shown(text)}: give one, Policy(model, tokenizer)")
    return encode_text(tokenizer, text, add_special_tokens=False) if text else []


@dataclass(frozen=True)
class TokenCount:
    """Counts the tokens that a text adds to a prompt."""

    tokenizer: Any

    def __call__(self, text: str) -> int:
        return len(encode_more(self.tokenizer, text))

    def plain(self) -> str | None:
        """The tokenizer as JSON, which `count_with` reads in another process; None for one in Python."""
        fast = with_defaults(self.tokenizer, PlainTokenizer).backend_tokenizer
        return fast.to_str() if fast is not None else None


def check_prompts(
    policy: TrainablePolicy, prompts: Sequence[list[int]], sampling: Sampling, *, choosing: bool = False
) -> None:
    """Raises: OperantError for an empty prompt, one that leaves no room for a reply, or ids that there are not.

    choosing: among given replies, so that room is looked for elsewhere.
    """
    sampling.check_ids(policy.vocabulary)
    for i, prompt in enumerate(prompts):
        require(prompt, f"prompt {i} has no tokens: give at least one (a beginning-of-text token, say)")
        check_ids(prompt, policy.vocabulary, f"prompt {i}")
        if not choosing and (why := policy.misfit(len(prompt), sampling.max_tokens)) is not None:
            raise OperantError(f"prompt {i} {why}: shorten the prompt or lower sampling.max_tokens")


def check_expressed(sampling: Sampling, names: Sequence[str], engine: str) -> None:
    """Raises: OperantError for the first of `names` that is not at its default: the engine cannot sample so."""
    for option in fields(Sampling):
        value = getattr(sampling, option.name)
        idle = option.name == "truncation" and not sampling.truncates
        if option.name in names and value != option.default and not idle:
            why = f"engine {engine} cannot sample so; leave it out, or use engine=native"
            raise OperantError(f"sampling.{option.name}={shown(value)}: {why}")


def end_of(ids: Sequence[int], sampling: Sampling, tokenizer: Tokenizer | None) -> int | None:
    """Number of tokens after which a stop token or string has ended a reply; None if neither has."""
    strings = () if sampling.fixed_length else sampling.stop_strings
    table = stop_table(tokenizer, strings) if strings else None
    for count, token in enumerate(ids, 1):
        if token in sampling.stops:
            return count
        if table is not None and count >= sampling.min_tokens and table.ends(ids[:count], sampling.min_tokens):
            return count
    return None
