"""A reward model: any network that scores a text. Here, how fluent another language model finds the reply."""

from typing import Any

import torch

from operant import load_policy
from operant.types import Batch, Rollout


class Fluency:
    """The mean log-prob, in nats a token, of each reply under the language model `model`.

    Options: --reward fluency --reward.model builtin:reviews-lm
    """

    __name__ = "fluency"

    def __init__(self, model: str = "builtin:reviews-lm", batch: int = 16):
        self.model, self.batch, self.judge = model, batch, None

    def check(self) -> None:
        """Called before the policy loads: a model that is missing is an error then, and not in the first step."""
        if self.judge is None:
            judge: Any = load_policy(self.model)
            self.judge = judge.requires_grad_(False)

    def __call__(self, rollouts: list[Rollout]) -> list[float | None]:
        self.check()
        return [x for i in range(0, len(rollouts), self.batch) for x in self._some(rollouts[i : i + self.batch])]

    @torch.no_grad()
    def _some(self, rollouts: list[Rollout]) -> list[float | None]:
        judge: Any = self.judge
        texts = [[judge.tokenizer(text)["input_ids"] for text in (r.query, r.text[len(r.query) :])] for r in rollouts]
        batch = Batch.given([[*query] or [0] for query, _ in texts], [reply or [0] for _, reply in texts])
        logprobs, counts = judge.forward(batch).logprobs.sum(1).tolist(), batch.actions.sum(1).tolist()
        found = zip(texts, logprobs, counts, strict=True)
        return [total / count if reply else None for (_, reply), total, count in found]  # no reply: no opinion
