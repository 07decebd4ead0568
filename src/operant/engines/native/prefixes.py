"""Keys and values that stay from one call of the engine to the next: a prompt that begins the same is not read again.

    kept = Prefixes(gigabytes=2)
    kept.add(ids, keys_and_values)          # of a prompt and its reply, whose row has ended
    prefix, shared = kept.find(prompt)      # the row that shares the most tokens with the beginning of the prompt

Which episode a prompt belongs to need not be known: it begins with the last prompt and reply of its episode, or with a
part of them.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from operant.models.choices import Branch, states_of_tree, tree
from operant.models.policy import Policy
from operant.types import Batch

Ids = tuple[int, ...]


@dataclass
class Prefix:
    """What the model has computed for a row of tokens."""

    ids: Ids
    keys_and_values: Tensor
    """[layers, 2, heads, number of ids, width of a head]"""
    states: Tensor | None = None
    """[number of ids, D] the trunk states, if there is a trunk and they are known."""


class Prefixes:
    """Rows of tokens with their keys and values, at most `gigabytes`: the oldest make room for new ones."""

    def __init__(self, gigabytes: float):
        self.most, self.bytes = int(gigabytes * 1e9), 0
        self._rows: dict[Ids, Prefix] = {}
        """By age, the oldest first."""
        self._sorted: list[Ids] = []

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, prompt: Sequence[int]) -> tuple[Prefix | None, int]:
        """The row that shares most tokens with the beginning of the prompt, and their number: one is left to read."""
        ids = tuple(prompt)
        place = bisect_left(self._sorted, ids)  # in alphabetical order, the longest common prefix is beside it
        beside = [(_common(ids, row), row) for row in self._sorted[max(place - 1, 0) : place + 1]]
        shared, row = max(beside, default=(0, ()))
        shared = min(shared, len(ids) - 1)
        return (self._rows[row], shared) if shared else (None, 0)

    def add(self, ids: Sequence[int], keys_and_values: Tensor, states: Tensor | None = None) -> None:
        """Keep a row, if it fits, in place of the row that it goes on from."""
        row, size = tuple(ids), keys_and_values.numel() * keys_and_values.element_size()
        if size > self.most:
            return
        before = self._sorted[max(bisect_left(self._sorted, row) - 1, 0) :][:1]
        for old in [row, *(b for b in before if b == row[: len(b)])]:
            self.remove(old)
        while self._rows and self.bytes + size > self.most:
            self.remove(next(iter(self._rows)))
        self._rows[row] = Prefix(row, keys_and_values, states)
        self.bytes += size
        insort(self._sorted, row)

    def get(self, ids: Sequence[int]) -> Prefix | None:
        return self._rows.get(tuple(ids))

    def remove(self, row: Ids) -> None:
        prefix = self._rows.pop(row, None)
        if prefix is not None:
            self.bytes -= prefix.keys_and_values.numel() * prefix.keys_and_values.element_size()
            del self._sorted[bisect_left(self._sorted, row)]


def _common(a: Ids, b: Ids) -> int:
    if b == a[: len(b)]:
        return len(b)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class ReadOn:
    """Computes the branches of choices whose prompts begin with tokens of an earlier call, and keeps what is taken.

    Each row of the model's call has the cached columns of its prompt, the rest of the prompt, and its branches.
    """

    def __init__(self, policy: Policy, prompts: Sequence[list[int]], kept: Prefixes):
        self.policy, self.kept = policy, kept
        self.prompts = [[*policy.virtual, *p] for p in prompts]
        self.shared: list[int] = []
        """Of each prompt, the number of tokens that are not read again."""
        self.branches: list[list[tuple[list[int], int]]] = [[] for _ in prompts]
        """Of each prompt: the tokens of its branches that were read, and the column of the call where they begin."""
        self.cache = DynamicCache()

    def __call__(self, batch: Batch, options: list[Branch]) -> tuple[Tensor, Tensor]:
        policy, device = self.policy, self.policy.device
        found = [self.kept.find(p) for p in self.prompts]
        self.shared = [shared for _, shared in found]
        before = len(policy.virtual)
        first = [row[len(p) - before] for row, p in zip(batch.tokens.tolist(), self.prompts, strict=True)]
        rest = Batch.given([p[n:] for p, n in zip(self.prompts, self.shared, strict=True)], [[t] for t in first])
        own = [replace(option, column=option.column + before - self.shared[option.row]) for option in options]
        inputs, past = tree(rest.to(device), own, policy.head.weight.dtype), max(self.shared)
        known = torch.tensor(self.shared, device=device)[:, None]
        inputs.kwargs["position_ids"] += known
        if past:
            some = next(prefix.keys_and_values for prefix, _ in found if prefix is not None)
            held = some.new_zeros(*some.shape[:2], len(found), some.shape[2], past, some.shape[4])
            for row, (prefix, n) in enumerate(found):
                if prefix is not None:
                    held[:, :, row, :, :n] = prefix.keys_and_values[:, :, :, :n]
            self.cache = DynamicCache((keys, values) for keys, values in held)
            mask = inputs.kwargs["attention_mask"]
            seen = torch.arange(past, device=device) < known
            ahead = torch.zeros_like(seen, dtype=mask.dtype).masked_fill(~seen, torch.finfo(mask.dtype).min)
            ahead = ahead[:, None, None].expand(-1, -1, mask.shape[2], -1)
            inputs.kwargs["attention_mask"] = torch.cat([ahead, mask], -1)
        inputs.kwargs.update(past_key_values=self.cache, use_cache=True)
        ends = [past + len(p) - n + 1 for p, n in zip(self.prompts, self.shared, strict=True)]
        for option in options:
            self.branches[option.row].append((option.ids[:-1], ends[option.row]))
            ends[option.row] += len(option.ids) - 1
        return states_of_tree(policy, batch, options, inputs)

    def keep(self, row: int, pick: int) -> None:
        """Keep what was computed for a prompt and for the option that is taken, all but its last token."""
        prompt, shared, past = self.prompts[row], self.shared[row], max(self.shared)
        ids, begin = self.branches[row][pick]
        spans = ((0, shared), (past, past + len(prompt) - shared), (begin, begin + len(ids)))
        columns = torch.cat([torch.arange(*span) for span in spans]).to(self.policy.device)
        layers: list[Any] = self.cache.layers
        taken = [torch.stack([x[row, :, columns] for x in (layer.keys, layer.values)]) for layer in layers]
        self.kept.add([*prompt, *ids], torch.stack(taken))
