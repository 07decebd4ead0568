"""`learner.parallel=fsdp`: the policy and its copies are divided over the ranks, and with them the optimizer's states.

What a rank has of each parameter are some of its rows, which are plain tensors to the optimizer. So an optimizer that
treats every number alike makes the same step as on the whole tensor; others are refused.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from operant import distributed
from operant.distributed import Shards
from operant.models.reference import PolicyCopy
from operant.training.update_rules import GradientUpdate, OnePass
from operant.types import OperantError


def check(rule: type[GradientUpdate], options: Mapping[str, Any]) -> None:
    """Check that the options of a learner go together with `learner.parallel=fsdp`, before any model loads.

    Raises: OperantError.
    """
    own = options["learner"]
    if own.parallel != "fsdp":
        return
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
    if getattr(options["optimizer"], "states", "float32") == "8bit":
        raise OperantError(
            "learner.parallel=fsdp with optimizer.states=8bit: 256 numbers share a scale, and the ranks would cut "
            "these blocks; leave states out, because each rank has only its share of them"
        )
    if own.keep_gradients:
        raise OperantError(
            "learner.keep_gradients with learner.parallel=fsdp: each rank has some rows of the gradients; leave it out"
        )


def divide(policy: Any, copies: Iterable[PolicyCopy], offload: str) -> None:
    """Divide the policy and the own weights of its copies over the ranks. Without several ranks, do nothing.

    Raises: OperantError for a model that cannot be divided, and for offloading without several ranks.
    """
    if distributed.world() == 1:
        if offload != "none":
            raise OperantError(
                f"learner.offload={offload} in one process: only what is divided over several ranks is offloaded; "
                "start them by torchrun --nproc-per-node 2 -m operant ..., or leave it out"
            )
        return
    if getattr(policy.model, "is_quantized", False):
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
    apart, of_policy = list(copies), {id(p) for p in policy.parameters()}
    for copied in apart:
        others = [p for p in copied.policy.parameters() if id(p) in of_policy]
        own = len([*copied.policy.parameters()]) > len(others)
        copied.shards = (
            Shards(copied.policy, _units, shared=others, offload=offload in ("reference", "both")) if own else None
        )
    policy.shards = Shards(policy, _units, offload=offload in ("optimizer", "both"))
    for copied in apart:
        if copied.shards is not None:
            copied.shards.free()


def _units(policy: Any) -> list[nn.Module]:
    """What is gathered one at a time: the blocks, if every rank calls each of them once in a pass."""
    models = [m for m in (policy, policy.critic) if m is not None and hasattr(m, "blocks")]
    once = all(m.modes.padded for m in models)
    return [block for m in models for stack in m.blocks() for block in stack] if once else []


@contextmanager
def updating(policy: Any, *, keep: bool) -> Iterator[None]:
    """A context for an update, in which each rank has only its parts of the policy. Every rank must call.

    keep: whole frozen weights stay, because a copy that shares them is read inside.
    """
    if policy.shards is None:
        yield
        return
    policy.shards.module.modes = policy.modes
    policy.shards.free(frozen=not keep)
    yield
    policy.shards.gather()


@contextmanager
def present(copies: Iterable[PolicyCopy]) -> Iterator[None]:
    """Inside this context, the copies are whole on every rank. Every rank must call."""
    with ExitStack() as stack:
        for copied in copies:
            stack.enter_context(copied.present())
        yield
