"""Turns that earlier weights, or another sampler, generated: their age, and importance weights for them.

A turn is stale if its version is not that of the policy in training. Its tokens were drawn from another distribution,
which the importance weight of a token corrects: its probability under the policy before the update over that under its
sampler, at most a cap c, as in truncated importance sampling (Ionides, 2008; V-trace, arXiv:1802.01561, equation 1).
With masked importance sampling, what is above the cap has no weight at all.
"""

from collections.abc import Sequence

import torch

from operant.tally import Tally
from operant.types import Batch, OperantError, Rollout, Turn

WEIGHTS = ("none", "token", "sequence")
"""Importance weights: none, of each token, or of the whole reply at each of its tokens."""


def age(turn: Turn, version: int) -> int:
    """Versions between the weights that generated a turn and `version`; 0 for replies from elsewhere, without any."""
    return version - turn.version if turn.logprobs is not None else 0


def with_staleness(batch: Batch, rollouts: Sequence[Rollout], version: int) -> Batch:
    """Add the age of every action to a collated batch, unless all are current."""
    ages = [torch.tensor([age(turn, version) for turn in rollout.turns]) for rollout in rollouts]
    if not any(bool(of_turns.any()) for of_turns in ages):
        return batch
    table = torch.nn.utils.rnn.pad_sequence(ages, batch_first=True)
    found = table[batch.episodes[:, None], batch.turns.clamp(min=0)]
    return batch.with_(staleness=torch.where(batch.actions, found, 0))


def with_importance(
    batch: Batch,
    sampled: torch.Tensor | None,
    kind: str,
    cap: float | None,
    *,
    mask: bool = False,
    unscored: torch.Tensor | None = None,
) -> Batch:
    """Add importance weights to a batch whose `logprobs` are those of the policy before the update.

    sampled: [B, T] log-probs under the sampler, but for the actions `unscored` [B, T]. kind: `token`: one weight a
    token; `sequence`: the product over all actions of an episode, at each of them. cap: the largest weight; None: any.
    mask: a weight above the cap is 0. A demonstration has no sampler, and the weight 1.
    Raises: OperantError if an action of another reply has no log-prob under its sampler.
    """
    own = batch.actions if batch.demonstrated is None else batch.actions & ~batch.demonstrated[:, None]
    unknown = own if sampled is None else own & unscored if unscored is not None else torch.zeros_like(own)
    if bool(unknown.any()):
        raise OperantError(
            f"learner.importance={kind!r} needs the log-probs under the sampler, and a reply of this step has none: "
            "train on replies of `generate`, give every Turn its logprobs, or set learner.importance=none"
        )
    log_ratio = batch.logprobs.new_zeros(own.shape) if sampled is None else batch.logprobs - sampled
    log_ratio = torch.where(own, log_ratio, 0.0)
    if kind == "sequence":
        sums = log_ratio.new_zeros(len(batch.bootstrap)).index_add(0, batch.episodes, log_ratio.sum(1))
        log_ratio = torch.where(batch.actions, sums[batch.episodes][:, None], 0.0)
    most, weights = float("inf") if cap is None else cap, log_ratio.exp()
    tiny = torch.finfo(weights.dtype).tiny  # so that 0 is what was masked, and not what is too small for the type
    masked = torch.where(weights > most, 0.0, weights.clamp(min=tiny))
    return batch.with_(importance=torch.where(own, masked if mask else weights.clamp(max=most), 1.0))


def measure(
    rollouts: Sequence[Rollout],
    version: int,
    batch: Batch,
    cap: float | None,
    sampled: torch.Tensor | None = None,
    *,
    mask: bool = False,
) -> Tally:
    """The metrics of staleness, of importance weights and of the engine's log-probs; `batch` is scored.

    cap, mask: as `with_importance` had them. sampled: [B, T] log-probs under the sampler, if those of the batch were
    computed again.
    """
    tally = Tally()
    if sampled is not None and batch.logprobs is not None:
        current = batch.actions if batch.staleness is None else batch.actions & (batch.staleness == 0)
        gap = (batch.logprobs - sampled.to(batch.logprobs)).abs()
        tally.mean("rollout/engine_gap", gap, current)
        if current.any():
            tally.extreme("rollout/engine_gap_max", float(gap[current].max()))
    ages = [age(turn, version) for rollout in rollouts for turn in rollout.turns if turn.logprobs is not None]
    tally.mean("rollout/staleness", ages)
    if ages:
        tally.extreme("rollout/staleness_max", max(ages))
    if batch.importance is not None:
        tally.mean("rollout/importance_mean", batch.importance, batch.actions)
        if cap is not None:
            over = batch.importance == 0 if mask else batch.importance >= cap
            tally.mean("rollout/importance_clipped", over, batch.actions)
    return tally
