"""The options of a learner, composed from defaults, preset and caller, and checked against each other.

Everything is checked before any model loads.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypedDict, cast

import torch

from operant.algorithms import ALGORITHMS, Algorithm, applicable_options, find, preset
from operant.bounds import at_least_one, bounded, check_bounds
from operant.import_by_name import Lazy
from operant.models.adapters import LoraOptions, OutputMlpOptions, SoftPromptOptions
from operant.models.options import ModelOptions
from operant.models.value_head import ValueOptions
from operant.objectives.kl import EXACT, OF_THE_REWARD, KLOptions
from operant.options import Schema, compose, defaults, names, resolve, values
from operant.rewards.shaping import ScoreOptions
from operant.sampling import Sampling
from operant.storage import old_names
from operant.training.optimizer import OWN, RateOptions, without_unused
from operant.training.select import SELECTIONS, parse
from operant.training.update import find_rule
from operant.types import OUTCOMES, Batch, OperantError, Outputs, require, shown


@dataclass(frozen=True)
class LearnerOptions:
    """General options."""

    seed: int = 0
    """Seed of every random number."""
    on_length: str = bounded("ended", choices=("ended", "penalty", "drop", "bootstrap"))
    """How a reply that hit its length limit is treated: ended | penalty (score.missing_stop) | drop | bootstrap."""
    device: str = "auto"
    """Where the models live: auto (a GPU where torch has one), cpu, cuda, cuda:1, ..."""
    rescore: bool | None = None
    """Recompute log-probs and values in a second pass, even if decoding stored them. None: in bfloat16, where a token
    decoded alone and the same token in a whole row differ in the second digit, and with engines that compute elsewhere
    (openai, vllm)."""
    max_staleness: int | None = bounded(None, at_least=0)
    """Episodes with a turn of weights more than this many steps old are left out; none: no bound."""
    importance: str = bounded("none", choices=("none", "token", "sequence"))
    """Importance weights in the loss, for turns of earlier weights or another sampler: none; token: of each token;
    sequence: of the whole episode. Log-probs and values of the policy before the update are then recomputed."""
    importance_cap: float | None = bounded(2.0, above=0)
    """The largest importance weight; none: any."""
    importance_floor: float = bounded(0.0, at_least=0, at_most=1)
    """The smallest importance weight. With importance_mask and a cap, the two bounds are those of IcePop."""
    importance_mask: bool = False
    """Masked importance sampling: tokens (or replies) whose weight is above the cap or below the floor are not trained
    on. False: their weight is the bound, truncated importance sampling."""
    critic_steps: int = bounded(0, at_least=0)
    """Steps at the start that train the critic alone, on the replies of a policy that does not move yet (VAPO: 50)."""
    drop_equal: bool = False
    """Leave out the replies of a group whose raw rewards are all equal: they teach a method that compares nothing, and
    count in its means. If no group is left, all stay."""
    select: str | None = bounded(None, fits=parse, rule=SELECTIONS)
    """Rejection sampling: the replies of a step, over all ranks, that the update learns from. top:N: the best N;
    top:P%: the best P percent; group:N: the best N replies to each prompt (best of n); above:X: those with a score
    above X; none: all."""
    select_unit: str = bounded("episode", choices=("episode", "turn"))
    """What `select` keeps: episode, by its total; turn, by its discounted return from there on."""
    threads: int | str = bounded("auto", fits=at_least_one, rule="auto, or a number of at least 1")
    """Threads of the processor: a number that share every product, or auto: one where others would mostly wait; else a
    model of up to 67M parameters computes half of a batch in each of two, and a larger one uses all of torch's."""
    keep_memory: bool = True
    """On Linux without a GPU: the C library keeps freed memory for the next step instead of returning it page by page.
    It holds for the whole process."""
    parallel: str = bounded("ddp", choices=("ddp", "fsdp"))
    """What the ranks of torchrun divide: ddp: replies; fsdp: also weights, gradients and states (docs/scale.md)."""
    offload: str = bounded("none", choices=("none", "reference", "optimizer", "both"))
    """With fsdp on a GPU, what the CPU's memory has: none; reference; optimizer: policy, gradients and states; both."""
    watch_every: int = bounded(10, at_least=0)
    """Steps between detailed measurements: histograms of every gradient, norms of weights and updates by block; 0:
    never. Tensors above 65,536 numbers are sampled."""
    keep_gradients: bool = False
    """Keep the gradients of the last optimizer step, clipped, in the parameters' `.grad` until the next update. They
    take as much memory as the trained weights. None are kept of an update that was refused or stopped early."""

    def __post_init__(self) -> None:
        check_bounds(self, "learner")
        bounds = self.importance_cap is not None or self.importance_floor > 0
        for name in ("mask", "floor"):
            if getattr(self, f"importance_{name}") and (self.importance == "none" or not bounds):
                idle = "importance_cap=none" if self.importance != "none" else "importance=none"
                raise OperantError(f"learner.importance_{name} with learner.{idle}: no weight is bounded; leave it out")
        if self.importance != "none" and self.rescore is False:
            why = "the weights need log-probs of the policy before the update; leave rescore out"
            raise OperantError(f"learner.importance={self.importance!r} with learner.rescore=false: {why}")
        if self.parallel != "fsdp" and self.offload != "none":
            how = "only what is divided over the ranks is offloaded; set parallel=fsdp, or leave it out"
            raise OperantError(f"learner.offload={self.offload} with learner.parallel=ddp: {how}")


