"""Update rules: how the weights are moved, once a training step. A method chooses one (`Algorithm.update`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import torch

from operant.bounds import bounded
from operant.import_by_name import Table
from operant.models.policy import Policy
from operant.sampling import Sampling
from operant.training.objective import MicroBatchOptions, Objective
from operant.training.optimizer import OptimizerOptions, RateOptions, apply, make_optimizer, rate
from operant.training.own_optimizer import OwnOptimizer
from operant.training.update import UpdateOptions, UpdateResult, UpdateRun, update
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
        """Train on the batch of a training step. Every rank calls it. The arguments are those of `update.UpdateRun`."""
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
