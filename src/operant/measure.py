"""What is told of a step's rollouts and batch, as sums and counts. Names and meanings: `tracking/registry.py`."""

import torch
from torch import Tensor

from operant.kl import estimate
from operant.tally import Tally
from operant.types import Batch, Rollout


def of_rollouts(rollouts: list[Rollout]) -> Tally:
    """Lengths, and how replies ended."""
    tally = Tally()
    turns = [turn for r in rollouts for turn in r.turns]
    lengths = {
        "rollout/query_tokens": [len(t.prompt) for t in turns],
        "rollout/reply_tokens": [len(t.action) for t in turns],
    }
    for name, values in lengths.items():
        tally.mean(name, values)
        tally.spread(f"{name}_std", values)
    for end in ("stop", "length"):
        tally.mean(f"rollout/ended_{end}", [t.end == end for t in turns])
    tally.mean("rollout/ended_cut", [r.end == "cut" for r in rollouts])
    tally.mean("rollout/turns", [len(r.turns) for r in rollouts])
    tally.add("rollout/count", len(rollouts), 0.0)
    return tally


def of_batch(batch: Batch, coef: float) -> Tally:
    """KL, its price, values and returns; `batch.rewards` is what was learnt from, KL already paid."""
    tally, at = Tally(), batch.actions
    index = batch.episodes
    replies = len(batch.bootstrap)

    def per_episode(x: Tensor) -> list[float]:
        sums = torch.zeros(replies, dtype=torch.float64).index_add(0, index, torch.where(at, x, 0.0).double().sum(1))
        return sums.tolist()

    tally.mean("rollout/logprob_mean", batch.raw_logprobs, at)
    tally.mean("policy/sampled_entropy", per_episode(-batch.raw_logprobs))
    if batch.ref_logprobs is not None:
        tally.mean("rollout/ref_logprob_mean", batch.ref_logprobs, at)
        k1 = estimate("k1", batch.raw_logprobs, batch.ref_logprobs)
        each = per_episode(k1)
        tally.mean("kl/per_reply", each)
        tally.spread("kl/per_reply_std", each)
        tally.mean("kl/per_token", k1, at)
        tally.mean("kl/k3", per_episode(estimate("k3", batch.raw_logprobs, batch.ref_logprobs)))
    if batch.kl is not None:
        charged = per_episode(batch.kl)
        tally.mean("kl/paid", charged)
        tally.mean("reward/kl_penalty", [coef * k for k in charged])
    tally.mean("reward/return", per_episode(batch.rewards))
    for name, x in (("value", batch.values), ("returns", batch.returns), ("policy/advantage", batch.advantages)):
        if x is not None:
            joint = "_" if "/" in name else "/"
            tally.mean(f"{name}{joint}mean", x, at)
            tally.spread(f"{name}{joint}std", x, at)
    return tally


def of_scores(raw: list[float], used: list[float], abstained: int) -> Tally:
    """Scores as the reward gave them, and as they were used."""
    tally = Tally()
    for name, scores in (("reward/", raw), ("reward/scaled_", used)):
        tally.mean(f"{name}mean", scores)
        tally.spread(f"{name}std", scores)
    for score in raw:
        tally.extreme("reward/max", score)
        tally.extreme("reward/min", score)
    tally.add("reward/abstained", abstained, abstained + len(raw))
    return tally


def finish(metrics: dict[str, float]) -> dict[str, float]:
    """What follows from several pooled numbers."""
    if "value/error" in metrics and metrics.get("returns/std"):
        metrics["value/explained_variance"] = 1 - metrics["value/error"] / metrics["returns/std"] ** 2
    return metrics
