"""Where a model's name leads: a folder, a model that comes with the package, or the Hugging Face Hub.

    find_model("./my-model")          # the folder itself
    find_model("builtin:reviews-lm")  # a folder inside the package
    find_model("gpt2")                # the folder in the Hub's cache, downloaded first where the Hub can be reached
    find_model("gpt2@607a30d")        # of one revision: a branch, a tag or a commit
    pinned("gpt2")                    # "gpt2@607a30d...": the name by which the same weights are had later

What is returned is always a folder, so nothing after this line talks to a network. Left alone, transformers would try
for most of a minute before it said that there is no Hub; here the first contact has a deadline of a few seconds.
"""

import difflib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from operant.types import OperantError, shown

BUILTIN = Path(__file__).parents[1] / "builtin"
CONNECT_SECONDS = 3.0
"""How long the Hub may take to answer the first request."""
_HUB_NAME = r"(?=.{1,96}$)(?!.*(--|\.\.))(\w[\w.-]*/)?\w([\w.-]*\w)?"
"""As the Hub checks it, so that nothing else is asked for."""
_REVISION = r"(?=.{1,128}$)(?!.*\.\.)\w[\w.-]*(/\w[\w.-]*)*"
"""A branch, tag or commit; it becomes part of a path in the cache, so nothing in it leads upwards."""
WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
"""Files of a model that are downloaded: no pickles, no code."""
CONFIGS = ("config.json", "adapter_config.json")
"""One of them stands in every model's folder; the second alone in an adapter's."""


def find_model(name: str | os.PathLike[str]) -> str:
    """The folder of a model: `name` is a folder, `builtin:NAME` or a Hub name, also `name@revision`.

    Raises: OperantError where there is none, within five seconds.
    """
    text = _name(name)
    if text.startswith("builtin:"):
        return str(_builtin_model(text.removeprefix("builtin:")))
    if (path := found(text)) is not None:
        return str(_own_folder(path))
    repository, revision = _on_hub(text)
    return _cached(repository, revision) or _download(repository, revision)


def pinned(name: Any) -> Any:
    """A Hub name as `name@commit`, which means the same weights for ever; whatever else is given, as it is.

    Nothing is downloaded. Raises: OperantError as `find_model`.
    """
    if not isinstance(name, str) or name.startswith("builtin:") or found(name) is not None:
        return name
    repository, revision = _on_hub(name)
    if (folder := _cached(repository, revision)) is not None:
        return f"{repository}@{Path(folder).name}"
    commit = _ask_commit(repository, revision)
    return f"{repository}@{commit}" if commit else name


def split(name: str) -> tuple[str, str | None]:
    """Repository and revision of a Hub name; any other name, and None."""
    named = (
        name.startswith("builtin:") or found(name) is not None or not re.fullmatch(_HUB_NAME, name.partition("@")[0])
    )
    return (name, None) if named else _on_hub(name)


def _on_hub(text: str) -> tuple[str, str | None]:
    """Repository and revision of a Hub name. Raises: OperantError where it is none."""
    repository, at, revision = text.partition("@")
    if not re.fullmatch(_HUB_NAME, repository, re.ASCII):
        raise OperantError(f"model {shown(text)}: there is no such folder; {_what_can('model')}")
    if at and not re.fullmatch(_REVISION, revision):
        raise OperantError(
            f"model {shown(text)}: {shown(revision)} is no revision; a branch, tag or commit stands after @"
        )
    return repository, revision or None


def find_config(name: str | os.PathLike[str]) -> str:
    """As `find_model`, of a model whose weights are not wanted: the folder that holds its config.json."""
    text = _name(name)
    if text.startswith("builtin:") or found(text) is not None:
        return find_model(text)
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    repository, revision = _on_hub(text)
    cached = try_to_load_from_cache(repository, "config.json", revision=revision)
    if isinstance(cached, str):
        return str(Path(cached).parent)
    _ask_commit(repository, revision)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        with suppress(OSError):  # a model may lack them
            hf_hub_download(repository, file, revision=revision)
    return str(Path(hf_hub_download(repository, "config.json", revision=revision)).parent)


def found(name: str | os.PathLike[str]) -> Path | None:
    """The file or folder of that name; None where nothing is there, or it can be no name of any."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a NUL in it, the home of nobody
        return None


def _name(given: Any) -> str:
    text = os.fspath(given) if isinstance(given, os.PathLike) else given
    if not isinstance(text, str) or not text.strip():
        raise OperantError(f"model {shown(given)} is no name: {_what_can('model')}, a Hub name, or a model from Python")
    return text


def builtin_models() -> list[str]:
    """Names of the models that come with the package."""
    return sorted(p.parent.name for p in BUILTIN.glob("*/config.json"))


def offline() -> bool:
    """Whether the user has said that there is no Hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").strip().lower() in ("1", "on", "true", "yes")


