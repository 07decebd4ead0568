"""A soft prompt: a few trained vectors before the tokens of a frozen language model (arXiv:2104.08691)."""

from typing import Any

import torch
from torch import nn

from operant import load_policy


class SoftPrompt(nn.Module):
    """`base` behind `length` trained positions. Its states at those positions are cut off before the output head.

    Options: --policy soft_prompt --policy.base builtin:reviews-lm --policy.length 8
    """

    def __init__(self, base: str = "builtin:reviews-lm", length: int = 8, seed: int = 0):
        super().__init__()
        loaded = load_policy(base)
        self.tokenizer, self.base, self.length = loaded.tokenizer, loaded.model.requires_grad_(False), length
        self.config = self.base.config
        words = self.base.get_input_embeddings().weight
        first = torch.randint(len(words), (length,), generator=torch.Generator().manual_seed(seed))
        self.vectors = nn.Parameter(words[first].detach().clone())  # a prompt of random words to begin with

    def get_output_embeddings(self) -> nn.Module:
        return self.base.get_output_embeddings()

    def forward(self, input_ids: Any, attention_mask: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        begun = past_key_values is not None and past_key_values.get_seq_length() > 0
        embedded = self.base.get_input_embeddings()(input_ids)
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        before = attention_mask.new_ones(len(input_ids), self.length)
        kwargs = {name: value for name, value in kwargs.items() if name != "position_ids"}
        if not begun:
            embedded = torch.cat([self.vectors.expand(len(input_ids), -1, -1).to(embedded), embedded], 1)
            attention_mask = torch.cat([before, attention_mask], 1)
        out = self.base.base_model(inputs_embeds=embedded, attention_mask=attention_mask, **kwargs)
        states = out.last_hidden_state[:, 0 if begun else self.length :]
        out["logits"] = self.base.get_output_embeddings()(states)
        return out
