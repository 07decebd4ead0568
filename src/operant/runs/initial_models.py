"""Copies of the models that a run started from: a resume needs them beside the checkpoint.

    config = pin_names(config)                  # Hub names become `name@commit`, before config.yaml is written
    copy_initial_models(config, run)            # copies models in plain folders into the run folder
    config = with_copies(config, run, warn)     # on resume: the same models, even if those folders have changed

    runs/x/start/policy/  reference/  adapter/  critic/    model and tokenizer; an adapter's base model is in base/
    runs/x/start/manifest.json                             names of the models; size and hash of every file

A built-in model, or one of the Hub at a commit, can be loaded again and is not copied.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from operant.import_by_name import nearest
from operant.models import lora as adapters
from operant.models.base import POLICIES
from operant.runs.config import Config
from operant.runs.named_parts import is_object
from operant.storage import atomic_io, hub, manifest
from operant.types import OperantError

START = "start"
MODELS = {"policy": "policy", "reference": "reference", "lora.adapter": "adapter", "value.critic": "critic"}
"""Options that name a model, and the folder of its copy."""
_NO_NAMES = ("copy", "none")


def pin_names(config: Config) -> Config:
    """The options with the current commit of each Hub name. Raises: OperantError for a name that cannot be resolved."""
    try:
        return _with(config, {option: hub.pinned(name) for option, name in _named(config).items()})
    except OperantError as error:
        if hint := nearest(str(config.train.policy)[:100], POLICIES.names()):
            raise OperantError(f"{error}{hint}") from error
        raise


def copy_initial_models(config: Config, run: Path) -> None:
    """Copy models in plain folders into `run/start/`; existing copies stay.

    The files are copied and not hard-linked, because a program that overwrites the original would change a link too.
    Raises: OperantError if the disk refuses.
    """
    folders = {option: folder for option, name in _named(config).items() if (folder := hub.found(name)) is not None}
    if not folders or (run / START).exists():
        return
    temporary = run / f".{START}.tmp"
    with atomic_io.explained(run / START, "copy the model that the run starts from to"):
        atomic_io.remove_tree(temporary)
        for option, folder in folders.items():
            _copy_model(folder, temporary / MODELS[option], alone=option == "lora.adapter")
        names = sorted(str(p.relative_to(temporary).as_posix()) for p in temporary.rglob("*") if p.is_file())
        called = {option: str(_named(config)[option]) for option in folders}
        manifest.write(temporary, {"schema": 2, "kind": START, "models": called}, names)
        for folder in (temporary, *(p for p in temporary.rglob("*") if p.is_dir())):
            atomic_io.sync_folder(folder)
        atomic_io.replace_folder(temporary, run / START)


def with_copies(config: Config, run: Path, warn: Callable[[str], None]) -> Config:
    """The options with the run's copies in place of the original folders.

    warn: called for a folder without a copy. Raises: OperantError if the copies are damaged.
    """
    named, start = _named(config), run / START
    if not start.is_dir():
        for name in (name for name in named.values() if hub.found(name) is not None):
            warn(f"{run} has no copy of the initial model in {START}/: {name} is loaded as it is now")
        return config
    if wrong := manifest.problem(start):
        raise OperantError(
            f"{start}, the copy of the initial model, is damaged: {wrong}; restore it, or delete it to load the "
            "original folder, if that has not changed"
        )
    called = manifest.read(start).get("models")
    called = called if isinstance(called, Mapping) else {}
    copies = {option: str(start / MODELS[option]) for option, name in named.items() if called.get(option) == str(name)}
    return _with(config, copies)


# --- options ----------------------------------------------------------------------------------------------------------


def _named(config: Config) -> dict[str, Any]:
    """The models that options name, by option."""
    groups = {"": config.train, **config.learner}
    models = {option: getattr(groups.get(_group(option)), option.rpartition(".")[2], None) for option in MODELS}
    names = {
        option: name
        for option, name in models.items()
        if isinstance(name, (str, Path)) and not (option == "policy" and is_object(option, name))
    }
    return {option: name for option, name in names.items() if option == "policy" or name not in _NO_NAMES}


def _group(option: str) -> str:
    return option.rpartition(".")[0]


def _with(config: Config, names: Mapping[str, Any]) -> Config:
    """The configuration with other names of models, by option."""
    train = replace(config.train, **{option: name for option, name in names.items() if not _group(option)})
    learner = dict(config.learner)
    for option, name in names.items():
        if group := _group(option):
            learner[group] = replace(learner[group], **{option.rpartition(".")[2]: name})
    return replace(config, train=train, learner=learner)


# --- folders ----------------------------------------------------------------------------------------------------------


def _copy_model(folder: Path, target: Path, *, alone: bool = False) -> None:
    """Copy the files of a model. The base model of an adapter is copied too if it is a folder; a Hub name is pinned.

    alone: leave out the adapter's base model, because it is the policy, which has a copy of its own.
    """
    _copy_files(folder.glob, folder, target)
    for critic in adapters.critics_of(folder):
        _copy_files(critic.rglob, critic, target / "critic")
    if adapters.is_adapter(folder) and not alone:
        base = adapters.base_of(folder)
        if (found := hub.found(base)) is not None:
            _copy_model(found, target / adapters.BASE)
        else:
            path = target / adapters.CONFIG
            name, revision = hub.split(hub.pinned(base))
            content = json.loads(path.read_text(encoding="utf-8"))
            content |= {"base_model_name_or_path": name, "revision": revision}
            atomic_io.write_and_sync(path, json.dumps(content, indent=2))


def _copy_files(listed: Callable[[str], Iterator[Path]], folder: Path, target: Path) -> None:
    atomic_io.mkdir(target)
    for source in (path for pattern in hub.WANTED for path in listed(pattern) if path.is_file()):
        copy = target / source.relative_to(folder)
        atomic_io.mkdir(copy.parent)
        with atomic_io.operation("write", copy):
            shutil.copyfile(source, copy)
        atomic_io.sync(copy)
