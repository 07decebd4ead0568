"""Train on a batch, epoch by epoch, minibatch by minibatch; and the update rules, of which a method chooses one.

The units of all ranks, in the order of a hash, are first cut into minibatches. Each rank then takes its own units of a
minibatch, and cuts them into micro-batches to bound its memory. The weights of a minibatch are computed before its
first backward pass, and gradients are summed, so micro-batches, padding and ranks do not change the optimizer step.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor, nn

from operant import distributed
from operant.bounds import bounded
from operant.import_by_name import Lazy, Table
from operant.metrics import collect
from operant.metrics.collect import BLOCKS, GRADIENTS
from operant.models.policy import Policy
from operant.rollouts.collate import played, token_weights, units
from operant.sampling import Sampling, counter
from operant.tally import Tally
from operant.training.nonfinite import RefusedUpdate
from operant.training.objective import FAULTS, MicroBatchOptions, Objective, TokenBudget, accumulate
from operant.training.optimizer import OptimizerOptions, RateOptions, apply, make_optimizer, masters, rate
from operant.training.own_optimizer import OwnOptimizer
from operant.types import Batch, OperantError, shown

__all__ = [
    "UPDATE_RULES",
    "GradientUpdate",
    "OptimizerOptions",
    "RateOptions",
    "UpdateOptions",
    "UpdateResult",
    "find_rule",
]

IF_REFUSED = Lazy({"first_fault": "operant.training.refused_step:first_fault"})
"""Imported for an optimizer step that meets NaN or infinity."""
STOPS = "above 0, or none; else no step would be taken"
SAMPLE = 1 << 16
"""The largest sample of one tensor, in numbers. Norms of larger tensors are estimated from an evenly spaced sample."""


def block_names(names: Collection[str]) -> dict[str, str]:
    """The block of each parameter, by name. In every architecture, the first number in a name is that of the block.

    Parameters before the first block belong to `embedding`, those after it without a number to `final`, and those of a
    critic to `value`.
    """
    sided = any(".encoder." in name for name in names)
    out, seen = {}, set[str]()
    for name in names:
        side = next((s for s in ("encoder", "decoder") if sided and f".{s}." in name), "")
        numbered = re.match(r".*?\.(\d+)\.", name)
        if name.startswith(("value_head", "critic")):
            out[name] = "value"
        elif numbered:
            out[name] = f"{side} block {numbered[1]}".strip()
            seen |= {side, ""}
        else:
            out[name] = "final" if side in seen else "embedding"
    return out


class NormRecorder:
    """Adds the norms of one update to a tally. It is made before the update, because it compares weights with those."""

    def __init__(self, policy: Policy, tally: Tally, *, detailed: bool = False):
        """`detailed`: also add histograms of every gradient, and the norms of weights and of their change."""
        self.tally = tally
        self.parameters = distributed.trained(policy)
        self.divided = policy.shards is not None
        self.blocks = block_names(self.parameters)
        self.detailed = detailed
        self.before = {name: _sample(p).clone() for name, p in self.parameters.items()} if detailed else {}

    def gradients(self, norms: dict[str, float]) -> None:
        """Add the gradients of an optimizer step. `norms`: their norms by parameter."""
        self._add("gradient", norms)
        if self.detailed and (self.divided or distributed.rank() == 0):  # whole ones are the same on every rank
            for name, p in self.parameters.items():
                if p.grad is not None:
                    self.tally.histogram(GRADIENTS + name, _sample(p.grad))
        self.detailed = False  # histograms of the first optimizer step only

    def whole(self, norms: dict[str, float]) -> dict[str, float]:
        """The norms of whole parameters from those of this rank's rows, if they are divided. Every rank must call."""
        return distributed.joined(norms) if self.divided else norms

    def weights(self) -> None:
        """Add the norms of the weights after the update, and of their change in it."""
        if not self.before:
            return
        now = {name: _sample(p) for name, p in self.parameters.items()}
        ratios = {name: p.numel() / max(len(now[name]), 1) for name, p in self.parameters.items()}
        sizes = {name: _norm(x, ratios[name]) for name, x in now.items()}
        changes = {name: _norm(x - self.before[name], ratios[name]) for name, x in now.items()}
        for kind, norms in (("weight", sizes), ("update", changes)):
            self._add(kind, self.whole(norms))

    def _add(self, kind: str, norms: dict[str, float]) -> None:
        """Add the norm of each block: the root of the sum of its parameters' squared norms."""
        squares: dict[str, float] = {}
        for name, norm in norms.items():
            squares[self.blocks[name]] = squares.get(self.blocks[name], 0.0) + norm**2
        for block, square in squares.items():
            self.tally.add(f"{BLOCKS}{kind}/{block}", square**0.5)


