"""The options of a learner: what there is to set, composed from preset and caller, and whether it can go together.

All of it is settled before any model loads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from operant.algorithms import ALGORITHMS, Algorithm, find, fitting, preset
from operant.models.lora import LoraOptions
from operant.models.options import ModelOptions
from operant.models.value_head import ValueOptions
from operant.objectives.kl import OF_THE_REWARD, KLOptions
from operant.options import compose, defaults, names, resolve, values
from operant.rewards.shaping import ScoreOptions
from operant.sampling import Sampling
from operant.storage import old_names
from operant.training.optimizer import OptimizerOptions
from operant.training.update import UpdateOptions
from operant.types import Batch, OperantError, Outputs, shown


@dataclass(frozen=True)
class LearnerOptions:
    """What belongs to no room alone."""

    seed: int = 0
    """Of every random number, through counters."""
    on_length: str = "ended"
    """A reply that hit its length limit: ended | penalty (score.missing_stop) | drop | bootstrap."""
    device: str = "auto"
    """Where the models live: auto (a GPU where torch has one), cpu, cuda, cuda:1, ..."""
    rescore: bool | None = None
    """Make a second pass for log-probs and values also where decoding kept them. None: in bfloat16, where a token
    decoded alone and the same token in a whole row differ in the second digit."""
    threads: int | str = "auto"
    """Of the processor: a number, or auto: one where the model and the batch are so small that threads would wait for
    each other more than they compute, all that torch has elsewhere. Sizes alone decide it."""
    keep_memory: bool = True
    """On Linux processors: have the C library keep freed memory for the next step rather than give it back, page by
    page. For the whole process."""
    watch_every: int = 10
    """Steps between close looks: histograms of every gradient, norms of weights and updates by block; 0: none. Of
    tensors above 65,536 numbers they see a sample."""

    def __post_init__(self) -> None:
        if self.on_length not in ("ended", "penalty", "drop", "bootstrap"):
            raise OperantError(f"on_length={self.on_length!r}: it must be ended, penalty, drop or bootstrap")
        wrong = self.threads < 1 if isinstance(self.threads, int) else self.threads != "auto"
        if wrong:
            raise OperantError(f"threads={self.threads!r}: it must be auto, or a number of at least 1")
        if self.watch_every < 0:
            raise OperantError(f"watch_every={self.watch_every}: it must be at least 0")


def schema(algorithm: Algorithm) -> dict[str, Any]:
    """The options of a learner, by group; those of loss and advantage are their functions' own arguments."""
    return {
        "learner": LearnerOptions,
        "sampling": Sampling,
        "kl": KLOptions,
        "loss": algorithm.loss,
        "advantage": algorithm.advantage or (lambda batch: batch),
        "update": UpdateOptions,
        "optimizer": OptimizerOptions,
        "score": ScoreOptions,
        "lora": LoraOptions,
        "value": ValueOptions,
        "model": ModelOptions,
    }


def without(algorithm: Algorithm) -> dict[str, str]:
    """The groups of options that an algorithm has no use for, and what it lacks."""
    lacks = {"kl": not algorithm.kl, "value": not algorithm.needs.critic, "score": algorithm.source == "data"}
    words = {"kl": "reference to measure KL to", "value": "critic", "score": "reward"}
    return {group: words[group] for group, lacking in lacks.items() if lacking}


def usable(algorithm: Algorithm) -> list[str]:
    """The names of all options that the algorithm has a use for."""
    useless = {f"kl.{name}" for name in OF_THE_REWARD} if "reward" not in algorithm.kl else set()
    groups = {group: made for group, made in schema(algorithm).items() if group not in without(algorithm)}
    return [name for name in names(groups) if name not in useless]


