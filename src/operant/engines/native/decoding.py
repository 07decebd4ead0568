"""Decoding: reads prompts once, then feeds one token per row and step, and removes finished rows.

    decoding = decode(policy, rows=32, columns=72)
    decoding.admit(prompts)                 # .states [B, D]: the state before the first token of each reply
    decoding.step(ids)                      # feeds one token to each row, and updates .states
    decoding.keep(order)                    # removes the rows of finished replies

`Pooled` writes into one buffer, and can admit new prompts at any time. `Cached` uses transformers' own cache, for
encoder-decoders and for models whose cache is of another kind. `Whole` has no cache. `capabilities.py` finds out which
of them are exact for a model.
"""

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
