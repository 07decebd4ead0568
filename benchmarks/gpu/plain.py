"""A straightforward PPO loop in plain torch on transformers' `generate`, as a baseline.

It does the same work without optimisations: a second pass for log-probs, full logits, padded rows, a full reference.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

KL, CLIP, VALUE_CLIP, VALUE, LAMBDA = 0.1, 0.2, 0.2, 0.1, 0.95


class Plain:
    """Float32 weights under autocast (where the place is a GPU), a critic head, a copy as the reference."""

    def __init__(self, model: nn.Module, precision: str):
        self.model: Any = model.float().train(False)
        self.reference: Any = deepcopy(model).to(getattr(torch, precision)).requires_grad_(False)
        self.device, self.dtype = next(model.parameters()).device, getattr(torch, precision)
        self.value = nn.Linear(self.model.config.hidden_size, 1).to(self.device)
        weights = [*self.model.parameters(), *self.value.parameters()]
        self.optimizer = torch.optim.AdamW(weights, lr=1e-5, weight_decay=0.0, fused=True)

    def step(self, prompts: list[list[int]], tokens: int, *, epochs: int, minibatch: int) -> None:
        """One PPO step: generate, score and update."""
        queries = torch.tensor(prompts, device=self.device)
        with torch.no_grad(), self._autocast():
            rows = self.model.generate(
                queries,
                attention_mask=torch.ones_like(queries),
                do_sample=True,
                top_k=0,
                min_new_tokens=tokens,
                max_new_tokens=tokens,
                pad_token_id=0,
            )
            old, values = self._pass(rows, tokens)
            ref = _chosen(self.reference(rows).logits, rows, tokens)
        rewards = -KL * (old - ref)
        rewards[:, -1] += (rows[:, -tokens:] % 2 == 0).float().mean(1)
        advantages, returns = _gae(rewards, values)
        for _ in range(epochs):
            for part in torch.randperm(len(rows), device=self.device).split(minibatch):
                self._descend(rows[part], tokens, old[part], values[part], advantages[part], returns[part])

    def _descend(self, rows: Tensor, tokens: int, old: Tensor, values: Tensor, gain: Tensor, returns: Tensor) -> None:
        with self._autocast():
            new, valued = self._pass(rows, tokens)
        ratio = (new - old).exp()
        policy = -torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
        near = values + (valued - values).clamp(-VALUE_CLIP, VALUE_CLIP)
        value = 0.5 * torch.maximum((valued - returns) ** 2, (near - returns) ** 2).mean()
        (policy + VALUE * value).backward()
        nn.utils.clip_grad_norm_([p for group in self.optimizer.param_groups for p in group["params"]], 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _pass(self, rows: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        out = self.model(rows, output_hidden_states=True)
        values = self.value(out.hidden_states[-1][:, -tokens - 1 : -1].float()).squeeze(-1)
        return _chosen(out.logits, rows, tokens), values.float()

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)


def _chosen(logits: Tensor, rows: Tensor, tokens: int) -> Tensor:
    """[B, A] log-probs of the last `tokens` ids."""
    logprobs = logits[:, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, rows[:, 1:, None]).squeeze(-1)[:, -tokens:]


def _gae(rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Whitened advantages, and returns [B, A]."""
    advantages, last = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        following = values[:, t + 1] if t + 1 < rewards.shape[1] else torch.zeros_like(last)
        last = rewards[:, t] + following - values[:, t] + LAMBDA * last
        advantages[:, t] = last
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8), advantages + values
