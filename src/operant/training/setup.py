"""The policy and the sampling of a learner, made from its options."""

from collections.abc import Mapping
from typing import Any

import torch

from operant import distributed, machine
from operant.algorithms import Algorithm, find
from operant.models import output_mlp
from operant.models.base import POLICIES, PolicyBase
from operant.models.loading import load_policy, load_reference
from operant.models.policy import Policy
from operant.models.reference import MaskOptions, PolicyCopy
from operant.rollouts.generation_kwargs import warned
from operant.sampling import Sampling, TokenCount
from operant.training.options import LearnerOptions, find_device
from operant.types import EngineParts, Env, OperantError


def load_trained_policy(policy: Any, algorithm: str, options: Mapping[str, Any], tokenizer: Any) -> Policy:
    """Load the policy to its device, with a critic if the algorithm needs one. Its parameters are equal on all ranks.

    Raises: OperantError if a finished Policy lacks the critic.
    """
    learner, needs_critic = options["learner"], find(algorithm).needs.critic
    device = find_device(learner.device)
    if learner.keep_memory and device.type == "cpu":
        machine.keep_memory()
    with torch.random.fork_rng(devices=[]):  # a new critic is drawn from torch's own random numbers
        torch.manual_seed(learner.seed)
        loaded = load_policy(
            policy,
            value=options["value"] if needs_critic else None,
            tokenizer=tokenizer,
            options=options["model"],
            lora=options["lora"],
            soft=options["soft_prompt"],
            mlp=options["output_mlp"],
            seed=learner.seed,
            device=device,
        ).to(device)
    if needs_critic and not loaded.has_values:
        own = isinstance(loaded, PolicyBase)
        how = "set has_values and write values" if own else "build it with value=ValueOptions()"
        raise OperantError(f"algorithm {algorithm!r} needs a critic, and the policy has none: {how}")
    if (needed := find(algorithm).needs.policy) and not isinstance(loaded, POLICIES.find(needed)):
        raise OperantError(
            f"algorithm {algorithm!r} trains no language model: use policy={needed} with policy.trunk=MODEL, as "
            f"`operant train {algorithm} --trunk MODEL` does"
        )
    distributed.align(loaded.trainable())
    return loaded


def make_copies(
    algorithm: Algorithm, policy: Policy, reference: Any, options: Mapping[str, Any]
) -> tuple[PolicyCopy | None, dict[str, PolicyCopy]]:
    """The reference, if the method has one, and the other copies of the policy by name."""
    rate = options["teacher"].rate if algorithm.teacher else 0.0
    follows = ("polyak", rate) if rate else "frozen"
    rules = {name: rule for name, rule in algorithm.copies.items() if name != "reference"}
    if algorithm.target is not None:
        rules |= {algorithm.target: options["target"].rule}
    if algorithm.mask is not None:
        mask: MaskOptions = options["mask"]
        rules = {name: rule for name, rule in rules.items() if name != algorithm.mask}
        rules |= {} if mask.by == "policy" else {algorithm.mask: mask.rule if mask.by == "copy" else "frozen"}
    copies = {name: PolicyCopy(policy, rule, values=name in algorithm.with_values) for name, rule in rules.items()}
    if algorithm.mask is not None and options["mask"].by == "model":
        if output_mlp.find(policy.model) is None:
            raise OperantError(
                "mask.by=model: the policy has no MLP behind a frozen model, which could say what is likely; set "
                "output_mlp.width, or use mask.by=copy"
            )
        output_mlp.detach(copies[algorithm.mask].policy.model)
    return load_reference(reference, policy, follows) if "reference" in algorithm.copies else None, copies


def configured_sampling(options: Mapping[str, Any], policy: Policy) -> Sampling:
    """The configured sampling; the model's stop tokens are used if none are configured.

    Raises: OperantError for a token outside the vocabulary, or replies that do not fit into the model's context, and as
    `Sampling.of`.
    """
    sampling: Sampling = options["sampling"]
    if options["kl"].coef or options["kl"].loss_coef:
        warned(sampling)
    sampling = sampling.of(policy)
    sampling.check_ids(policy.vocabulary)
    if policy.context is not None and policy.context < 1:
        raise OperantError(
            f"soft_prompt.tokens={options['soft_prompt'].tokens}: it leaves no room in the model's context; use fewer"
        )
    # The critic evaluates the state after a reply that was cut, for which a decoder needs one more position.
    after = options["learner"].on_length == "bootstrap" and policy.encoder_decoder
    if (why := policy.misfit(1, sampling.max_tokens + after)) is not None:
        raise OperantError(f"sampling.max_tokens={sampling.max_tokens}: even the shortest prompt {why}; lower it")
    return sampling


def tell_room(env: Env, policy: Policy, sampling: Sampling) -> None:
    """Tell a world that shortens its prompts how long they may be: it calls `env.measure` if there is one."""
    measure = getattr(env, "measure", None)
    if measure is None or policy.tokenizer is None:
        return
    context = None if policy.encoder_decoder else policy.context
    measure(TokenCount(policy.tokenizer), context and context - sampling.max_tokens)


def prepare_engine(engine: Any, learner: LearnerOptions, name: str, mask: PolicyCopy | None) -> None:
    """Tell the engine which tokens the method `name` masks.

    Raises: OperantError for an engine that cannot mask, or one that keeps its weights, if stale replies are neither
    corrected nor bounded.
    """
    parts = EngineParts.of(engine)
    if mask is not None:
        if parts.mask_with is None:
            raise OperantError(f"algorithm={name} masks tokens, and {type(engine).__name__} has no mask_with")
        parts.mask_with(mask.policy)
    if not (parts.follows or learner.importance != "none" or learner.max_staleness):
        raise OperantError(
            f"{type(engine).__name__} keeps its weights (engine.sync=none), so every reply after the first step is "
            "stale: let it follow the policy (engine.sync=folder), correct for it (learner.importance=token), or bound "
            "it (learner.max_staleness=N)"
        )
