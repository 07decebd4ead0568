"""The policy, its copies and its sampling, made from the options of a learner; and the options of the copies."""

import warnings
from dataclasses import asdict, dataclass, replace
from inspect import isclass

import torch

from operant import distributed, machine
from operant.algorithms import Algorithm, find
from operant.bounds import bounded, check_bounds
from operant.envs import asked
from operant.models.adapters import adapted
from operant.models.base import POLICIES, PolicyBase
from operant.models.loading import BESIDE, Trained, load_policy, load_reference
from operant.models.options import ModelOptions
from operant.models.policy import Policy
from operant.models.reference import PolicyCopy
from operant.models.value_head import ActionValueHead, ValueOptions
from operant.rollouts.generation_kwargs import warned
from operant.sampling import Sampling, TokenCount
from operant.training.objective import critic_and_rest
from operant.training.options import LearnerOptions, OptionGroups, find_device
from operant.types import Engine, EngineParts, Env, EnvBase, OperantError, Tokenizer, require, shown, with_defaults


@dataclass(frozen=True)
class TargetOptions:
    """How the copy of a method with a target network follows the policy."""

    rate: float = bounded(0.05, above=0, at_most=1)
    """Each step moves the copy by this share of its distance to the policy (polyak averaging)."""
    every: int = bounded(0, at_least=0, rule="a number of steps, or 0 to follow by target.rate")
    """Instead, the copy becomes equal to the policy after every so many steps; 0: it follows by `rate`."""

    def __post_init__(self) -> None:
        check_bounds(self, "target")


@dataclass(frozen=True)
class MaskOptions:
    """The mask policy of a method that has one: its truncated distribution decides which tokens may be drawn."""

    by: str = bounded("copy", choices=("copy", "policy", "model"))
    """copy: a copy of the policy, which keeps its weights for `every` steps (a learned mask). policy: the policy
    itself, which is plain truncated sampling. model: the frozen language model without its `output_mlp`."""
    every: int = bounded(5, at_least=0, rule="a number of steps, or 0 for never")
    """Steps after which the copy becomes equal to the policy; 0: never, which is how RL4LMs behaved."""

    def __post_init__(self) -> None:
        check_bounds(self, "mask")


def load_trained_policy(policy: object, algorithm: str, options: OptionGroups, tokenizer: Tokenizer | None) -> Trained:
    """Load the policy to its device, with a critic if the method needs one, and equal parameters on all ranks."""
    learner, needs = options["learner"], find(algorithm).needs
    device = find_device(learner.device)
    if learner.keep_memory and device.type == "cpu":
        machine.keep_memory()
    if isinstance(policy, Policy) and options["model"] not in (ModelOptions(), policy.options):
        raise OperantError(
            "model.* with an existing Policy, which has its own: leave them out, pass the model itself, or make "
            "another one, Policy(model, options=ModelOptions(...))"
        )
    if isinstance(policy, Policy):
        own = tokenizer is None or tokenizer is policy.tokenizer or policy.options.chat_template is not None
        require(own, "tokenizer with an existing Policy, which has its own: leave it out, or Policy(model, tokenizer)")
    parts = [options[name].on for name in ("lora", "soft_prompt", "output_mlp")]
    all_trained = options["model"].train_layers is None and not any(parts)
    if isinstance(policy, (Policy, PolicyBase)) and needs.critic and policy.has_values:  # a preset may have set some
        own = policy.value_options if isinstance(policy, Policy) else None
        asked, has = (asdict(value or ValueOptions()) for value in (options["value"], own))
        usual, kept = find(algorithm).defaults, {"actions", *(["critic"] if policy.critic is not None else [])}
        lost = [k for k, x in asked.items() if x not in (has[k], getattr(ValueOptions, k), usual.get(f"value.{k}"))]
        if named := " and ".join(f"value.{name}" for name in lost if name not in kept):
            warnings.warn(f"{named}: no effect, the policy has a critic of its own", stacklevel=2)
    elif isinstance(policy, torch.nn.Module) and not (isinstance(policy, PolicyBase) or adapted(policy)):
        frozen = sum(not p.requires_grad for p in policy.parameters()) if all_trained else 0
        if frozen:
            warnings.warn(f"{frozen} tensors of the model are frozen (requires_grad=False), and stay so", stacklevel=2)
    with torch.random.fork_rng(devices=[]):  # a new critic is drawn from torch's own random numbers
        torch.manual_seed(learner.seed)
        loaded = load_policy(
            policy,
            value=options["value"] if needs.critic else None,
            tokenizer=tokenizer,
            options=options["model"],
            lora=options["lora"],
            soft=options["soft_prompt"],
            mlp=options["output_mlp"],
            seed=learner.seed,
            device=device,
        ).to(device)
    own = replace(options["model"], head_precision=ModelOptions().head_precision)  # which CISPO sets by itself
    if not isinstance(loaded, Policy) and own != ModelOptions():
        raise OperantError(f"model.*: a {type(loaded).__name__} takes none of them; leave them out")
    if needs.critic and not loaded.has_values:
        own = isinstance(loaded, PolicyBase)
        how = "set has_values and write values" if own else "build it with value=ValueOptions()"
        raise OperantError(f"algorithm {algorithm!r} needs a critic, and the policy has none: {how}")
    if needs.action_values and not isinstance(loaded.value_head, ActionValueHead):
        how = "build the Policy with value=ValueOptions(actions=True), of a transformers model"
        raise OperantError(f"algorithm {algorithm!r} needs Q values of every action, and the policy has none: {how}")
    if learner.critic_steps:
        critic_and_rest(loaded, f"learner.critic_steps={learner.critic_steps}")
    if needs.policy and not isinstance(loaded, POLICIES.find(needs.policy)):
        raise OperantError(
            f"algorithm {algorithm!r} trains no language model: use policy={needs.policy} with policy.trunk=MODEL, as "
            f"`operant train {algorithm} --trunk MODEL` does"
        )
    distributed.align(loaded.trainable())
    loaded.version = 0  # another learner may have trained it: ages are counted in the steps of one
    return loaded