class OptionGroups(TypedDict):
    """The options of a learner, by group."""

    learner: LearnerOptions
    sampling: Sampling
    kl: KLOptions
    loss: dict[str, Any]
    """Arguments of the method's loss, as `advantage` those of its advantage."""
    advantage: dict[str, Any]
    update: Any
    """Of the class that the update rule names, `GradientUpdate.update_options`."""
    optimizer: Any
    """Of the class that the update rule names; absent if it names none."""
    score: ScoreOptions
    lora: LoraOptions
    soft_prompt: SoftPromptOptions
    output_mlp: OutputMlpOptions
    value: ValueOptions
    model: ModelOptions
    teacher: Any
    """This and those below are there for the methods that have them (`OF_METHODS`)."""
    condition: Any
    mask: Any
    target: Any
    replay: Any


OF_METHODS = Lazy(
    {
        "teacher": "operant.rollouts.prompts:TeacherOptions",
        "condition": "operant.rollouts.prompts:ConditionOptions",
        "mask": "operant.training.setup:MaskOptions",
        "target": "operant.training.setup:TargetOptions",
        "replay": "operant.training.replay_buffer:ReplayOptions",
    }
)
"""The groups of options that some methods have (`Algorithm.options`)."""


def schema(algorithm: Algorithm) -> Schema:
    """The options of a learner, by group.

    Those of loss and advantage are the arguments of the method's functions, `update` and `optimizer` those of its rule.
    """
    rule = find_rule(algorithm.update)
    known: dict[str, Any] = {
        "learner": LearnerOptions,
        "sampling": Sampling,
        "kl": KLOptions,
        "loss": algorithm.loss,
        "advantage": algorithm.advantage or (lambda batch: batch),
        "update": rule.update_options,
        "optimizer": rule.optimizer_options,
        "score": ScoreOptions,
        "lora": LoraOptions,
        "soft_prompt": SoftPromptOptions,
        "output_mlp": OutputMlpOptions,
        "value": ValueOptions,
        "model": ModelOptions,
    }
    known |= {group: OF_METHODS[group] for group in algorithm.options}
    return {group: made for group, made in known.items() if made is not None}


def missing_parts(algorithm: Algorithm) -> dict[str, str]:
    """The option groups that a method does not use, and the part that it lacks: a reference, a critic or a reward."""
    missing = {} if algorithm.kl else {"kl": "reference to measure KL to"}
    missing |= {} if algorithm.needs.critic else {"value": "critic"}
    return missing | ({"score": "reward"} if algorithm.source == "data" else {})


def compares_nothing(algorithm: Algorithm) -> bool:
    """Whether no part of the method has the log-probs of an earlier policy."""
    return (algorithm.source == "data" and "reference" not in algorithm.copies) or "condition" in algorithm.options


def option_names(algorithm: Algorithm) -> list[str]:
    """The full names of all options that a method uses."""
    unused = {f"kl.{name}" for name in OF_THE_REWARD} if "reward" not in algorithm.kl else set()
    unused |= {"update.target_kl", "update.ratio_threshold"} if compares_nothing(algorithm) else set()
    groups = {group: made for group, made in schema(algorithm).items() if group not in missing_parts(algorithm)}
    return [name for name in names(groups) if name not in unused]


