"""Finds out which ways of decoding are exact for a model, when it first decodes."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from operant.engines.native.decoding import Cached, Pooled
from operant.engines.native.kv_cache import plain_layers
from operant.engines.native.prefixes import Prefixes, ReadOn
from operant.models.capabilities import agrees, close, feed, plain_state, three_rows
from operant.models.hidden_states import Modes
from operant.models.policy import Policy
from operant.types import Batch


@torch.no_grad()
def try_decoding(policy: Policy) -> Modes:
    """Try the ways of decoding that were not tried yet on three short rows; returns the policy's modes."""
    modes = policy.modes
    if not modes.tried:
        rows = three_rows(policy)
        plain = [plain_state(policy, row) for row in rows]
        left = agrees(lambda: _beside(policy, rows, moved=False), plain) if modes.left is None else modes.left
        alone = agrees(lambda: [_cached(policy, row) for row in rows], plain) if modes.cached is None else modes.cached
        pooled = modes.pooled
        if pooled is None:
            pooled = left and alone and agrees(lambda: _pooled(policy, rows), plain)
        if modes.cached is None and alone and not pooled and (left or policy.encoder_decoder):
            ends = [_second(policy, row) for row in rows] if policy.encoder_decoder else plain
            alone = agrees(lambda: _beside(policy, rows, moved=True), [ends[2], ends[0]])
        policy.modes = replace(modes, left=left, cached=alone, pooled=pooled)
    return policy.modes


@torch.no_grad()
def continues(policy: Policy) -> bool:
    """Whether prompts can be read from the keys and values of their beginnings on; tries it when it is first asked."""
    modes = try_decoding(policy)
    if modes.continued is None:
        rows = three_rows(policy)
        exact = modes.pooled and agrees(lambda: _continued(policy, rows), [plain_state(policy, row) for row in rows])
        policy.modes = replace(modes, continued=exact)
    return bool(policy.modes.continued)


@torch.no_grad()
def chooses_on(policy: Policy, columns: int) -> bool:
    """Whether options can be read after prompts of which only the ends are read, in rows of up to `columns` tokens."""
    if policy.modes.branched_on is None:
        rows, kept = [row[:-1] for row in three_rows(policy)], Prefixes(gigabytes=1)
        plain, exact = _chosen(policy, rows, None), continues(policy) and policy.modes.branched and policy.modes.padded
        if exact:
            exact = agrees(lambda: [_chosen(policy, part, kept) for part in ([r[:1] for r in rows], rows)][1:], [plain])
        policy.modes = replace(policy.modes, branched_on=bool(exact))
    return bool(policy.modes.branched_on) and plain_layers(policy, columns + len(policy.virtual)) is not None


def _cached(policy: Policy, row: list[int]) -> Tensor:
    """The state at the end of a row whose last token is fed by itself, after the others."""
    decoding = Cached(policy)
    if policy.encoder_decoder:  # here the token that is fed by itself is one on the decoder's side
        decoding.admit([row])
        decoding.step(torch.tensor([row[0]], device=policy.device))
        whole = _second(policy, row)
        return plain_state(policy, row) if close(decoding.states, whole) else torch.full_like(whole, torch.nan)
    decoding.admit([row[:-1]])
    decoding.step(torch.tensor(row[-1:], device=policy.device))
    return decoding.states


def _second(policy: Policy, row: list[int]) -> Tensor:
    """The state after the source `row` and its first token as the reply, of an encoder-decoder without a cache."""
    fed = feed(policy, row) | {"decoder_input_ids": torch.tensor([[policy.start_token, row[0]]])}
    return policy.last_states(**{k: v.to(policy.device) for k, v in fed.items()}, use_cache=False)[0]


def _beside(policy: Policy, rows: list[list[int]], *, moved: bool) -> list[Tensor]:
    """The states at the ends of prompts that are read side by side, padded on the left.

    moved: of the third and the first of them, after the cache was moved and one more token was fed.
    """
    decoding, last = Cached(policy), 0 if policy.encoder_decoder else -1
    decoding.admit([row[:-1] for row in rows] if moved and not policy.encoder_decoder else rows)
    if moved:
        decoding.keep(np.asarray([2, 0]))
        decoding.step(torch.tensor([rows[2][last], rows[0][last]], device=policy.device))
    return list(decoding.states[:, None])


def _pooled(policy: Policy, rows: list[list[int]]) -> list[Tensor]:
    """Two of three rows are admitted after the longest; in the order of `rows`."""
    short, long, middle = rows
    decoding = Pooled(policy, 3, len(long))
    decoding.admit([long[:-2]])
    decoding.step(torch.tensor(long[-2:-1], device=policy.device))
    decoding.admit([middle[:-1], short[:-1]])
    decoding.step(torch.tensor([row[-1] for row in (long, middle, short)], device=policy.device))
    return [decoding.states[i : i + 1] for i in (2, 0, 1)]


def _continued(policy: Policy, rows: list[list[int]]) -> list[Tensor]:
    """Three rows are read at once after the beginnings of two of them."""
    kept = Prefixes(gigabytes=1)
    for row in rows[:2]:
        decoding = Pooled(policy, 1, len(row))
        decoding.admit([row[: len(row) // 2]])
        states = torch.cat(decoding.read) if decoding.read else None
        kept.add(row[: len(row) // 2], decoding.cache.lift(0).clone(), states)
    short, long, middle = rows
    decoding = Pooled(policy, 3, len(long))
    decoding.kept = kept
    decoding.admit([long, middle, short])
    return [decoding.states[i : i + 1] for i in (2, 0, 1)]


def _chosen(policy: Policy, rows: list[list[int]], kept: Prefixes | None) -> Tensor:
    """The log-probs of two options after each row. `kept`: the rows are read where an earlier call has ended."""
    options = [[row[-1:], [*row[:1], *row[-1:]]] for row in rows]
    read = ReadOn(policy, rows, kept) if kept is not None else None
    found = policy.choice_logprobs(Batch.choosing(rows, options), compute=read)[0]
    if read is not None and read.shared:
        for row in range(len(rows)):
            read.keep(row, 1)
    return found
