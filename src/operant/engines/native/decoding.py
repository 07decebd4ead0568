"""Decoding: reads prompts once, then feeds one token per row and step, and removes finished rows.

    decoding = decode(policy, rows=32, columns=72)
    decoding.admit(prompts)                 # .states [B, D]: the state before the first token of each reply
    decoding.step(ids)                      # feeds one token to each row, and updates .states
    decoding.keep(order)                    # removes the rows of finished replies

`Pooled` writes into one buffer, and can admit new prompts at any time. `Cached` uses transformers' own cache, for
encoder-decoders and for models whose cache is of another kind. `Whole` has no cache. `capabilities.py` finds out which
of them are exact for a model. `Record` keeps the tokens that are drawn, and makes completions of them.
"""

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from operant.engines.native.kv_cache import Window, plain_layers
from operant.engines.native.prefixes import Prefix, Prefixes
from operant.models import layout
from operant.models.policy import Policy
from operant.rollouts.collate import distinct
from operant.sampling import Sampling, stop_table
from operant.types import Completion, End

READ_AT_ONCE = 16384
"""Most prompt tokens in one call of the model, padding included."""
PADDING = 256
"""Tokens of padding that cost less than another call of the model."""


class Decoding:
    """A batch of growing rows. `states` [B, D] is the hidden state before the next token of each."""

    joins = True
    """Whether prompts can be admitted beside live rows."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.states: Tensor = torch.empty(0)
        self.live = 0
        self.trunk = None if policy.encoder_decoder else policy.trunk
        self.read: list[Tensor] = []
        """With a trunk: the trunk states [len(prompt), D] of each prompt that was last admitted."""
        self.below: Tensor | None = None
        """With a trunk: the trunk states [B, D] of the tokens that were last fed."""
        self.kept: Prefixes | None = None
        """The keys and values of earlier calls. Only `Pooled` uses them."""

    def admit(self, prompts: Sequence[list[int]], following: list[int] | None = None) -> None:
        """Read prompts, equal ones once, and append a row for each. `following`: the prompt that will come next.

        If there are live rows, no prompt may be longer than the longest of them, so the longest prompts come first.
        """
        raise NotImplementedError

    def step(self, ids: Tensor) -> None:
        """Append one token to each row; `ids` [B]."""
        raise NotImplementedError

    def keep(self, order: np.ndarray) -> None:
        """Row i becomes the previous row order[i]; rows that are not in `order` are removed."""
        raise NotImplementedError

    def _join(self, states: Tensor) -> None:
        self.states = torch.cat([self.states, states]) if self.live else states
        self.live = len(self.states)

    def _keep_states(self, order: np.ndarray) -> Tensor:
        """Reorder `states`; returns `order` as a tensor on the device."""
        rows = torch.from_numpy(order).to(self.policy.device)
        self.states, self.live = self.states[rows], len(order)
        return rows

    def _left(self, prompts: list[list[int]], width: int | None = None) -> dict[str, Tensor]:
        """The arguments of a causal model for prompts padded on the left, so that all end at the same column.

        `width`: the number of columns that the model reads, which are the last ones; None: all.
        """
        tokens, mask = layout.pad(prompts, "left", self.policy.device)
        width = width or tokens.shape[1]
        if min(map(len, prompts)) == tokens.shape[1] == width:
            return {"input_ids": tokens}
        places = layout.positions(mask)[:, -width:]
        return {"input_ids": tokens[:, -width:], "attention_mask": mask.long(), "position_ids": places}

    def _below(self, prompts: list[list[int]]) -> list[Tensor]:
        """The trunk states of prompts, as far as the last call of the model has read them."""
        if self.trunk is None:
            return []
        return [last[max(len(last) - len(p), 0) :].clone() for last, p in zip(self.trunk.last, prompts, strict=True)]

    def _last_below(self) -> Tensor | None:
        return self.trunk.last[:, -1] if self.trunk is not None else None


def needed_layers(policy: Policy, columns: int) -> int:
    """Number of layers of a model that caches plain keys and values."""
    layers = plain_layers(policy, columns)
    if layers is None:
        raise ValueError(f"{type(policy.model).__name__} keeps more than keys and values")
    return layers


class Pooled(Decoding):
    """All rows share one buffer, written in place. New prompts are read into columns that end at the current one."""

    def __init__(self, policy: Policy, rows: int, columns: int):
        super().__init__(policy)
        self.cache = Window(needed_layers(policy, columns), rows, columns)
        self.parked: tuple[list[int], Tensor, Tensor, list[Tensor]] | None = None
        """The last prompt, its keys and values, state and trunk states, if the next `admit` begins with it again."""

    def admit(self, prompts: Sequence[list[int]], following: list[int] | None = None) -> None:
        unique, sources = distinct(prompts)
        states, below, begin = [], [], self.live
        todo = unique
        self.cache.end_at(max(map(len, unique)))
        if self.parked is not None and unique[0] == self.parked[0]:
            _, keys_and_values, state, read = self.parked
            self.cache.place(keys_and_values)
            states, below, todo = [state], list(read), unique[1:]
        self.parked = None
        found = [self._find(p) for p in todo]
        for part in portions(list(map(len, todo)), [shared for _, shared in found]):
            states.append(self._read(todo[part], found[part], below))
        if following is not None and following == unique[-1]:
            last = self.cache.lift(self.cache.live - 1).clone()
            self.parked = (following, last, states[-1][-1:].clone(), below[-1:])
        self.cache.repeat(sources, begin)
        self._join(torch.cat(states)[sources] if len(unique) < len(prompts) else torch.cat(states))
        self.read = [below[i] for i in sources] if below else []

    def _find(self, prompt: list[int]) -> tuple[Prefix | None, int]:
        """What is kept of the beginning of a prompt, and the number of tokens that they share."""
        prefix, shared = self.kept.find(prompt) if self.kept is not None else (None, 0)
        unknown = self.trunk is not None and prefix is not None and prefix.states is None
        return (None, 0) if unknown else (prefix, shared)

    def _read(self, prompts: list[list[int]], found: list[tuple[Prefix | None, int]], below: list[Tensor]) -> Tensor:
        """[B, D] the states at the ends of prompts, which one call reads; appends their trunk states to `below`.

        The call reads the same number of tokens of each prompt: of those that share more, it reads some again.
        """
        read = max(len(p) - shared for p, (_, shared) in zip(prompts, found, strict=True))
        begun = [(prefix, max(len(p) - read, 0)) for p, (prefix, _) in zip(prompts, found, strict=True)]
        some = next((prefix for prefix, n in begun if prefix is not None and n), None)
        heads = [(prefix or some).keys_and_values[:, :, :, :n] for prefix, n in begun] if some is not None else []
        self.cache.reading(len(prompts), max(map(len, prompts)), heads)
        states = self.policy.last_states(**self._left(prompts, read), past_key_values=self.cache)[0]
        self.cache.read([len(p) for p in prompts])
        for own, (prefix, n) in zip(self._below(prompts), begun, strict=False):
            below.append(torch.cat([prefix.states[:n], own]) if prefix is not None and n else own)
        return states

    def step(self, ids: Tensor) -> None:
        self.cache.stepping()
        feed = {"input_ids": ids[:, None]}
        seen = self.cache.visible(self.policy.device)
        if seen is not None:
            feed |= {"attention_mask": seen[0], "position_ids": seen[1]}
        self.states, _ = self.policy.last_states(**feed, past_key_values=self.cache)
        self.cache.stepped()
        self.below = self._last_below()

    def keep(self, order: np.ndarray) -> None:
        self.cache.keep(order)
        self._keep_states(order)


class Cached(Decoding):
    """Uses the cache that transformers makes for the model. New prompts wait until there is no live row."""

    joins = False

    def admit(self, prompts: Sequence[list[int]], following: list[int] | None = None) -> None:
        unique, sources = distinct(prompts)
        if self.policy.encoder_decoder:
            tokens, mask = layout.pad(unique, "right", self.policy.device)
            self.mask = mask.long()
            self.source = self.policy.encoded(tokens, self.mask)
            start = torch.full((len(unique), 1), self.policy.start_token, device=self.policy.device)
            feed = {"encoder_outputs": self.source, "attention_mask": self.mask, "decoder_input_ids": start}
            self.states, self.cache = self.policy.last_states(**feed)
        else:
            feed = self._left(unique)
            self.mask = feed.get("attention_mask")
            self.lengths = torch.tensor([len(p) for p in unique], device=self.policy.device)
            self.states, self.cache = self.policy.last_states(**feed)
            below = self._below(unique)
            self.read = [below[i] for i in sources] if below else []
        if len(unique) < len(prompts):
            self.keep(np.asarray(sources))
        self.live = len(prompts)

    def step(self, ids: Tensor) -> None:
        feed: dict[str, object] = {"decoder_input_ids" if self.policy.encoder_decoder else "input_ids": ids[:, None]}
        if self.policy.encoder_decoder:
            feed |= {"encoder_outputs": self.source, "attention_mask": self.mask}
        elif self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], 1)
            feed |= {"attention_mask": self.mask, "position_ids": self.lengths[:, None]}
            self.lengths = self.lengths + 1
        self.states, self.cache = self.policy.last_states(**feed, past_key_values=self.cache)
        self.below = self._last_below()

    def keep(self, order: np.ndarray) -> None:
        rows = self._keep_states(order)
        # Layers of linear attention cannot select rows, only reorder them, which may leave some out.
        linear = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in getattr(self.cache, "layers", ()))
        (self.cache.reorder_cache if linear else self.cache.batch_select_indices)(rows)
        if self.mask is not None:
            self.mask = self.mask[rows]
        if self.policy.encoder_decoder:
            self.source = type(self.source)(last_hidden_state=self.source.last_hidden_state[rows])
        else:
            self.lengths = self.lengths[rows]


class Whole(Decoding):
    """Has no cache: every step computes each row from its start, by itself. Slow, but exact for every model."""

    def __init__(self, policy: Policy):
        super().__init__(policy)
        self.rows: list[tuple[list[int], list[int]]] = []

    def admit(self, prompts: Sequence[list[int]], following: list[int] | None = None) -> None:
        self.read = []
        self._join(torch.cat([self._compute(list(p), []) for p in prompts]))
        self.rows += [(list(p), []) for p in prompts]

    def step(self, ids: Tensor) -> None:
        below, states = [], []
        for (prompt, reply), token in zip(self.rows, ids.tolist(), strict=True):
            reply.append(token)
            states.append(self._compute(prompt, reply))
            below += [] if (last := self._last_below()) is None else [last]
        self.states = torch.cat(states)
        self.below = torch.cat(below) if below else None

    def keep(self, order: np.ndarray) -> None:
        self._keep_states(order)
        self.rows = [self.rows[i] for i in order.tolist()]

    def _compute(self, prompt: list[int], reply: list[int]) -> Tensor:
        policy = self.policy
        feed = {"input_ids": [prompt if policy.encoder_decoder else prompt + reply]}
        if policy.encoder_decoder:
            feed["decoder_input_ids"] = [[policy.start_token, *reply]]
        tensors = {k: torch.tensor(v, device=policy.device) for k, v in feed.items()}
        states = self.policy.last_states(**tensors, use_cache=False)[0]
        if not reply:
            self.read += self._below([prompt])
        return states


def portions(lengths: list[int], kept: list[int]) -> Iterator[slice]:
    """Cut prompts, which come longest first, into parts that one call of the model reads.

    `kept`: of each prompt, the number of tokens that need not be read. Prompts of which very different numbers remain
    are read by several calls.
    """
    start, width, real = 0, 0, 0
    for i, remaining in enumerate(n - known for n, known in zip(lengths, kept, strict=True)):
        wide, count = max(width, remaining), i + 1 - start
        padded = any(kept[start : i + 1]) and wide * count > 2 * (real + remaining) + PADDING
        if i > start and (wide * count > READ_AT_ONCE or padded):
            yield slice(start, i)
            start, width, real = i, 0, 0
        width, real = max(width, remaining), real + remaining
    if lengths:
        yield slice(start, len(lengths))


class Record:
    """Tokens, log-probs and values of N replies, each [N, max_tokens], and which of the replies have ended."""

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        version: int,
        begun: Sequence[Sequence[int]] = (),
        more: Sequence[int] = (),
        *,
        fed: bool = False,
    ):
        """begun: tokens that each reply begins with, before at most `more` new ones; fed: they are fed one by one."""
        shape, device = (len(prompts), sampling.max_tokens), policy.device
        self.sampling, self.version = sampling, version
        self.prompts = prompts
        self.tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(shape, dtype=policy.numbers, device=device)
        self.values = torch.zeros_like(self.logprobs) if policy.value_head is not None else None
        none = torch.zeros(shape[0], dtype=torch.long)
        self.begun = torch.tensor([len(ids) for ids in begun]) if begun else none
        """[N] number of the first tokens of each reply that earlier calls have drawn: its completion has the others."""
        self.first = none if fed else self.begun
        """[N] place in each reply of the first token that is drawn or fed; those before it are part of the prompt."""
        self.limits = torch.full(shape[:1], sampling.max_tokens)
        if begun:
            self.limits = (self.begun + torch.tensor(more)).clamp(max=sampling.max_tokens)
        for i, ids in enumerate(begun):
            self.tokens[i, : len(ids)] = torch.tensor(ids, dtype=torch.long)
        self.lengths = self.limits.to(device, copy=True)
        self.ended = torch.zeros(shape[0], dtype=torch.bool, device=device)
        stops = sorted(sampling.stops)
        self.stops = torch.zeros(max([policy.vocabulary, *(s + 1 for s in stops)]), dtype=torch.bool, device=device)
        self.stops[stops] = True
        strings = () if sampling.fixed_length else sampling.stop_strings
        self.table = stop_table(policy.tokenizer, strings) if strings else None
        self.flags = torch.from_numpy(self.table.flags).to(device) if self.table else None
        self.allowed: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        """One entry per step: the replies, the number of ids that each could draw, and these ids."""
        self.read: dict[int, Tensor] = {}
        """With a trunk: the trunk states [len(prompt), D] of each reply's prompt."""
        self.below: list[tuple[Tensor, Tensor, Tensor]] = []
        """With a trunk: one entry per step: the replies, the positions of the tokens that were fed, their states."""

    def write(
        self, live: Tensor, places: Tensor, ids: Tensor, logprobs: Tensor, values: Tensor | None, kept: Tensor | None
    ) -> None:
        """Record the tokens at positions `places` [B] of the replies `live` [B].

        `kept` [B, V]: the tokens that could be drawn. Tokens after the end of a reply are recorded, but never used.
        """
        at = (live, places)
        self.tokens[at], self.logprobs[at] = ids, logprobs
        if self.values is not None and values is not None:
            self.values[at] = values.to(self.values)
        if kept is not None:
            ragged = kept.nonzero()[:, 1].to(torch.int32)
            self.allowed.append(tuple(x.cpu().numpy() for x in (live, kept.sum(1), ragged)))
        stopped = self.stops[ids]
        if self.table is not None and self.flags is not None:
            least = self.sampling.min_tokens
            flagged = self.flags[ids.clamp(max=len(self.flags) - 1)] & ~stopped & (places + 1 >= least)
            for i in flagged.nonzero().squeeze(1).tolist():
                reply = self.tokens[live[i], : int(places[i]) + 1]
                stopped[i] = self.table.ends(reply.tolist(), least)
        fresh = stopped & ~self.ended[live]
        self.lengths[live] = torch.where(fresh, places + 1, self.lengths[live])
        self.ended[live] |= fresh

    def completions(self) -> list[Completion]:
        tokens, logprobs = self.tokens.tolist(), self.logprobs.tolist()
        values = self.values.tolist() if self.values is not None else None
        lengths = self.lengths.tolist()
        allowed, states = self._allowed(lengths), self._states(lengths)
        out = []
        for i, (n, ended) in enumerate(zip(lengths, self.ended.tolist(), strict=True)):
            end: End = "stop" if ended else "length"
            new = slice(int(self.begun[i]), n)
            own = values[i][new] if values is not None else None
            drawn = allowed[i][int(self.begun[i] - self.first[i]) :] if allowed else None
            more = {"allowed": drawn, "states": states[i] if states else None}
            out.append(Completion(tokens[i][new], logprobs[i][new], own, end, self.version, **more))
        return out

    def _allowed(self, lengths: list[int]) -> list[list[Sequence[int]]] | None:
        """The ids that could be drawn at each position of each reply, in arrays: there may be thousands at each."""
        if not self.allowed:
            return None
        out: list[list[Sequence[int]]] = [[] for _ in lengths]
        first = self.first.tolist()
        for live, counts, ids in self.allowed:
            for i, own in zip(live.tolist(), np.split(ids, counts.cumsum()[:-1]), strict=True):
                if len(out[i]) < lengths[i] - first[i]:
                    out[i].append(array("i", own.tobytes()))
        return out

    def _states(self, lengths: list[int]) -> list[Tensor] | None:
        """The trunk states [len(prompt) + len(action) - 1, D] of each prompt and reply."""
        if not self.read:
            return None
        first = self.first.tolist()
        counts = [len(p) + n - m - 1 for p, n, m in zip(self.prompts, lengths, first, strict=True)]
        like = self.read[0]
        flat = like.new_empty(sum(counts), like.shape[1])
        parts = list(flat.split(counts))
        for i, part in enumerate(parts):
            part[: len(self.prompts[i])] = self.read[i]
        begins = torch.tensor([0, *counts[:-1]], device=like.device).cumsum(0)
        begins += torch.tensor([len(p) - m for p, m in zip(self.prompts, first, strict=True)], device=like.device)
        for live, places, states in self.below:
            used = places < self.lengths[live] - 1
            flat[(begins[live] + places)[used]] = states[used]
        return parts
