"""Turns a batch [B, T] into the arguments of a model call, and says which of the model's states precede an action.

A causal model predicts the token at t from its state at t - 1: no other file shifts by one. It reads rows side by side
with padding, or packed end to end. An encoder-decoder reads the tokens before the first action as its source, and
predicts the rest after a start token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from operant.types import Batch

Select = Callable[[Tensor], Tensor]
"""[B, T', D] -> [N, D]: the states before the N actions of the batch, rows first."""


@dataclass(frozen=True)
class PackedRows:
    """Rows of a batch that are packed end to end."""

    read: Tensor
    """[B, T] bool: the S tokens that the model reads, rows first."""
    lengths: list[int]
    """Number of these tokens in each row that has any."""


@dataclass(frozen=True)
class ModelInput:
    """The arguments that a model is called with for a batch."""

    kwargs: dict[str, Any]
    select: Select
    rows: PackedRows | None = None
    """The rows, if they are packed end to end as one row [1, S]."""


def in_front(virtual: Sequence[int], batch: Batch) -> Batch:
    """The batch with virtual tokens at the start of each row. Only tokens, mask and actions [B, n + T] grow."""
    if not virtual:
        return batch
    ids = torch.tensor(virtual, device=batch.tokens.device).expand(len(batch), -1)
    sides = (batch.mask, True), (batch.actions, False)
    mask, actions = (functional.pad(x, (len(virtual), 0), value=new) for x, new in sides)
    return batch.with_(tokens=torch.cat([ids, batch.tokens], 1), mask=mask, actions=actions)


def end_to_end(batch: Batch) -> ModelInput:
    """Arguments for a decoder-only model that reads packed rows [1, S]; positions begin at 0 in each row."""
    # Of each row, only tokens before its last action are read: no action is predicted from the others.
    ahead = batch.actions.int().flip(1).cumsum(1).flip(1)
    read = torch.zeros_like(batch.mask)
    read[:, :-1] = batch.mask[:, :-1] & (ahead[:, 1:] > 0)
    counts = read.sum(1)
    lengths = counts.tolist()
    if not any(lengths):  # without any action, one token is read: a model cannot be called with none
        read[0, 0], lengths = True, [1]
        counts = read.sum(1)
    begins = (counts.cumsum(0) - counts).repeat_interleave(counts, output_size=sum(lengths))
    place = torch.arange(sum(lengths), device=counts.device) - begins
    before_action = batch.actions.roll(-1, 1)[read]
    kwargs = {"input_ids": batch.tokens[read][None], "position_ids": place[None]}
    return ModelInput(kwargs, lambda hidden: hidden[0, before_action], PackedRows(read, [n for n in lengths if n]))


def causal(batch: Batch) -> ModelInput:
    """Arguments for a decoder-only model that reads rows side by side."""
    # The last column is not read, because it predicts no action. So a row may have one token more than the context.
    width = batch.tokens.shape[1] - 1
    tokens, mask = batch.tokens[:, : max(width, 1)], batch.mask[:, : max(width, 1)]
    kwargs = {"input_ids": tokens}
    lengths = mask.sum(1)
    if not bool((mask == (torch.arange(mask.shape[1], device=lengths.device) < lengths[:, None])).all()):
        # With padding on the left, positions start at the first real token. Padding on the right needs no arguments:
        # no token attends to later ones, and the default positions are right.
        kwargs |= {"attention_mask": mask.long(), "position_ids": positions(mask)}
    return ModelInput(kwargs, lambda hidden: hidden[:, :width][batch.actions[:, 1:]])


def to_model_layout(batch: Batch, inputs: ModelInput, *, encoder_decoder: bool) -> Tensor:
    """[B, S, D] the cached trunk states of the batch, arranged as the tokens of the model's input.

    For an encoder-decoder, the encoder's cached output becomes an argument in `inputs`.
    """
    states, kwargs = batch.states, inputs.kwargs
    if inputs.rows is not None:
        return states[inputs.rows.read][None]
    if not encoder_decoder:
        return states[:, : kwargs["input_ids"].shape[1]]
    source = sources(batch)
    del kwargs["input_ids"]
    kwargs["encoder_outputs"] = (compact(states, source)[0],)
    return compact(states, batch.mask & ~source)[0]


def to_batch_layout(batch: Batch, hidden: Tensor, source: Tensor | None, rows: PackedRows | None = None) -> Tensor:
    """[B, T, D] trunk states `hidden` [B, S, D] (and an encoder's output `source`), arranged as the batch's tokens."""
    out = hidden.new_zeros(*batch.tokens.shape, hidden.shape[-1])
    if rows is not None:
        out[rows.read] = hidden[0]
        return out
    if source is None:
        out[:, : hidden.shape[1]] = hidden
        return out
    read = sources(batch)
    for where, states in ((read, source), (batch.mask & ~read, hidden)):
        inside = torch.arange(states.shape[1], device=states.device) < where.sum(1)[:, None]
        out[where] = states[inside]
    return out


def sources(batch: Batch) -> Tensor:
    """[B, T] bool: the tokens that an encoder reads, which are all before the first action."""
    first = batch.actions.int().argmax(1)
    return batch.mask & (torch.arange(batch.tokens.shape[1], device=batch.tokens.device) < first[:, None])


def encoder_decoder(batch: Batch, start: int) -> ModelInput:
    """Arguments for an encoder-decoder. A row is one source and one reply, which the decoder reads after `start`."""
    tokens, source = batch.tokens, sources(batch)
    target = batch.mask & ~source
    source_ids, source_mask = compact(tokens, source)
    target_ids, target_mask = compact(tokens, target)
    acted, _ = compact(batch.actions, target)
    shifted = torch.cat([torch.full_like(target_ids[:, :1], start), target_ids[:, :-1]], 1)
    kwargs = {"input_ids": source_ids, "attention_mask": source_mask.long(), "decoder_input_ids": shifted}
    return ModelInput(kwargs, lambda hidden: hidden[acted & target_mask])


def positions(mask: Tensor) -> Tensor:
    """[B, T] index of each token among the real tokens of its row."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def compact(x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Move the entries of each row where `keep` is True to its start. Returns ([B, W, ...], mask [B, W])."""
    lengths = keep.sum(1)
    mask = torch.arange(max(int(lengths.max()), 1), device=x.device) < lengths[:, None]
    out = x.new_zeros(*mask.shape, *x.shape[2:])
    out[mask] = x[keep]
    return out, mask


def pad(rows: Sequence[Sequence[int]], side: str, device: torch.device, filler: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of ids padded to a rectangle, and its mask. side: left or right. filler: the id of padding."""
    width = max(map(len, rows))
    tokens = torch.full((len(rows), width), filler, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        tokens[i, place] = torch.tensor(row, dtype=torch.long)
        mask[i, place] = True
    return tokens.to(device), mask.to(device)


def places(batch: Batch) -> Tensor:
    """[B, T] index of each token within its reply; off actions the numbers have no meaning.

    Demonstrations beside other replies stand behind any `min_tokens`, because they were not sampled with it.
    """
    column = torch.arange(batch.turns.shape[1], device=batch.turns.device).expand_as(batch.turns)
    begins = torch.ones_like(batch.actions)
    begins[:, 1:] = batch.turns[:, 1:] != batch.turns[:, :-1]
    found = column - torch.where(begins, column, 0).cummax(1).values
    return found if batch.demonstrated is None else torch.where(batch.demonstrated[:, None], 1 << 30, found)
