"""Nested state to tensors and JSON and back, losslessly, and the folder that holds both.

Lists stand as themselves, dicts as `{"dict": [[key, value], ...]}` (so that the key 0 of an optimizer does not come
back as "0"), tuples as `{"tuple": [...]}`, tensors as `{"tensor": name}`. A tensor that has two names is written once.
"""

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from operant.storage import atomic_io, manifest
from operant.types import OperantError

TENSORS, STATE = "tensors.safetensors", "state.json"


class Bag:
    """Tensors by name; one that is there already keeps its first name. `finite=False`: NaN and infinity are let in."""

    def __init__(self, *, finite: bool = True) -> None:
        self.finite = finite
        self.tensors: dict[str, Tensor] = {}
        self._places: dict[tuple[Any, ...], str] = {}

    def add(self, value: Tensor, name: str) -> str:
        """The name under which `value` lies in the bag now. Raises `OperantError` where it is not finite."""
        value = value.detach()
        if self.finite and value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise _not_finite(name)
        while name in self.tensors:  # {"a.b": x, "a": {"b": y}} makes one name of two
            name += "'"
        place = (value.data_ptr(), value.dtype, value.device, value.shape, value.stride())
        first = self._places.setdefault(place, name) if value.numel() else name
        self.tensors.setdefault(first, value)
        return first


def encode(value: Any, name: str, bag: Bag) -> Any:
    """`value` as JSON; its tensors go into `bag` under names that begin with `name`.

    Raises `OperantError` with the name of what is not finite, or of a type that cannot be written.
    """
    if isinstance(value, Tensor):
        return {"tensor": bag.add(value, name)}
    if isinstance(value, dict):
        return {"dict": [[_key(k, name), encode(v, f"{name}.{k}", bag)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [encode(v, f"{name}.{i}", bag) for i, v in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _not_finite(name)
        return float(value)
    if value is None or type(value) in (bool, int, str):
        return value
    kind = type(value).__name__
    raise OperantError(f"{name} is a {kind}, which no checkpoint holds; make it a tensor, number, string, list or dict")


def decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The value that `encode` was given. Tensors are on the CPU."""
    if isinstance(value, list):
        return [decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "tuple":
        return tuple(decode(v, tensors) for v in inner)
    return {k: decode(v, tensors) for k, v in inner}


def _key(key: Any, name: str) -> Any:
    if type(key) in (str, int, bool) or key is None:
        return key
    raise OperantError(f"{name} has the key {key!r}, a {type(key).__name__}; use a string or a whole number")


def _not_finite(name: str) -> OperantError:
    return OperantError(f"{name} holds NaN or infinity, so no checkpoint is written; go on from the last one")


def write_folder(folder: Path, bag: Bag, content: Any, about: dict[str, Any]) -> None:
    """Write the three files and bring them to the disk, the manifest last. Raises: OSError."""
    atomic_io.mkdir(folder, exist_ok=False)
    _write_tensors(folder / TENSORS, bag.tensors)
    atomic_io.fill(folder / STATE, json.dumps(content, allow_nan=False))
    manifest.write(folder, about, (TENSORS, STATE))
    atomic_io.sync_folder(folder)


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        with atomic_io.operation("write", path):
            save_file(_separate(tensors), path)
    except SafetensorError as error:  # it hides the number of the system's error in its text
        code = re.search(r"os error (\d+)", str(error))
        raise OSError(int(code[1]) if code else None, str(error)) from error
    atomic_io.sync(path)


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As safetensors wants them: contiguous, each the only user of its memory. Copies only where they are not."""
    separate, seen = {}, set()
    for name, tensor in tensors.items():
        tensor = tensor.cpu().contiguous()
        memory = tensor.untyped_storage()
        if memory.nbytes() != tensor.nbytes or memory.data_ptr() in seen:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        separate[name] = tensor
    return separate


def read_folder(folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """Content and tensors of a folder. Raises: OSError; ValueError where they are not what their names say."""
    try:
        content = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{STATE} is no JSON of a checkpoint") from error
    try:
        return content, load_file(folder / TENSORS)
    except SafetensorError as error:
        raise ValueError(f"{TENSORS} is no safetensors file ({error})") from error
