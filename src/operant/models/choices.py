"""Choices among options: scores every option of a prompt in one forward pass, and makes the distribution over them.

The options of a row are its branches: each attends to the row up to the position where it begins, and to itself. So the
row is computed once, whatever the number of its options. If a model does not compute branches exactly
(`Policy.branching` tries it), each option gets a row of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from operant.models.hidden_states import HiddenStates
from operant.models.layout import ModelInput, in_front
from operant.models.logprobs import divergence
from operant.sampling import Sampling
from operant.types import Batch, Choices


@dataclass(frozen=True)
class Branch:
    """One option of one choice, as a branch of a row."""

    row: int
    column: int
    """The column of the row at which the option begins."""
    ids: list[int]
    """The tokens of the option, with its stop token."""


def branches(batch: Batch, end: int | None) -> list[Branch]:
    """The options of a batch, choice by choice. `end`: a stop token that is appended to each, or None."""
    width, stop = batch.tokens.shape[1], [] if end is None else [end]
    return [Branch(*divmod(place, width), ids + stop) for place, _, among in batch.choices.listed() for ids in among]


def tree(batch: Batch, options: Sequence[Branch], numbers: torch.dtype) -> ModelInput:
    """Arguments for a decoder-only model: rows followed by their branches, and the mask of which token attends where.

    `select` returns the states before the N actions of the batch, rows first, then those before each branch's tokens.
    """
    lengths = batch.mask.sum(1).tolist()
    fed = [branch.ids[:-1] for branch in options]
    begins, ends = [], list(lengths)
    for branch, ids in zip(options, fed, strict=True):
        begins.append(ends[branch.row])
        ends[branch.row] += len(ids)
    rows, width, device = len(batch), max(ends), batch.tokens.device
    # numpy fills the many short pieces in a tenth of the time that torch needs.
    tokens = np.zeros((rows, width), dtype=np.int64)
    tokens[:, : batch.tokens.shape[1]] = (batch.tokens * batch.mask).cpu().numpy()
    # Position 0 at padding: a tree may have more columns than the model has positions.
    places = np.zeros((rows, width), dtype=np.int64)
    sees = np.eye(width, dtype=bool)[None].repeat(rows, 0)
    causal = np.tri(width, dtype=bool)
    for row, length in enumerate(lengths):
        sees[row, :length, :length] = causal[:length, :length]
        places[row, :length] = np.arange(length)
    before: list[int] = []
    for branch, ids, begin in zip(options, fed, begins, strict=True):
        row, end = branch.row, begin + len(ids)
        tokens[row, begin:end] = ids
        places[row, begin:end] = np.arange(branch.column, branch.column + len(ids))
        sees[row, begin:end, : branch.column] = True
        sees[row, begin:end, begin:end] = causal[: len(ids), : len(ids)]
        before += [row * width + branch.column - 1, *range(row * width + begin, row * width + end)]
    unseen = torch.from_numpy(~sees[:, None])
    mask = torch.zeros(rows, 1, width, width, dtype=numbers).masked_fill(unseen, torch.finfo(numbers).min)
    own = torch.nn.functional.pad(batch.actions[:, 1:], (0, width - batch.actions.shape[1] + 1)).flatten().nonzero()
    index = torch.cat([own.squeeze(1), torch.tensor(before, dtype=torch.long, device=device)])
    kwargs = {
        "input_ids": torch.from_numpy(tokens).to(device),
        "attention_mask": mask.to(device),
        "position_ids": torch.from_numpy(places).to(device),
    }
    return ModelInput(kwargs, lambda hidden: hidden.flatten(0, 1)[index])


def separate_rows(batch: Batch, options: Sequence[Branch]) -> Batch:
    """A batch with one row for each option: the tokens before the option, and the option."""
    rows = batch.tokens.cpu()
    prompts = [rows[branch.row, : branch.column].tolist() for branch in options]
    return Batch.given(prompts, [branch.ids for branch in options]).to(batch.tokens.device)


def states_with_options(
    model: HiddenStates, batch: Batch, options: list[Branch], *, branched: bool
) -> tuple[Tensor, Tensor]:
    """The model's `states` [N, D], and those before every token of the options in the batch [M, D].

    `branched`: compute options as branches of their row. Otherwise each option has a row of its own.
    """
    if not branched:
        states, rows = model.states(batch), separate_rows(batch, options)
        if not model.encoder_decoder:
            return states, model.states(rows)
        # An encoder reads a prompt that several options share only once.
        inputs, prompts = model.model_input(rows), {b.row: i for i, b in reversed(list(enumerate(options)))}
        once = [prompts[row] for row in sorted(prompts)]
        which = torch.tensor([sorted(prompts).index(b.row) for b in options], device=model.device)
        encoded = model.encoded(inputs.kwargs.pop("input_ids")[once], inputs.kwargs["attention_mask"][once])
        inputs.kwargs["encoder_outputs"] = (encoded[0][which],)
        return states, model.selected_states(rows, inputs)
    if len(batch) > 1 and not model.modes.padded:
        parts = []
        for i in range(len(batch)):
            own = [replace(option, row=0) for option in options if option.row == i]
            parts.append(states_with_options(model, batch.rows(slice(i, i + 1)), own, branched=True))
        states, before = zip(*parts, strict=True)
        return torch.cat(states), torch.cat(before)
    moved = [replace(option, column=option.column + len(model.virtual)) for option in options]
    inputs = tree(in_front(model.virtual, batch), moved, model.head.weight.dtype)
    return states_of_tree(model, batch, options, inputs)


def states_of_tree(
    model: HiddenStates, batch: Batch, options: list[Branch], inputs: ModelInput
) -> tuple[Tensor, Tensor]:
    """`states` [N, D], and the states before every token of the options [M, D], from the arguments of a `tree`."""
    both = model.selected_states(batch.with_(states=None), inputs)
    count = len(both) - sum(len(option.ids) for option in options)
    return both[:count], both[count:]


def among(logprobs: Tensor, options: Sequence[Branch], choices: Choices, sampling: Sampling) -> Tensor:
    """[C, O] log-prob of each option of each choice, -inf beyond a choice's last option.

    `logprobs` [M]: log-probs of the tokens of all options.
    """
    lengths = torch.tensor([len(branch.ids) for branch in options], device=logprobs.device)
    owner = torch.repeat_interleave(torch.arange(len(options), device=logprobs.device), lengths)
    scores = logprobs.new_zeros(len(options)).index_add(0, owner, logprobs)
    scores = (scores / lengths if sampling.choice == "mean" else scores) / sampling.temperature
    counts = choices.counts.tolist()
    table = torch.nn.utils.rnn.pad_sequence(list(scores.split(counts)), batch_first=True, padding_value=-torch.inf)
    return table.log_softmax(-1)


def chosen(
    table: Tensor, picked: Tensor, other: Tensor | None = None, divergences: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Log-prob, entropy, logsumexp and exact divergences of choices, each [C].

    `table` [C, O]: log-probs of the options. `picked` [C]: the chosen option. `other` [C, O]: log-probs of the options
    under another model, for the `divergences`.
    """
    found = {"logprobs": table.gather(-1, picked.to(table.device)[:, None]).squeeze(-1)}
    known = torch.where(table == -torch.inf, 0.0, table)
    found["entropy"] = -(table.exp() * known).sum(-1)
    found["logsumexp"] = torch.zeros_like(found["logprobs"])  # their scores are log-probs of one distribution
    if other is not None:
        least = torch.finfo(table.dtype).min / 4  # finite: beyond the last option, the gradient of a gap would be NaN
        found |= {kind: divergence(table.clamp(min=least), other.clamp(min=least), kind) for kind in divergences}
    return found
