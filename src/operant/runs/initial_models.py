"""The models that a run began from, which a resume needs beside the checkpoint: kept once a run.

    config = pinned(config)               # Hub names become `name@commit`, before config.yaml is written
    keep(config, run)                     # what lies in plain folders, into the run's own
    config = restored(config, run, say)   # on resume: the same models, whatever has become of those folders

    runs/x/start/policy/  reference/  adapter/  critic/    model and tokenizer; of an adapter its model, in base/
    runs/x/start/manifest.json                             what they were called, and every file by size and hash

A model of the package, or of the Hub at a commit, can be had again and is not kept; `reference: copy` is the policy's.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from operant.models import lora as adapters
from operant.runs.config import Config
from operant.storage import atomic_io, hub, manifest
from operant.types import OperantError

START = "start"
MODELS = {"policy": "policy", "reference": "reference", "lora.adapter": "adapter", "value.critic": "critic"}
"""Options that name a model, and the folder that each is kept in."""
_NO_NAMES = ("copy", "none")


def pinned(config: Config) -> Config:
    """The same options, Hub names with the commit that they mean today. Raises: OperantError for what cannot be had."""
    return _with(config, {option: hub.pinned(name) for option, name in _named(config).items()})


def keep(config: Config, run: Path) -> None:
    """Copy what the run begins from into `run/start/`, where plain folders are named; what was kept before stays.

    Copies, no links: whoever trains into the folder that they came from writes into the same files.
    Raises: OperantError where the disk refuses.
    """
    taken = {option: folder for option, name in _named(config).items() if (folder := hub.found(name)) is not None}
    if not taken or (run / START).exists():
        return
    temporary = run / f".{START}.tmp"
    with atomic_io.explained(run / START, "keep the model that the run begins from as"):
        atomic_io.remove_tree(temporary)
        for option, folder in taken.items():
            _keep_model(folder, temporary / MODELS[option], alone=option == "lora.adapter")
        names = sorted(str(p.relative_to(temporary).as_posix()) for p in temporary.rglob("*") if p.is_file())
        called = {option: str(_named(config)[option]) for option in taken}
        manifest.write(temporary, {"schema": 2, "kind": START, "models": called}, names)
        for folder in (temporary, *(p for p in temporary.rglob("*") if p.is_dir())):
            atomic_io.sync_folder(folder)
        atomic_io.replace_folder(temporary, run / START)


def restored(config: Config, run: Path, say: Callable[[str], None]) -> Config:
    """The same options, with the kept models in place of the folders that they were named by.

    Says through `say` where a folder was named and nothing was kept. Raises: OperantError where what was kept is
    damaged.
    """
    named, start = _named(config), run / START
    if not start.is_dir():
        for name in (name for name in named.values() if hub.found(name) is not None):
            say(f"{run} has no {START}/ of its own: {name} is taken as it is now")
        return config
    if wrong := manifest.problem(start):
        raise OperantError(
            f"{start}, which the run began from, is damaged: {wrong}; put it back, or delete it to go on with the "
            "folder that was named, where that is what it was"
        )
    called = manifest.read(start).get("models")
    called = called if isinstance(called, Mapping) else {}
    kept = {option: str(start / MODELS[option]) for option, name in named.items() if called.get(option) == str(name)}
    return _with(config, kept)


# --- options ----------------------------------------------------------------------------------------------------------


def _named(config: Config) -> dict[str, Any]:
    """By option, the models that are given by name."""
    groups = {"": config.train, **config.learner}
    given = {option: getattr(groups.get(_group(option)), option.rpartition(".")[2], None) for option in MODELS}
    names = {option: name for option, name in given.items() if isinstance(name, (str, Path))}
    return {option: name for option, name in names.items() if option == "policy" or name not in _NO_NAMES}


def _group(option: str) -> str:
    return option.rpartition(".")[0]


def _with(config: Config, names: Mapping[str, Any]) -> Config:
    train = replace(config.train, **{option: name for option, name in names.items() if not _group(option)})
    learner = dict(config.learner)
    for option, name in names.items():
        if group := _group(option):
            learner[group] = replace(learner[group], **{option.rpartition(".")[2]: name})
    return replace(config, train=train, learner=learner)


# --- folders ----------------------------------------------------------------------------------------------------------


def _keep_model(folder: Path, target: Path, *, alone: bool = False) -> None:
    """Copy what loading reads. Of an adapter its model too, where that is a folder; else the name of it is pinned.

    `alone`: the adapter's model is the policy's, and is kept there.
    """
    _copy(folder.glob, folder, target)
    for critic in adapters.critics_of(folder):
        _copy(critic.rglob, critic, target / "critic")
    if adapters.is_adapter(folder) and not alone:
        base = adapters.base_of(folder)
        if (found := hub.found(base)) is not None:
            _keep_model(found, target / adapters.BASE)
        else:
            _pin_base(target / adapters.CONFIG, hub.pinned(base))


def _copy(listed: Callable[[str], Iterator[Path]], folder: Path, target: Path) -> None:
    atomic_io.mkdir(target)
    for source in (path for pattern in hub.WANTED for path in listed(pattern) if path.is_file()):
        copy = target / source.relative_to(folder)
        atomic_io.mkdir(copy.parent)
        with atomic_io.operation("write", copy):
            shutil.copyfile(source, copy)
        atomic_io.sync(copy)


def _pin_base(path: Path, name: str) -> None:
    base, revision = hub.split(name)
    told = json.loads(path.read_text(encoding="utf-8"))
    atomic_io.write_and_sync(path, json.dumps(told | {"base_model_name_or_path": base, "revision": revision}, indent=2))
