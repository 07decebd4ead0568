"""From a model's name to a folder: a folder of the user, a built-in model, or a model of the Hugging Face Hub.

    find_model("./my-model")          # the folder itself
    find_model("builtin:reviews-lm")  # a folder inside the package
    find_model("gpt2")                # a folder in the Hub's cache, downloaded if it is not there
    find_model("gpt2@607a30d")        # one revision: a branch, a tag or a commit
    pinned("gpt2")                    # "gpt2@607a30d...": a name that always means the same weights

Models are always loaded from the returned folder, without network. If the Hub cannot be reached, transformers would try
for most of a minute; here the first request has a deadline of a few seconds.
"""

import difflib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from operant.types import OperantError, require, shown

T = TypeVar("T")
BUILTIN = Path(__file__).parents[1] / "builtin"
CONNECT_SECONDS = 3.0
"""How long the Hub may take to answer the first request."""
_HUB_NAME = r"(?=.{1,96}$)(?!.*(--|\.\.))(\w[\w.-]*/)?\w([\w.-]*\w)?"
"""The Hub's own rule for names, so that no other name is requested."""
_REVISION = r"(?=.{1,128}$)(?!.*\.\.)\w[\w.-]*(/\w[\w.-]*)*"
"""A branch, tag or commit. It becomes part of a path in the cache, so it must not contain `..`."""
WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
"""Files of a model that are downloaded: no pickles and no code."""
OWN = "policy.json"
"""In the export of a policy that is no transformers model: the name and options that made it."""
CONFIGS = ("config.json", "adapter_config.json")
"""Every model's folder has one of these files; an adapter's has only the second."""


def find_model(name: str | os.PathLike[str]) -> str:
    """The folder of a model: `name` is a folder, also of a run, `builtin:NAME` or a Hub name, also `name@revision`."""
    text = _name(name)
    if text.startswith("builtin:"):
        name, models = text.removeprefix("builtin:"), builtin_models()
        if name not in models:
            near = difflib.get_close_matches(name, models, 1)
            hint = f"; did you mean 'builtin:{near[0]}'?" if near else ""
            known = ", ".join(f"builtin:{n}" for n in models) or "none in this install"
            raise OperantError(f"model {text!r} does not exist{hint} (built-in models: {known})")
        return str(BUILTIN / name)
    if (path := found(text)) is not None:
        folder, which = exported(path), f"model {str(exported(path))!r}"
        require(folder.is_dir(), f"{which} is a file; give the folder that holds config.json")
        known_file = any((folder / file).is_file() for file in (*CONFIGS, OWN))
        require(known_file, f"{which}: the folder has no config.json, so it is not a transformers model")
        if odd := [p.name for p in folder.iterdir() if p.exists() and not p.is_file() and not p.is_dir()]:
            raise OperantError(f"{which}: {odd[0]!r} is a pipe or device, and reading it may never end; remove it")
        return str(folder)
    repository, revision = _on_hub(text)
    if (folder := _cached(repository, revision)) is not None:
        return folder
    folder = _downloaded(repository, revision, WANTED)
    whole = _has_weights(Path(folder))
    require(whole, f"model {repository!r} has no safetensors weights on the Hub; convert it and give its folder")
    return folder


def pinned(name: T) -> T | str:
    """A Hub name as `name@commit`, which always means the same weights, and a run's folder as that of its model.
    Anything else is returned unchanged. Does not download the model."""
    if not isinstance(name, str) or name.startswith("builtin:"):
        return name
    if (path := found(name)) is not None:
        return name if exported(path) == path else str(exported(path))
    repository, revision = _on_hub(name)
    if (folder := _cached(repository, revision)) is not None:
        return f"{repository}@{Path(folder).name}"
    commit = _ask_commit(repository, revision)
    return f"{repository}@{commit}" if commit else name


def split(name: str) -> tuple[str, str | None]:
    """Repository and revision of a Hub name; any other name, and None."""
    is_local = name.startswith("builtin:") or found(name) is not None
    return (name, None) if is_local or not re.fullmatch(_HUB_NAME, name.partition("@")[0]) else _on_hub(name)


def _on_hub(text: str) -> tuple[str, str | None]:
    repository, at, revision = text.partition("@")
    if not re.fullmatch(_HUB_NAME, repository, re.ASCII):
        raise OperantError(f"model {shown(text)}: there is no such folder; {_local_remedy('model')}")
    good = not at or re.fullmatch(_REVISION, revision)
    require(good, f"model {shown(text)}: {shown(revision)} is not a revision; give a branch, tag or commit after @")
    return repository, revision or None


