"""Checkpoints of everything that changes in a run.

    state = RunState()
    state.register("policy", policy)          # anything with state_dict() and load_state_dict()
    state.register("optimizer", optimizer)

    path = state.save("runs/x/checkpoints", step=12).path
    step, extra = state.load(newest_whole("runs/x/checkpoints"))

A checkpoint is a folder `step-00012/` with `tensors.safetensors`, `state.json` and `manifest.json` (sizes and hashes
of the two, versions, machine). It gets its name only when it is complete on the disk. Nothing in it is unpickled.
With `RunState.ranks`, parts may be divided over ranks: each writes its own rows to a file of its own.
A checkpoint of kind `light` (`light-00012/`) holds only the trained weights.
"""

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from operant import machine
from operant.storage import atomic_io
from operant.storage.checkpoint_store import (
    SCHEMA,
    Retention,
    about,
    clean,
    damaged,
    light_refused,
    newest_whole,
    path_of,
    prune,
    to_resume,
    verify,
)
from operant.storage.state_codec import PART_FILES, NamedTensors, decode, encode, read_folder, write_folder
from operant.types import OperantError, require

__all__ = ["LIGHT", "OPTIMIZER", "RunState", "Saved", "about", "newest_whole", "read_extra", "read_part", "to_resume"]