def _sample(x: Tensor) -> Tensor:
    """An evenly spaced sample of a tensor. The distance is odd, so that it does not hit the same few columns only."""
    flat = x.detach().flatten()
    step = -(-len(flat) // SAMPLE)
    return flat[:: step | 1 if step > 1 else 1]


def _norm(x: Tensor, ratio: float) -> float:
    """The norm of a tensor, estimated from a sample `x`. `ratio`: the size of the tensor over that of the sample."""
    return float(torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))) * ratio**0.5


@dataclass(frozen=True)
class UpdateOptions(MicroBatchOptions):
    """How often a batch is used, and how it is cut. Raises: OperantError for a value out of range."""

    epochs: int = bounded(4, at_least=1)
    """Passes over the batch in each training step."""
    minibatch: int | None = bounded(None, at_least=1)
    """Units (episodes, pairs) per optimizer step, over all ranks; None: the whole batch."""
    target_kl: float | None = bounded(None, above=0, rule=STOPS)
    """Stop the update when the epoch's mean KL(old || new) per token exceeds this."""
    ratio_threshold: float | None = bounded(None, above=0, rule=STOPS)
    """Skip an optimizer step whose mean ratio exceeds this (TRL: 10)."""


class UpdateRun(TypedDict):
    """What a training step says to its update."""

    seed: int
    step: int
    places: Sequence[int | None]
    """The index of each episode among those of all ranks, which decides its minibatches."""
    budget: TokenBudget
    detailed: bool
    """Measure every gradient, weight and change."""
    keep_gradients: bool
    """The clipped gradients of the last optimizer step stay in the parameters."""


class UpdateResult(NamedTuple):
    """The outcome of an update, on this rank."""

    tally: Tally
    """The metrics of all minibatches."""
    refused: RefusedUpdate | None
    """The optimizer step that ended the update because of NaN or infinity."""


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    objective: Objective,
    *,
    options: UpdateOptions,
    optimizer_options: RateOptions,
    sampling: Sampling,
    seed: int = 0,
    step: int = 0,
    places: Sequence[int | None] = (),
    detailed: bool = False,
    budget: TokenBudget | None = None,
    keep_gradients: bool = False,
    step_on: Callable[[Batch, float], None] | None = None,
) -> UpdateResult:
    """Train for some epochs on the batch.

    If a log-prob, logsumexp, value, loss or gradient is NaN or infinite on any rank, that optimizer step is not made on
    any rank, and the update ends.
    seed ... keep_gradients: as in `UpdateRun`; without `places`, episodes are numbered round robin over the ranks.
    step_on(minibatch, factor): makes the optimizer step of a minibatch, whose gradients are computed by then. `factor`
    clips them. By default `optimizer` makes it.
    """
    tally = Tally()
    for name in ("update/steps", "update/epochs"):
        tally.add(name, 0.0, 0.0)  # so that the metric is 0 if there are none
    recorder = NormRecorder(policy, tally, detailed=detailed)
    rows_of_units, numbers = numbered_units(batch, objective.unit, places)
    budget = budget or options.budget()
    together = policy.shards or distributed.GradientSum(policy)
    step_on = step_on or (lambda minibatch, shrink: apply(optimizer, optimizer_options, shrink=shrink))
    for epoch in range(options.epochs):
        of_epoch = Tally()
        for number, chosen in enumerate(minibatches(numbers, options.minibatch, seed, step, epoch)):
            minibatch = weighted(batch, [row for unit in chosen for row in rows_of_units[unit]], objective)
            if epoch == 0:
                collect.of_advantages(tally, played(minibatch)[1])
            _clear(recorder.parameters)
            measured = accumulate(together, minibatch, objective, sampling, budget, gap=epoch + number == 0)
            norms = recorder.whole(_gradient_norms(recorder.parameters))
            norm, bound = math.hypot(*norms.values()), optimizer_options.max_grad_norm or float("inf")
            faults, _ = measured.sums.pop(FAULTS, (0.0, 0.0))
            if distributed.largest(int(faults > 0 or not math.isfinite(norm))):  # on any rank
                _clear(recorder.parameters)
                together.gather()
                fault = IF_REFUSED["first_fault"](policy, minibatch, objective, sampling, budget.tokens)
                refused = RefusedUpdate(fault, minibatch, first=tally.sums["update/steps"][0] == 0)
                return UpdateResult(_ended(tally, recorder, measured, refused=True), refused)
            of_epoch.merge(measured)
            if _mean_exceeds(of_epoch, "policy/old_new_k3", options.target_kl):
                _clear(recorder.parameters)
                return UpdateResult(_ended(tally, recorder, measured, early=True), None)
            skipped = _mean_exceeds(measured, "policy/ratio_mean", options.ratio_threshold)
            loss, _ = measured.sums.pop("loss/total", (0.0, 0.0))
            if not skipped:
                recorder.gradients(norms)
                measured.add("update/grad_norm", norm)
                measured.add("update/grad_norm_clipped", min(norm, bound))
                measured.add("update/steps", 1.0 / distributed.world(), 0.0)  # all ranks make the same steps
                measured.add("loss/total", loss, 1.0 / distributed.world())  # the loss is the sum of the ranks' parts
                step_on(minibatch, min(1.0, bound / (norm + 1e-6)))
            measured.add("policy/skipped_steps", float(skipped))
            if skipped or not keep_gradients:
                _clear(recorder.parameters)
            for p, master in masters(optimizer) if keep_gradients and not skipped else ():
                p.grad = None if master.grad is None else master.grad.to(p.dtype)  # that of the master was clipped
            tally.merge(measured)
        tally.add("update/epochs", 1.0 / distributed.world(), 0.0)
    return UpdateResult(_ended(tally, recorder), None)


