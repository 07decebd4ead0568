"""The options of a run for `--help`, with the values of its recipe, read where they are declared."""

import re
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial

from operant.bounds import rules
from operant.import_by_name import find
from operant.options import Factory, convert, defaults, kinds, names
from operant.tools.cli.parser import About, sentences
from operant.tools.cli.without_torch import without_torch
from operant.types import OperantError

COMMON = {
    "policy": ("", "the model: a folder, builtin:NAME, or a name of the Hub"),
    "tasks": ("", "prompts, demonstrations or labels: a file, builtin:NAME, or a data set of the Hub"),
    "form": ("", "what makes tasks of published rows: summarize, translate, ...: docs/tasks.md"),
    "reward": ("play", "a name, my_file.py:function, or {name: weight}"),
    "algorithm": ("", "ppo, grpo, rejection, sft, dpo, reward-model, ...: docs/algorithms.md has all"),
    "loss.kind": ("labels", "which labels it learns from, and how: docs/algorithms.md"),
    "steps": ("", "training steps"),
    "batch": ("", "replies per step"),
    "samples": ("groups", "replies to each prompt, compared with each other"),
    "sampling.max_tokens": ("play", "tokens of the longest reply"),
    "data.reply_field": ("demonstrations", "the field of the replies; none: found by itself"),
    "optimizer.lr": ("", "learning rate"),
    "update.epochs": ("", "passes over the replies of a step"),
    "update.minibatch": ("", "replies per optimizer step; none: all of a step"),
    "kl.coef": ("kl in the reward", "price of drifting from the initial model, in the reward"),
    "kl.loss_coef": ("kl in the loss", "price of drifting from the initial model, in the loss"),
    "lora.rank": ("language model", "train an adapter of this rank; 0: the whole model"),
    "evaluate": ("", "held-out prompts, answered before and after"),
    "learner.seed": ("", "of every random number"),
}
"""The options that the short help shows: the trait that a method must have, and a text of one line. An option that the
method does not use is left out."""

WRONG = (-1e9, -1.0, 0.0, 1e9, "?")
"""Values of which some are outside the bounds of any number, and no choice."""
SAID_BY_THE_TYPE = r"a whole number of at most 64 bits|a finite number \(up to.*?\)|text"
SHORT = {"a whole number of at most 64 bits": "a whole number", "text": ""}


@without_torch
def declared(spec: str, values: Mapping[str, object]) -> list[About]:
    """The options of a dataclass `module:Name` of this package. values: those that are not its defaults."""
    made = find("options", *spec.split(":"))
    return _described({"": made}, defaults(made) | {n: x for n, x in values.items() if n in defaults(made)})


@without_torch
def alone(option: str) -> bool:
    """Whether an option may stand without a value; true for one that no built-in method has."""
    from operant.algorithms import ALGORITHMS
    from operant.runs.config import config_schema

    of_methods = [kinds(config_schema(method, {})) for method in ALGORITHMS]
    found = [kind for of in of_methods for name, kind in of.items() if f".{name}".endswith(f".{option}")]
    return not found or bool in found


@without_torch
def common(recipe: str | None, given: Mapping[str, object]) -> tuple[str, dict[str, tuple[object, str]]]:
    """The method of a run, and its common options by name, each with its value and a line of text."""
    method, _, values, traits = settings(recipe, given)
    shown = {name: text for name, (trait, text) in COMMON.items() if name in values and trait in ("", *traits)}
    return method, {name: (values[name], text) for name, text in shown.items()}


@without_torch
def every(recipe: str | None, given: Mapping[str, object]) -> list[About]:
    """All options of a run."""
    from operant.algorithms import find, preset_names

    method, schema, values, _ = settings(recipe, given)
    algorithm = find(method)
    checks = {"loss": partial(algorithm.loss, None, None), "advantage": partial(algorithm.advantage or dict, None)}
    described = _described(schema, values, checks)
    return [about._replace(rule=preset_names()) if about.name == "preset" else about for about in described]


def settings(
    recipe: str | None, given: Mapping[str, object]
) -> tuple[str, dict[str, object], dict[str, object], list[str]]:
    """The method of a run, the groups of its options, the value of each that it uses, and the method's traits.

    Raises: OperantError as `chosen_options`.
    """
    from operant.algorithms import find
    from operant.runs.config import chosen_options
    from operant.training.options import option_names, schema

    method, groups, chosen, _ = chosen_options(given, recipe)
    algorithm = find(method)
    used = [*option_names(algorithm), *names({g: made for g, made in groups.items() if g not in schema(algorithm)})]
    values = {full: defaults(groups[group])[name] for full, (group, name) in names(groups).items() if full in used}
    values |= {full: value for full, value in chosen.items() if full in values} | {"algorithm": method}
    traits = [algorithm.source, *(["groups"] if algorithm.needs.samples > 1 else [])]
    traits += [f"kl in the {place}" for place in algorithm.kl[:1]]  # where it is usually charged
    traits += ["labels"] if algorithm.needs.labels else ["demonstrations"] if algorithm.source == "data" else []
    traits += [] if algorithm.needs.policy else ["language model"]
    return method, groups, values, traits


def _described(
    schema: Mapping[str, object], values: Mapping[str, object], checks: Mapping[str, Callable[..., object]] = {}
) -> list[About]:
    """What the help says of the options with these values. checks: by group, the function whose arguments they are."""
    types, places = kinds(schema), names(schema)
    texts = {group: sentences(made) for group, made in schema.items()}
    bounds = {group: rules(made.make if isinstance(made, Factory) else made) for group, made in schema.items()}
    described = []
    for full, value in values.items():
        group, name = places[full]
        rule = bounds[group].get(name) or _refusal(name, types[full], checks.get(group))
        if type(None) in typing.get_args(types[full]) and "none" not in rule.lower():
            rule = f"{rule}, or none" if rule else "none, or text"
        described.append(About(full, value, texts[group].get(name, ""), rule, types[full] is bool))
    return described


def _refusal(name: str, kind: object, check: Callable[..., object] | None) -> str:
    """Bounds or choices of an option, as its type and the function whose argument it is answer to wrong values."""
    said: list[str] = []
    for wrong in WRONG:
        try:
            value = convert(wrong, kind, name)
            with suppress(TypeError, AttributeError):  # a function checks its options before its tensors
                check(**{name: value}) if check is not None else None
        except OperantError as error:
            said += re.findall(rf"\b{name}=.*?: it must (?:be |lie )(.*)", str(error))
    only_types = [rule for rule in said if re.fullmatch(rf"({SAID_BY_THE_TYPE})(, or none)?", rule)]
    rule = next((rule for rule in said if rule not in only_types), said[0] if said else "").removesuffix(", or none")
    return re.sub(SAID_BY_THE_TYPE, lambda m: SHORT.get(m[0], "a number"), rule)