LIGHT = {"policy"}
"""Parts of a light checkpoint. A policy's state holds only its trained weights."""
OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written: its folder, size and duration."""

    path: Path
    bytes: int
    seconds: float


class Part(Protocol):
    def state_dict(self) -> object: ...

    def load_state_dict(self, state: Any, /) -> object: ...


@runtime_checkable
class Renewed(Protocol):
    """A part that begins anew when the weights have changed, and its own state is not loaded."""

    def renew(self) -> None: ...


P = TypeVar("P", bound=Part)


class RunState:
    """The registered parts of a run, by name."""

    def __init__(self) -> None:
        self.parts: dict[str, Part] = {}
        self.ranks: Any = None
        """`operant.distributed`, if states are divided over ranks (`types.Divided`), which then all save; else None."""

    def __repr__(self) -> str:
        return f"RunState({', '.join(self.parts)})"

    def register(self, name: str, part: P) -> P:
        """Register `part` and return it. Its state may hold tensors, numbers, text, None, lists, tuples and dicts."""
        require(name not in self.parts, f"part {name!r} is registered already; give the second one another name")
        missing = [m for m in ("state_dict", "load_state_dict") if not callable(getattr(part, m, None))]
        if missing:
            raise OperantError(f"part {name!r} ({type(part).__name__}) has no {missing[0]}(); give it one")
        self.parts[name] = part
        return part

    def save(
        self,
        folder: str | Path,
        step: int,
        extra: object = None,
        *,
        kind: str = "resume",
        lengths: Mapping[str, int] | None = None,
        retention: Retention | None = None,
    ) -> Saved:
        """Write `folder/step-00012`, or `folder/light-00012` of kind `light`, with only the trained weights.

        extra: any value that a part's state may hold. lengths: bytes of the run's growing files, for the manifest. What
        `retention` (None: the newest two of each kind) does not keep is deleted once the new one is complete.
        Raises: OperantError, which leaves older checkpoints as they are, for a tensor or number that is NaN or infinity
        (by its name), and for an error of the disk.
        """
        begun, folder, tensors = time.perf_counter(), Path(folder), NamedTensors()
        run: Callable[[Callable[[], Any]], Any] = self.ranks.together if self.ranks is not None else lambda work: work()
        first = self.ranks is None or self.ranks.rank() == 0
        info = {"schema": SCHEMA, "kind": kind, "step": step, "time": time.strftime("%Y-%m-%d %H:%M:%S")}
        info |= {"made_by": machine.about(), "lengths": dict(lengths or {})}
        path = path_of(folder, kind, step)
        temporary = path.with_name(f".{path.name}.tmp")

        def content() -> dict[str, object]:
            names = [name for name in self.parts if kind == "resume" or name in LIGHT]
            parts = {name: encode(self.parts[name].state_dict(), name, tensors) for name in names}
            found: dict[str, object] = {"parts": parts, "extra": encode(extra, "extra", tensors)}
            shapes = {name: part.shape for name, part in tensors.parts.items()}
            return found | ({"divided": shapes} if shapes else {})

        def begin() -> None:
            with atomic_io.explained(path, "save the checkpoint"):
                atomic_io.mkdir(folder)
                clean(folder)
                if self.ranks is not None:
                    atomic_io.mkdir(temporary, exist_ok=False)

        def write_parts() -> None:
            with atomic_io.explained(path, "save the checkpoint"):
                self.ranks.write_parts(str(temporary), tensors.parts)

        def finish() -> int:
            with atomic_io.explained(path, "save the checkpoint"):
                others = sorted(file.name for file in temporary.glob(PART_FILES))
                write_folder(temporary, tensors, encoded, info, others)
                atomic_io.replace_folder(temporary, path)
                size = sum(file.stat().st_size for file in path.iterdir())
                prune(folder, step, retention or Retention())
                return size

        encoded = run(content)
        try:
            run(begin if first else lambda: None)
            if self.ranks is not None:
                run(write_parts)
            size = run(finish if first else lambda: 0)
        finally:
            if first:
                with suppress(OSError):
                    atomic_io.remove_tree(temporary)
        return Saved(path, size, time.perf_counter() - begun)

    def load(
        self, path: str | Path, warn: Callable[[str], None] = warnings.warn, *, fresh_optimizer: bool = False
    ) -> tuple[int, Any]:
        """Load the checkpoint at `path` into the parts; returns its step and `extra`.

        With `fresh_optimizer`, the optimizer is not loaded; nor, from a light checkpoint, are parts that it lacks: they
        are renewed, if they can be.
        Calls `warn` if another machine or version wrote the checkpoint: the run then continues, not bit-identically.
        """
        path = Path(path)
        if problem := verify(path):
            raise damaged(path, problem)
        info = about(path)
        if info["kind"] == "light" and not fresh_optimizer:
            raise light_refused(path)
        extra, states = _read(path, None if self.ranks is None else self.ranks.bounds)
        skipped: set[str] = set()
        if fresh_optimizer:
            skipped = {OPTIMIZER} if info["kind"] == "resume" else set(self.parts) - LIGHT
        found, wanted = set(states) - skipped, set(self.parts) - skipped
        if absent := sorted(wanted - found):
            raise OperantError(f"{path} lacks {', '.join(absent)}; resume with the options that it was made with")
        if unknown := sorted(found - wanted):
            raise OperantError(f"{path} holds {', '.join(unknown)}, which this run lacks; resume with its own options")
        for key, here in machine.about().items():
            if (before := info["made_by"].get(key)) != here:
                warn(f"{path}: made with {key} {before}, here is {here}; the run continues, but not bit-identically")
        for name in (name for name in self.parts if name not in skipped):
            try:
                self.parts[name].load_state_dict(states[name])
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                raise OperantError(f"part {name!r} of {path} does not fit: {error}; resume with its options") from error
        for name in skipped & set(self.parts):
            if isinstance(part := self.parts[name], Renewed):
                part.renew()
        return info["step"], extra


def read_extra(path: Path) -> Any:
    """The `extra` that the checkpoint at `path` was saved with. Raises: OperantError if it is damaged."""
    return _read(path)[0]


def read_part(path: Path, name: str) -> Any:
    """The state of one part in the checkpoint at `path`."""
    if problem := verify(path):
        raise damaged(path, problem)
    states = _read(path)[1]
    require(name in states, f"{path} lacks {name}: it was not written by a training run")
    return states[name]


def _read(path: Path, bounds: Callable[[int], slice] | None = None) -> tuple[Any, dict[str, Any]]:
    """The decoded `extra`, and the decoded states of the parts by name; `bounds` as in `read_folder`."""
    try:
        with atomic_io.explained(path, "read"):
            content, tensors = read_folder(path, bounds)
        return decode(content["extra"], tensors), {k: decode(v, tensors) for k, v in content["parts"].items()}
    except OperantError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, str(error) if type(error) is ValueError else "its state is not valid") from error
