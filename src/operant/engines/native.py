"""Generate with the training weights themselves: batched, cached, and nothing computed for replies that have ended.

Log-probs and values come out of decoding; there is no second pass for them. Random numbers come from counters, so a
reply depends on its key and not on its neighbours.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from operant.batch import given_rows
from operant.policy.policy import Policy
from operant.sampling import Sampling, stop_table, uniforms
from operant.types import Completion, End, OperantError

COMPACT_AT = 0.75
"""Finished replies leave the batch once the live ones are fewer than this share of it."""


class NativeEngine:
    """The engine of one process: `policy` is the model in training, so `sync` only notes the version.

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
        # Prompts of like length are read together; what a reply says does not depend on it.
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        out: dict[int, Completion] = {}
        for start in range(0, len(order), self.batch):
            part = order[start : start + self.batch]
            replies = self._batch([prompts[i] for i in part], sampling, [keys[i] for i in part])
            out |= dict(zip(part, replies, strict=True))
        return [out[i] for i in range(len(prompts))]

    @torch.no_grad()
    def choose(
        self,
        prompts: Sequence[list[int]],
        options: Sequence[list[list[int]]],
        sampling: Sampling,
        keys: Sequence[int],
    ) -> list[tuple[int, Completion]]:
        """For each prompt, one of the given replies, drawn in proportion to its probability; which one, and it."""
        chosen = []
        for prompt, replies, key in zip(prompts, options, keys, strict=True):
            batch = given_rows([prompt] * len(replies), replies)
            out = self.policy.forward(batch, sampling)
            pick, _ = sampling.draw(out.logprobs.sum(1)[None], uniforms([key], 0))
            index = int(pick)
            at = batch.actions[index]
            values = None if out.values is None else out.values[index][at].tolist()
            logprobs = out.logprobs[index][at].tolist()
            chosen.append((index, Completion(list(replies[index]), logprobs, values, "stop", self.version)))
        return chosen

    def _check(self, prompts: Sequence[list[int]], sampling: Sampling) -> None:
        limit = self.policy.context
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise OperantError(f"prompt {i} has no tokens: give at least one (a beginning-of-text token, say)")
            if limit is not None and len(prompt) + sampling.max_tokens > limit:
                raise OperantError(
                    f"prompt {i} has {len(prompt)} tokens; with max_tokens={sampling.max_tokens} it does not fit into "
                    f"the model's context of {limit}: shorten the prompt or lower sampling.max_tokens"
                )

    def _batch(self, prompts: list[list[int]], sampling: Sampling, keys: list[int]) -> list[Completion]:
        policy, record = self.policy, _Record(len(prompts), sampling, self)
        decoding = policy.prefill(prompts)
        masks = self.mask_model.prefill(prompts) if self.mask_model is not None else None
        live = torch.arange(len(prompts), device=policy.device)
        seeds = [keys[i] for i in range(len(keys))]
        for place in range(sampling.max_tokens):
            scores = sampling.adjust(policy.logits(decoding.states), place)
            kept = sampling.kept(
                scores if masks is None else sampling.adjust(self.mask_model.logits(masks.states), place)
            )
            if kept is not None:
                scores = scores.masked_fill(~kept, -torch.inf)
            ids, logprobs = sampling.draw(scores, uniforms([seeds[i] for i in live.tolist()], place))
            values = policy.value_head(decoding.states) if policy.value_head is not None else None
            record.write(live, place, ids, logprobs, values, kept)
            running = record.running(live)
            if not bool(running.any()):
                break
            if int(running.sum()) < COMPACT_AT * len(live):
                rows = running.nonzero().squeeze(1)
                live, ids = live[rows], ids[rows]
                decoding.keep(rows)
                if masks is not None:
                    masks.keep(rows)
            if place + 1 < sampling.max_tokens:
                decoding.step(ids)
                if masks is not None:
                    masks.step(ids)
        return record.completions()


class _Record:
    """What was drawn so far: [B, max_tokens] each, and the length of each reply that has ended."""

    def __init__(self, count: int, sampling: Sampling, engine: NativeEngine):
        shape, device = (count, sampling.max_tokens), engine.policy.device
        self.sampling, self.version = sampling, engine.version
        self.tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(shape, device=device)
        self.values = torch.zeros(shape, device=device) if engine.policy.value_head is not None else None
        self.allowed: list[list[list[int]]] | None = [[] for _ in range(count)] if sampling.truncates else None
        self.lengths = torch.full((count,), sampling.max_tokens, device=device)
        self.ended = torch.zeros(count, dtype=torch.bool, device=device)
        self.stops = torch.tensor(sorted(sampling.stops), dtype=torch.long, device=device)
        strings = () if sampling.fixed_length else sampling.stop_strings
        self.table = stop_table(engine.policy.tokenizer, strings) if strings else None
        self.flags = torch.from_numpy(self.table.flags).to(device) if self.table else None

    def write(
        self, live: Tensor, place: int, ids: Tensor, logprobs: Tensor, values: Tensor | None, kept: Tensor | None
    ) -> None:
        """Note one token of every live row; rows that have ended but are still carried along are noted nowhere."""
        self.tokens[live, place], self.logprobs[live, place] = ids, logprobs
        if values is not None:
            self.values[live, place] = values
        if kept is not None:
            for row, mask in zip(live.tolist(), kept, strict=True):
                if not self.ended[row]:
                    self.allowed[row].append(mask.nonzero().squeeze(1).tolist())
        stopped = torch.isin(ids, self.stops) if len(self.stops) else torch.zeros_like(ids, dtype=torch.bool)
        if self.table is not None and place + 1 >= self.sampling.min_tokens:
            for i in (self.flags[ids.clamp(max=len(self.flags) - 1)] & ~stopped).nonzero().squeeze(1).tolist():
                stopped[i] = self.table.ends(self.tokens[live[i], : place + 1].tolist(), self.sampling.min_tokens)
        fresh = live[stopped & ~self.ended[live]]
        self.lengths[fresh] = place + 1
        self.ended[fresh] = True

    def running(self, live: Tensor) -> Tensor:
        return ~self.ended[live]

    def completions(self) -> list[Completion]:
        """One per prompt; the ids keep the stop token."""
        tokens, logprobs = self.tokens.tolist(), self.logprobs.tolist()
        values = self.values.tolist() if self.values is not None else None
        out = []
        for i, (n, ended) in enumerate(zip(self.lengths.tolist(), self.ended.tolist(), strict=True)):
            end: End = "stop" if ended else "length"
            own = values[i][:n] if values is not None else None
            done = Completion(tokens[i][:n], logprobs[i][:n], own, end, self.version)
            out.append(replace(done, allowed=self.allowed[i]) if self.allowed is not None else done)
        return out
