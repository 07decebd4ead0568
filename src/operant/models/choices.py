"""Choices among given replies: every option of a prompt in one pass, and the distribution over them.

The options of a row grow from it like branches: each sees the row up to where it begins, and itself. So the row is
computed once, whatever the number of its options. A model that does not compute branches exactly (the probe in
`Policy.branching` tells) gets a row for each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from operant.models.layout import Laid
from operant.sampling import Sampling
from operant.types import Batch, Choices


@dataclass(frozen=True)
class Branch:
    """One option of one choice."""

    row: int
    column: int
    """Where it begins in its row."""
    ids: list[int]
    """Its tokens, the one that ends it included."""


def branches(batch: Batch, end: int | None) -> list[Branch]:
    """The options of a batch, choice by choice."""
    assert batch.choices is not None  # by the caller, who has looked
    width, stop = batch.tokens.shape[1], [] if end is None else [end]
    return [
        Branch(*divmod(place, width), option + stop) for place, _, among in batch.choices.listed() for option in among
    ]


def tree(batch: Batch, held: Sequence[Branch], numbers: torch.dtype) -> Laid:
    """Arguments for a decoder-only model: rows with their branches behind them, and who sees what.

    `select` gives the states before the N actions of the batch, rows first, and then those before each branch's tokens.
    """
    lengths = batch.mask.sum(1).tolist()
    fed = [branch.ids[:-1] for branch in held]
    begins, ends = [], list(lengths)
    for branch, ids in zip(held, fed, strict=True):
        begins.append(ends[branch.row])
        ends[branch.row] += len(ids)
    rows, width, device = len(batch), max(ends), batch.tokens.device
    tokens = torch.zeros(rows, width, dtype=torch.long, device=device)
    tokens[:, : batch.tokens.shape[1]] = batch.tokens * batch.mask
    places = torch.zeros(rows, width, dtype=torch.long)  # of padding 0: a tree may be wider than the model's context
    sees = torch.eye(width, dtype=torch.bool).repeat(rows, 1, 1)
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    for row, length in enumerate(lengths):
        sees[row, :length, :length] = causal[:length, :length]
        places[row, :length] = torch.arange(length)
    before: list[int] = []
    for branch, ids, begin in zip(held, fed, begins, strict=True):
        row, end = branch.row, begin + len(ids)
        tokens[row, begin:end] = torch.tensor(ids, dtype=torch.long, device=device)
        places[row, begin:end] = torch.arange(branch.column, branch.column + len(ids))
        sees[row, begin:end, : branch.column] = True
        sees[row, begin:end, begin:end] = causal[: len(ids), : len(ids)]
        before += [row * width + branch.column - 1, *range(row * width + begin, row * width + end)]
    mask = torch.zeros(rows, 1, width, width, dtype=numbers).masked_fill(~sees[:, None], torch.finfo(numbers).min)
    own = torch.nn.functional.pad(batch.actions[:, 1:], (0, width - batch.actions.shape[1] + 1)).flatten().nonzero()
    index = torch.cat([own.squeeze(1), torch.tensor(before, dtype=torch.long, device=device)])
    kwargs = {"input_ids": tokens, "attention_mask": mask.to(device), "position_ids": places.to(device)}
    return Laid(kwargs, lambda hidden: hidden.flatten(0, 1)[index])


def spelt_out(batch: Batch, held: Sequence[Branch]) -> Batch:
    """A row for each option: what stands before it, and it."""
    rows = batch.tokens.cpu()
    return Batch.given([rows[b.row, : b.column].tolist() for b in held], [b.ids for b in held]).to(batch.tokens.device)


def among(logprobs: Tensor, held: Sequence[Branch], choices: Choices, sampling: Sampling) -> Tensor:
    """[C, O] log-probs of the options of each choice, -inf where there are fewer; of their tokens' log-probs [M]."""
    lengths = torch.tensor([len(branch.ids) for branch in held], device=logprobs.device)
    owner = torch.repeat_interleave(torch.arange(len(held), device=logprobs.device), lengths)
    scores = logprobs.new_zeros(len(held)).index_add(0, owner, logprobs)
    if sampling.choice == "mean":
        scores = scores / lengths
    scores = scores / sampling.temperature
    counts = choices.counts.tolist()
    table = torch.nn.utils.rnn.pad_sequence(list(scores.split(counts)), batch_first=True, padding_value=-torch.inf)
    return table.log_softmax(-1)


def chosen(table: Tensor, picked: Tensor, other: Tensor | None = None) -> dict[str, Tensor]:
    """What is known of choices whose options have log-probs `table` [C, O]: named tensors [C], as of tokens.

    `other`: the options' log-probs under another model, for the exact divergences.
    """
    found = {"logprobs": table.gather(-1, picked.to(table.device)[:, None]).squeeze(-1)}
    known = torch.where(table == -torch.inf, 0.0, table)
    found["entropy"] = -(table.exp() * known).sum(-1)
    found["logsumexp"] = torch.zeros_like(found["logprobs"])  # their scores are log-probs of one distribution
    if other is not None:
        theirs = torch.where(other == -torch.inf, 0.0, other)
        found["reverse"] = (table.exp() * (known - theirs)).sum(-1)
        found["forward"] = (other.exp() * (theirs - known)).sum(-1)
    return found
