"""Scores the options of choices whose prompts begin with tokens of an earlier call, and reads only the rest of them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from operant.engines.native.prefixes import Prefixes
from operant.models.choices import Branch, tree
from operant.models.policy import Policy
from operant.types import Batch


class ReadOn:
    """Computes the branches of a batch of choices for `Policy.choice_logprobs`, and keeps those that are taken.

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
        """`states` [N, D], and the states before every token of the options [M, D]."""
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
        return policy.compute_tree(batch, options, inputs)

    def keep(self, row: int, pick: int) -> None:
        """Keep what was computed for a prompt and for the option that is taken, all but its last token."""
        prompt, shared, past = self.prompts[row], self.shared[row], max(self.shared)
        ids, begin = self.branches[row][pick]
        spans = ((0, shared), (past, past + len(prompt) - shared), (begin, begin + len(ids)))
        columns = torch.cat([torch.arange(*span) for span in spans]).to(self.policy.device)
        layers: list[Any] = self.cache.layers
        taken = [torch.stack([x[row, :, columns] for x in (layer.keys, layer.values)]) for layer in layers]
        self.kept.add([*prompt, *ids], torch.stack(taken))