def learner_options(
    name: str, preset_name: str | None, given: Mapping[str, object], *, above: Mapping[str, object] | None = None
) -> tuple[OptionGroups, list[str]]:
    """Compose the defaults, the method's own values, the preset and the caller's options, and check the result.

    given: the caller's options, which replace all others. above: values that replace the method's and the preset's.
    Returns the options by group, complete, and the names of preset options that were left out because they belong to
    another method.
    """
    algorithm = find(name)
    known, chosen = schema(algorithm), preset(preset_name)
    of_a_run = [k for k in chosen if "." not in k]  # steps and batch, which a learner does not have
    base, left_out = applicable_options(chosen, name, [*option_names(algorithm), *of_a_run])
    base = {k: v for k, v in {**algorithm.defaults, **base, **(above or {})}.items() if k in names(known)}
    own = own_options(name, known, given)
    return checked_options(name, with_base(base, own)), left_out


def with_base(base: Mapping[str, object], own: Mapping[str, object]) -> dict[str, object]:
    """The options of preset and recipe, replaced by the caller's, without those that the optimizer does not use."""
    return without_unused(base, {**base, **own}.get("optimizer.kind", "adamw")) | dict(own)


def checked_options(name: str, given: Mapping[str, object]) -> OptionGroups:
    """Compose the options of a learner from full names and check them together: one object for each group."""
    algorithm = find(name)
    known = schema(algorithm)
    composed = compose(known, given)
    for group in ("loss", "advantage"):
        composed[group] = defaults(known[group]) | composed[group]
    for group, part in missing_parts(algorithm).items():
        method_values = {full: value for full, value in algorithm.defaults.items() if full.startswith(f"{group}.")}
        unchanged = compose({group: known[group]}, method_values)[group]
        for option, value in values(composed[group]).items():
            if value != getattr(unchanged, option):
                raise OperantError(f"{group}.{option}={shown(value)}: algorithm {name} has no {part}; leave it out")
    options = cast(OptionGroups, composed)
    _check_combinations(name, options)
    _check_loss_and_advantage(algorithm, options)
    return options


def own_options(name: str, known: Schema, given: Mapping[str, object]) -> dict[str, object]:
    """The caller's options under their full names."""
    old_names.refuse(given)
    if given.get("optimizer.kind") == OWN and "optimizer.kind" not in names(known):
        raise OperantError(f"optimizer: the update rule of algorithm {name} makes its own steps; leave it out")
    try:
        return resolve(known, given)
    except OperantError as error:
        owners = []
        for other in (method for method in ALGORITHMS if method != name):
            with suppress(OperantError):
                resolve({**known, **schema(find(other))}, given)
                owners.append(other)
        _, of_another_system, answer = str(error).partition("that is its name in")
        named_here = of_another_system and any(full in answer for full in names(known))
        if not owners or named_here or "ambiguous" in str(error):
            raise
        raise OperantError(
            f"{str(error).split(';')[0]} with algorithm={name}: it belongs to {' and '.join(owners)}; leave it out"
        ) from error


def _check_loss_and_advantage(algorithm: Algorithm, options: OptionGroups) -> None:
    """Call the method's functions on four replies of two tokens with every field, so that they refuse options early."""
    batch = Batch.given([[0], [0], [1], [1]], [[0, 0]] * 4)
    zeros = torch.zeros(batch.tokens.shape)
    made = {name: zeros for name in ("logprobs", "raw_logprobs", "ref_logprobs", "values", "kl", "price", "weights")}
    batch = batch.with_(**made, groups=torch.tensor([0, 0, 1, 1]), anchors=batch.turns, advantages=zeros, returns=zeros)
    out = Outputs(zeros, zeros, entropy=zeros, logsumexp=zeros, values=zeros, kl=dict.fromkeys(EXACT, zeros))
    out = replace(out, outcomes=torch.zeros(*zeros.shape, len(OUTCOMES)))
    if algorithm.needs.action_values:
        out = replace(out, q=dict.fromkeys(("one", "two", "one_nll", "two_nll"), zeros))
    if algorithm.source == "both":
        batch = batch.with_(demonstrated=torch.tensor([False, False, True, True]))
    if algorithm.look is not None:
        batch = batch.with_(extra=algorithm.look(batch, lambda *names: out))
    if algorithm.advantage is not None:
        credited = algorithm.advantage(batch.with_(demonstrated=None), **options["advantage"])
        batch = batch.with_(extra=credited.extra)
    algorithm.loss(out, batch, **options["loss"])


