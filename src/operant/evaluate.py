"""Held-out tasks, judged with random numbers that depend on nothing but the task: the same before and after."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from operant.batch import collate
from operant.kl import estimate
from operant.observe import passed
from operant.policy.policy import Policy
from operant.rewards import judge
from operant.sampling import Sampling
from operant.types import RewardFn, Rollout, Task


@dataclass(frozen=True)
class Evaluation:
    """What held-out tasks came to."""

    rollouts: list[Rollout]
    scores: list[float | None]
    kl: float | None
    """Mean k1 sum a reply against the reference, in nats."""

    @property
    def mean(self) -> float:
        """Mean score of the replies that were judged."""
        known = [s for s in self.scores if s is not None]
        return sum(known) / len(known) if known else float("nan")

    def as_plain(self) -> dict[str, Any]:
        """For a file or a checkpoint: the mean, the KL, and every reply as text with its score."""
        pairs = zip(self.rollouts, self.scores, strict=True)
        replies = [{"task": r.task.id, "query": r.query, "reply": r.reply, "score": s} for r, s in pairs]
        return {"mean": self.mean, "kl": self.kl, "replies": replies}

    @classmethod
    def from_plain(cls, kept: Mapping[str, Any]) -> "Evaluation":
        """What `as_plain` kept: texts and scores, without ids."""
        rollouts = [
            Rollout(Task(r["task"], r["query"]), 0, [], [r["reply"]], query=r["query"]) for r in kept["replies"]
        ]
        return cls(rollouts, [r["score"] for r in kept["replies"]], kept["kl"])


def totals(rollouts: list[Rollout], reward: RewardFn) -> list[float | None]:
    """One number a rollout; per-token scores are summed."""
    scores = judge(reward, rollouts).scores
    return [sum(s) if isinstance(s, list) else s for s in scores]


@torch.no_grad()
def divergence(
    rollouts: list[Rollout], policy: Policy, reference: Policy, sampling: Sampling, micro_tokens: int = 8192
) -> float:
    """Mean over replies of the summed log-ratio to the reference, in nats."""
    batch = collate(rollouts, [0.0] * len(rollouts), joined=not policy.encoder_decoder)
    raw = batch.logprobs
    if raw is None or batch.allowed is not None:
        raw = passed(batch, policy, sampling, micro_tokens).raw_logprobs
    theirs = passed(batch.with_(allowed=None), reference, sampling, micro_tokens).raw_logprobs
    return float((estimate("k1", raw, theirs) * batch.actions).sum()) / len(rollouts)
