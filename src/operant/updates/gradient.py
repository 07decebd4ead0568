"""Descend on a batch: epochs, minibatches, micro-batches.

Minibatches are cut first (units in the order of a hash), over all ranks; then each rank takes the units that it holds;
then micro-batches bound its memory. Weights are known for the whole minibatch before the first backward, and gradients
are summed, so neither micro-batches nor padding nor ranks change what the optimizer sees.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from operant import distributed, losses, measure
from operant.advantages import whiten
from operant.batch import cut, token_weights, units
from operant.kl import EXACT, KLOptions, estimate, loss_term
from operant.policy.policy import Policy
from operant.sampling import Sampling, counter
from operant.tally import Tally
from operant.types import Batch, LossFn, OperantError, Outputs
from operant.updates.blocks import Watch
from operant.updates.optimizer import OptimizerOptions, apply


@dataclass(frozen=True)
class UpdateOptions:
    """How often a batch is used, and in what pieces."""

    epochs: int = 4
    minibatch: int | None = None
    """Units (episodes, pairs) an optimizer step, over all ranks; None: the whole batch."""
    micro_tokens: int = 8192
    """Tokens, padding included, of one forward and backward pass. Bounds memory, changes no number."""
    target_kl: float | None = None
    """Stop the update once the epoch's mean KL(old || new) a token is above this."""
    ratio_threshold: float | None = None
    """Refuse an optimizer step whose mean ratio is above this (TRL: 10)."""

    def __post_init__(self) -> None:
        for name in ("epochs", "minibatch", "micro_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OperantError(f"update.{name}={value}: it must be at least 1")


@dataclass(frozen=True)
class Objective:
    """What is descended on: the algorithm's loss, what it averages over, and the KL term of the loss."""

    loss: LossFn
    unit: str = "episode"
    per: str = "token"
    horizon: int | None = None
    entropy_gradient: bool = False
    whiten: Callable[[Tensor, Tensor], Tensor] | None = None
    """Whitening of advantages within a minibatch: (advantages, actions) -> advantages."""
    kl: KLOptions | None = None
    reference: Policy | None = None


def minibatch_whitening(scope: str, unbiased: bool) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The `whiten` of an objective whose advantages ask for it after the cut."""
    return partial(whiten, unbiased=unbiased) if scope == "minibatch" else None


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    objective: Objective,
    *,
    options: UpdateOptions,
    steering: OptimizerOptions,
    sampling: Sampling,
    seed: int = 0,
    step: int = 0,
    closely: bool = False,
) -> Tally:
    """Epochs over the batch; returns the metrics of all minibatches, of this rank.

    `closely`: look at every gradient, weight and update, too (`blocks.Watch`).
    """
    tally, first = Tally(), True
    watch = Watch(policy, tally, closely=closely)
    held = units(batch, objective.unit)
    for epoch in range(options.epochs):
        so_far = Tally()
        for mine in _cut(len(held), options.minibatch, seed, step, epoch):
            whole = _minibatch(batch, [row for u in mine for row in held[u]], objective)
            seen = Tally()
            for micro in _micro_batches(whole, objective.unit, options.micro_tokens):
                _backward(policy, micro, objective, sampling, seen, gap=first)
            first = False
            distributed.sum_gradients(policy.trainable())
            so_far.merge(seen)
            if _too_far(so_far, options.target_kl):
                optimizer.zero_grad()
                seen.sums.pop("loss/total", None)
                tally.merge(seen).add("update/early_stopped", 1.0)
                watch.weights()
                return tally
            _apply(watch, optimizer, options, steering, seen)
            tally.merge(seen)
        tally.add("update/epochs", 1.0 / distributed.world(), 0.0)
    tally.add("update/early_stopped", 0.0)
    watch.weights()
    return tally


def _cut(count: int, size: int | None, seed: int, step: int, epoch: int) -> list[list[int]]:
    """This rank's units of each minibatch. Units are numbered over all ranks as `distributed.shard` deals them."""
    numbers = [distributed.rank() + distributed.world() * u for u in range(count)]
    everyone = [n for part in distributed.gathered(numbers) for n in part]
    order = sorted(everyone, key=lambda n: (counter(seed, step, epoch, n), n))
    size = size or len(order)
    local = {n: u for u, n in enumerate(numbers)}
    return [[local[n] for n in order[i : i + size] if n in local] for i in range(0, len(order), size)]


def _minibatch(batch: Batch, rows: Sequence[int], objective: Objective) -> Batch:
    """The rows, with weights over all ranks; a rank without any takes part with a row of weight 0."""
    part = batch.rows(torch.tensor(rows or [0]))
    if not rows:
        part = part.with_(actions=torch.zeros_like(part.actions))
    if objective.whiten is not None and part.advantages is not None:
        part = part.with_(advantages=objective.whiten(part.advantages, part.actions))
    return part.with_(weights=token_weights(part, objective.per, objective.horizon))


def _micro_batches(batch: Batch, unit: str, budget: int) -> list[Batch]:
    """Units of near-equal length under a token budget; every rank makes the same number."""
    parts = [batch.rows(torch.tensor(rows)) for rows in cut(batch, units(batch, unit), budget)]
    spare = parts[0].rows(slice(0, 1))
    dummy = spare.with_(weights=torch.zeros_like(spare.weights), actions=torch.zeros_like(spare.actions))
    return parts + [dummy] * (distributed.largest(len(parts)) - len(parts))


def _backward(
    policy: Policy, batch: Batch, objective: Objective, sampling: Sampling, tally: Tally, *, gap: bool
) -> None:
    if not bool(batch.actions.any()):
        return
    exact = objective.kl is not None and objective.kl.loss_coef > 0 and objective.kl.loss_kind in EXACT
    against = objective.reference if exact else None
    out = policy.forward(batch, sampling, against=against, entropy_gradient=objective.entropy_gradient)
    terms = objective.loss(out, batch)
    loss = terms.pop("loss")
    if objective.kl is not None and objective.kl.loss_coef:
        divergence = _kl_term(out, batch, objective.kl)
        terms["kl/in_loss"] = divergence.detach()
        loss = loss + objective.kl.loss_coef * divergence
    whole = losses.total(loss, batch)
    whole.backward()
    tally.add("loss/total", float(whole.detach()), 0.0)
    _record(tally, out, batch, terms, gap)


def _kl_term(out: Outputs, batch: Batch, options: KLOptions) -> Tensor:
    if options.loss_kind in EXACT:
        return out.kl[options.loss_kind]
    behaviour = batch.raw_logprobs if batch.raw_logprobs is not None else batch.logprobs
    return loss_term(options.loss_kind, out.raw_logprobs, behaviour, batch.ref_logprobs)


def _record(tally: Tally, out: Outputs, batch: Batch, terms: dict[str, Tensor], gap: bool) -> None:
    """Metrics as sums over actions and their number."""
    at, count = batch.actions, float(batch.actions.sum())
    for name, value in terms.items():
        tally.add(name, float(value[at].double().sum()), count)
    tally.add("policy/entropy", float(out.entropy[at].detach().double().sum()), count)
    if batch.logprobs is None:
        return
    log_ratio = (out.logprobs.detach() - batch.logprobs)[at]
    tally.histogram("ratio", log_ratio.exp())
    tally.add("policy/old_new_k3", float(estimate("k3", -log_ratio, torch.zeros_like(log_ratio)).sum()), count)
    tally.spread("policy/ratio_std", log_ratio.exp())
    tally.extreme("policy/ratio_max", float(log_ratio.max().exp()))
    tally.extreme("policy/ratio_min", float(log_ratio.min().exp()))
    if gap:
        tally.extreme("rollout/logprob_gap", float(log_ratio.abs().max()))
        measure.of_likelihood(tally, batch, out)


def _too_far(so_far: Tally, limit: float | None) -> bool:
    if limit is None:
        return False
    total, count = so_far.sums.get("policy/old_new_k3", (0.0, 0.0))
    return distributed.total_float(total) / max(distributed.total_float(count), 1.0) > limit


def _apply(
    watch: Watch, optimizer: torch.optim.Optimizer, options: UpdateOptions, steering: OptimizerOptions, seen: Tally
) -> None:
    """Clip and step; a gradient that is not finite, or a ratio beyond its threshold, never reaches the weights."""
    norms = {name: torch.linalg.vector_norm(p.grad) for name, p in watch.held.items() if p.grad is not None}
    whole = torch.linalg.vector_norm(torch.stack(list(norms.values()))) if norms else torch.zeros(())
    norm, bound = float(whole), steering.max_grad_norm or float("inf")
    finite = norm == norm and norm != float("inf")
    refused = not finite or _ratio_beyond(seen, options.ratio_threshold)
    if not refused:
        watch.gradients({name: float(x) for name, x in norms.items()})
        torch.nn.utils.clip_grads_with_norm_(watch.held.values(), bound, whole)
        seen.add("update/grad_norm", norm)
        seen.add("update/grad_norm_clipped", min(norm, bound))
        seen.add("update/steps", 1.0 / distributed.world(), 0.0)  # every rank takes the same ones
        apply(optimizer, steering)
    loss, _ = seen.sums.pop("loss/total", (0.0, 0.0))
    seen.add("loss/total", loss, 1.0 / distributed.world())  # of every rank a share of one loss
    seen.add("policy/skipped_steps", float(refused))
    seen.add("update/not_finite", float(not finite))
    optimizer.zero_grad()


def _ratio_beyond(seen: Tally, threshold: float | None) -> bool:
    if threshold is None or "policy/ratio_mean" not in seen.sums:
        return False
    total, count = seen.sums["policy/ratio_mean"]
    return distributed.total_float(total) / max(distributed.total_float(count), 1.0) > threshold
