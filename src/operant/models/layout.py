"""How rows are handed to a model: the one shift by one of the library, rows end to end, the split for encoder-decoders.

`[B, T]` comes in; what the model is called with, and which of its states stand before an action, go out. A causal model
at t - 1 predicts the token at t, and reads rows side by side, padded, or end to end. An encoder-decoder reads what
stands before the first action as its source, and predicts the rest from a start token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from operant.types import Batch

Select = Callable[[Tensor], Tensor]
"""[B, T', D] -> [N, D]: the states before the N actions of the batch, rows first."""


@dataclass(frozen=True)
class Rows:
    """Rows end to end."""

    read: Tensor
    """[B, T] bool: the tokens that are computed, S of them, rows first."""
    lengths: list[int]
    """How many those are, of each row that has any."""


@dataclass(frozen=True)
class Laid:
    """A batch as a model is called with it."""

    kwargs: dict[str, Any]
    select: Select
    rows: Rows | None = None
    """Where they lie end to end, as one row [1, S]."""


def end_to_end(batch: Batch) -> Laid:
    """Arguments for a decoder-only model whose attention is kept within rows: [1, S], positions beginning anew."""
    # Of each row what somebody is predicted from: nothing from its last action on.
    ahead = batch.actions.int().flip(1).cumsum(1).flip(1)
    read = torch.zeros_like(batch.mask)
    read[:, :-1] = batch.mask[:, :-1] & (ahead[:, 1:] > 0)
    counts = read.sum(1)
    lengths = counts.tolist()
    if not any(lengths):  # nothing is asked for, and no model computes nothing
        read[0, 0], lengths = True, [1]
        counts = read.sum(1)
    place = torch.arange(sum(lengths), device=counts.device) - (counts.cumsum(0) - counts).repeat_interleave(
        counts, output_size=sum(lengths)
    )
    asked = batch.actions.roll(-1, 1)[read]
    kwargs = {"input_ids": batch.tokens[read][None], "position_ids": place[None]}
    return Laid(kwargs, lambda hidden: hidden[0, asked], Rows(read, [n for n in lengths if n]))


def causal(batch: Batch) -> Laid:
    """Arguments for a decoder-only model, rows side by side."""
    # The last column predicts nothing that is asked for: a state at the very end of the context still has its value.
    width = batch.tokens.shape[1] - 1
    tokens, mask = batch.tokens[:, : max(width, 1)], batch.mask[:, : max(width, 1)]
    kwargs = {"input_ids": tokens}
    lengths = mask.sum(1)
    if not bool((mask == (torch.arange(mask.shape[1], device=lengths.device) < lengths[:, None])).all()):
        # Padding on the left: positions start at the first real token. On the right, nothing needs to be said:
        # no token looks ahead, and the default positions are the true ones.
        kwargs |= {"attention_mask": mask.long(), "position_ids": positions(mask)}
    return Laid(kwargs, lambda hidden: hidden[:, :width][batch.actions[:, 1:]])


def kept(batch: Batch, laid: Laid, *, encoder_decoder: bool) -> Tensor:
    """[B, S, D] the batch's trunk states where the model looks for them; an encoder's output becomes an argument."""
    states, kwargs = batch.states, laid.kwargs
    assert states is not None  # by the caller, who has looked
    if laid.rows is not None:
        return states[laid.rows.read][None]
    if not encoder_decoder:
        return states[:, : kwargs["input_ids"].shape[1]]
    source = sources(batch)
    del kwargs["input_ids"]
    kwargs["encoder_outputs"] = (compact(states, source)[0],)
    return compact(states, batch.mask & ~source)[0]


def spread(batch: Batch, hidden: Tensor, source: Tensor | None, rows: Rows | None = None) -> Tensor:
    """[B, T, D] trunk states `hidden` [B, S, D] (and an encoder's output `source`) in the layout of the batch."""
    out = hidden.new_zeros(*batch.tokens.shape, hidden.shape[-1])
    if rows is not None:
        out[rows.read] = hidden[0]
        return out
    if source is None:
        out[:, : hidden.shape[1]] = hidden
        return out
    read = sources(batch)
    for where, held in ((read, source), (batch.mask & ~read, hidden)):
        inside = torch.arange(held.shape[1], device=held.device) < where.sum(1)[:, None]
        out[where] = held[inside]
    return out


def sources(batch: Batch) -> Tensor:
    """[B, T] what an encoder reads: everything before the first action."""
    first = batch.actions.int().argmax(1)
    return batch.mask & (torch.arange(batch.tokens.shape[1], device=batch.tokens.device) < first[:, None])


def encoder_decoder(batch: Batch, start: int) -> Laid:
    """Arguments for an encoder-decoder: every row is one source and one reply, which the decoder sees after `start`."""
    tokens, source = batch.tokens, sources(batch)
    target = batch.mask & ~source
    source_ids, source_mask = compact(tokens, source)
    target_ids, target_mask = compact(tokens, target)
    acted, _ = compact(batch.actions, target)
    shifted = torch.cat([torch.full_like(target_ids[:, :1], start), target_ids[:, :-1]], 1)
    kwargs = {"input_ids": source_ids, "attention_mask": source_mask.long(), "decoder_input_ids": shifted}
    return Laid(kwargs, lambda hidden: hidden[acted & target_mask])


def positions(mask: Tensor) -> Tensor:
    """[B, T] position of each token among the real ones of its row."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def compact(x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """The kept places of each row, moved to its start: ([B, W, ...], mask [B, W])."""
    lengths = keep.sum(1)
    mask = torch.arange(max(int(lengths.max()), 1), device=x.device) < lengths[:, None]
    out = x.new_zeros(*mask.shape, *x.shape[2:])
    out[mask] = x[keep]
    return out, mask


def pad(rows: Sequence[Sequence[int]], side: str, device: Any = None) -> tuple[Tensor, Tensor]:
    """Ids as a rectangle and its mask; what stands under the padding is 0 and never looked at."""
    width = max(map(len, rows))
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        tokens[i, place] = torch.tensor(row, dtype=torch.long)
        mask[i, place] = True
    return tokens.to(device), mask.to(device)


def places(batch: Batch) -> Tensor:
    """[B, T] the index of each token within its reply; meaningless off actions."""
    column = torch.arange(batch.turns.shape[1], device=batch.turns.device).expand_as(batch.turns)
    begins = torch.ones_like(batch.actions)
    begins[:, 1:] = batch.turns[:, 1:] != batch.turns[:, :-1]
    return column - torch.where(begins, column, 0).cummax(1).values