def learner_options(
    name: str, preset_name: str | None, given: Mapping[str, Any], *, above: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """The method's defaults, preset, then the caller's own values, composed and complete: functions' arguments too.

    `above`: values that replace the method's and the preset's. Also returns the names of preset options that belong to
    another method and were left out.
    """
    algorithm = find(name)
    known, chosen = schema(algorithm), preset(preset_name)
    of_a_run = [k for k in chosen if "." not in k]  # steps, batch: nothing to a learner
    base, left_out = fitting(chosen, name, [*usable(algorithm), *of_a_run])
    base = {k: v for k, v in {**algorithm.defaults, **base, **(above or {})}.items() if k in names(known)}
    composed = compose(known, base | own_options(name, known, given))
    for group in ("loss", "advantage"):
        composed[group] = defaults(known[group]) | composed[group]
    _usable(name, known, composed)
    _possible(name, composed)
    _rehearse(algorithm, composed)
    return composed, left_out


def own_options(name: str, known: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The caller's options under their full names. Raises: OperantError for an unknown one; it says whose it is."""
    old_names.refuse(given)
    try:
        return resolve(known, given)
    except OperantError as error:
        theirs = [other for other in ALGORITHMS if other != name and _has(schema(find(other)), known, given)]
        if not theirs:
            raise
        raise OperantError(
            f"{str(error).split(';')[0]} with algorithm={name}: it belongs to {' and '.join(theirs)}; leave it out"
        ) from error


def _has(other: Mapping[str, Any], known: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Whether a name that is unknown here is an option there."""
    try:
        resolve({**known, **other}, given)
    except OperantError:
        return False
    return True


def _usable(name: str, known: Mapping[str, Any], composed: Mapping[str, Any]) -> None:
    """Refuse options of what the method lacks: they would be ignored."""
    algorithm = find(name)
    for group, what in without(algorithm).items():
        base = compose({group: known[group]}, _under(algorithm.defaults, group))[group]
        for option, value in values(composed[group]).items():
            if value != getattr(base, option):
                raise OperantError(f"{group}.{option}={shown(value)}: algorithm {name} has no {what}; leave it out")


def _under(options: Mapping[str, Any], group: str) -> dict[str, Any]:
    return {full: value for full, value in options.items() if full.startswith(f"{group}.")}


def _rehearse(algorithm: Algorithm, options: Mapping[str, Any]) -> None:
    """Call the pure functions once, on a reply of two tokens: what they refuse is refused now, and not in a step."""
    batch = Batch.given([[0]], [[0, 0]])
    zeros = torch.zeros(batch.tokens.shape)
    batch = batch.with_(logprobs=zeros, values=zeros, advantages=zeros, returns=zeros)
    if algorithm.advantage is not None:
        algorithm.advantage(batch, **options["advantage"])
    algorithm.loss(Outputs(zeros, zeros, entropy=zeros, values=zeros), batch, **options["loss"])


def _possible(name: str, options: Mapping[str, Any]) -> None:
    """Refuse what cannot go together, while nothing has been loaded."""
    algorithm, kl = find(name), options["kl"]
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
    sampling, score, on_length = options["sampling"].for_training(), options["score"], options["learner"].on_length
    if on_length == "bootstrap" and not algorithm.needs.critic:
        raise OperantError(
            f"on_length='bootstrap' with algorithm={name}: it needs a critic; use ended, penalty or drop"
        )
    if on_length == "bootstrap" and sampling.fixed_length and options["advantage"].get("gamma", 1.0) == 1:
        raise OperantError(
            "on_length='bootstrap' with sampling.fixed_length and advantage.gamma=1: nothing would anchor the "
            "value of an endless reply; use gamma below 1, or on_length='ended'"
        )
    if on_length == "penalty" and score.missing_stop is None:
        raise OperantError("on_length='penalty' needs score.missing_stop: say what such a reply gets")
    if score.missing_stop is not None and sampling.fixed_length:
        raise OperantError(
            f"score.missing_stop={score.missing_stop} with sampling.fixed_length: every reply ends by its length, so "
            "all would be penalised; use score.truncate_token, or let replies stop"
        )


def find_device(name: str) -> torch.device:
    """Raises: OperantError for a device that torch does not have."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # "meta" is a device, and has no numbers
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).strip().splitlines()[0]
        raise OperantError(
            f"device={shown(name)} cannot be used here ({why}); `operant doctor` lists what can"
        ) from error
    return device