def make_copies(
    algorithm: Algorithm, policy: Policy, reference: object, options: OptionGroups
) -> tuple[PolicyCopy | None, dict[str, PolicyCopy]]:
    """The reference, if the method has one, and the other copies of the policy by name."""
    rules = dict(algorithm.copies)
    has_reference = rules.pop("reference", None) is not None
    if "target" in options:
        target = options["target"]
        rules["target"] = ("every", target.every) if target.every else ("polyak", target.rate)
    mask = options.get("mask")
    if mask is not None:
        rules.pop("mask", None)
        if mask.by != "policy":
            rules["mask"] = ("every", mask.every) if mask.by == "copy" and mask.every else "frozen"
    copies = {name: PolicyCopy(policy, rule, values=name in algorithm.with_values) for name, rule in rules.items()}
    if mask is not None and mask.by == "model":
        if BESIDE["OUTPUT_MLP"].find(policy.model) is None:
            raise OperantError(
                "mask.by=model: the policy has no MLP behind a frozen model, which could say what is likely; set "
                "output_mlp.width, or use mask.by=copy"
            )
        BESIDE["OUTPUT_MLP"].detach(copies["mask"].policy.model)
    rate = options["teacher"].rate if "teacher" in options else 0.0
    follows = ("polyak", rate) if rate else "frozen"
    return load_reference(reference, policy, follows) if has_reference else None, copies


def configured_sampling(options: OptionGroups, policy: Policy) -> Sampling:
    """The configured sampling; the model's stop tokens are used if none are configured."""
    sampling = options["sampling"]
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
    """Tell a world that shortens its prompts how long they may be: it calls `env.measure` if there is one.

    Raises: OperantError for what is no world.
    """
    world = hasattr(env, "reset") and hasattr(env, "step") and not isclass(env)
    require(world, f"env={shown(env)}: give a world, an object with `reset` and `step`; operant.train also takes names")
    measure = with_defaults(env, EnvBase).measure
    if measure is None or policy.tokenizer is None:
        return
    context = None if policy.encoder_decoder else policy.context
    asked(env, "measure", measure, TokenCount(policy.tokenizer), context and context - sampling.max_tokens)


def prepare_engine(engine: Engine, learner: LearnerOptions, name: str, mask: PolicyCopy | None) -> None:
    """Tell the engine which tokens the method `name` masks."""
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
