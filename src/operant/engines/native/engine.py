"""Generate with the training weights themselves: batched, cached, and nothing computed for replies that have ended.

Log-probs, values and trunk states come out of decoding; there is no second pass for them. Random numbers come from
counters, so a reply depends on its key and not on its neighbours: prompts step in wherever a reply has left.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from operant.engines.native.capabilities import try_decoding
from operant.engines.native.cuda_graphs import static
from operant.engines.native.decoding import Cached, Decoding, Pooled, Whole
from operant.engines.native.kv_cache import plain_layers
from operant.engines.native.record import Record
from operant.models.policy import Policy
from operant.rollouts.collate import cut, distinct, units
from operant.sampling import Sampling, check_ids, uniforms
from operant.types import Batch, Completion, OperantError
from operant.watchdog import beat

COMPACT_AT = 1.0
"""Finished replies leave the batch once the live ones are fewer than this share of it."""
ADMIT_AT = 0.25
"""Waiting prompts step in once this share of the rows is free: reading few at a time costs a pass over the weights."""
MICRO_TOKENS = 8192
"""Tokens of a pass in which given replies are scored, prompts and options together."""
LOOK_EVERY = 8
"""Tokens between two looks at which replies have ended, where looking makes the CPU wait for the device."""


class NativeEngine:
    """The engine of one process: `policy` is the model in training, so `sync` only notes the version.

    `batch`: rows that are decoded at once; more prompts than that step in as others end.
    `mask_model`: another policy whose truncated distribution says which tokens may be drawn (NLPO).
    """

    def __init__(self, policy: Policy, *, batch: int = 256, mask_model: Policy | None = None):
        self.policy, self.batch, self.mask_model, self.version = policy, batch, mask_model, policy.version

    def sync(self, policy: Policy, version: int) -> None:
        """Take over the weights of `policy`. Caches never outlive a call, so there is nothing to invalidate."""
        self.policy, self.version = policy, version

    @torch.no_grad()
    def generate(self, prompts: Sequence[list[int]], sampling: Sampling, keys: Sequence[int]) -> list[Completion]:
        """One reply for each prompt, in the order of the prompts.

        Raises: OperantError for an empty prompt, or one that leaves no room for `max_tokens` in the model's context.
        """
        self._check(prompts, sampling)
        if not prompts:
            return []
        record = Record(self.policy, prompts, sampling, self.version)
        _Speech(self, prompts, sampling, keys, record).run()
        return record.completions()

    @torch.no_grad()
    def choose(
        self,
        prompts: Sequence[list[int]],
        options: Sequence[list[list[int]]],
        sampling: Sampling,
        keys: Sequence[int],
    ) -> list[tuple[int, Completion]]:
        """For each prompt, one of the given replies, drawn as `Sampling.choice` says; which one, and it.

        Of replies with the same ids the first stands for all.
        """
        once = [distinct(replies) for replies in options]
        batch = Batch.choosing(prompts, [among for among, _ in once])
        made: list[tuple[int, Completion]] = [(0, Completion([], [], None, "stop", self.version))] * len(once)
        for rows in cut(batch, units(batch), MICRO_TOKENS):
            some = batch.rows(torch.tensor(rows))
            table, values = self.policy.choice_logprobs(some, sampling)
            known = None if values is None else values[some.actions].tolist()
            picks, logprobs = sampling.draw(table, uniforms([keys[row] for row in rows], 0).to(table.device))
            for i, (row, pick, logprob) in enumerate(zip(rows, picks.tolist(), logprobs.tolist(), strict=True)):
                among, places = once[row]
                value = None if known is None else [known[i]]
                made[row] = places.index(pick), Completion(among[pick], [logprob], value, "stop", self.version)
        return made

    def _check(self, prompts: Sequence[list[int]], sampling: Sampling) -> None:
        sampling.check_ids(self.policy.vocabulary)
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise OperantError(f"prompt {i} has no tokens: give at least one (a beginning-of-text token, say)")
            check_ids(prompt, self.policy.vocabulary, f"prompt {i}")
            if (why := self.policy.misfit(len(prompt), sampling.max_tokens)) is not None:
                raise OperantError(f"prompt {i} {why}: shorten the prompt or lower sampling.max_tokens")


class _Speech:
    """All prompts of one call, from the first that is read to the last reply that ends."""

    def __init__(
        self,
        engine: NativeEngine,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        keys: Sequence[int],
        record: Record,
    ):
        self.policy, self.mask_model, self.sampling, self.record = engine.policy, engine.mask_model, sampling, record
        self.prompts, self.keys = prompts, np.asarray(keys, dtype=np.uint64)
        self.rows = min(engine.batch, len(prompts))
        columns = max(map(len, prompts)) + sampling.max_tokens
        models = [self.policy] + ([self.mask_model] if self.mask_model is not None else [])
        self.decodings: list[Decoding] = [
            decode(model, self.rows, columns, moves=self.rows < len(prompts)) for model in models
        ]
        self.waiting = in_turn(prompts)
        device = self.policy.device
        self.work = torch.empty(self.rows, self.policy.vocabulary, dtype=self.policy.numbers, device=device)
        self.ahead_by = look_every(device)
        self.patience = 1 if record.table is not None else self.ahead_by
        self._seat(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))

    def run(self) -> None:
        """Until every reply has ended."""
        tokens = 0
        while self.waiting or len(self.live):
            beat()
            self._admit()
            ids = self._draw()
            tokens += 1
            ids = self._retire(ids, look=tokens % self.patience == 0)
            if len(self.live):
                self._step(ids)

    def _seat(self, live: np.ndarray, places: np.ndarray) -> None:
        """Row i says the token at places[i] of reply live[i]; the device has a copy of both."""
        self.live, self.places = live, places
        self.ahead: list[Tensor] = []
        device = self.policy.device
        self.on_device = torch.tensor(live, device=device), torch.tensor(places, device=device)

    def _admit(self) -> None:
        """Waiting prompts take the free rows, once those are enough to be worth a call."""
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
        self._seat(np.concatenate([self.live, new]), np.concatenate([self.places, np.zeros_like(new)]))

    def _draw(self) -> Tensor:
        """One token for every row; returns their ids [B]."""
        policy, sampling, states = self.policy, self.sampling, self.decodings[0].states
        live, places = self.on_device
        scores = sampling.adjust(policy.logits(states), places)
        masks = scores
        if self.mask_model is not None:
            masks = sampling.adjust(self.mask_model.logits(self.decodings[1].states), places)
        kept = sampling.kept(masks)
        if kept is not None:
            scores = scores.masked_fill(~kept, -torch.inf)
        ids, logprobs = sampling.draw(scores, self._chances(), self.work[: len(scores)])
        values = policy.value_head(states) if policy.value_head is not None else None
        self.record.write(live, places, ids, logprobs, values, kept)
        return ids

    def _chances(self) -> Tensor:
        """[B] the random number of each row; for the tokens up to the next look at once, as one copy to the device."""
        if not self.ahead:
            keys, places = self.keys[self.live], self.places + np.arange(self.ahead_by)[:, None]
            drawn = uniforms(np.broadcast_to(keys, places.shape), places)
            self.ahead = list(drawn.to(self.policy.device, non_blocking=True).flip(0))
        return self.ahead.pop()

    def _retire(self, ids: Tensor, look: bool) -> Tensor:
        """Rows whose replies have ended leave; the ids that remain."""
        running = self.places + 1 < self.sampling.max_tokens
        full = not running.all()
        if look and (self.sampling.stops or self.record.table is not None):
            running &= ~self.record.ended[self.on_device[0]].cpu().numpy()
        count = int(running.sum())
        if full or not count or count < COMPACT_AT * len(running):
            order = without(running)
            for decoding in self.decodings:
                decoding.keep(order)
            ids = ids[torch.from_numpy(order).to(ids.device)]
            self._seat(self.live[order], self.places[order])
        return ids

    def _step(self, ids: Tensor) -> None:
        for decoding in self.decodings:
            decoding.step(ids)
        live, places = self.on_device
        if self.decodings[0].below is not None:
            self.record.below.append((live, places.clone(), self.decodings[0].below))
        self.places += 1
        places += 1


def decode(policy: Policy, rows: int, columns: int, *, moves: bool = True) -> Decoding:
    """The fastest way of decoding that agrees with the model: at most `rows` replies at once, of `columns` tokens.

    `columns`: of a row's prompt and reply together. `moves`: whether prompts will step in beside live rows.
    """
    modes = try_decoding(policy)
    pooled = modes.pooled and plain_layers(policy.model, columns) is not None
    if pooled and policy.device.type == "cuda":
        fixed = static(policy, rows, columns, moves=moves)
        if fixed is not None:
            return fixed
    if not (modes.cached and (modes.left or policy.encoder_decoder)):
        return Whole(policy)
    return Pooled(policy, rows, columns) if pooled else Cached(policy)


def look_every(device: torch.device) -> int:
    """Tokens between two looks at the device."""
    return 1 if device.type == "cpu" else LOOK_EVERY


def in_turn(prompts: Sequence[list[int]]) -> list[int]:
    """The order in which prompts are read: the longest first, equal ones together. It depends on nothing else."""
    first: dict[tuple[int, ...], int] = {}
    group = [first.setdefault(tuple(p), i) for i, p in enumerate(prompts)]
    return sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), group[i], i))


def without(running: np.ndarray) -> np.ndarray:
    """The rows that are running, so that as few as possible move: the last ones fill the holes."""
    count = int(running.sum())
    order = np.arange(count)
    order[~running[:count]] = count + np.flatnonzero(running[count:])
    return order