def find_config(name: str | os.PathLike[str]) -> str:
    """As `find_model`, without the weights: a folder that holds the model's config.json."""
    text = _name(name)
    if text.startswith("builtin:") or found(text) is not None:
        return find_model(text)
    from huggingface_hub import try_to_load_from_cache

    repository, revision = _on_hub(text)
    cached = try_to_load_from_cache(repository, "config.json", revision=revision)
    if isinstance(cached, str):
        return str(Path(cached).parent)
    return _downloaded(repository, revision, ["config.json", "tokenizer.json", "tokenizer_config.json"])


def exported(path: Path) -> Path:
    """The model that a run in the folder has exported; any other folder is itself."""
    return path / "export" if (path / "config.yaml").is_file() and (path / "export").is_dir() else path


def found(name: str | os.PathLike[str]) -> Path | None:
    """The file or folder of that name; None if there is none, or the name is not valid."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, with a NUL, or the home of an unknown user
        return None


def _name(name: object) -> str:
    text = os.fspath(name) if isinstance(name, os.PathLike) else name
    if not isinstance(text, str) or not text.strip():
        remedy = f"{_local_remedy('model')}, a Hub name, or a model from Python"
        raise OperantError(f"model {shown(name)} is not a name: {remedy}")
    return text


def builtin_models() -> list[str]:
    return sorted(p.parent.name for p in BUILTIN.glob("*/config.json"))


def offline() -> bool:
    """Whether the user has switched the Hub off, with HF_HUB_OFFLINE."""
    return os.environ.get("HF_HUB_OFFLINE", "").strip().lower() in ("1", "on", "true", "yes")


@contextmanager
def quietly() -> Iterator[None]:
    """Load or save a model without transformers' progress bars."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def reach(kind: str, name: str, ask: Callable[[], T], *, patient: bool = False) -> T:
    """What `ask` gets of a `kind` ("model" or "dataset") from the Hub, or an OperantError. patient: no deadline."""

    def unreachable(reason: str) -> OperantError:
        missing = f"{kind} {name!r} is not on this machine and cannot be downloaded"
        return OperantError(f"{missing} ({reason}); {_local_remedy(kind)}")

    if offline():
        raise unreachable("HF_HUB_OFFLINE is set, and it is not in the cache")
    answers, failure, answered = list[T](), list[Exception](), threading.Event()

    def work() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            failure.append(error)
        answered.set()

    # In a thread, because looking up a host name has no timeout; a thread that hangs is abandoned.
    threading.Thread(target=work, daemon=True).start()
    if not answered.wait(None if patient else CONNECT_SECONDS):
        raise unreachable(f"the Hub did not answer in {CONNECT_SECONDS:.0f} seconds")
    if failure:
        if getattr(getattr(failure[0], "response", None), "status_code", None) in (401, 403, 404):
            reason = f"the Hub has no such {kind}, or you may not read it; check the name, or `hf auth login`"
            raise OperantError(f"{kind} {name!r}: {reason}") from failure[0]
        raise unreachable(f"{type(failure[0]).__name__}: {failure[0]}"[:160]) from failure[0]
    return answers[0]


def _local_remedy(kind: str) -> str:
    if kind == "dataset":
        return "use a local .jsonl, .csv or .parquet file, or builtin:openings"
    names = " ".join(f"builtin:{n}" for n in builtin_models()) or "the built-in models of a complete install"
    return f"use a local folder, {names}"


def _cached(repository: str, revision: str | None) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    cached = (try_to_load_from_cache(repository, name, revision=revision) for name in (*CONFIGS, OWN))
    folder = next((Path(path).parent for path in cached if isinstance(path, str)), None)
    return str(folder) if folder and _has_weights(folder) else None


def _downloaded(repository: str, revision: str | None, files: list[str]) -> str:
    from huggingface_hub import snapshot_download

    _ask_commit(repository, revision)
    asked = partial(snapshot_download, repository, revision=revision, allow_patterns=files)
    return reach("model", repository, asked, patient=True)


def _has_weights(folder: Path) -> bool:
    """Whether every weight file is there: an interrupted download leaves only the config, or some of the shards."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return all((folder / shard).exists() for shard in shards)
    return any(folder.glob("*.safetensors"))


def _ask_commit(repository: str, revision: str | None) -> str | None:
    from huggingface_hub import HfApi

    asked = partial(HfApi().model_info, repository, revision=revision, timeout=CONNECT_SECONDS)
    return reach("model", f"{repository}@{revision}" if revision else repository, asked).sha
