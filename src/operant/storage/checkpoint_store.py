"""The checkpoints of a run on disk: their names, which of them are whole, and which go.

checkpoints/step-00012/     kind `resume`: everything that changes in a run
checkpoints/light-00012/    kind `light`: what is trained, alone

path = newest_whole(folder)               # damaged ones are named and passed over
about(path)["lengths"]                    # what a checkpoint says of itself
prune(folder, step, Retention(keep=2))    # once the new one stands
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from operant.storage import atomic_io, manifest
from operant.types import OperantError

SCHEMA = 2
KINDS = {"resume": "step", "light": "light"}
"""What a checkpoint holds, and what its name begins with."""
HELD = {"tensors.safetensors", "state.json"}
_MIGRATIONS = {1: lambda told: told | {"schema": 2, "kind": "resume", "lengths": {}}}
"""By schema: what makes its manifest one of the next."""


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: of each kind the newest `keep`, those of every `every`-th step, and those of `spare`."""

    keep: int = 2
    every: int = 0
    spare: frozenset[int] = frozenset()

    def __contains__(self, step: int) -> bool:
        return step in self.spare or (self.every > 0 and step > 0 and step % self.every == 0)


def path_of(folder: Path, kind: str, step: int) -> Path:
    """Where a checkpoint of a step lies."""
    return folder / atomic_io.step_name(step, KINDS[kind])


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name; None for any other name."""
    return next((step for name in KINDS.values() if (step := atomic_io.step_of(path, name)) is not None), None)


def about(path: str | Path) -> dict[str, Any]:
    """What a checkpoint says of itself, in the words of today's schema: `kind`, `step`, `time`, `made_by` (versions,
    machine, threads), `lengths` (bytes of the run's files when it was written).

    Raises: OperantError where it is damaged, or of a newer schema.
    """
    path = Path(path)
    try:
        with atomic_io.explained(path, "read"):
            return _told(path)
    except OperantError:
        raise
    except ValueError as error:
        raise OperantError(f"{path} is damaged: {error}; resume from an older checkpoint, or start anew") from error


def _told(path: Path) -> dict[str, Any]:
    told = manifest.read(path)
    schema = told.get("schema")
    if type(schema) is not int or schema < 1:
        raise ValueError(f"{manifest.NAME} has no schema")
    if schema > SCHEMA:
        raise OperantError(f"{path} has schema {schema}, this operant reads up to {SCHEMA}; use the one that wrote it")
    for old in range(schema, SCHEMA):
        told = _MIGRATIONS[old](told)
    if fault := _fault(told, path):
        raise ValueError(f"{manifest.NAME} {fault}")
    return told


def _fault(told: dict[str, Any], path: Path) -> str | None:
    """What no checkpoint of ours says of itself."""
    named, lengths = step_of(path), told.get("lengths")
    if told.get("kind") not in KINDS:
        return f"is of kind {told.get('kind')!r}"
    if type(told.get("step")) is not int or named not in (None, told["step"]):
        return f"is of step {told.get('step')!r}"
    if set(told["files"]) != HELD:
        return f"names {', '.join(sorted(set(told['files']) ^ HELD))[:80]}"
    if not isinstance(told.get("made_by"), dict) or not isinstance(lengths, dict):
        return "does not say by what it was made"
    if not all(Path(name).name == name and type(size) is int and size >= 0 for name, size in lengths.items()):
        return "has lengths of files that are none of the run's"
    return None


def verify(path: Path, *, hashes: bool = True) -> str | None:
    """What is wrong with a checkpoint; None where it is whole. `hashes=False` looks at sizes alone."""
    if wrong := manifest.wrong(path, hashes=hashes):
        return wrong
    try:
        _told(path)
    except OperantError:  # of a newer operant: no damage
        return None
    except ValueError as error:
        return str(error)
    return None


def newest_whole(
    folder: str | Path, say: Callable[[str], None] = warnings.warn, kinds: tuple[str, ...] = ("resume",)
) -> Path | None:
    """The newest checkpoint of `folder` that is whole, or None; of one step, that of the first of `kinds`.

    Says through `say` which ones it passes over.
    """
    for path in _newest_first(Path(folder), kinds):
        wrong = verify(path)
        if wrong is None:
            return path
        say(f"passing over the damaged checkpoint {path}: {wrong}")
    return None


def _newest_first(folder: Path, kinds: tuple[str, ...]) -> list[Path]:
    """Checkpoints by step; of one step, the finished one before the one that it replaces."""
    found = []
    for place, kind in enumerate(kinds):
        for path in folder.glob(f"{KINDS[kind]}-*"):
            step = atomic_io.step_of(path, KINDS[kind])
            if step is not None and path.suffix in ("", ".old") and path.is_dir():
                found.append((-step, place, path.suffix != "", path))
    return [path for *_, path in sorted(found)]


def to_resume(folder: str | Path, say: Callable[[str], None], *, fresh_optimizer: bool = False) -> Path | None:
    """The checkpoint that a run goes on from, or None where there is none yet.

    Raises: OperantError where whatever is whole is light, and no fresh optimizer was asked for.
    """
    if fresh_optimizer:
        return newest_whole(folder, say, ("resume", "light"))
    path = newest_whole(folder, say)
    if path is None and (light := newest_whole(folder, say, ("light",))) is not None:
        raise light_refused(light)
    return path


def light_refused(path: Path) -> OperantError:
    return OperantError(
        f"{path} is light: it holds the trained weights and no optimizer, so the run cannot go on exactly; "
        "--fresh-optimizer goes on with these weights and an optimizer that begins anew"
    )


def clean(folder: Path) -> None:
    """Take away what a save left that was killed, and give back a name that it took. Raises: OSError.

    The run's lock keeps others out.
    """
    for left in folder.glob(".*.tmp"):
        atomic_io.remove_tree(left)
    for aside in folder.glob("*.old"):
        if step_of(aside) is not None and not aside.with_suffix("").exists():
            atomic_io.rename(aside, aside.with_suffix(""))


def prune(folder: Path, step: int, retention: Retention) -> None:
    """Delete what retention does not keep, and what is damaged. Raises: OSError.

    Those after `step`, which has just been written, are of a future that was given up by an older resume.
    """
    for kind in KINDS:
        listed = _newest_first(folder, (kind,))
        whole: dict[int, Path] = {}
        for path in listed:
            own = step_of(path) or 0
            if own <= step and own not in whole and verify(path, hashes=False) is None:
                whole[own] = path
        stay = {path for place, (own, path) in enumerate(whole.items()) if place < retention.keep or own in retention}
        for path in listed:
            if path not in stay:
                _discard(path)


def _discard(path: Path) -> None:
    """Under a name that is no checkpoint's first: a kill in the middle leaves none that is half there."""
    gone = path.with_name(f".{path.name}.tmp")
    atomic_io.rename(path, gone)
    atomic_io.remove_tree(gone)
