"""The checkpoints of a run on disk: their names, which of them are complete, and which are deleted.

checkpoints/step-00012/     kind `resume`: everything that changes in a run
checkpoints/light-00012/    kind `light`: only the trained weights

path = newest_whole(folder)               # damaged ones are skipped with a warning
about(path)["lengths"]                    # the manifest of a checkpoint
prune(folder, step, Retention(keep=2))    # once the new one is complete
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from operant.storage import atomic_io, manifest
from operant.storage.state_codec import PART_FILES
from operant.types import OperantError

SCHEMA = 2
KINDS = {"resume": "step", "light": "light"}
"""The kinds of checkpoints, and the beginning of their names."""
FILES = {"tensors.safetensors", "state.json"}
_MIGRATIONS = {1: lambda content: content | {"schema": 2, "kind": "resume", "lengths": {}}}
"""By schema: the function from its manifest to one of the next schema."""


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: of each kind the newest `keep`, those of every `every`-th step, and those in `spare`."""

    keep: int = 2
    every: int = 0
    spare: frozenset[int] = frozenset()

    def __contains__(self, step: int) -> bool:
        return step in self.spare or (self.every > 0 and step > 0 and step % self.every == 0)


def path_of(folder: Path, kind: str, step: int) -> Path:
    return folder / atomic_io.step_name(step, KINDS[kind])


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name; None for any other name."""
    return next((step for name in KINDS.values() if (step := atomic_io.step_of(path, name)) is not None), None)


def about(path: str | Path) -> dict[str, Any]:
    """The manifest of a checkpoint in the current schema: `kind`, `step`, `time`, `made_by` (versions, machine,
    threads), `lengths` (bytes of the run's files when it was written)."""
    path = Path(path)
    try:
        with atomic_io.explained(path, "read"):
            return _read(path)
    except OperantError:
        raise
    except ValueError as error:
        raise damaged(path, str(error)) from error


def damaged(path: Path, problem: str) -> OperantError:
    return OperantError(f"{path} is damaged: {problem}; resume from an older checkpoint, or start a new run")


def _read(path: Path) -> dict[str, Any]:
    content = manifest.read(path)
    schema = content.get("schema")
    if type(schema) is not int or schema < 1:
        raise ValueError(f"{manifest.NAME} has no schema")
    if schema > SCHEMA:
        raise OperantError(f"{path} has schema {schema}, this operant reads up to {SCHEMA}; use the one that wrote it")
    for old in range(schema, SCHEMA):
        content = _MIGRATIONS[old](content)
    if problem := _problem(content, path):
        raise ValueError(f"{manifest.NAME} {problem}")
    return content


def _problem(content: dict[str, Any], path: Path) -> str | None:
    """The first value of a manifest that is not valid; None if all are."""
    step_in_name, lengths = step_of(path), content.get("lengths")
    if content.get("kind") not in KINDS:
        return f"is of kind {content.get('kind')!r}"
    if type(content.get("step")) is not int or step_in_name not in (None, content["step"]):
        return f"is of step {content.get('step')!r}"
    named = {name for name in content["files"] if not fnmatch(name, PART_FILES)}
    if named != FILES:
        return f"names {', '.join(sorted(named ^ FILES))[:80]}"
    if not isinstance(content.get("made_by"), dict) or not isinstance(lengths, dict):
        return "does not say which versions and machine made it"
    if not all(Path(name).name == name and type(size) is int and size >= 0 for name, size in lengths.items()):
        return "has lengths of files that do not belong to the run"
    return None


def verify(path: Path, *, hashes: bool = True) -> str | None:
    """What is wrong with a checkpoint; None if it is complete. `hashes=False` checks sizes alone."""
    if problem := manifest.problem(path, hashes=hashes):
        return problem
    try:
        _read(path)
    except OperantError:  # a newer schema is not damage
        return None
    except ValueError as error:
        return str(error)
    return None


def newest_whole(
    folder: str | Path, warn: Callable[[str], None] = warnings.warn, kinds: tuple[str, ...] = ("resume",)
) -> Path | None:
    """The newest complete checkpoint of `folder`, or None; of the same step, the one of the first of `kinds`.

    Calls `warn` for each damaged one that it skips.
    """
    for path in _newest_first(Path(folder), kinds):
        problem = verify(path)
        if problem is None:
            return path
        warn(f"skipping the damaged checkpoint {path}: {problem}")
    return None


def _newest_first(folder: Path, kinds: tuple[str, ...]) -> list[Path]:
    """The checkpoints of a folder, newest first; of the same step, a new one before the `.old` one that it replaces."""
    found = []
    for place, kind in enumerate(kinds):
        for path in folder.glob(f"{KINDS[kind]}-*"):
            step = atomic_io.step_of(path, KINDS[kind])
            if step is not None and path.suffix in ("", ".old") and path.is_dir():
                found.append((-step, place, path.suffix != "", path))
    return [path for *_, path in sorted(found)]


def to_resume(folder: str | Path, warn: Callable[[str], None], *, fresh_optimizer: bool = False) -> Path | None:
    """The checkpoint that a run resumes from, or None if there is none yet."""
    path = newest_whole(folder, warn, ("resume", "light") if fresh_optimizer else ("resume",))
    if path is None and not fresh_optimizer and (light := newest_whole(folder, warn, ("light",))) is not None:
        raise light_refused(light)
    if path is None and (torn := _newest_first(Path(folder), ("resume", "light"))):
        why = [f"{path.name} {verify(path)}" for path in torn[:4]] + ["..."] * (len(torn) > 4)
        raise OperantError(
            f"{folder} has no checkpoint that is whole: {', '.join(why)}; put back a copy of one, or "
            "move them all away to let the run begin again at step 1"
        )
    return path


def light_refused(path: Path) -> OperantError:
    return OperantError(
        f"{path} is light: it holds the trained weights and no optimizer, so the run cannot resume exactly; "
        "--fresh-optimizer resumes with these weights and a new optimizer"
    )


def clean(folder: Path) -> None:
    """Undo a save that was killed: delete temporary folders, and give a replaced checkpoint its name back.

    The caller holds the run's lock.
    """
    for temporary in folder.glob(".*.tmp"):
        atomic_io.remove_tree(temporary)
    for old in folder.glob("*.old"):
        if step_of(old) is not None and not old.with_suffix("").exists():
            atomic_io.rename(old, old.with_suffix(""))


def prune(folder: Path, step: int, retention: Retention) -> None:
    """Delete the checkpoints that retention does not keep, and damaged ones. Raises: OSError.

    Those after `step`, which has just been written, were made before the run resumed from an older one; they go too.
    """
    for kind in KINDS:
        paths = _newest_first(folder, (kind,))
        complete: dict[int, Path] = {}
        for path in paths:
            path_step = step_of(path) or 0
            if path_step <= step and path_step not in complete and verify(path, hashes=False) is None:
                complete[path_step] = path
        kept = {path for i, (at, path) in enumerate(complete.items()) if i < retention.keep or at in retention}
        for path in paths:
            if path not in kept:
                # Renamed first, so that a kill in the middle leaves no half checkpoint under its name.
                temporary = path.with_name(f".{path.name}.tmp")
                atomic_io.rename(path, temporary)
                atomic_io.remove_tree(temporary)
