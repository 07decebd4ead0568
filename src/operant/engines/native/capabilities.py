"""Finds out which ways of decoding are exact for a model, when it first decodes."""

from dataclasses import replace

import torch
from torch import Tensor

from operant.engines.native.decoding import Cached, Pooled
from operant.models.capabilities import agrees, close, feed, plain_state, three_rows
from operant.models.hidden_states import Modes
from operant.models.policy import Policy


@torch.no_grad()
def try_decoding(policy: Policy) -> Modes:
    """Try the ways of decoding that were not tried yet on three short rows; returns the policy's modes."""
    modes = policy.modes
    if None in (modes.left, modes.cached, modes.pooled):
        rows = three_rows(policy)
        plain = [plain_state(policy, row) for row in rows]
        left = agrees(lambda: _left(policy, rows), plain) if modes.left is None else modes.left
        alone = agrees(lambda: [_cached(policy, row) for row in rows], plain) if modes.cached is None else modes.cached
        pooled = modes.pooled
        if pooled is None:
            pooled = left and alone and agrees(lambda: _pooled(policy, rows), plain)
        policy.modes = replace(modes, left=left, cached=alone, pooled=pooled)
    return policy.modes


def _left(policy: Policy, rows: list[list[int]]) -> list[Tensor]:
    """The states at the ends of prompts that are read side by side, padded on the left."""
    decoding = Cached(policy)
    decoding.admit(rows)
    return list(decoding.states[:, None])


def _cached(policy: Policy, row: list[int]) -> Tensor:
    """The state at the end of a row whose last token is fed by itself, after the others."""
    decoding = Cached(policy)
    if policy.encoder_decoder:  # here the token that is fed by itself is one on the decoder's side
        decoding.admit([row])
        decoding.step(torch.tensor([row[0]], device=policy.device))
        fed = feed(policy, row) | {"decoder_input_ids": torch.tensor([[policy.start_token, row[0]]])}
        whole = policy.last_states(**{k: v.to(policy.device) for k, v in fed.items()})[0]
        return plain_state(policy, row) if close(decoding.states, whole) else torch.full_like(whole, torch.nan)
    decoding.admit([row[:-1]])
    decoding.step(torch.tensor(row[-1:], device=policy.device))
    return decoding.states


def _pooled(policy: Policy, rows: list[list[int]]) -> list[Tensor]:
    """The states at the ends of three rows, of which two are admitted after the longest; in the order of `rows`."""
    short, long, middle = rows
    decoding = Pooled(policy, 3, len(long))
    decoding.admit([long[:-2]])
    decoding.step(torch.tensor(long[-2:-1], device=policy.device))
    decoding.admit([middle[:-1], short[:-1]])
    decoding.step(torch.tensor([row[-1] for row in (long, middle, short)], device=policy.device))
    return [decoding.states[i : i + 1] for i in (2, 0, 1)]