def _ended(
    tally: Tally, recorder: NormRecorder, last: Tally | None = None, *, early: bool = False, refused: bool = False
) -> Tally:
    """Add how the update ended, and the norms of the weights. last: of a minibatch without an optimizer step."""
    if last is not None:
        last.sums.pop("loss/total", None)
        tally.merge(last)
    tally.add("update/early_stopped", float(early))
    tally.add("update/refused", float(refused) / distributed.world(), 0.0)
    recorder.weights()
    return tally


def numbered_units(batch: Batch, unit: str, places: Sequence[int | None]) -> tuple[list[list[int]], list[int]]:
    """The rows of each unit that has an action, and a number for each, unique over all ranks.

    The number is the place of the unit's first episode, if places are known and unique.
    """
    acts, episodes = batch.actions.any(1).tolist(), batch.episodes.tolist()
    rows_of_units = [rows for rows in units(batch, unit) if any(acts[row] for row in rows)]
    own = [places[episodes[rows[0]]] if places else None for rows in rows_of_units]
    return rows_of_units, distributed.numbers(own)


def minibatches(numbers: Sequence[int], size: int | None, seed: int, step: int, epoch: int) -> list[list[int]]:
    """The indices of this rank's units in each minibatch, which is cut from the shuffled units of all ranks."""
    of_all_ranks = [n for part in distributed.gathered(list(numbers)) for n in part]
    order = sorted(of_all_ranks, key=lambda n: (counter(seed, step, epoch, n), n))
    size = size or max(len(order), 1)  # none, if a threshold has kept no reply
    local = {n: unit for unit, n in enumerate(numbers)}
    return [[local[n] for n in order[i : i + size] if n in local] for i in range(0, len(order), size)]


def weighted(batch: Batch, rows: Sequence[int], objective: Objective) -> Batch:
    """The rows, with token weights over all ranks. A rank without rows takes part with one row of weight 0."""
    part = batch.rows(torch.tensor(rows or [0]))
    counted = part if rows else part.with_(actions=torch.zeros_like(part.actions))
    if not bool(part.actions.any()):  # a pass without any action has no gradient, and the other ranks wait for one
        last = torch.arange(part.tokens.shape[1], device=part.mask.device) == part.mask.sum(1, keepdim=True) - 1
        hinted = None if part.hinted is None else part.with_(hinted=None, actions=last)
        part = part.with_(actions=last, allowed=None, choices=None, hinted=hinted)
    if objective.whiten is not None and part.advantages is not None:
        own = counted.actions if part.demonstrated is None else counted.actions & ~part.demonstrated[:, None]
        part = objective.whiten(part, own)
    part = part if rows else part.with_(importance=None)
    weights = token_weights(counted, objective.per, objective.horizon)
    return part.with_(weights=weights if part.importance is None else weights * part.importance)


def _mean_exceeds(tally: Tally, metric: str, limit: float | None) -> bool:
    """Whether the mean of a metric over all ranks is above the limit; False for None, as for a metric of no rank."""
    if limit is None:
        return False
    total, count = tally.sums.get(metric, (0.0, 0.0))
    return distributed.total_float(total) / max(distributed.total_float(count), 1.0) > limit


def _clear(parameters: Mapping[str, nn.Parameter]) -> None:
    for p in parameters.values():
        p.grad = None


def _gradient_norms(parameters: Mapping[str, nn.Parameter]) -> dict[str, float]:
    """The norm of each gradient, in float32 or wider; all norms leave the device in one transfer."""
    gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    if not gradients:
        return {}
    wide = {torch.promote_types(g.dtype, torch.float32) for g in gradients.values()}
    norms = torch._foreach_norm(list(gradients.values()), dtype=max(wide, key=lambda kind: kind.itemsize))
    return dict(zip(gradients, torch.stack(norms).tolist(), strict=True))


