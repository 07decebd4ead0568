"""All that changes in a run: in memory, on disk, and back.

    state = RunState()
    state.register("policy", policy)          # anything with state_dict() and load_state_dict()
    state.register("optimizer", optimizer)

    before = state.snapshot()                 # a step happens as a whole:
    state.restore(before)                     # where it fails, it never was

    path = state.save("runs/x/checkpoints", step=12)
    step, extra = state.load(newest_whole("runs/x/checkpoints"))

A checkpoint is a folder `step-00012/` with `tensors.safetensors`, `state.json` and `manifest.json` (sizes and hashes
of the two, versions, machine). It gets its name only once it lies on the disk whole. Nothing in it is unpickled.
"""

import copy
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from operant import files, machine
from operant.encoding import Bag, decode, encode, read_folder, verify, write_folder
from operant.types import OperantError

SCHEMA = 1


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

    def save(self, folder: str | Path, step: int, extra: Any = None, *, keep: int = 2) -> Path:
        """Write `folder/step-00012` and keep the `keep` newest whole ones up to it; returns its path.

        extra: anything that a part's state may be. Raises `OperantError` for a tensor or number that is not finite
        (by its name), and when the disk refuses; what stood there before stays.
        """
        folder, bag = Path(folder), Bag()
        body = {name: encode(part.state_dict(), name, bag) for name, part in self.parts.items()}
        content = {"parts": body, "extra": encode(extra, "extra", bag)}
        path, temporary = folder / files.step_name(step), folder / f".{files.step_name(step)}.tmp"
        with files.explained(path, "save the checkpoint"):
            files.mkdir(folder)
            for left in folder.glob(".step-*.tmp"):  # by a save that was killed; the run's lock keeps others out
                files.remove_tree(left)
            try:
                write_folder(temporary, bag, content, _about(step))
                files.put_folder(temporary, path)
            finally:
                with suppress(OSError):
                    files.remove_tree(temporary)
            _prune(folder, step, keep)
        return path

    def load(self, path: str | Path, say: Callable[[str], None] = warnings.warn) -> tuple[int, Any]:
        """Put the checkpoint at `path` into the parts; returns its step and `extra`.

        Raises `OperantError` where it is damaged, or where its parts are not exactly the registered ones. Says
        through `say` where another machine or version wrote it: the run then goes on, though not to the same bits.
        """
        path = Path(path)
        if wrong := verify(path):
            raise OperantError(f"{path} is damaged: {wrong}; resume from an older checkpoint, or start anew")
        with files.explained(path, "read"):
            manifest, content, tensors = read_folder(path)
        if manifest["schema"] != SCHEMA:
            raise OperantError(f"{path} has schema {manifest['schema']}, this operant reads {SCHEMA}; use its version")
        self._match(path, set(content["parts"]))
        for difference in _differences(manifest["made_by"]):
            say(f"{path}: {difference}; the run goes on, but not to the same bits")
        for name, part in self.parts.items():
            try:
                part.load_state_dict(decode(content["parts"][name], tensors))
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                raise OperantError(f"part {name!r} of {path} does not fit: {error}; resume with its options") from error
        return manifest["step"], decode(content["extra"], tensors)

    def _match(self, path: Path, found: set[str]) -> None:
        absent, unknown = sorted(set(self.parts) - found), sorted(found - set(self.parts))
        if absent:
            raise OperantError(f"{path} lacks {', '.join(absent)}; resume with the options that it was made with")
        if unknown:
            raise OperantError(f"{path} holds {', '.join(unknown)}, which this run lacks; resume with its own options")


def newest_whole(folder: str | Path, say: Callable[[str], None] = warnings.warn) -> Path | None:
    """The newest checkpoint of `folder` that is whole, or None. Says through `say` which ones it passes over."""
    for path in _newest_first(Path(folder)):
        wrong = verify(path)
        if wrong is None:
            return path
        say(f"passing over the damaged checkpoint {path}: {wrong}")
    return None


def _newest_first(folder: Path) -> list[Path]:
    """Checkpoints by step; of one step, the finished one before the one that it replaces."""
    found = [p for p in folder.glob("step-*") if p.is_dir() and files.step_of(p) is not None]
    return sorted(found, key=lambda p: (files.step_of(p) or 0, p.suffix == ""), reverse=True)


def _prune(folder: Path, step: int, keep: int) -> None:
    """Delete all but the newest whole ones. Those after `step` are of a future that was given up by an older resume."""
    whole = [p for p in _newest_first(folder) if (files.step_of(p) or 0) <= step and verify(p, hashes=False) is None]
    for path in _newest_first(folder):
        if path not in whole[:keep]:
            files.remove_tree(path)


def _about(step: int) -> dict[str, Any]:
    return {"schema": SCHEMA, "step": step, "time": time.strftime("%Y-%m-%d %H:%M:%S"), "made_by": machine.about()}


def _differences(made_by: dict[str, Any]) -> list[str]:
    here = machine.about()
    return [f"made with {k} {made_by.get(k)}, here is {here[k]}" for k in here if made_by.get(k) != here[k]]
