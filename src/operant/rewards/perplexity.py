"""Perplexity of the replies under a fixed model: how natural the text is that the policy writes."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from operant.data.demonstrations import Demonstrations
from operant.models.loading import load_policy
from operant.models.model_passes import batches
from operant.types import Batch, Message, OperantError, Rollout, Task, require


class Perplexity:
    """exp(mean negative log-prob per token) of the replies under `model`, which never changes: 1 and above.

    `model` is a folder, `builtin:NAME` or a Hub name, such as the one that training began from; it is not the policy.
    It reads each reply after the text before it (without what a world says between turns), with its own tokenizer, and
    only the tokens of the reply count. As a metric: of all replies together, by tokens, and under `of_replies` of each
    reply; an empty one has none. A prompt that is too long for the model loses its beginning, a reply its end. batch:
    replies of a pass.
    """

    reads_start = True
    """As a metric of a run, `model` is by default the one that the run begins from."""

    def __init__(self, model: str | None = None, *, batch: int = 16, device: str | None = None):
        if not model:
            raise OperantError(
                "perplexity.model is missing: name the fixed model that reads the replies, a folder, "
                "builtin:NAME or a Hub name, as in {perplexity: {model: ./start}}; that which training begins from "
                "is a good one"
            )
        require(batch >= 1, f"perplexity: batch={batch} must be at least 1")
        self.model, self.batch = model, batch
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.policy: Any = None

    def check(self) -> None:
        if self.policy is None:
            policy = load_policy(self.model)
            if policy.tokenizer is None:
                raise OperantError(f"perplexity.model={self.model!r} has no tokenizer, which it needs to read text")
            self.policy = policy.to(self.device)

    def __call__(self, rollouts: list[Rollout]) -> dict[str, float | list[float | None] | None]:
        found = self.nats([(r.text.removesuffix(r.reply), r.reply) for r in rollouts])
        each = [math.exp(nats / tokens) if tokens else None for nats, tokens in found]
        tokens = sum(count for _, count in found)
        return {"": math.exp(math.fsum(nats for nats, _ in found) / tokens) if tokens else None, "of_replies": each}

    @torch.no_grad()
    def nats(self, texts: Sequence[tuple[str | list[Message], str]]) -> list[tuple[float, int]]:
        """The summed negative log-probs of each reply's tokens, and their number; texts: prompts, as text or
        messages, and replies."""
        self.check()
        found = [(0.0, 0)] * len(texts)
        rows = [(i, *ids) for i, text in enumerate(texts) if (ids := self._ids(*text))[1]]
        for places in batches([len(prompt) + len(reply) for _, prompt, reply in rows], self.batch, pads=True):
            some = [rows[place] for place in places]
            batch = Batch.given([prompt for _, prompt, _ in some], [reply for _, _, reply in some])
            sums = -(self.policy(batch).logprobs.double().cpu() * batch.actions).sum(1)
            for (i, _, reply), nats in zip(some, sums.tolist()):
                found[i] = nats, len(reply)
        return found

    def _ids(self, prompt: str | list[Message], reply: str) -> tuple[list[int], list[int]]:
        """The token ids of both, cut to what the model reads."""
        policy = self.policy
        if not reply:
            return [], []
        start = [t for t in (policy.tokenizer.bos_token_id, *policy.stop_tokens) if t is not None][:1]
        task = Task("a reply", prompt or start, replies=(reply,))
        (rollout,) = Demonstrations(policy.tokenizer, None, encoder_decoder=policy.encoder_decoder).rollouts([task])
        before, action = rollout.turns[0].prompt, rollout.turns[0].action
        if policy.context is not None:
            action = action if policy.encoder_decoder else action[: policy.context - 1]
            before = before[-(policy.context - (0 if policy.encoder_decoder else len(action))) :]
        if (why := policy.misfit(len(before), len(action))) is not None:
            raise OperantError(f"perplexity.model={self.model!r}: a reply {why}")
        return before, action
