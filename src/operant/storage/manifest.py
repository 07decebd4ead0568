"""What lies in a folder, by size and hash: `manifest.json`, written last, so that a folder without it is not whole.

    write(folder, {"schema": 2}, ["tensors.safetensors", "state.json"])
    wrong(folder)                  # None, or in words what is wrong

A manifest may be damaged, or come from a stranger: it seals itself, and no name in it leads out of its folder.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from operant.storage import atomic_io

NAME = "manifest.json"
LARGEST = 1 << 24
"""Bytes of the largest manifest that is read."""


def write(folder: Path, about: Mapping[str, Any], names: Iterable[str]) -> None:
    """Write the manifest of the files `names` of `folder`, and `about` beside them. Raises: OSError."""
    facts = {name: {"size": (folder / name).stat().st_size, "sha256": _hash(folder / name)} for name in names}
    told = {**about, "files": facts}
    atomic_io.fill(folder / NAME, json.dumps(told | {"sha256": _seal(told)}, indent=2))


def read(folder: Path) -> dict[str, Any]:
    """What a manifest says. Raises: ValueError where it is none or was changed, OSError where it cannot be read."""
    path = folder / NAME
    if _size(path) > LARGEST:
        raise ValueError(f"{NAME} has {_size(path)} bytes, which no manifest has")
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{NAME} cannot be read") from error
    if not isinstance(told, dict) or not isinstance(told.get("files"), dict):
        raise ValueError(f"{NAME} cannot be read")
    rest = {key: value for key, value in told.items() if key != "sha256"}
    if told.get("sha256") != _seal(rest) and told.get("schema") != 1:  # the first schema had no seal
        raise ValueError(f"{NAME} was changed since it was written")
    return rest


def wrong(folder: Path, *, hashes: bool = True) -> str | None:
    """What is wrong with a folder; None where it is whole. `hashes=False` looks at sizes alone."""
    try:
        for name, fact in read(folder)["files"].items():
            _check(folder, name, fact, hashes)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{Path(error.filename or folder).name} cannot be read ({(error.strerror or str(error)).lower()})"
    except (ValueError, KeyError, TypeError, RuntimeError) as error:  # the last: links in a circle
        return str(error) if type(error) is ValueError else f"{NAME} cannot be read"
    return None


def _check(folder: Path, name: str, fact: Mapping[str, Any], hashes: bool) -> None:
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{NAME} names {name!r}, which lies outside")
    if (size := _size(path)) != fact["size"]:
        raise ValueError(f"{name} has {size} bytes, not {fact['size']}")
    if hashes and _hash(path) != fact["sha256"]:
        raise ValueError(f"{name} was changed since it was written")


def _size(path: Path) -> int:
    size = path.stat().st_size
    if not path.is_file():  # a folder, or a pipe that nobody ever writes to
        raise ValueError(f"{path.name} is no file")
    return size


def _hash(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(told: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