class GradientUpdate:
    """Epochs of minibatches, and an optimizer step for each.

    A rule of one's own is a class with these members. It may derive from this one and change what differs: its options,
    `make_optimizer`, `step`, or its state.
    """

    update_options: type[MicroBatchOptions] = UpdateOptions
    """The dataclass of the options `update.*`."""
    optimizer_options: type | None = OptimizerOptions
    """The dataclass of the options `optimizer.*`; None: there are none. Here, one derived from `RateOptions`."""

    def __init__(self, policy: Policy, options: Mapping[str, Any], own: OwnOptimizer | None = None):
        """`options`: by group, among them `update` and `optimizer`. `own`: an optimizer that the user has made."""
        self.policy, self.options, self.own = policy, options, own
        self.optimizer: Any = self.make_optimizer() if own is None else own.optimizer

    def make_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of the policy's trained weights; None if `step` needs none."""
        return make_optimizer(self.policy, self.options["optimizer"])

    def parts(self) -> dict[str, Any]:
        """All state that changes, by name: objects with `state_dict` and `load_state_dict`.

        These are the optimizer, which `fresh_optimizer` does not load, and the rule itself if it has both methods.
        """
        optimizer = {} if self.optimizer is None else {"optimizer": self.own or self.optimizer}
        return optimizer | ({"rule": self} if hasattr(self, "state_dict") else {})

    def learning_rate(self, step: int, total: int | None) -> float:
        """The learning rate of a training step of `total`, counted from 0. Raises: OperantError after the schedule."""
        if self.own is not None:
            return float(self.optimizer.param_groups[0]["lr"])
        options = self.options["optimizer"]
        if total is not None and step >= total and options.schedule != "constant":
            raise OperantError(
                f"all total_steps={total} steps are done, and optimizer.schedule={options.schedule} has reached 0, so "
                "another step would change nothing: build the Learner with more total_steps"
            )
        return rate(options, step, total)

    def update(
        self, batch: Batch, objective: Objective, sampling: Sampling, *, lr: float, **run: Unpack[UpdateRun]
    ) -> UpdateResult:
        """Train on the batch of a training step. Every rank calls it. The arguments are those of `UpdateRun`."""
        result = update(
            self.policy,
            self.optimizer,
            batch,
            objective,
            options=self.options["update"],
            optimizer_options=self.options["optimizer"],
            sampling=sampling,
            **run,
            step_on=lambda minibatch, shrink: self.step(minibatch, sampling, lr=lr, shrink=shrink),
        )
        if self.own is not None and (result.refused is None or not result.refused.first):
            self.own.schedule()
        return result

    def step(self, minibatch: Batch, sampling: Sampling, *, lr: float, shrink: float) -> None:
        """Move the weights once; the gradients of the minibatch are in place, and are to be multiplied by `shrink`."""
        apply(self.optimizer, self.options["optimizer"], lr=lr, shrink=shrink)


@dataclass(frozen=True)
class OnePassOptions(UpdateOptions):
    """Options of an update that uses each batch once."""

    epochs: int = bounded(1, at_least=1)
    """Passes over the batch in each training step: 1, because the loss has no ratio that corrects a second one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs != 1:
            raise OperantError(
                f"update.epochs={self.epochs}: the gradient of this method is that of the policy which drew the "
                "replies, so each batch is used once; leave it out, or use algorithm=ppo"
            )


class OnePass(GradientUpdate):
    """One pass over the batch, for losses without a ratio."""

    update_options = OnePassOptions


UPDATE_RULES = Table(
    "update rule",
    "operant.update_rules",
    {"gradient": GradientUpdate, "one-pass": OnePass, "trust-region": "operant.training.trust_region:TrustRegion"},
)
"""The class of each update rule; other packages add theirs as entry points of `operant.update_rules`."""


def find_rule(rule: object) -> type[GradientUpdate]:
    """The class of an update rule: the rule itself, or that of a name or a `module:object`.

    Raises: OperantError for an unknown one, and for one that lacks a member.
    """
    found: Any = UPDATE_RULES.find(rule) if isinstance(rule, str) else rule
    members = ("update_options", "optimizer_options", "parts", "learning_rate", "update")
    if lacking := [name for name in members if not hasattr(found, name)]:
        raise OperantError(f"update rule {shown(rule)} has no {lacking[0]}: derive it from GradientUpdate")
    if not (isinstance(found.update_options, type) and issubclass(found.update_options, MicroBatchOptions)):
        raise OperantError(f"update rule {shown(rule)}: its update_options must be derived from MicroBatchOptions")
    return found
