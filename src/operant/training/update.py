"""Descend on a batch: epochs, minibatches, micro-batches.

Minibatches are cut first (units in the order of a hash), over all ranks; then each rank takes the units that it holds;
then micro-batches bound its memory. Weights are known for the whole minibatch before the first backward, and gradients
are summed, so neither micro-batches nor padding nor ranks change what the optimizer sees.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from operant import distributed
from operant.metrics import collect
from operant.models.policy import Policy
from operant.rollouts.collate import token_weights, units
from operant.sampling import Sampling, counter
from operant.tally import Tally
from operant.training.find_nonfinite import RefusedUpdate, first_fault
from operant.training.gradient_norms import Watch
from operant.training.microbatch import Budget, accumulate
from operant.training.objective import FAULTS, Objective
from operant.training.optimizer import OptimizerOptions, apply
from operant.types import Batch, OperantError


@dataclass(frozen=True)
class UpdateOptions:
    """How often a batch is used, and in what pieces."""

    epochs: int = 4
    minibatch: int | None = None
    """Units (episodes, pairs) an optimizer step, over all ranks; None: the whole batch."""
    micro_tokens: int = 8192
    """Tokens of one forward and backward pass, padding (where rows are padded) included. Bounds memory, changes no
    number."""
    micro_batch: str = "auto"
    """auto: where memory runs out, micro_tokens is halved and the optimizer step made anew. fixed: that is an error."""
    target_kl: float | None = None
    """Stop the update once the epoch's mean KL(old || new) a token is above this."""
    ratio_threshold: float | None = None
    """Refuse an optimizer step whose mean ratio is above this (TRL: 10)."""

    def __post_init__(self) -> None:
        for name in ("epochs", "minibatch", "micro_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OperantError(f"update.{name}={value}: it must be at least 1")
        for name in ("target_kl", "ratio_threshold"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise OperantError(f"update.{name}={value}: it must be above 0, or none; else no step would be taken")
        if self.micro_batch not in ("auto", "fixed"):
            raise OperantError(f"update.micro_batch={self.micro_batch!r}: it must be auto or fixed")

    def budget(self) -> Budget:
        return Budget(self.micro_tokens, fixed=self.micro_batch == "fixed")


Updated = tuple[Tally, RefusedUpdate | None]
"""The metrics of an update, and the optimizer step that ended it, where one was refused."""


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    objective: Objective,
    *,
    options: UpdateOptions,
    optimizer_options: OptimizerOptions,
    sampling: Sampling,
    seed: int = 0,
    step: int = 0,
    places: Sequence[int | None] = (),
    detailed: bool = False,
    budget: Budget | None = None,
) -> Updated:
    """Epochs over the batch; returns the metrics of all minibatches, of this rank.

    An optimizer step with a log-prob, logsumexp, value, loss or gradient that is not finite is not made, on any rank,
    and ends the update.
    `places`: where each episode stands among those of all ranks, which decides its minibatches; without, they are
    counted round robin over the ranks. `detailed`: look at every gradient, weight and update (`blocks.Watch`).
    """
    tally, first = Tally(), True
    for name in ("update/steps", "update/epochs"):
        tally.add(name, 0.0, 0.0)  # none is a number, too
    watch = Watch(policy, tally, detailed=detailed)
    held = [rows for rows in units(batch, objective.unit) if bool(batch.actions[rows].any())]
    numbers = _numbers([int(batch.episodes[rows[0]]) for rows in held], places)
    budget = budget or options.budget()
    together = distributed.Together(policy, idle=policy.critic is not None)  # its output head says nothing
    for epoch in range(options.epochs):
        so_far = Tally()
        for mine in _cut(numbers, options.minibatch, seed, step, epoch):
            whole = _minibatch(batch, [row for u in mine for row in held[u]], objective)
            if epoch == 0:
                collect.of_advantages(tally, whole)
            seen, first = accumulate(together, whole, objective, sampling, budget, gap=first), False
            norms = _norms(watch.held)
            if not _finite(seen, norms):
                optimizer.zero_grad()
                fault = first_fault(policy, whole, objective, sampling, budget.tokens)
                seen.sums.pop("loss/total", None)
                moved = tally.sums["update/steps"][0] > 0
                return _ended(tally.merge(seen), watch, refused=True), RefusedUpdate(
                    fault, whole, budget.tokens, not moved
                )
            so_far.merge(seen)
            if _too_far(so_far, options.target_kl):
                optimizer.zero_grad()
                seen.sums.pop("loss/total", None)
                return _ended(tally.merge(seen), watch, early=True), None
            _apply(watch, norms, optimizer, options, optimizer_options, seen)
            tally.merge(seen)
        tally.add("update/epochs", 1.0 / distributed.world(), 0.0)
    return _ended(tally, watch), None


UPDATES: dict[str, Callable[..., Updated]] = {"gradient": update}
"""Rules of update by name. Each takes the arguments of `update`."""


def _ended(tally: Tally, watch: Watch, *, early: bool = False, refused: bool = False) -> Tally:
    tally.add("update/early_stopped", float(early))
    tally.add("update/refused", float(refused) / distributed.world(), 0.0)
    watch.weights()
    return tally


def _finite(seen: Tally, norms: Mapping[str, float]) -> bool:
    """Whether every rank's numbers are."""
    faults, _ = seen.sums.pop(FAULTS, (0.0, 0.0))
    return not distributed.largest(int(faults > 0 or not math.isfinite(math.hypot(*norms.values()))))


def _numbers(episodes: Sequence[int], places: Sequence[int | None]) -> list[int]:
    """Of each unit, by its first episode: where it stands among the units of all ranks, each a number of its own."""
    given = [places[e] for e in episodes] if places else [None] * len(episodes)
    everyone = [n for part in distributed.gathered(given) for n in part]
    if None in everyone or len(set(everyone)) < len(everyone):  # from elsewhere, or from several calls
        return [distributed.rank() + distributed.world() * u for u in range(len(episodes))]
    return [n for n in given if n is not None]


def _cut(numbers: Sequence[int], size: int | None, seed: int, step: int, epoch: int) -> list[list[int]]:
    """This rank's units of each minibatch, which are cut from the units of all."""
    everyone = [n for part in distributed.gathered(list(numbers)) for n in part]
    order = sorted(everyone, key=lambda n: (counter(seed, step, epoch, n), n))
    size = size or len(order)
    local = {n: u for u, n in enumerate(numbers)}
    return [[local[n] for n in order[i : i + size] if n in local] for i in range(0, len(order), size)]


def _minibatch(batch: Batch, rows: Sequence[int], objective: Objective) -> Batch:
    """The rows, with weights over all ranks; a rank without any takes part with a row of weight 0."""
    part = batch.rows(torch.tensor(rows or [0]))
    counted = part if rows else part.with_(actions=torch.zeros_like(part.actions))
    if objective.whiten is not None and part.advantages is not None:
        part = objective.whiten(part, counted.actions)
    return part.with_(weights=token_weights(counted, objective.per, objective.horizon))


def _too_far(so_far: Tally, limit: float | None) -> bool:
    if limit is None:
        return False
    total, count = so_far.sums.get("policy/old_new_k3", (0.0, 0.0))
    return distributed.total_float(total) / max(distributed.total_float(count), 1.0) > limit


def _apply(
    watch: Watch,
    norms: dict[str, float],
    optimizer: torch.optim.Optimizer,
    options: UpdateOptions,
    optimizer_options: OptimizerOptions,
    seen: Tally,
) -> None:
    """Clip and step; a ratio beyond its threshold never reaches the weights."""
    norm, bound = math.hypot(*norms.values()), optimizer_options.max_grad_norm or float("inf")
    skipped = _ratio_beyond(seen, options.ratio_threshold)
    loss, _ = seen.sums.pop("loss/total", (0.0, 0.0))
    if not skipped:
        watch.gradients(norms)
        seen.add("update/grad_norm", norm)
        seen.add("update/grad_norm_clipped", min(norm, bound))
        seen.add("update/steps", 1.0 / distributed.world(), 0.0)  # every rank takes the same ones
        seen.add("loss/total", loss, 1.0 / distributed.world())  # of every rank a share of one loss
        apply(optimizer, optimizer_options, shrink=min(1.0, bound / (norm + 1e-6)))
    seen.add("policy/skipped_steps", float(skipped))
    optimizer.zero_grad()


def _norms(parameters: Mapping[str, nn.Parameter]) -> dict[str, float]:
    """The length of each gradient, in float32 at least; all leave the device at once."""
    held = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    if not held:
        return {}
    wide = {torch.promote_types(g.dtype, torch.float32) for g in held.values()}
    found = torch._foreach_norm(list(held.values()), dtype=max(wide, key=lambda kind: kind.itemsize))
    return dict(zip(held, torch.stack(found).tolist(), strict=True))


def _ratio_beyond(seen: Tally, threshold: float | None) -> bool:
    if threshold is None or "policy/ratio_mean" not in seen.sums:
        return False
    total, count = seen.sums["policy/ratio_mean"]
    return distributed.total_float(total) / max(distributed.total_float(count), 1.0) > threshold
