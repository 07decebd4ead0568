"""The objective that an update minimises, and its gradient for one micro-batch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from operant.algorithms import Algorithm
from operant.distributed import GradientSum
from operant.metrics import collect
from operant.models.policy import Policy
from operant.objectives import losses
from operant.objectives.advantages import normalised
from operant.objectives.kl import EXACT, KLOptions, direct_term, estimate, loss_term
from operant.sampling import Sampling
from operant.tally import Tally
from operant.types import Batch, LossFn, Outputs

FAULTS = "update/faults"
"""The number of sums of a micro-batch that were not finite. The update removes it, so it is not a metric."""


@dataclass(frozen=True)
class Objective:
    """The algorithm's loss, the unit and weights of its mean, and the KL term of the loss."""

    loss: LossFn
    unit: str = "episode"
    per: str = "token"
    horizon: int | None = None
    entropy_gradient: bool = False
    whiten: Callable[[Batch, Tensor], Batch] | None = None
    """The function that whitens advantages within a minibatch: (batch, actions) -> batch."""
    kl: KLOptions | None = None
    reference: Policy | None = None


def minibatch_whitening(scope: str, unbiased: bool) -> Callable[[Batch, Tensor], Batch] | None:
    """The function that whitens advantages within a minibatch; None for any other `scope`."""
    return partial(normalised, unbiased=unbiased) if scope == "minibatch" else None


def make_objective(
    algorithm: Algorithm, options: Mapping[str, Any], reference: Policy | None, sampling: Sampling
) -> Objective:
    """The objective of a learner with these options. Without a reference, it has no KL term."""
    loss, advantage = options["loss"], options["advantage"]
    return Objective(
        loss=partial(algorithm.loss, **loss),
        unit=algorithm.unit,
        per=algorithm.per,
        horizon=sampling.max_tokens,
        entropy_gradient=bool(loss.get("entropy_coef")),
        whiten=minibatch_whitening(advantage.get("whiten_scope", "none"), advantage.get("unbiased", False)),
        kl=options["kl"] if reference is not None else None,
        reference=reference,
    )


def backward(
    policy: GradientSum, batch: Batch, objective: Objective, sampling: Sampling, tally: Tally, *, gap: bool
) -> None:
    """Add the gradient of a micro-batch to the parameters, and its metrics to the tally.

    A micro-batch of weight 0, which a rank computes while others have more micro-batches than it, adds no metrics.
    gap: also add the metrics that compare log-probs before the first optimizer step with those of the batch.
    """
    out, terms = forward(policy, batch, objective, sampling)
    whole = losses.total(terms.pop("loss"), batch)
    whole.backward()
    if bool(batch.weights.any()):
        _record(tally, out, batch, terms | {"loss/total": whole.detach()}, gap)


@torch.no_grad()
def measure_terms(policy: Policy, batch: Batch, objective: Objective, sampling: Sampling, tally: Tally) -> None:
    """Add the metrics of the loss itself on a batch to the tally, without a gradient."""
    _, terms = forward(policy, batch, objective, sampling)
    for name in (name for name in terms if name != "loss"):
        x = terms[name]
        tally.mean(name, x, batch.actions if x.ndim == 2 else ~x.isnan())


def forward(
    policy: Policy | GradientSum, batch: Batch, objective: Objective, sampling: Sampling
) -> tuple[Outputs, dict[str, Tensor]]:
    """Run one forward pass, and return its outputs and its terms: `loss`, with the KL term added, and metrics."""
    kl = objective.kl
    in_loss = kl is not None and kl.loss_coef > 0
    exact = (in_loss and kl.loss_kind in EXACT) or (batch.price is not None and kl is not None and kl.kind in EXACT)
    against = objective.reference if exact or batch.hinted is not None else None
    out = policy(batch, sampling, against=against, entropy_gradient=objective.entropy_gradient)
    terms = objective.loss(out, batch)
    if in_loss:
        divergence = _kl_term(out, batch, kl.loss_kind, loss_term)
        terms["kl/in_loss"] = divergence.detach()
        terms["loss"] = terms["loss"] + kl.loss_coef * divergence
    if kl is not None and batch.price is not None:
        terms["loss"] = terms["loss"] + batch.price * _kl_term(out, batch, kl.kind, direct_term)
    return out, terms


def _kl_term(out: Outputs, batch: Batch, kind: str, sampled: Callable[..., Tensor]) -> Tensor:
    """[B, T] The divergence of a kind: computed exactly, or estimated by `sampled` from the log-probs.

    It is 0 at demonstrations, whose tokens the policy has not drawn: an estimate from them has the wrong sign.
    """
    behaviour = batch.raw_logprobs if batch.raw_logprobs is not None else batch.logprobs
    found = out.kl[kind] if kind in EXACT else sampled(kind, out.raw_logprobs, behaviour, batch.ref_logprobs)
    return found if batch.demonstrated is None else torch.where(batch.demonstrated[:, None], 0.0, found)


def _record(tally: Tally, out: Outputs, batch: Batch, terms: dict[str, Tensor], gap: bool) -> None:
    """Add metrics as sums over actions and their number; all sums leave the device in one transfer."""
    if batch.demonstrated is not None:  # demonstrations have metrics of their own: the terms that are called given/...
        at = batch.actions & batch.demonstrated[:, None]
        for name in [name for name in terms if name.startswith("given/")]:
            tally.mean(name, terms.pop(name).detach(), at)
    for name in [name for name, x in terms.items() if x.ndim == 1]:  # [B], NaN at rows that have no such number
        of_rows = terms.pop(name).detach()
        tally.mean(name, of_rows[~of_rows.isnan()])
    at = batch.actions if batch.demonstrated is None else batch.actions & ~batch.demonstrated[:, None]
    sums = {name: x.double() if x.ndim == 0 else x[at].double().sum() for name, x in terms.items()}
    if out.entropy is not None:  # a reward model draws nothing
        sums["policy/entropy"] = out.entropy.detach()[at].double().sum()
    # A sum in float64 is finite if and only if all its terms are.
    checked = [
        x.detach()[batch.actions].double().sum() for x in (out.logprobs, out.logsumexp, out.values) if x is not None
    ]
    *numbers, count = torch.stack([*checked, *sums.values(), at.sum().double()]).tolist()
    totals = dict(zip(sums, numbers[len(checked) :], strict=True))
    bad = [x for x in (*numbers[: len(checked)], totals["loss/total"]) if not math.isfinite(x)]
    tally.add(FAULTS, len(bad), 0.0)
    for name, total in totals.items():
        tally.add(name, total, 0.0 if name == "loss/total" else count)
    if batch.logprobs is None or not count:
        return
    log_ratio = (out.logprobs.detach() - batch.logprobs)[at].cpu()
    ratio = log_ratio.exp()
    tally.histogram("ratio", ratio)
    tally.add("policy/old_new_k3", float(estimate("k3", -log_ratio, torch.zeros_like(log_ratio)).sum()), count)
    tally.spread("policy/ratio_std", ratio)
    tally.extreme("policy/ratio_max", float(ratio.max()))
    tally.extreme("policy/ratio_min", float(ratio.min()))
    current = at if batch.staleness is None else at & (batch.staleness == 0)  # the others differ for a good reason
    if gap and bool(current.any()):
        tally.extreme("rollout/logprob_gap", float(log_ratio[current[at].cpu()].abs().max()))
        collect.of_likelihood(tally, batch, out, current)
