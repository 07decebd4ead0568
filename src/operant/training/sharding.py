"""`learner.parallel=fsdp`: the policy and its copies are divided over the ranks, and with them the optimizer's states.

What a rank has of each parameter are some of its rows, which are plain tensors to the optimizer. So an optimizer that
treats every number alike makes the same step as on the whole tensor; others are refused.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from operant import distributed
from operant.distributed import Shards, rows_of
from operant.models.policy import Policy
from operant.models.reference import PolicyCopy
from operant.models.safe_loading import is_quantised
from operant.objectives.kl import EXACT, KLOptions
from operant.training.optimizer import masters
from operant.training.options import LearnerOptions
from operant.training.update_rules import GradientUpdate, OnePass, find_rule
from operant.types import Batch, Divided, OperantError


def check(update: object, options: Mapping[str, Any]) -> None:
    """Check that the options of a learner go together with `learner.parallel=fsdp`, before any model loads."""
    own, rule = options["learner"], find_rule(update)
    if rule not in (GradientUpdate, OnePass):
        raise OperantError(
            f"learner.parallel=fsdp with the update rule {rule.__name__}: it moves whole weights, and each rank has "
            "some rows of them; use learner.parallel=ddp, or a method that follows the gradient, such as ppo"
        )
    if options["optimizer"].kind == "own":
        raise OperantError(
            "learner.parallel=fsdp with an optimizer of your own: it would see some rows of each matrix on every "
            "rank, which only some optimizers allow; use adamw, rmsprop or sgd, or learner.parallel=ddp"
        )
    if options["optimizer"].states == "8bit":
        raise OperantError(
            "learner.parallel=fsdp with optimizer.states=8bit: 256 numbers share a scale, and the ranks would cut "
            "these blocks; leave states out, because each rank has only its share of them"
        )
    if own.keep_gradients:
        raise OperantError(
            "learner.keep_gradients with learner.parallel=fsdp: each rank has some rows of the gradients; leave it out"
        )


def divide(policy: Policy, copies: Sequence[PolicyCopy], own: LearnerOptions) -> None:
    """Divide the policy and the own weights of these copies, if there are several ranks."""
    offload = own.offload
    if distributed.world() == 1:
        if offload != "none":
            raise OperantError(
                f"learner.offload={offload} in one process: only what is divided over several ranks is offloaded; "
                "start them by torchrun --nproc-per-node 2 -m operant ..., or leave it out"
            )
        return
    if is_quantised(policy.model):
        raise OperantError(
            "learner.parallel=fsdp with a quantised model: its weights cannot be divided; use learner.parallel=ddp, or "
            "load the model unquantised"
        )
    both = [policy.model, policy.critic.model] if policy.critic is not None else []
    if len({id(p) for m in both for p in m.parameters()}) < sum(len([*m.parameters()]) for m in both):
        raise OperantError(
            "learner.parallel=fsdp with value.critic=copy of a model with frozen weights: both have the same ones, and "
            "each would divide them; use a value head (value.critic=none), or learner.parallel=ddp"
        )
    of_policy = {id(p) for p in policy.parameters()}
    for copied in copies:
        others = [p for p in copied.policy.parameters() if id(p) in of_policy]
        if len([*copied.policy.parameters()]) > len(others):
            copied.shards = Shards(copied.policy, _units, shared=others, offload=offload in ("reference", "both"))
    policy.shards = Shards(policy, _units, offload=offload in ("optimizer", "both"))
    for copied in copies:
        if copied.shards is not None:
            copied.shards.free()


def _units(policy: Any) -> list[nn.Module]:
    """What is gathered one at a time: the blocks, if every rank calls each of them once in a pass."""
    models = [m for m in (policy, policy.critic) if m is not None and hasattr(m, "blocks")]
    once = all(m.modes.padded for m in models)
    return [block for m in models for stack in m.blocks() for block in stack] if once else []


@contextmanager
def updating(
    policy: Policy, present: Callable[[], AbstractContextManager[None]], kl: KLOptions, batch: Batch
) -> Iterator[None]:
    """A context for an update, in which each rank has only its parts of a divided policy. Every rank must call.

    present: the context in which copies of the policy are whole.

    """
    shards = policy.shards
    if distributed.largest(int(batch.choices is not None)):
        raise OperantError(
            "learner.parallel=fsdp with a world that offers choices: the ranks would call the model unequally often in "
            "a pass, and wait for each other; use learner.parallel=ddp"
        )
    # The loss may read the reference, which shares frozen weights with the policy: they are whole then.
    reads = (kl.loss_coef > 0 and kl.loss_kind in EXACT) or (kl.direct and kl.kind in EXACT) or batch.hinted is not None
    with present() if reads else nullcontext():
        shards.module.modes = policy.modes
        shards.free(frozen=not reads)
        yield
        shards.gather()


class DividedOptimizer:
    """The state of an optimizer whose parameters are rows of divided ones, as a part of `RunState`."""

    def __init__(self, optimizer: Any, shards: Shards):
        self.optimizer, self.shards = optimizer, shards
        names = {id(p): name for name, p in shards.trained.items()}
        names |= {id(master): names[id(p)] for p, master in masters(optimizer)}
        self.names = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        """The name of each parameter, in the order of the optimizer's own numbers."""
        self.mastered = [names[id(p)] for p, _ in masters(optimizer)]

    def state_dict(self) -> dict[str, Any]:
        def divided(name: str, x: Any) -> Any:
            whole = not isinstance(x, Tensor) or x.shape != self.shards.local[name].shape
            return x if whole else self.shards.part(name, x)

        return self._converted(self.optimizer.state_dict(), divided)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        def rows(name: str, x: Any) -> Any:
            known = isinstance(x, Divided) or (isinstance(x, Tensor) and x.shape == self.shards.own[name].shape)
            return rows_of(x) if known else x

        self.optimizer.load_state_dict(self._converted(state, rows))

    def renew(self) -> None:
        """As `MasterWeights.renew`."""
        if hasattr(self.optimizer, "renew"):
            self.optimizer.renew()

    def _converted(self, state: dict[str, Any], convert: Callable[[str, Any], Any]) -> dict[str, Any]:
        """The state with `convert(name of the parameter, x)` in the place of each moment and master weight x."""
        by_number = {
            number: {what: convert(self.names[number], x) for what, x in values.items()}
            for number, values in state["state"].items()
        }
        masters = [convert(name, x) for name, x in zip(self.mastered, state.get("masters", []), strict=True)]
        return state | {"state": by_number} | ({"masters": masters} if "masters" in state else {})
