"""A refused step as a folder: what `operant replay` needs to repeat it in another process.

    refused/step-00012/tensors.safetensors   the batch as it went in, and the weights that are trained
                       state.json            what was not finite and where, the options, the model's name
                       manifest.json         sizes and hashes

It may hold NaN and infinity, which are what it is about. Nothing in it is unpickled.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from operant import distributed, machine
from operant.options import values
from operant.sampling import Sampling
from operant.storage import atomic_io, manifest
from operant.storage.state_codec import NamedTensors, decode, encode, read_folder, write_folder
from operant.training.nonfinite import NonFinite, first, located
from operant.training.scoring import Bootstraps
from operant.types import Batch, Choices, OperantError

KEPT = 3
"""How many bundles of a run are kept, the newest."""
IN_A_ROW = 3
"""A run ends after so many refused steps in a row."""
SCHEMA = 1


@dataclass(frozen=True)
class RefusedStep:
    """A step that was not made, or not completed, because of NaN or infinity."""

    stage: str
    """observe: found before the update. update: found in an optimizer step, which ended the update."""
    fault: NonFinite
    parts: list[tuple[Batch, Bootstraps]]
    """By rank: the batch as collated, or the minibatch, and the states to bootstrap from."""
    sampling: Sampling
    coef: float
    tokens: int
    """The token budget of one forward and backward pass."""
    whole: bool = True
    """Whether no weight has moved: no optimizer step came before it in its training step."""

    def message(self) -> str:
        where = "before the update" if self.stage == "observe" else "in the update"
        kept = "nothing has changed" if self.whole else "the optimizer steps before it stand"
        return f"a step was refused, {where}: {self.fault.message()}; {kept}"


def refuse(
    stage: str, fault: NonFinite | None, batch: Batch, bootstraps: Bootstraps, *, tokenizer: Any, **more: Any
) -> RefusedStep | None:
    """The refused step that all ranks agree on; None where no rank found NaN or infinity. Every rank must call."""
    rank = distributed.rank()
    met = first(distributed.gathered(None if fault is None else located(fault, batch, tokenizer, rank)))
    if met is None and stage == "observe":
        return None
    parts = distributed.gathered((batch.to("cpu"), dict(bootstraps)))
    # Each rank's own gradient may be finite, and their sum infinite.
    return RefusedStep(stage, met or NonFinite("gradient norm", "not finite"), parts, **more)


def name(given: Any) -> str | None:
    """A model's name, which another process can load; for an object, its class in angle brackets."""
    return given if given is None else str(given) if isinstance(given, (str, Path)) else f"<{type(given).__name__}>"


def write(path: str | Path, refusal: RefusedStep | None, about: Mapping[str, Any], weights: Any) -> Path:
    """Write the bundle whole, in place of an older one of that name. `about`: algorithm, options, names of the models.

    Raises: OperantError without a refusal, or where the disk refuses.
    """
    if refusal is None:
        raise OperantError("the last step was not refused: there is nothing to write a bundle of")
    path, bag = Path(path), NamedTensors(finite=False)
    held = {f.name: getattr(refusal, f.name) for f in fields(refusal)}
    held |= {"fault": asdict(refusal.fault), "sampling": values(refusal.sampling)}
    held["parts"] = [(_plain(batch), ends) for batch, ends in refusal.parts]
    content = encode({"refusal": held, "about": dict(about), "weights": weights}, "bundle", bag)
    told = {"schema": SCHEMA, "kind": "refused", "time": time.strftime("%Y-%m-%d %H:%M:%S")}
    temporary = path.with_name(f".{path.name}.tmp")
    with atomic_io.explained(path):
        atomic_io.mkdir(path.parent)
        for old in (temporary, path):
            atomic_io.remove_tree(old)
        write_folder(temporary, bag, content, told | {"made_by": machine.about()})
        atomic_io.rename(temporary, path)
        atomic_io.sync_folder(path.parent)
    return path


def read(path: str | Path) -> tuple[RefusedStep, dict[str, Any], Any]:
    """The refused step, `about`, and the trained weights. Raises: OperantError for a damaged bundle."""
    path = Path(path)
    if not (path / manifest.NAME).exists():
        raise OperantError(f"{path} is no bundle of a refused step: they lie in a run's refused/, as step-00012")
    if wrong := manifest.problem(path):
        raise OperantError(f"{path} is damaged: {wrong}; it cannot be replayed")
    try:
        with atomic_io.explained(path, "read"):
            told, (content, tensors) = manifest.read(path), read_folder(path)
        if told.get("kind") != "refused" or told.get("schema") != SCHEMA:
            raise OperantError(f"{path} is no bundle of a refused step that this operant reads")
        held = decode(content, tensors)
        return _refusal(held["refusal"]), held["about"], held["weights"]
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, OperantError):
            raise
        raise OperantError(f"{path} is damaged: {error}; it cannot be replayed") from error


def _plain(batch: Batch) -> dict[str, Any]:
    held = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return held | {"choices": None if batch.choices is None else asdict(batch.choices)}


def _batch(held: dict[str, Any]) -> Batch:
    choices = held.get("choices")
    return Batch(**held | {"choices": None if choices is None else Choices(**choices)})


def _refusal(held: dict[str, Any]) -> RefusedStep:
    parts = [(_batch(batch), ends) for batch, ends in held["parts"]]
    made = RefusedStep(**held | {"parts": parts, "fault": NonFinite(**held["fault"])})
    return replace(made, sampling=Sampling(**held["sampling"]))


def keep(path: Path, put: Callable[[Path], Any]) -> None:
    """Write one more bundle of a run and delete the oldest. Raises: OperantError where the disk refuses."""
    put(path)
    with atomic_io.explained(path.parent, "delete"):
        for old in sorted(path.parent.glob("step-*"), key=lambda p: atomic_io.step_of(p) or 0)[:-KEPT]:
            atomic_io.remove_tree(old)