def _check_combinations(name: str, options: OptionGroups) -> None:
    """Refuse options that contradict the method or each other."""
    algorithm, kl, own = find(name), options["kl"], options["learner"]
    if algorithm.source == "data" and (own.importance != "none" or own.max_staleness is not None):
        named = "max_staleness" if own.importance == "none" else "importance"
        raise OperantError(f"learner.{named} with algorithm={name}: demonstrations have no sampler; leave it out")
    if compares_nothing(algorithm) and (limit := values(options["update"]).get("target_kl")):
        raise OperantError(f"update.target_kl={limit} with algorithm={name}: nothing is compared; leave it out")
    if own.select and own.select_unit == "turn" and (algorithm.look or "teacher" in algorithm.options):
        raise OperantError(f"learner.select_unit=turn with algorithm={name}: its loss reads episodes; use that")
    if own.select is None and "learner.select" in algorithm.defaults:
        raise OperantError(f"learner.select=none with algorithm={name}: it imitates the best replies; say which")
    if own.select is not None and algorithm.source == "data":
        raise OperantError(f"learner.select={own.select} with algorithm={name}: demonstrations have no score")
    if own.select is not None and algorithm.unit in ("pair", "group"):
        raise OperantError(
            f"learner.select={own.select} with algorithm={name}: it learns from better replies beside worse ones, and "
            "only the best would stay; leave it out"
        )
    if own.select is not None and kl.loss_coef and kl.loss_kind not in EXACT:
        raise OperantError(
            f"kl.loss_kind={kl.loss_kind} with learner.select={own.select}: it is estimated from the drawn tokens, and "
            "those that stay are no fair sample of the policy's; use kl.loss_kind=reverse, or kl.loss_coef=0"
        )
    if kl.coef and algorithm.kl == ("loss",):
        raise OperantError(
            f"kl.coef={kl.coef:g} with algorithm={name}: KL in the reward would be divided by the group's deviation, "
            "and trained on at full strength where scores are equal; use kl.loss_coef, which charges it in the loss"
        )
    changed = [name for name in OF_THE_REWARD if getattr(kl, name) != getattr(KLOptions(coef=0.0), name)]
    if changed and algorithm.kl == ("loss",):
        raise OperantError(
            f"kl.{changed[0]}={getattr(kl, changed[0])} with algorithm={name}: it is about KL in the reward, and this "
            "method charges it in the loss; use kl.loss_coef and kl.loss_kind"
        )
    if options["update"].per is not None and (algorithm.per == "source" or algorithm.unit not in ("episode", "turn")):
        raise OperantError(f"update.per={options['update'].per} with algorithm={name}: its loss compares; leave it out")
    if own.drop_equal and (algorithm.needs.samples < 2 or algorithm.source == "data"):
        raise OperantError(f"learner.drop_equal with algorithm={name}: it has no equal rewards to drop; leave it out")
    sampling, needs = options["sampling"], algorithm.needs
    apart = needs.critic and not needs.action_values and algorithm.source == "play"
    apart = apart and algorithm.update != "trust-region"
    alone = "no critic trains alone" if needs.critic else "it needs a critic"
    if own.critic_steps and not (apart and own.parallel == "ddp"):
        why = "parallel=fsdp: its shards train together" if apart else f"algorithm={name}: {alone}"
        raise OperantError(f"learner.critic_steps={own.critic_steps} with {why}; leave it out")
    if sampling.guidance and not needs.action_values:
        raise OperantError(f"sampling.guidance={sampling.guidance:g}: algorithm {name} has no Q values; leave it out")
    if options["value"].actions != needs.action_values and needs.critic:
        raise OperantError(f"value.actions={options['value'].actions}: algorithm {name} decides it; leave it out")
    if ("condition" in algorithm.options or needs.action_values) and own.importance != "none":
        why = "it does not use the probabilities that replies were drawn with; leave it out"
        raise OperantError(f"learner.importance with algorithm={name}: {why}")
    masks = "mask" in algorithm.options and ("mask" in algorithm.copies or options["mask"].by != "policy")
    if masks and not sampling.truncates:
        raise OperantError(
            f"sampling.top_p=1 with algorithm={name}: every token may be drawn, so its mask does nothing; set "
            "sampling.top_p, top_k or min_p, or use the method without a mask"
        )
    if "replay" in options:
        options["replay"].check_with(options)
    sampling, score, on_length = sampling.for_training(), options["score"], options["learner"].on_length
    if on_length == "bootstrap" and not algorithm.needs.critic:
        raise OperantError(f"on_length=bootstrap with algorithm={name}: it needs a critic; use ended, penalty or drop")
    if on_length == "bootstrap" and sampling.fixed_length and options["advantage"].get("gamma", 1.0) == 1:
        raise OperantError(
            "on_length='bootstrap' with sampling.fixed_length and advantage.gamma=1: nothing would anchor the "
            "value of an endless reply; use gamma below 1, or on_length='ended'"
        )
    if on_length == "drop" and sampling.fixed_length:
        raise OperantError("on_length=drop with sampling.fixed_length: all replies end by length; use on_length=ended")
    if on_length == "penalty" and score.missing_stop is None:
        raise OperantError("on_length='penalty' needs score.missing_stop, the score of a reply without an end; set it")
    if score.missing_stop is not None and sampling.fixed_length:
        raise OperantError(
            f"score.missing_stop={score.missing_stop} with sampling.fixed_length: every reply ends by its length, so "
            "all would be penalised; use score.truncate_token, or let replies stop"
        )


