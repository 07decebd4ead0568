"""Lossless conversion of nested state to tensors and JSON, and the folder that holds both.

Lists are stored as lists, dicts as `{"dict": [[key, value], ...]}` (so that the key 0 of an optimizer does not come
back as "0"), tuples as `{"tuple": [...]}`, tensors as `{"tensor": name}`. A tensor with two names is written once.
Tensors whose rows are divided over ranks (`types.Divided`) are in files of their own, one a rank, in the format of
torch's distributed checkpoint; they are read by any number of ranks.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from operant.storage import atomic_io, manifest
from operant.types import Divided, OperantError

TENSORS, STATE = "tensors.safetensors", "state.json"
PART_FILES = "shard-*-model-*.safetensors"
"""The names that torch's distributed checkpoint gives its files."""


class NamedTensors:
    """Tensors by name; a tensor that is added twice keeps its first name. `finite=False` allows NaN and infinity."""

    def __init__(self, *, finite: bool = True) -> None:
        self.finite = finite
        self.tensors: dict[str, Tensor] = {}
        self.parts: dict[str, Divided] = {}
        """Those whose rows are divided over the ranks."""
        self._places: dict[tuple[Any, ...], str] = {}

    def add(self, whole: Tensor | Divided, name: str) -> str:
        """Add a tensor and return its name in the collection. Raises: OperantError if it is not finite."""
        value = whole.rows if isinstance(whole, Divided) else whole.detach()
        if self.finite and value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise _not_finite(name)
        while name in self.tensors or name in self.parts:  # {"a.b": x, "a": {"b": y}} gives the same name twice
            name += "'"
        if isinstance(whole, Divided):  # every rank has the same names, also a rank without rows
            first = self._places.setdefault((id(value),), name)
            self.parts.setdefault(first, whole)
            return first
        place = (value.data_ptr(), value.dtype, value.device, value.shape, value.stride())
        first = self._places.setdefault(place, name) if value.numel() else name
        self.tensors.setdefault(first, value)
        return first


def encode(value: object, name: str, tensors: NamedTensors) -> object:
    """`value` as JSON; its tensors are added to `tensors` under names that begin with `name`.

    Raises: OperantError with the name of a value that is not finite, or of a type that cannot be stored.
    """
    if isinstance(value, (Tensor, Divided)):
        return {"tensor": tensors.add(value, name)}
    if isinstance(value, dict):
        for key in value:
            if type(key) not in (str, int, bool) and key is not None:
                kind = type(key).__name__
                raise OperantError(f"{name} has the key {key!r}, of type {kind}; use a string or an integer")
        return {"dict": [[k, encode(v, f"{name}.{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [encode(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _not_finite(name)
        return float(value)
    if value is None or type(value) in (bool, int, str):
        return value
    what = f"{name} is of type {type(value).__name__}, which no checkpoint can store"
    raise OperantError(f"{what}; make it a tensor, number, string, list or dict")


def decode(value: Any, tensors: Mapping[str, Tensor | Divided]) -> Any:
    """The value that `encode` was called with. Tensors are on the CPU."""
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


def _not_finite(name: str) -> OperantError:
    return OperantError(f"{name} holds NaN or infinity, so no checkpoint is written; resume from the last one")


def write_folder(
    folder: Path, tensors: NamedTensors, content: object, about: Mapping[str, object], others: Sequence[str] = ()
) -> None:
    """Write the three files and sync them to the disk, the manifest last. Raises: OSError.

    others: names of files that are in the folder already and belong to it.
    """
    atomic_io.mkdir(folder, exist_ok=bool(others))
    separate, memories = dict[str, Tensor](), set[int]()
    for name, tensor in tensors.tensors.items():  # safetensors needs contiguous ones that share no memory
        tensor = tensor.cpu().contiguous()
        memory = tensor.untyped_storage()
        if memory.nbytes() != tensor.nbytes or memory.data_ptr() in memories:
            tensor = tensor.clone()
        memories.add(tensor.untyped_storage().data_ptr())
        separate[name] = tensor
    try:
        with atomic_io.operation("write", folder / TENSORS):
            save_file(separate, folder / TENSORS)
    except SafetensorError as error:
        raise OSError(None, str(error)) from error
    atomic_io.sync(folder / TENSORS)
    atomic_io.write_and_sync(folder / STATE, json.dumps(content, allow_nan=False))
    manifest.write(folder, about, (TENSORS, STATE, *others))
    atomic_io.sync_folder(folder)


def read_folder(folder: Path, bounds: Callable[[int], slice] | None = None) -> tuple[Any, dict[str, Tensor | Divided]]:
    """Content and tensors of a folder. Raises: OSError; ValueError if a file is not of its format.

    bounds: of a tensor that is divided, which of so many rows are read; None: all, as a whole tensor.
    """
    try:
        content = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{STATE} is not the JSON of a checkpoint") from error
    name = TENSORS
    try:
        tensors: dict[str, Tensor | Divided] = {**load_file(folder / TENSORS)}
        divided = content.get("divided", {}) if isinstance(content, dict) else {}
        for name in sorted(path.name for path in folder.glob(PART_FILES)) if divided else ():
            with safe_open(folder / name, "pt") as file:
                offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
                for key in set(file.keys()) & set(divided):
                    stored, first = file.get_slice(key), offsets[key]["saved_offsets"][0]
                    rows, *others = divided[key]
                    own = slice(0, rows) if bounds is None else bounds(rows)
                    if key not in tensors:
                        zeros = torch.zeros(own.stop - own.start, *others, dtype=stored[:0].dtype)
                        tensors[key] = zeros if bounds is None else Divided(zeros, tuple(divided[key]))
                    found = tensors[key]
                    begin, end = max(own.start, first), min(own.stop, first + stored.get_shape()[0])
                    if begin < end:
                        into = found.rows if isinstance(found, Divided) else found
                        into[begin - own.start : end - own.start] = stored[begin - first : end - first]
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"{name} is not a safetensors file ({error})") from error
    return content, tensors
