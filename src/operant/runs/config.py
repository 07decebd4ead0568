"""A run's options: recipe, preset and the caller's own, composed into one checked, complete configuration.

Later wins: defaults < the recipe < a preset that the caller names < the caller's options. A preset that a recipe names
lies below the recipe's own values.
"""

import difflib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from operant import options as named
from operant.algorithms import DEFAULT, find, fitting, preset
from operant.data import DataOptions
from operant.metrics.registry import METRICS
from operant.metrics.registry import describe as describe_metric
from operant.rewards import IsolationOptions
from operant.runs.evaluate import EvaluationOptions
from operant.storage import old_names
from operant.storage.hub import BUILTIN, found
from operant.training.options import learner_options, own_options, schema, usable
from operant.types import OperantError, shown


@dataclass(frozen=True)
class TrainOptions:
    """What is trained, on what, for how long."""

    policy: Any = "builtin:reviews-lm"
    """A folder, builtin:NAME, a Hub name (also name@revision); from Python a model or a Policy, too."""
    tasks: Any = None
    """A file, builtin:openings/train, a data set of the Hub; from Python a list or a function, too."""
    reward: Any = None
    """A name (builtin:sentiment, letters:e), module:function, or {name: weight}; from Python any function."""
    reference: Any = "copy"
    """What KL is measured against: copy (of the policy at the start), none, or a model."""
    algorithm: str = "ppo"
    preset: str | None = None
    """openai | trl | rl4lms | textworld: values of those systems."""
    steps: int = 100
    batch: int = 64
    """Replies a step, over all ranks."""
    samples: int = 1
    """Replies to each prompt of a step."""
    reward_chunks: int = 1
    """Call the reward so many times a step, with a part of the prompts each, in a thread beside the generation of the
    next part. For rewards that wait or compute elsewhere and judge each reply by itself; 1: one call with them all."""
    evaluate: Any = None
    """Held-out tasks: judged before and after training with the same random numbers."""
    evaluate_every: int = 0
    """Steps between evaluations on the way; 0: only before and after."""
    best: str | None = None
    """A metric: the model of the step where it is largest is kept in best/, and that step's checkpoint; with a minus
    before it, smallest."""
    probes: int = 32
    """Queries (held-out ones, where there are any) that policy and reference answer alike, to be read; 0: none."""
    probe_every: int = 5
    """Steps between answers to the probes; before training and at the end always."""
    trackers: tuple[str, ...] = ()
    """Copies of what the run tells: tensorboard, wandb, trackio; several with commas."""
    checkpoint: str = "resume"
    """resume: all that changes, to go on exactly. light: what is trained alone, to go on with --fresh-optimizer. both:
    one of each."""
    checkpoint_minutes: float = 10.0
    """Minutes between checkpoints; 0: one after every step. One is always written at the end, however it comes."""
    checkpoint_every: int = 0
    """Steps between checkpoints, besides those by time; 0: by time alone."""
    keep: int = 2
    """Checkpoints of each kind that are kept: the newest."""
    keep_every: int = 0
    """A checkpoint after every so many steps, which stays; 0: none."""
    silence_minutes: float = 0.0
    """After so long without a sign of life (a token, a micro-batch, a phase that begins) the stacks of all threads go
    to log.txt and the process ends with code 1, resumable; 0: never, as suits a reward that asks a person. The log
    tells slow phases either way."""
    samples_every: int = 10
    """Steps between sample replies on the console; 0: none."""

    def __post_init__(self) -> None:
        at_least_0 = ("evaluate_every", "probes", "checkpoint_minutes", "checkpoint_every", "keep_every")
        at_least_1 = ("steps", "batch", "samples", "reward_chunks", "keep", "probe_every")
        for name, least in [*((n, 0) for n in at_least_0), *((n, 1) for n in at_least_1)]:
            if getattr(self, name) < least:
                raise OperantError(f"{name}={getattr(self, name)}: it must be at least {least}")
        if self.batch % self.samples:
            raise OperantError(f"batch={self.batch} is no multiple of samples={self.samples}, replies a prompt")
        if self.reward_chunks > (prompts := self.batch // self.samples):
            raise OperantError(f"reward_chunks={self.reward_chunks}: a step has {prompts} prompts, and no more chunks")
        if not 0 <= self.silence_minutes <= 60 * 24 * 30:
            raise OperantError(f"silence_minutes={self.silence_minutes}: it must lie between 0 and 43200, a month")
        if self.checkpoint not in ("resume", "light", "both"):
            raise OperantError(f"checkpoint={self.checkpoint!r}: it must be resume, light or both")
        if self.best is not None:
            _check_best(self.best, self.evaluate, self.evaluate_every)


def _check_best(best: str, evaluate: Any, every: int) -> None:
    name = best.removeprefix("-")
    if describe_metric(name) is None:
        near = difflib.get_close_matches(name, METRICS, 1)
        hint = f"did you mean {near[0]!r}?" if near else "docs/metrics.md lists them"
        raise OperantError(f"best={best!r} is no metric; {hint}")
    if name.startswith("evaluate/") and (evaluate is None or not every):
        raise OperantError(f"best={best!r} is measured by evaluations on the way: set evaluate and evaluate_every")


@dataclass(frozen=True)
class Config:
    """One object a group; the others stand apart from what the learner is given."""

    train: TrainOptions
    data: DataOptions
    evaluation: EvaluationOptions
    isolation: IsolationOptions
    learner: dict[str, Any]
    left_out: Mapping[str, list[str]] = field(default_factory=dict)
    """Options of a recipe or preset, by its name, that belong to another method and were left out."""


OWN = {"": TrainOptions, "data": DataOptions, "evaluation": EvaluationOptions, "isolation": IsolationOptions}


def config_schema(algorithm: str) -> dict[str, Any]:
    """Every option of a run, by group."""
    return {**OWN, **schema(find(algorithm))}


def configure(given: Mapping[str, Any], recipe: str | None = None, *, pays: bool = False) -> Config:
    """Compose and check. `pays`: there is a world, which may be the only one that pays.

    Raises: OperantError for an unknown recipe or option, a wrong type or an impossible value.
    """
    base = load_recipe(recipe) if recipe else {}
    above = preset(_text(given.get("preset")))
    below = preset(_text(base.get("preset"))) if "preset" not in given else {}
    chosen = next((o["algorithm"] for o in (given, above, base, below) if o.get("algorithm") is not None), DEFAULT)
    known = config_schema(chosen)
    own = own_options(chosen, known, given)
    base = _of_its_method(base, chosen)
    usable_here = [*named.names(OWN), *usable(find(chosen))]
    composed, left_out = dict(find(chosen).defaults), dict[str, list[str]]()
    for source, options in ((base.get("preset"), below), (recipe, base), (given.get("preset"), above)):
        fit, foreign = fitting(options, chosen, usable_here)
        composed |= fit
        left_out |= {str(source): foreign} if foreign else {}
    if named.is_none((composed | own).get("reference", "copy")):  # nothing to measure a default's KL to
        composed |= dict.fromkeys(("kl.coef", "kl.loss_coef"), 0.0)
    built = named.compose(known, composed | own)
    train, data, evaluation, isolation = [built.pop(group) for group in OWN]
    flat = {f"{g}.{k}": v for g, made in built.items() for k, v in _plain(made).items()}
    train = replace(train, algorithm=chosen)
    config = Config(train, data, evaluation, isolation, learner_options(chosen, None, flat)[0], left_out)
    _sensible(config, pays)
    return config


def _set(options: Any, name: str) -> bool:
    return getattr(options, name) != named.defaults(type(options))[name]


def _of_its_method(recipe: Mapping[str, Any], chosen: str) -> dict[str, Any]:
    """A recipe's options under their full names, `algorithm` among them: without one, the first that has them all."""
    named_there = recipe.get("algorithm")
    if named_there is None and chosen != DEFAULT:
        with suppress(OperantError):
            return named.resolve(config_schema(chosen), {**recipe, "algorithm": chosen})
    written_for = named_there or DEFAULT
    return named.resolve(config_schema(written_for), {**recipe, "algorithm": written_for})


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value.lower() not in ("none", "null") else None


def _sensible(config: Config, pays: bool) -> None:
    train, algorithm = config.train, find(config.train.algorithm)
    if train.tasks is None:
        raise OperantError("tasks is not given: say --tasks ... (README.md shows what it may be)")
    if train.reward is None and algorithm.source == "play" and not pays:
        raise OperantError("reward is not given: say --reward ... (README.md shows what it may be)")
    if train.samples < algorithm.needs.samples:
        raise OperantError(
            f"samples={train.samples} with algorithm={train.algorithm}: it compares the replies to one prompt, so "
            f"every advantage would be 0; use samples={algorithm.needs.samples} or more"
        )
    given = [f"data.{name}" for name in ("reply_field", "loss_on", "max_length") if _set(config.data, name)]
    if algorithm.source == "play" and given:
        raise OperantError(f"{given[0]}: algorithm {train.algorithm} learns from replies of its own; leave it out")
    if algorithm.source == "data" and train.samples > 1:
        raise OperantError(f"samples={train.samples} with algorithm={train.algorithm}: it trains on given replies")
    if "reference" not in algorithm.copies and train.reference not in ("copy", None):
        raise OperantError(f"reference={shown(train.reference)}: algorithm {train.algorithm} keeps none; leave it out")


def recipes() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    return {path.stem: path for path in sorted(BUILTIN.glob("*.yaml"))}


def load_recipe(name: str) -> dict[str, Any]:
    """A recipe by name, or a YAML file. Raises: OperantError with the nearest name."""
    path = recipes().get(name) or found(name)
    if path is None or not path.is_file():
        near = difflib.get_close_matches(str(name)[:100], recipes(), 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(recipes())}, and any YAML file"
        raise OperantError(f"recipe {shown(name)} is unknown; {hint}")
    return old_names.current(named.read_mapping(path), path)


def as_mapping(config: Config) -> dict[str, Any]:
    """The whole configuration as plain data, for config.yaml; what is no plain data is told by its description."""
    out = {k: describe(v) for k, v in named.values(config.train).items()}
    out |= {"data": _plain(config.data), "evaluation": _plain(config.evaluation)}
    out["isolation"] = _plain(config.isolation)
    return out | {group: _plain(made) for group, made in config.learner.items()}


def describe(value: Any) -> Any:
    """Plain data as it is; a function as module:name; anything else in angle brackets."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [describe(part) for part in value]
    if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
        return {k: describe(v) for k, v in value.items()}
    if callable(value) and hasattr(value, "__qualname__"):
        return f"<function {value.__module__}:{value.__qualname__}>"
    size = f" of {len(value)}" if hasattr(value, "__len__") else ""
    return f"<{type(value).__name__}{size}>"


def _plain(made: Any) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in named.values(made).items()}
