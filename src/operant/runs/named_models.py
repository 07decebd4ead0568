"""Models by name: what a user types (a run folder, a checkpoint of a run, or any model), and what a run begins from.

policy, engine = load("runs/sft")            # what the run has exported
policy, engine = load("runs/sft@120")        # the weights of its checkpoint of step 120
policy, engine = load("builtin:reviews-lm")  # a model's folder or name

config = pin_names(config)                   # Hub names become `name@commit`, before config.yaml is written
copy_initial_models(config, run)             # copies models in plain folders into the run folder
config = with_copies(config, run, warn)      # on resume: the same models, even if those folders have changed
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from operant.algorithms import find
from operant.import_by_name import nearest
from operant.models.adapters import LoraOptions, OutputMlpOptions, SoftPromptOptions
from operant.models.base import POLICIES
from operant.models.loading import MODELS, START, Trained, copies, copy_models, load_policy
from operant.models.options import ModelOptions
from operant.models.policy_state import PolicyState
from operant.models.safe_loading import load_tokenizer
from operant.models.value_head import ValueOptions
from operant.options import compose
from operant.rollouts.play import Opening
from operant.rollouts.prompts import ConditionOptions, Wanted
from operant.runs import named_parts
from operant.runs.build import trained
from operant.runs.config import Config
from operant.runs.folder import read_config, runs_near
from operant.storage.checkpoint import read_extra, read_part
from operant.storage.checkpoint_store import KINDS, newest_whole, path_of, step_of
from operant.storage.hub import find_model, pinned
from operant.training.learner import default_engine
from operant.training.options import find_device
from operant.types import Engine, OperantError, Tokenizer, require, said_of


def divided(name: str) -> tuple[Path, int | None]:
    """The folder in a name, and the step behind it, as in `runs/sft@120`; None if there is none."""
    folder, at, step = name.rpartition("@")
    if not at or Path(name).exists() or not (Path(folder) / "config.yaml").is_file():
        return Path(name), None  # a name of the Hub may have a revision behind its @
    if not step.isascii() or not step.isdigit() or len(step) > 18:
        raise OperantError(f"{name}: behind the @ stands the step of a checkpoint, as in {folder}@120")
    return Path(folder), int(step)


def run_options(name: str) -> dict[str, Any]:
    """The flat options of the run that a name stands for; empty if it is no run. Raises: OperantError as `divided`."""
    folder, _ = divided(name)
    return named_parts.flattened(read_config(folder)) if (folder / "config.yaml").is_file() else {}


def check(name: str) -> None:
    """Refuse a name that stands for no model, without loading one.

    Raises: OperantError, with the runs or checkpoints there are.
    """
    folder, step = divided(name)
    if step is not None:
        checkpoint_of(folder, step)
    elif (folder / "config.yaml").exists() and not (folder / "export").exists():
        steps = checkpoint_steps(folder)
        checkpoint = f", or name a checkpoint: {folder}@{steps[-1]}" if steps else ""
        how = f"wait for the run to end, or resume it: operant train --resume {folder}{checkpoint}"
        raise OperantError(f"{folder} has no exported model yet: {how}")
    elif not (folder / "export").exists():
        try:
            find_model(name)
        except OperantError as error:
            raise OperantError(f"{error}; {runs_near(folder)}") from error


def load(name: str) -> tuple[Trained, Engine]:
    """The policy of a name, and its engine. Raises: OperantError as `check`, or for a model that cannot be loaded."""
    check(name)
    folder, step = divided(name)
    if step is None and (folder / "export").exists():
        return trained(folder)
    try:
        policy = load_policy(name) if step is None else at_step(folder, step)
    except OperantError as error:
        if step is not None:
            raise
        raise OperantError(f"{error}; {runs_near(folder)}") from error
    return policy, default_engine(policy)


def stated_return(name: str, tokenizer: Tokenizer | None) -> Opening | None:
    """What states a return in prompts, as the evaluations of the run that a name stands for; None for other models.

    Raises: OperantError if its options name no return, and none of its checkpoints says which were the best ones.
    """
    if not (run := run_options(name)).get("condition"):
        return None
    wanted = Wanted(compose({"": ConditionOptions}, run["condition"])[""])
    if (opening := wanted.opening(tokenizer, training=False)) is None:
        folder, step = divided(name)
        path = newest_whole(folder / "checkpoints", kinds=tuple(KINDS)) if step is None else checkpoint_of(folder, step)
        if path is not None:
            small = read_extra(path).get("small") or {}  # of a light checkpoint
            wanted.load_state_dict(small.get("wanted") or read_part(path, "wanted"))
        opening = wanted.opening(tokenizer, training=False)
    set_it = "set condition.evaluated in its config.yaml"
    require(opening is not None, f"{name} states a return in each prompt, and no checkpoint says which: {set_it}")
    return opening


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints that a run has, in ascending order."""
    found = (step_of(path) for path in (folder / "checkpoints").glob("*-*") if not path.suffix)
    return sorted({step for step in found if step is not None})


