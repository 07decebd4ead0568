"""The parts of a method. Each other file of this package defines a method, and its docstring is the method's page."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from operant.types import AdvantageFn, Batch, LossFn, Outputs, Rollout

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Needs:
    """The requirements of a method, which are checked before any model loads."""

    critic: bool = False
    """Whether it needs the values of states."""
    action_values: bool = False
    """Whether the critic has a value Q of each token too; only a transformers model has such a critic."""
    samples: int = 1
    """The smallest number of replies to one prompt: a method that compares them needs two."""
    reward: bool = True
    """Whether it learns from a reward. Without, a reward is optional: it is measured, and not trained on."""
    labels: bool = False
    """Whether it learns from labelled replies: a demonstration is then paid its label (`Task.scores`)."""
    policy: str = ""
    """The policy that it needs, which generates nothing: its name in `models.base.POLICIES`. Empty: any that does."""
    token_scores: bool = False
    """Whether a reward has to pay single tokens where `advantage.gamma` is 0: one number would reach one token."""


@dataclass(frozen=True)
class Algorithm:
    """A method: a loss, an advantage, and how both are used."""

    loss: LossFn
    """Returns named [B, T] tensors. Its keyword-only arguments are the options `loss.*` of the method."""
    advantage: AdvantageFn | None = None
    """Its keyword-only arguments are the options `advantage.*`."""
    source: str = "play"
    """play: rollouts of the policy, which a reward scores. data: demonstrations (`Task.replies`), without a reward.
    both: each step has the replies of the policy to its tasks, and their demonstrations (`Batch.demonstrated`), whose
    advantages are 0."""
    look: Callable[[Batch, Callable[..., Outputs]], Mapping[str, "Tensor"]] | None = None
    """Adds fields to the batch before the update: `look(batch, outputs)` returns `Batch.extra` by name. `outputs(name)`
    computes the `Outputs` of the copy of that name over the batch, [B, T]; `policy` is the policy itself.
    `outputs(name, other)` computes them over another batch, whose rows are cut to the model's context."""
    usable: Callable[..., list[bool]] | None = None
    """Checks labels: `usable(labels, loss, whole=...)` gets those of each group, of all data or (`whole` False) of a
    step, and the options of the loss. It says of each group whether anything is learnt from it, and raises
    OperantError if nothing can be learnt."""
    collated: Callable[[Batch, Sequence[Rollout], float], Batch] | None = None
    """Adds fields to the rows of some rollouts before they are scored: `collated(batch, rollouts, turn_discount)`."""
    options: tuple[str, ...] = ()
    """The groups of options that it has beside those of every learner, each with what it does in a step:

    `teacher`: the copy `reference` is a teacher, which reads the replies behind prompts with a hint; `Outputs.kl` is
    then the divergence from it. `condition`: prompts state a return, the wanted one in play, and in training the one
    reached. `mask`: the truncated distribution of the copy `mask` decides which tokens may be drawn (NLPO); the engine
    then needs a method `mask_with(policy)`. `target`: the copy `target` follows the policy. `replay`: the loss holds
    for replies from any source, so that a step may learn from earlier ones."""
    unit: str = "episode"
    """The unit that is shuffled and cut into minibatches: turn | episode | pair | group."""
    per: str = "token"
    """The unit over which the loss is averaged: see `rollouts.collate.token_weights`."""
    copies: Mapping[str, str | tuple[str, float]] = field(default_factory=dict)
    """Copies of the policy by name, and the rule by which each is updated: see `models.reference.PolicyCopy`."""
    with_values: tuple[str, ...] = ()
    """The copies that keep the critic: a target critic, say."""
    needs: Needs = Needs()
    """What is checked before any model loads."""
    kl: tuple[str, ...] = ()
    """The places where a KL penalty may be charged: in the `reward`, in the `loss`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The method's own defaults of options, where the general ones do not suit it."""
    title: str = ""
    """How it is written in a sentence; empty: its name in capitals."""
    update: Any = "gradient"
    """The update rule: a class like `training.update.GradientUpdate`, its name, or its `module:object`."""

    @property
    def rows(self) -> dict[str, bool]:
        """What the rows of its tasks have, as arguments of `data.load_tasks`."""
        given = self.source != "play"
        return {"with_replies": given, "labelled": given and self.needs.labels}


Rewarded = partial(Algorithm, copies={"reference": "frozen"}, kl=("reward", "loss"))
"""A method that follows rewards, and may charge KL to the first policy in them, or in the loss."""
COMPARED: dict[str, object] = {"samples": 8, "update.epochs": 1, "kl.coef": 0.0}
"""The defaults of methods that compare replies: KL is charged in the loss, so that equal scores have advantage 0."""
Comparison = partial(Algorithm, copies={"reference": "frozen"}, needs=Needs(samples=2), kl=("loss",), defaults=COMPARED)
"""A method that compares the replies to a prompt with each other, without a critic, and charges KL in the loss."""
