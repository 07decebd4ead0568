"""The native engine: generates replies with the training weights, in batches and with a cache.

Decoding also computes log-probs, values and trunk states, so no second pass is needed. Waiting prompts take the rows of
finished replies. The random numbers of a reply come from its own key, so it does not depend on the rest of the batch.
Between the turns of episodes, keys and values are kept (`prefixes.py`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from math import inf

import numpy as np
import torch
from torch import Tensor

from operant.engines.native.capabilities import chooses_on, continues, try_decoding
from operant.engines.native.cuda_graphs import static
from operant.engines.native.decoding import Cached, Decoding, Pooled, Record, Whole
from operant.engines.native.kv_cache import plain_layers
from operant.engines.native.prefixes import Prefixes, ReadOn
from operant.machine import beat
from operant.models.policy import Policy
from operant.models.twins import both, dealt, twin_of, twins_of
from operant.rollouts.collate import cut, distinct, units
from operant.sampling import Sampling, check_ids, check_prompts, uniforms
from operant.types import Batch, Completion, OperantError, require

__all__ = ["NativeEngine"]

COMPACT_AT = 1.0
"""Finished replies are removed once the live ones are fewer than this share of the batch."""
ADMIT_AT = 0.25
"""Waiting prompts are admitted once this share of the rows is free: each call of the model reads all its weights."""
MICRO_TOKENS = 8192
"""Most tokens of a forward pass that scores options, prompts included."""
CHECK_EVERY = 8
"""Tokens between two checks for finished replies on a GPU, where the CPU has to wait for the result."""


class NativeEngine:
    """An engine in the training process: `policy` is the model in training, so `sync` only stores the version.

    `batch`: number of rows that are decoded at a time; further prompts wait until others have ended.
    `kept_gb`: most GB of keys and values that are kept from one turn of the episodes to the next (`remembering`); 0:
    every prompt is read from its start.
    Raises: OperantError for a `batch` below 1, or a `kept_gb` that is no number of GB.
    """

    def __init__(self, policy: Policy, *, batch: int = 256, kept_gb: float = 2.0):
        require(batch >= 1, f"engine.batch={batch!r}: it must be at least 1")
        require(0 <= kept_gb < inf, f"engine.kept_gb={kept_gb!r}: it is a number of GB, and 0 keeps nothing")
        self.policy, self.batch, self.kept_gb, self.version = policy, batch, kept_gb, policy.version
        self.mask_model: Policy | None = None
        self.kept: Prefixes | None = None
        self.kept_by_twin: Prefixes | None = None

    def mask_with(self, policy: Policy | None) -> None:
        """Let the truncated distribution of another policy decide which tokens may be drawn (NLPO)."""
        self.mask_model = policy

    def sync(self, policy: Policy, version: int) -> None:
        """Use the weights of `policy`. What the previous ones have computed is dropped."""
        self.policy, self.version = policy, version
        if self.kept is not None:
            self._keep_nothing()

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Inside this context, a prompt that begins with tokens of an earlier call is read from there on only."""
        if self.kept_gb:
            self._keep_nothing()
        try:
            yield
        finally:
            self.kept = self.kept_by_twin = None

    def _keep_nothing(self) -> None:
        """Each half of the prompts has its own keys and values, at most half of `kept_gb` if there are two halves."""
        halved = twin_of(self.policy) is not None
        self.kept = Prefixes(self.kept_gb / 2 if halved else self.kept_gb)
        self.kept_by_twin = Prefixes(self.kept_gb / 2) if halved else None

    @torch.no_grad()
    def generate(self, prompts: Sequence[list[int]], sampling: Sampling, keys: Sequence[int]) -> list[Completion]:
        """One reply for each prompt, in the order of the prompts.

        Raises: OperantError for an empty prompt, or one that leaves no room for `max_tokens` in the model's context.
        """
        check_prompts(self.policy, prompts, sampling)
        twins = twins_of(self.policy, self.mask_model) if len(prompts) > 1 else None
        if twins is None:
            return self._generated(prompts, sampling, keys)
        twin, made = copy(self), dict[int, Completion]()
        (twin.policy, twin.mask_model), twin.kept = twins, self.kept_by_twin

        def generate(engine: NativeEngine, half: list[int]) -> None:
            some = engine._generated([prompts[i] for i in half], sampling, [keys[i] for i in half], parts=2)
            made.update(zip(half, some, strict=True))

        # Equal prompts are read together, and each where more of its beginning is kept, so that no half depends on how
        # far the other has come.
        read = [[*self.policy.virtual, *prompt] for prompt in prompts]
        same: dict[tuple[int, ...], list[int]] = {}
        for i, prompt in enumerate(read):
            same.setdefault(tuple(prompt), []).append(i)
        groups = [*same.values()] if len(same) > 1 else [[i] for i in range(len(read))]
        halves: list[list[int]] = [[], []]
        if self.kept is not None and twin.kept is not None:
            known = [self.kept.find(read[i])[1] - twin.kept.find(read[i])[1] for i, *_ in groups]
            halves = [[i for g, n in zip(groups, known) if n * sign > 0 for i in g] for sign in (1, -1)]
            groups = [group for group, n in zip(groups, known) if n == 0]
        for half, more in zip(halves, dealt(groups, [len(prompt) + sampling.max_tokens for prompt in read])):
            half += [i for group in more for i in group]
        both(lambda: generate(self, halves[0]), lambda: generate(twin, halves[1]))
        return [made[i] for i in range(len(prompts))]

    def _generated(
        self, prompts: Sequence[list[int]], sampling: Sampling, keys: Sequence[int], parts: int = 1
    ) -> list[Completion]:
        """The replies, with as many rows at a time as this engine has when it generates one of so many `parts`."""
        if not prompts:
            return []
        record = Record(self.policy, prompts, sampling, self.version)
        for _ in _GenerateCall(self, prompts, sampling, keys, record, kept=self.kept, parts=parts).steps():
            pass
        completions = record.completions()
        if self.kept is not None and record.read:
            for prompt, c in zip(prompts, completions, strict=True):
                if (prefix := self.kept.get([*prompt, *c.action[:-1]])) is not None:
                    prefix.states = c.states
        return completions

    @torch.no_grad()
    def generate_more(
        self,
        prompts: Sequence[list[int]],
        begun: Sequence[Sequence[int]],
        more: Sequence[int],
        sampling: Sampling,
        keys: Sequence[int],
    ) -> list[Completion]:
        """At most `more[i]` further tokens of each reply that begins with the tokens `begun[i]`, none of which ends it.

        A completion has the new tokens alone. Limits, masks and random numbers go by the place of a token in its whole
        reply, so that pieces by the same weights are the reply of `generate`. A piece with the end `length` goes on,
        unless the reply then has `sampling.max_tokens`.
        Raises: OperantError as `generate`, and for a reply that begins with `sampling.max_tokens` tokens or more.
        """
        check_prompts(self.policy, prompts, sampling)
        if (longest := max(map(len, begun), default=0)) >= (most := sampling.max_tokens):
            raise OperantError(
                f"a reply to be continued has {longest} tokens, and sampling.max_tokens={most} leaves no room: "
                "raise it, or keep fewer tokens"
            )
        if not prompts:
            return []
        # What an encoder-decoder has written is no part of its prompt: it is fed again, token by token.
        again = self.policy.encoder_decoder
        read = prompts if again else [[*prompt, *ids] for prompt, ids in zip(prompts, begun, strict=True)]
        record = Record(self.policy, read, sampling, self.version, begun, more, fed=again)
        for _ in _GenerateCall(self, read, sampling, keys, record, kept=None if again else self.kept).steps():
            pass
        return record.completions()

    @torch.no_grad()
    def stream(self, prompt: list[int], sampling: Sampling, key: int) -> Iterator[int]:
        """Yield the tokens of one reply as they are drawn: those that `generate` returns for the prompt and the key.

        Raises: OperantError as `generate` does, at the first token.
        """
        check_prompts(self.policy, [prompt], sampling)
        record = Record(self.policy, [prompt], sampling, self.version)
        for place, _ in enumerate(_GenerateCall(self, [prompt], sampling, [key], record).steps()):
            yield int(record.tokens[0, place])
            if record.ended[0]:  # on a GPU, decoding goes on for a few tokens behind the end
                return

    @torch.no_grad()
    def choose(
        self, prompts: Sequence[list[int]], options: Sequence[list[list[int]]], sampling: Sampling, keys: Sequence[int]
    ) -> list[tuple[int, Completion]]:
        """Draw one option for each prompt, as `Sampling.choice` defines; returns its index and the completion.

        If several options have the same ids, only the first of them is drawn.
        """
        check_prompts(self.policy, prompts, sampling, choosing=True)
        for i, ids in ((i, ids) for i, replies in enumerate(options) for ids in replies):
            check_ids(ids, self.policy.vocabulary, f"an option of prompt {i}")
        once = [distinct(replies) for replies in options]
        batch = Batch.choosing(prompts, [among for among, _ in once])
        wide = max((len(p) + max(map(len, among)) for p, (among, _) in zip(prompts, once, strict=True)), default=0)
        kept = self.kept if self.kept is not None and chooses_on(self.policy, wide + 1) else None
        made: list[tuple[int, Completion]] = [(0, Completion([], [], None, "stop", self.version))] * len(once)
        for rows in cut(batch, units(batch), MICRO_TOKENS):
            some = batch.rows(torch.tensor(rows))
            read = None if kept is None else ReadOn(self.policy, [prompts[row] for row in rows], kept)
            table, values = self.policy.choice_logprobs(some, sampling, read)
            known = None if values is None else values[some.actions].tolist()
            picks, logprobs = sampling.draw(table, uniforms([keys[row] for row in rows], 0).to(table.device))
            if sampling.top_k == 1:  # greedy, as for generated tokens
                logprobs, picks = table.max(-1)
            shares = table.exp().tolist()
            for i, (row, pick, logprob) in enumerate(zip(rows, picks.tolist(), logprobs.tolist(), strict=True)):
                among, places = once[row]
                value, of_options = None if known is None else [known[i]], [shares[i][place] for place in places]
                chosen = Completion(among[pick], [logprob], value, "stop", self.version, probabilities=of_options)
                made[row] = places.index(pick), chosen
                if read is not None and read.shared:
                    read.keep(i, pick)
        return made