def check_length(options: OptionGroups, total_steps: int | None) -> None:
    """Refuse `total_steps` below 1, and options that follow the length of the run if that is unknown (None)."""
    optimizer, following = options.get("optimizer"), []
    if isinstance(optimizer, RateOptions):
        following += [f"optimizer.schedule={optimizer.schedule}"] if optimizer.schedule != "constant" else []
        following += [f"optimizer.warmup={optimizer.warmup:g}"] if optimizer.warmup else []
    following += ["kl.control=linear"] if options["kl"].control == "linear" else []
    if following and total_steps is None:
        raise OperantError(
            f"{' and '.join(following)} without total_steps: the value of each step depends on the number of steps; "
            "pass Learner(..., total_steps=...), or leave it constant"
        )
    require(total_steps is None or total_steps >= 1, f"total_steps={total_steps}: it must be at least 1, or None")


def check_reference(options: OptionGroups, name: str, reference: object) -> None:
    """Refuse a KL penalty if algorithm `name` or the caller (`reference` None) has no reference to measure it to, and
    a teacher that is missing, or that cannot follow the policy.
    """
    kl, teacher = options["kl"], options.get("teacher")
    if teacher is not None and reference is None:
        raise OperantError(f"reference=none with algorithm={name}: it is the teacher; give copy, or another model")
    if teacher is not None and teacher.rate and reference != "copy":
        why = "only a copy follows the policy; leave one of them out"
        raise OperantError(f"teacher.rate={teacher.rate:g} with reference={shown(reference)}: {why}")
    if teacher is None and reference is None and "reference" in find(name).copies and not find(name).kl:
        raise OperantError(f"reference=none with algorithm={name}: its loss compares the policy with it; give copy")
    charged = [o for o, on in (("coef", kl.coef), ("end_coef", kl.charges), ("loss_coef", kl.loss_coef)) if on]
    if charged and (reference is None or "reference" not in find(name).copies):
        without = "reference=None" if reference is None else f"algorithm {name!r}, which has no reference"
        why = "there is nothing to measure KL to; leave one of them out"
        raise OperantError(f"kl.{charged[0]}={getattr(kl, charged[0])} with {without}: {why}")


def find_device(name: str) -> torch.device:
    """The device of that name; `auto` is a GPU if torch has one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # "meta" is a device, but its tensors have no numbers
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).strip().splitlines()[0]
        raise OperantError(
            f"device={shown(name)} cannot be used here ({why}); `operant doctor` lists what can"
        ) from error
    return device