def checkpoint_of(folder: Path, step: int) -> Path:
    path = next(filter(Path.is_dir, (path_of(folder / "checkpoints", kind, step) for kind in KINDS)), None)
    if path is None:
        known = ", ".join(map(str, checkpoint_steps(folder)[-20:])) or "none"
        raise OperantError(f"{folder} has no checkpoint of step {step} (steps: {known}); --keep-every keeps more")
    return path


def at_step(folder: Path, step: int) -> Trained:
    """The policy of a run with the weights of its checkpoint of `step`."""
    path = checkpoint_of(folder, step)
    config: dict[str, Any] = named_parts.flattened(read_config(folder))
    schema = {"value": ValueOptions, "model": ModelOptions, "lora": LoraOptions}
    given = {group: {**(config.get(group) or {})} for group in schema}
    for option in ("lora.adapter", "value.critic"):
        if (copy := folder / START / MODELS[option]).is_dir():
            group, _, name = option.partition(".")
            given[group][name] = str(copy)
    options = compose(schema, given)
    value = options["value"] if find(config.get("algorithm", "ppo")).needs.critic else None
    how = {"value": value, "options": options["model"], "lora": options["lora"]}
    how |= {} if options["lora"].quantise == "none" else {"device": find_device("auto")}  # where such weights are made
    policy = load_initial(config, folder, "policy", **how)
    with said_of(path):
        PolicyState(policy).load_state_dict(read_part(path, "policy"))
    return policy


def load_initial(config: Mapping[str, Any], folder: Path, option: str, **how: object) -> Trained:
    """Load the model that an option of the run in `folder` names: its copy there, if there is one.

    The policy has the soft prompt that the run began with. how: arguments of `load_policy`.
    """
    group, _, last = option.rpartition(".")
    name, copy = str((config[group] if group else config)[last]), folder / START / MODELS[option]
    if name.startswith("<"):
        remedy = "save that model and name its folder, as in ./my-model"
        raise OperantError(f"{folder} was started from Python with {option}={name}, which no file holds: {remedy}")
    if option == "policy":
        kinds = {"soft_prompt": SoftPromptOptions, "output_mlp": OutputMlpOptions}
        own = compose(kinds, {kind: config.get(kind) or {} for kind in kinds})
        seed = (config.get("learner") or {}).get("seed", 0)
        how |= {"soft": own["soft_prompt"], "mlp": own["output_mlp"], "seed": seed}
    if option == "policy" and named_parts.is_object("policy", name):
        made, exported = named_parts.policy(name, named_parts.stored_options("policy", config)), folder / "export"
        return load_policy(made, tokenizer=load_tokenizer(exported) if exported.is_dir() else None, **how)
    return load_policy(str(copy) if copy.is_dir() else name, **how)


def pin_names(config: Config) -> Config:
    """The options with the current commit of each Hub name."""
    try:
        return _with(config, {option: pinned(name) for option, name in _named(config).items()})
    except OperantError as error:
        if hint := nearest(str(config.train.policy)[:100], POLICIES.names()):
            raise OperantError(f"{error}{hint}") from error
        raise


def copy_initial_models(config: Config, run: Path) -> None:
    """Copy models in plain folders into `run/start/`, as `copy_models` does."""
    copy_models(_named(config), run)


def with_copies(config: Config, run: Path, warn: Callable[[str], None]) -> Config:
    """The options with the run's copies in place of the original folders, as `copies` finds them."""
    return _with(config, copies(_named(config), run, warn))


def _named(config: Config) -> dict[str, str | Path]:
    groups: dict[str, object] = {"": config.train, **config.learner}
    models = dict[str, str | Path]()
    for option in MODELS:
        group, _, name = option.rpartition(".")
        model = getattr(groups.get(group), name, None)
        initial = not named_parts.is_object(option, model) if option == "policy" else model not in ("copy", "none")
        if isinstance(model, (str, Path)) and initial:
            models[option] = model
    return models


def _with(config: Config, names: Mapping[str, object]) -> Config:
    """The configuration with other names of models, by option."""
    groups: dict[str, Any] = {"": config.train, **config.learner}
    for option, model in names.items():
        group, _, name = option.rpartition(".")
        groups[group] = replace(groups[group], **{name: model})
    return replace(config, train=groups.pop(""), learner=groups)
