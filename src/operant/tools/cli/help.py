"""The options of a run for `--help`, with the values of its recipe, without importing torch.

`known_options.json` has the texts, bounds and values of all options of the package; `make docs` writes it from the
dataclasses. A method or part from elsewhere is imported, and its options are read there.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import field, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from operant import options
from operant.storage.hub import BUILTIN, found
from operant.tools.cli.parser import About, sentences
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


@cache
def known() -> dict[str, Any]:
    """The content of `known_options.json`."""
    return json.loads((Path(__file__).parent / "known_options.json").read_text(encoding="utf-8"))


def declared(spec: str, values: Mapping[str, Any]) -> Iterator[About]:
    """The options of a dataclass `module:Name` of this package. values: those that are not its defaults."""
    for name, value in known()["declared"][spec].items():
        yield About(name, values.get(name, value), *known()["options"][f"{spec}.{name}"])


def alone(option: str) -> bool:
    """Whether an option may stand without a value; true for one that is not known here."""
    described = known()["options"]
    names = (
        [option]
        if option in described
        else [name for name in described if name.endswith(f".{option}") and ":" not in name]
    )
    return not names or any(described[name][2] for name in names)


def common(recipe: str | None, given: Mapping[str, Any]) -> tuple[str, dict[str, tuple[Any, str]]]:
    """The method of a run, and its common options by name, each with its value and a line of text."""
    method, found = settings(recipe, given) or _imported(recipe, given)[:2]
    traits = known()["methods"].get(method, {}).get("traits", ["play", "kl in the reward", "groups"])
    shown = {name: text for name, (trait, text) in COMMON.items() if name in found and trait in ("", *traits)}
    return method, {name: (found[name], text) for name, text in shown.items()}


def every(recipe: str | None, given: Mapping[str, Any]) -> Iterator[About]:
    """All options of a run."""
    cheap = settings(recipe, given)
    if cheap is None:
        _, values, schema = _imported(recipe, given)
        texts = {f"{group}.{name}": text for group, made in schema.items() for name, text in sentences(made).items()}
        for name, value in values.items():
            yield About(name, value, *known()["options"].get(name, [texts.get(name, "")]))
        return
    for name, value in cheap[1].items():
        yield About(name, value, *known()["options"].get(name, ()))


def settings(recipe: str | None, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The method of a run and the values of its options, composed as `runs.config.configure` composes them.

    None: the run names a method, preset or part that is not built in, or options that `configure` would refuse.
    """
    path = BUILTIN / f"{recipe}.yaml" if recipe else None
    path = path if path is None or path.is_file() else found(str(recipe))
    if recipe and (path is None or not path.is_file()):
        return None
    try:
        base, given = options.with_short_names(options.read_mapping(path) if path else {}, given)
        above, below = _preset(given.get("preset")), _preset(None if "preset" in given else base.get("preset"))
        sources = (given, above, base, below)
        method = next((o["algorithm"] for o in sources if o.get("algorithm") is not None), "ppo")
        schema = _schema(str(method), {**base, **given})
        own = options.resolve(schema, given)
        base = _of_recipe(base, str(method), {**base, **given})
    except (OperantError, KeyError, AttributeError, TypeError):
        return None
    plain = {full: options.defaults(schema[group])[name] for full, (group, name) in options.names(schema).items()}
    values = dict(plain)
    own_values = {name: about["defaults"] for name, about in known()["methods"].items()}
    values |= own_values[method]
    for source in (below, base, above):  # as `algorithms.applicable_options`
        written_for = source.get("algorithm") or "ppo"
        apart = () if written_for == method else (*own_values[method], *own_values[written_for])
        values |= {name: value for name, value in source.items() if name in values and name not in apart}
    kind = own.get("optimizer.kind", values.get("optimizer.kind"))
    values |= {name: plain[name] for name in known()["unused"].get(str(kind), ()) if name in plain}
    values |= own | {"algorithm": method}
    if options.is_none(values["reference"]):
        values |= {name: 0.0 for name in ("kl.coef", "kl.loss_coef") if name in values and name not in own}
    return method, values


def _of_recipe(base: dict[str, Any], method: str, named: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's options by full name, with its algorithm: the chosen one if the recipe names none and it fits."""
    if "algorithm" not in base:
        with suppress(OperantError):
            return options.resolve(_schema(method, named), {**base, "algorithm": method})
    written_for = base.get("algorithm") or "ppo"
    return options.resolve(_schema(written_for, named), {**base, "algorithm": written_for})


def _preset(names: Any) -> dict[str, Any]:
    """The options of presets. Raises: KeyError for an unknown one."""
    parts = [part.strip() for part in str(names or "").split(",")] if not options.is_none(names) else []
    return {name: value for part in parts if part for name, value in known()["presets"][part].items()}


def _schema(method: str, named: Mapping[str, Any]) -> dict[str, Any]:
    """The option groups of a method and of the parts of a run. Raises: KeyError for one that is not built in."""
    groups: dict[str, dict[str, Any]] = {}
    for full, value in known()["methods"][method]["values"].items():
        group, _, name = full.rpartition(".")
        groups.setdefault(group, {})[name] = value
    if f"tasks:{named.get('tasks')}" in known()["parts"]:
        groups["tasks"] = known()["parts"][f"tasks:{named['tasks']}"]
    for kind in ("reward", "env", "engine", "form"):
        if isinstance(value := named.get(kind), str) and not options.is_none(value):
            groups[kind] = known()["parts"][f"{kind}:{value.strip().partition(':')[0]}"]
        elif value is not None and not (kind == "reward" and isinstance(value, Mapping) and "name" not in value):
            raise KeyError(kind)
    fields = {
        g: [(n, Any, field(default=tuple(x) if isinstance(x, list) else x)) for n, x in of_group.items()]
        for g, of_group in groups.items()
    }
    return {group: make_dataclass(group or "Run", of_group) for group, of_group in fields.items()}


def _imported(recipe: str | None, given: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The method of a run, the values of its options and their groups, by importing everything that it names.

    Raises: OperantError as `configure`, if there is a recipe.
    """
    from operant.algorithms import DEFAULT, find
    from operant.runs.config import as_mapping, config_schema, configure, named_in
    from operant.tools.diagnosis.history import flat

    if recipe is None:
        method = str(given.get("algorithm", DEFAULT))
        schema = config_schema(method, named_in(given))
        values: Mapping[str, Any] = {"algorithm": method, **find(method).defaults, **options.resolve(schema, given)}
    else:
        config = configure(given, recipe)
        method = config.train.algorithm
        schema, values = config_schema(method, named_in(vars(config.train))), flat(as_mapping(config))
    names = {full: options.defaults(schema[group])[name] for full, (group, name) in options.names(schema).items()}
    return method, {full: values.get(full, default) for full, default in names.items()}, schema