class _GenerateCall:
    """The state of one call of `generate`; `steps` is its loop."""

    def __init__(
        self,
        engine: NativeEngine,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        keys: Sequence[int],
        record: Record,
        kept: Prefixes | None = None,
        parts: int = 1,
    ):
        self.policy, self.mask_model, self.sampling, self.record = engine.policy, engine.mask_model, sampling, record
        self.prompts = [[*self.policy.virtual, *p] for p in prompts]
        self.rows, self.keys = min(-(-engine.batch // parts), len(prompts)), np.asarray(keys, dtype=np.uint64)
        self.first, self.limits = record.first.numpy(), record.limits.numpy()
        columns = max(map(len, self.prompts)) + int((self.limits - self.first).max())
        models = [self.policy] + ([self.mask_model] if self.mask_model is not None else [])
        self.decodings: list[Decoding] = [
            decode(model, self.rows, columns, moves=self.rows < len(prompts)) for model in models
        ]
        self.kept = kept if kept is not None and continues(self.policy) else None
        self.decodings[0].kept = self.kept
        first_of: dict[tuple[int, ...], int] = {}
        group = [first_of.setdefault(tuple(p), i) for i, p in enumerate(prompts)]
        self.waiting = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), group[i], i))
        """The replies whose prompts are not read yet: the longest first, equal ones together."""
        device = self.policy.device
        self.fed = record.begun.to(device) if bool((record.begun > record.first).any()) else None
        """[N] number of the first tokens of each reply that are not drawn but fed, if there are any."""
        self.work = torch.empty(self.rows, self.policy.vocabulary, dtype=self.policy.numbers, device=device)
        self.ahead_by = check_every(device)
        self.check_every = 1 if record.table is not None else self.ahead_by
        self._set_rows(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))

    def steps(self) -> Iterator[None]:
        """Generate until every reply has ended; yields after each token of the live rows."""
        tokens = 0
        while self.waiting or len(self.live):
            beat()
            self._admit()
            ids = self._draw()
            yield
            tokens += 1
            ids = self._remove_finished(ids, check=tokens % self.check_every == 0)
            if len(self.live):
                self._step(ids)

    def _set_rows(self, live: np.ndarray, places: np.ndarray) -> None:
        """Let row i generate the token at position places[i] of reply live[i]; the device has a copy of both."""
        self.live, self.places = live, places
        self.ahead: list[Tensor] = []  # the random numbers [B] of later steps, the last of them first
        device = self.policy.device
        self.on_device = torch.tensor(live, device=device), torch.tensor(places, device=device)

    def _admit(self) -> None:
        """Admit waiting prompts to the free rows, once there are enough of these."""
        free = self.rows - len(self.live)
        least = min(len(self.waiting), max(1, int(self.rows * ADMIT_AT)))
        if not self.waiting or free < least or (len(self.live) and not all(d.joins for d in self.decodings)):
            return
        taken, self.waiting = self.waiting[:free], self.waiting[free:]
        prompts = [self.prompts[i] for i in taken]
        following = self.prompts[self.waiting[0]] if self.waiting else None
        for decoding in self.decodings:
            decoding.admit(prompts, following)
        self.record.read |= dict(zip(taken, self.decodings[0].read, strict=False))
        new = np.asarray(taken, dtype=np.int64)
        self._set_rows(np.concatenate([self.live, new]), np.concatenate([self.places, self.first[new]]))

    def _draw(self) -> Tensor:
        policy, sampling, states = self.policy, self.sampling, self.decodings[0].states
        live, places = self.on_device
        scores = sampling.adjust(policy.guided(sampling)(states), places)
        masks = scores
        if self.mask_model is not None:
            masks = sampling.adjust(self.mask_model.logits(self.decodings[1].states), places)
        allowed = sampling.kept(masks)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        if not self.ahead:  # the random numbers of several steps are copied to the device together
            keys, steps = self.keys[self.live], self.places + np.arange(self.ahead_by)[:, None]
            drawn = uniforms(np.broadcast_to(keys, steps.shape), steps)
            self.ahead = list(drawn.to(policy.device, non_blocking=True).flip(0))
        ids, logprobs = sampling.draw(scores, self.ahead.pop(), self.work[: len(scores)])
        if self.fed is not None:
            ids = torch.where(places < self.fed[live], self.record.tokens[live, places], ids)
        values = policy.value_head(states) if policy.value_head is not None else None
        self.record.write(live, places, ids, logprobs, values, allowed)
        return ids

    def _remove_finished(self, ids: Tensor, check: bool) -> Tensor:
        """Remove rows whose replies have ended; returns the ids of the others.

        `check`: ask the device for replies that have ended by a stop token or string.
        """
        running = self.places + 1 < self.limits[self.live]
        full = not running.all()
        if check and (self.sampling.stops or self.record.table is not None):
            running &= ~self.record.ended[self.on_device[0]].cpu().numpy()
        count = int(running.sum())
        if full or not count or count < COMPACT_AT * len(running):
            self._keep_prefixes(np.flatnonzero(~running))
            order = np.arange(count)  # the last rows fill the gaps, so that as few as possible move
            order[~running[:count]] = count + np.flatnonzero(running[count:])
            for decoding in self.decodings:
                decoding.keep(order)
            ids = ids[torch.from_numpy(order).to(ids.device)]
            self._set_rows(self.live[order], self.places[order])
        return ids

    def _keep_prefixes(self, rows: np.ndarray) -> None:
        """Keep the keys and values of rows whose replies have ended, all but those of the last token."""
        decoding = self.decodings[0]
        if self.kept is None or not isinstance(decoding, Pooled):
            return
        which = torch.from_numpy(self.live[rows]).to(self.record.tokens.device)
        replies, lengths = self.record.tokens[which].tolist(), self.record.lengths[which].tolist()
        for row, reply, length in zip(rows.tolist(), replies, lengths, strict=True):
            i = int(self.live[row])
            ids = [*self.prompts[i], *reply[self.first[i] : length - 1]]
            self.kept.add(ids, decoding.cache.lift(row, len(ids)).clone())

    def _step(self, ids: Tensor) -> None:
        for decoding in self.decodings:
            decoding.step(ids)
        live, places = self.on_device
        if self.decodings[0].below is not None:
            self.record.below.append((live, places.clone(), self.decodings[0].below))
        self.places += 1
        places += 1


def decode(policy: Policy, rows: int, columns: int, *, moves: bool = True) -> Decoding:
    """The fastest way of decoding that is exact for the model, with at most `rows` live rows.

    `columns`: most tokens of a prompt and its reply together. `moves`: prompts will be admitted beside live rows.
    """
    modes = policy.modes if policy.modes.tried else try_decoding(policy)
    pooled = modes.pooled and plain_layers(policy, columns) is not None
    if pooled and policy.device.type == "cuda":
        fixed = static(policy, rows, columns, moves=moves)
        if fixed is not None:
            return fixed
    if not (modes.cached and (modes.left or policy.encoder_decoder)):
        return Whole(policy)
    return Pooled(policy, rows, columns) if pooled else Cached(policy)


def check_every(device: torch.device) -> int:
    """Tokens between two checks for finished replies."""
    return 1 if device.type == "cpu" else CHECK_EVERY
