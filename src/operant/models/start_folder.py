"""Copies of the models that training started from: what is resumed needs them beside its checkpoint.

    copy_models({"policy": "./my-model"}, folder)     # copies models in plain folders to folder/start/
    copies({"policy": "./my-model"}, folder, warn)     # {"policy": "folder/start/policy"}

    start/policy/  reference/  adapter/  critic/       model and tokenizer; an adapter's base model is in base/
    start/manifest.json                                names of the models; size and hash of every file

A built-in model, or one of the Hub at a commit, can be loaded again and is not copied.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from operant.models import lora as adapters
from operant.storage import atomic_io, hub, manifest
from operant.types import OperantError

START = "start"
MODELS = {"policy": "policy", "reference": "reference", "lora.adapter": "adapter", "value.critic": "critic"}
"""Options that name a model, and the folder of its copy."""


def copy_models(named: Mapping[str, Any], folder: Path, called: Mapping[str, Any] | None = None) -> None:
    """Copy the models in plain folders, by option, into `folder/start/`; existing copies stay.

    called: the names under which `copies` is to find them; None: those in `named`.
    The files are copied and not hard-linked, because a program that overwrites the original would change a link too.
    Raises: OperantError if the disk refuses.
    """
    sources = {option: source for option, name in named.items() if (source := hub.found(name)) is not None}
    if not sources or (folder / START).exists():
        return
    temporary = folder / f".{START}.tmp"
    with atomic_io.explained(folder / START, "copy the model that the run starts from to"):
        atomic_io.remove_tree(temporary)
        for option, source in sources.items():
            _copy_model(source, temporary / MODELS[option], alone=option == "lora.adapter")
        names = sorted(str(p.relative_to(temporary).as_posix()) for p in temporary.rglob("*") if p.is_file())
        recorded = {option: str((called or named)[option]) for option in sources}
        manifest.write(temporary, {"schema": 2, "kind": START, "models": recorded}, names)
        for inner in (temporary, *(p for p in temporary.rglob("*") if p.is_dir())):
            atomic_io.sync_folder(inner)
        atomic_io.replace_folder(temporary, folder / START)


def copies(named: Mapping[str, Any], folder: Path, warn: Callable[[str], None]) -> dict[str, str]:
    """The copies in `folder/start/` of the models that options name, by option.

    warn: called for a folder without a copy. Raises: OperantError if the copies are damaged.
    """
    start = folder / START
    if not start.is_dir():
        for name in (name for name in named.values() if hub.found(name) is not None):
            warn(f"{folder} has no copy of the initial model in {START}/: {name} is loaded as it is now")
        return {}
    if wrong := manifest.problem(start):
        raise OperantError(
            f"{start}, the copy of the initial model, is damaged: {wrong}; restore it, or delete it to load the "
            "original folder, if that has not changed"
        )
    called = manifest.read(start).get("models")
    called = called if isinstance(called, Mapping) else {}
    return {option: str(start / MODELS[option]) for option, name in named.items() if called.get(option) == str(name)}


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
