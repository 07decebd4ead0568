"""The sizes and hashes of a folder's files, in `manifest.json`. It is written last: a folder without it is incomplete.

    write(folder, {"schema": 2}, ["tensors.safetensors", "state.json"])
    problem(folder)                # None, or a description of the problem

A manifest may be damaged or untrusted: it holds a hash of itself, and no name in it leads out of its folder.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from operant.storage import atomic_io

NAME = "manifest.json"
MAX_BYTES = 1 << 24
"""Bytes of the largest manifest that is read."""


def write(folder: Path, about: Mapping[str, object], names: Iterable[str]) -> None:
    """Write the manifest of the files `names` of `folder`, with the entries of `about`. Raises: OSError."""
    facts = {name: {"size": (folder / name).stat().st_size, "sha256": _hash(folder / name)} for name in names}
    content = {**about, "files": facts}
    atomic_io.write_and_sync(folder / NAME, json.dumps(content | {"sha256": _hash_of(content)}, indent=2))


def read(folder: Path) -> dict[str, Any]:
    """The content of a manifest. Raises: ValueError if it is invalid or was changed, OSError if it cannot be read."""
    path = folder / NAME
    if _size(path) > MAX_BYTES:
        raise ValueError(f"{NAME} has {_size(path)} bytes, too many for a manifest")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{NAME} cannot be read") from error
    if not isinstance(content, dict) or not isinstance(content.get("files"), dict):
        raise ValueError(f"{NAME} cannot be read")
    rest = {key: value for key, value in content.items() if key != "sha256"}
    if content.get("sha256") != _hash_of(rest) and content.get("schema") != 1:  # schema 1 had no hash of itself
        raise ValueError(f"{NAME} was changed since it was written")
    return rest


def problem(folder: Path, *, hashes: bool = True) -> str | None:
    """What is wrong with a folder; None if it is complete. `hashes=False` checks sizes alone."""
    try:
        for name, fact in read(folder)["files"].items():
            path = folder / name
            if not path.resolve().is_relative_to(folder.resolve()):
                raise ValueError(f"{NAME} names {name!r}, which is outside the folder")
            if (size := _size(path)) != fact["size"]:
                raise ValueError(f"{name} has {size} bytes, not {fact['size']}")
            if hashes and _hash(path) != fact["sha256"]:
                raise ValueError(f"{name} was changed since it was written")
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read ({(error.strerror or str(error)).lower()})"
    except (ValueError, KeyError, TypeError, RuntimeError) as error:  # RuntimeError: circular links
        return str(error) if type(error) is ValueError else f"{NAME} cannot be read"
    return None


def _size(path: Path) -> int:
    size = path.stat().st_size
    if not path.is_file():  # a folder, or a pipe that would never be written to
        raise ValueError(f"{path.name} is not a file")
    return size


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash_of(content: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
