"""What a method is made of. Each file beside this one defines a method, and its docstring is the method's page."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from operant.types import AdvantageFn, LossFn


@dataclass(frozen=True)
class Needs:
    """What a method cannot do without; it is checked before anything loads."""

    critic: bool = False
    samples: int = 1
    """Replies to one prompt: a method that compares them needs two."""


@dataclass(frozen=True)
class Algorithm:
    """A method as a choice of parts."""

    loss: LossFn
    """Its keyword-only arguments are the options `loss.*` of the method."""
    advantage: AdvantageFn | None = None
    """Its keyword-only arguments are the options `advantage.*`."""
    source: str = "play"
    """play: rollouts of the policy, which a reward scores. data: demonstrations (`Task.replies`), without a reward."""
    unit: str = "episode"
    """What is shuffled and cut into minibatches: episode | pair."""
    per: str = "token"
    """What the loss is averaged over: see `rollouts.collate.token_weights`."""
    copies: Mapping[str, str | tuple[str, float]] = field(default_factory=dict)
    """Copies of the policy by name, and the rule by which each is updated: see `models.reference.PolicyCopy`."""
    needs: Needs = Needs()
    kl: tuple[str, ...] = ()
    """Where a KL penalty may be charged: in the `reward`, in the `loss`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Options whose general defaults do not suit the method, and its own values."""
    update: str = "gradient"
    """The update rule: a key of `training.update.UPDATES`."""
