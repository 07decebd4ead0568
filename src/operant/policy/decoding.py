"""Decoding state: prompts that were read once, and the cache that grows with every token.

decoding = policy.prefill(prompts)      # .states [B, D]: the state before the first token of each reply
decoding.step(ids)                      # feeds one token a row; .states moves on
decoding.keep(rows)                     # finished replies leave; nothing is computed for them any more
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from operant.policy import layout

if TYPE_CHECKING:
    from operant.policy.policy import Policy


class Decoding:
    """A batch of growing rows. `states` [B, D] is the hidden state before the next token of each."""

    def __init__(self, policy: "Policy", prompts: list[list[int]]):
        self.policy = policy
        self.model: Any = policy.model
        if not (policy.modes.cached and (policy.modes.left or policy.encoder_decoder)):
            self.rows = [list(p) for p in prompts]
            self.replies: list[list[int]] = [[] for _ in prompts]
            self._recompute()
        elif policy.encoder_decoder:
            self._encode(prompts)
        else:
            self._prefill(prompts)

    def step(self, ids: Tensor) -> None:
        """Append one token a row."""
        if hasattr(self, "rows"):
            for reply, token in zip(self.replies, ids.tolist(), strict=True):
                reply.append(token)
            self._recompute()
            return
        feed = {"decoder_input_ids" if self.policy.encoder_decoder else "input_ids": ids[:, None]}
        if self.policy.encoder_decoder:
            feed |= {"encoder_outputs": self.source, "attention_mask": self.mask}
        elif self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], 1)
            feed |= {"attention_mask": self.mask, "position_ids": self.lengths[:, None]}
            self.lengths = self.lengths + 1
        self.states, self.cache = self.policy.last_states(**feed, past_key_values=self.cache)

    def keep(self, rows: Tensor) -> None:
        """Go on with some rows [B'] only."""
        self.states = self.states[rows]
        if hasattr(self, "rows"):
            picked = rows.tolist()
            self.rows = [self.rows[i] for i in picked]
            self.replies = [self.replies[i] for i in picked]
            return
        self.cache.batch_select_indices(rows)
        if self.mask is not None:
            self.mask = self.mask[rows]
        if self.policy.encoder_decoder:
            self.source = type(self.source)(last_hidden_state=self.source.last_hidden_state[rows])
        elif self.mask is not None:
            self.lengths = self.lengths[rows]

    def _prefill(self, prompts: list[list[int]]) -> None:
        tokens, mask = layout.pad(prompts, "left", self.policy.device)
        feed: dict[str, Any] = {"input_ids": tokens}
        self.mask = None
        if not bool(mask.all()):
            self.mask, self.lengths = mask.long(), mask.sum(1)
            feed |= {"attention_mask": self.mask, "position_ids": layout.positions(mask)}
        self.states, self.cache = self.policy.last_states(**feed)

    def _encode(self, prompts: list[list[int]]) -> None:
        tokens, mask = layout.pad(prompts, "right", self.policy.device)
        self.mask = mask.long()
        self.source = self.model.get_encoder()(input_ids=tokens, attention_mask=self.mask)
        start = torch.full((len(prompts), 1), self.policy.start_token, device=self.policy.device)
        self.states, self.cache = self.policy.last_states(
            encoder_outputs=self.source, attention_mask=self.mask, decoder_input_ids=start
        )

    def _recompute(self) -> None:
        """Without a cache: every row whole, by itself. Slow, and right for every model."""
        policy, states = self.policy, []
        for row, reply in zip(self.rows, self.replies, strict=True):
            if policy.encoder_decoder:
                feed = {"input_ids": [row], "decoder_input_ids": [[policy.start_token, *reply]]}
            else:
                feed = {"input_ids": [row + reply]}
            states.append(policy.last_states(**{k: torch.tensor(v, device=policy.device) for k, v in feed.items()})[0])
        self.states = torch.cat(states)