@contextmanager
def quietly() -> Iterator[None]:
    """Load or save a model without transformers' progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def reach(kind: str, name: str, ask: Callable[[], Any]) -> None:
    """Ask the Hub about a `kind` ("model" or "dataset") with our own deadline.

    Raises: OperantError where the Hub does not know the name, does not answer in time, or is not to be asked.
    """
    if offline():
        raise _unreachable(kind, name, "HF_HUB_OFFLINE is set and the cache does not hold it")
    failure: list[BaseException] = []
    answered = threading.Event()

    def work() -> None:
        try:
            ask()
        except Exception as error:
            failure.append(error)
        answered.set()

    # A thread of our own, because looking up a host name has no timeout: one that hangs is left behind.
    threading.Thread(target=work, daemon=True).start()
    if not answered.wait(CONNECT_SECONDS):
        raise _unreachable(kind, name, f"the Hub did not answer in {CONNECT_SECONDS:.0f} seconds")
    if failure:
        status = getattr(getattr(failure[0], "response", None), "status_code", None)
        if status in (401, 403, 404):
            why = f"{kind} {name!r}: the Hub has no such {kind}, or not for you; check the name, or `hf auth login`"
            raise OperantError(why) from failure[0]
        raise _unreachable(kind, name, f"{type(failure[0]).__name__}: {failure[0]}"[:160]) from failure[0]


def _unreachable(kind: str, name: str, reason: str) -> OperantError:
    can = _what_can(kind)
    return OperantError(f"{kind} {name!r} is not on this machine and cannot be had offline ({reason}); {can}")


def _what_can(kind: str) -> str:
    if kind == "dataset":
        return "what can: a .jsonl, .csv or .parquet file of your own, builtin:openings"
    names = " ".join(f"builtin:{n}" for n in builtin_models()) or "the built-in models of a complete install"
    return f"what can: a folder of your own, {names}"


def _builtin_model(name: str) -> Path:
    folder = BUILTIN / name
    if name not in builtin_models():
        near = difflib.get_close_matches(name, builtin_models(), 1)
        hint = f"; did you mean 'builtin:{near[0]}'?" if near else ""
        known = ", ".join(f"builtin:{n}" for n in builtin_models()) or "none in this install"
        raise OperantError(f"model 'builtin:{name}' does not exist{hint} (built-in models: {known})")
    return folder


def _own_folder(path: Path) -> Path:
    if not path.is_dir():
        raise OperantError(f"model {str(path)!r} is a file; give the folder that holds config.json")
    if not any((path / name).is_file() for name in CONFIGS):
        raise OperantError(f"model {str(path)!r}: the folder has no config.json, so it is no transformers model")
    if odd := [p.name for p in path.iterdir() if p.exists() and not p.is_file() and not p.is_dir()]:
        raise OperantError(
            f"model {str(path)!r}: {odd[0]!r} is a pipe or device, and reading it may never end; remove it"
        )
    return path


def _cached(repository: str, revision: str | None) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    held = (try_to_load_from_cache(repository, name, revision=revision) for name in CONFIGS)
    config = next((c for c in held if isinstance(c, str)), None)
    folder = Path(config).parent if config else None
    return str(folder) if folder and _has_weights(folder) else None


def _has_weights(folder: Path) -> bool:
    """Whether every weight file is there: a download that was cut short leaves a config alone, or some shards."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return all((folder / shard).exists() for shard in shards)
    return any(folder.glob("*.safetensors"))


def _download(repository: str, revision: str | None) -> str:
    from huggingface_hub import snapshot_download

    _ask_commit(repository, revision)
    folder = snapshot_download(repository, revision=revision, allow_patterns=WANTED)
    if not _has_weights(Path(folder)):
        raise OperantError(
            f"model {repository!r} has no safetensors weights on the Hub; convert it and give its folder"
        )
    return folder


def _ask_commit(repository: str, revision: str | None) -> str | None:
    """The commit that a revision means on the Hub now."""
    from huggingface_hub import HfApi

    told: list[Any] = []
    name = f"{repository}@{revision}" if revision else repository
    api, when = HfApi(), {"revision": revision, "timeout": CONNECT_SECONDS}
    reach("model", name, lambda: told.append(api.model_info(repository, **when)))
    return getattr(told[0], "sha", None)
