"""All that changes in a run: in memory, on disk, and back.

    state = RunState()
    state.register("policy", policy)          # anything with state_dict() and load_state_dict()
    state.register("optimizer", optimizer)

    before = state.snapshot()                 # a step happens as a whole:
    state.restore(before)                     # where it fails, it never was

    path = state.save("runs/x/checkpoints", step=12).path
    step, extra = state.load(newest_whole("runs/x/checkpoints"))

A checkpoint is a folder `step-00012/` with `tensors.safetensors`, `state.json` and `manifest.json` (sizes and hashes
of the two, versions, machine). It gets its name only once it lies on the disk whole. Nothing in it is unpickled.
One of kind `light` holds what is trained, and nothing else (`light-00012/`).
"""

import copy
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from operant import machine
from operant.storage import atomic_io
from operant.storage.checkpoint_store import (
    SCHEMA,
    Retention,
    about,
    clean,
    light_refused,
    newest_whole,
    path_of,
    prune,
    to_resume,
    verify,
)
from operant.storage.state_codec import Bag, decode, encode, read_folder, write_folder
from operant.types import OperantError

__all__ = ["LIGHT", "OPTIMIZER", "RunState", "Saved", "about", "newest_whole", "to_resume"]

LIGHT = {"policy"}
"""Parts of a light checkpoint: of a policy, `Kept` writes what is trained alone."""
OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written."""

    path: Path
    bytes: int
    seconds: float


class Part(Protocol):
    """Something that changes in a run."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class RunState:
    """The registered parts of a run, by name."""

    def __init__(self) -> None:
        self.parts: dict[str, Part] = {}

    def register(self, name: str, part: Any) -> Any:
        """Take `part` in; returns it. Its state: tensors, numbers, strings, None, lists, tuples and dicts of these."""
        if name in self.parts:
            raise OperantError(f"part {name!r} is registered already; give the second one a name of its own")
        missing = [m for m in ("state_dict", "load_state_dict") if not callable(getattr(part, m, None))]
        if missing:
            raise OperantError(f"part {name!r} ({type(part).__name__}) has no {missing[0]}(); give it one")
        self.parts[name] = part
        return part

    def snapshot(self, only: Iterable[str] | None = None) -> dict[str, Any]:
        """A deep copy of all parts (or `only` these: before an update begins no weights have moved)."""
        return {name: copy.deepcopy(self.parts[name].state_dict()) for name in (self.parts if only is None else only)}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Put a snapshot back. It may be used again: the parts get copies of their own."""
        for name, state in snapshot.items():
            self.parts[name].load_state_dict(copy.deepcopy(state))

    def save(
        self,
        folder: str | Path,
        step: int,
        extra: Any = None,
        *,
        kind: str = "resume",
        lengths: Mapping[str, int] | None = None,
        keep: int = 2,
        keep_every: int = 0,
        spare: Iterable[int] = (),
    ) -> Saved:
        """Write `folder/step-00012`, or of kind `light` `folder/light-00012` with what is trained alone.

        extra: anything that a part's state may be. lengths: bytes of the run's growing files, which stand in the
        manifest. Of each kind the newest `keep` stay, those of every `keep_every`-th step, and those of `spare`; what
        else there is goes once the new one stands.
        Raises: OperantError for a tensor or number that is not finite (by its name), and when the disk refuses; what
        stood there before stays.
        """
        begun, folder, bag = time.perf_counter(), Path(folder), Bag()
        parts = {name: part for name, part in self.parts.items() if kind == "resume" or name in LIGHT}
        body = {name: encode(part.state_dict(), name, bag) for name, part in parts.items()}
        content = {"parts": body, "extra": encode(extra, "extra", bag)}
        path = path_of(folder, kind, step)
        temporary = path.with_name(f".{path.name}.tmp")
        with atomic_io.explained(path, "save the checkpoint"):
            atomic_io.mkdir(folder)
            clean(folder)
            try:
                write_folder(temporary, bag, content, _about(kind, step, lengths or {}))
                atomic_io.put_folder(temporary, path)
            finally:
                with suppress(OSError):
                    atomic_io.remove_tree(temporary)
            size = sum(file.stat().st_size for file in path.iterdir())
            prune(folder, step, Retention(keep, keep_every, frozenset(spare)))
        return Saved(path, size, time.perf_counter() - begun)

    def load(
        self, path: str | Path, say: Callable[[str], None] = warnings.warn, *, fresh_optimizer: bool = False
    ) -> tuple[int, Any]:
        """Put the checkpoint at `path` into the parts; returns its step and `extra`.

        `fresh_optimizer`: leave the optimizer as it is now; of a light checkpoint, everything that it does not hold. A
        part that is left so and has a `renew()` is told that the weights have changed under it.
        Raises: OperantError where it is damaged, where its parts are not exactly the registered ones, or where it is
        light and the optimizer is to go on. Says through `say` where another machine or version wrote it: the run then
        goes on, though not to the same bits.
        """
        path = Path(path)
        if wrong := verify(path):
            raise _damaged(path, wrong)
        told = about(path)
        if told["kind"] == "light" and not fresh_optimizer:
            raise light_refused(path)
        extra, states = _read(path)
        left = set() if not fresh_optimizer else {OPTIMIZER} if told["kind"] == "resume" else set(self.parts) - LIGHT
        self._match(path, set(states) - left, set(self.parts) - left)
        for difference in _differences(told["made_by"]):
            say(f"{path}: {difference}; the run goes on, but not to the same bits")
        for name in (name for name in self.parts if name not in left):
            try:
                self.parts[name].load_state_dict(states[name])
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
                raise OperantError(f"part {name!r} of {path} does not fit: {error}; resume with its options") from error
        for name in left & set(self.parts):
            getattr(self.parts[name], "renew", _nothing)()
        return told["step"], extra

    def _match(self, path: Path, found: set[str], wanted: set[str]) -> None:
        absent, unknown = sorted(wanted - found), sorted(found - wanted)
        if absent:
            raise OperantError(f"{path} lacks {', '.join(absent)}; resume with the options that it was made with")
        if unknown:
            raise OperantError(f"{path} holds {', '.join(unknown)}, which this run lacks; resume with its own options")


def _read(path: Path) -> tuple[Any, dict[str, Any]]:
    """`extra`, and the states of the parts by name, decoded."""
    try:
        with atomic_io.explained(path, "read"):
            content, tensors = read_folder(path)
        return decode(content["extra"], tensors), {k: decode(v, tensors) for k, v in content["parts"].items()}
    except OperantError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(path, str(error) if type(error) is ValueError else "its state is none") from error


def _damaged(path: Path, wrong: str) -> OperantError:
    return OperantError(f"{path} is damaged: {wrong}; resume from an older checkpoint, or start anew")


def _about(kind: str, step: int, lengths: Mapping[str, int]) -> dict[str, Any]:
    told = {"schema": SCHEMA, "kind": kind, "step": step, "time": time.strftime("%Y-%m-%d %H:%M:%S")}
    return told | {"made_by": machine.about(), "lengths": dict(lengths)}


def _differences(made_by: Mapping[str, Any]) -> list[str]:
    here = machine.about()
    return [f"made with {k} {made_by.get(k)}, here is {here[k]}" for k in here if made_by.get(k) != here[k]]


def _nothing() -> None:
    pass
