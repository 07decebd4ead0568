"""A refused step as a folder, from which `operant replay` repeats it in another process; and the fault of a pass.

    refused/step-00012/tensors.safetensors   the batch before the step, and the trained weights
                       state.json            the fault and its place, the options, the name of the model
                       manifest.json         sizes and hashes

Its tensors may contain NaN and infinity. Nothing in it is unpickled.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from operant import machine
from operant.models.policy import Policy
from operant.objectives import losses
from operant.options import values
from operant.rollouts.collate import cut, units
from operant.sampling import Sampling
from operant.storage import atomic_io, manifest
from operant.storage.state_codec import NamedTensors, decode, encode, read_folder, write_folder
from operant.training.nonfinite import NonFinite, RefusedStep, find_at_actions
from operant.training.objective import Objective, forward
from operant.types import Batch, Choices, OperantError, require

KEPT = 3
"""The number of bundles that a run keeps: the newest ones."""
IN_A_ROW = 3
"""The number of refused steps in a row after which a run ends."""
SCHEMA = 1


def write(path: str | Path, refusal: RefusedStep | None, about: Mapping[str, object], weights: object) -> Path:
    """Write the bundle atomically, in place of an older one. about: algorithm, options and names of the models."""
    require(refusal is not None, "the last step was not refused, so there is no bundle to write")
    path, bag = Path(path), NamedTensors(finite=False)
    plain = asdict(refusal) | {"sampling": values(refusal.sampling)}
    content = encode({"refusal": plain, "about": dict(about), "weights": weights}, "bundle", bag)
    header = {"schema": SCHEMA, "kind": "refused", "time": time.strftime("%Y-%m-%d %H:%M:%S")}
    temporary = path.with_name(f".{path.name}.tmp")
    with atomic_io.explained(path):
        atomic_io.mkdir(path.parent)
        for old in (temporary, path):
            atomic_io.remove_tree(old)
        write_folder(temporary, bag, content, header | {"made_by": machine.about()})
        atomic_io.rename(temporary, path)
        atomic_io.sync_folder(path.parent)
    return path


def read(path: str | Path) -> tuple[RefusedStep, dict[str, Any], Any]:
    """The refused step, `about`, and the trained weights."""
    path = Path(path)
    if not (path / manifest.NAME).exists():
        raise OperantError(
            f"{path} is no bundle of a refused step: bundles are folders in refused/ of a run, such as step-00012"
        )
    if wrong := manifest.problem(path):
        raise OperantError(f"{path} is damaged: {wrong}; it cannot be replayed")
    try:
        with atomic_io.explained(path, "read"):
            header, (content, tensors) = manifest.read(path), read_folder(path)
        if header.get("kind") != "refused" or header.get("schema") != SCHEMA:
            raise OperantError(f"{path} is no bundle of a refused step that this version of operant can read")
        bundle = decode(content, tensors)
        plain = bundle["refusal"]
        parts = [(_batch(batch), bootstraps) for batch, bootstraps in plain["parts"]]
        fault, sampling = NonFinite(**plain["fault"]), Sampling(**plain["sampling"])
        refusal = RefusedStep(**plain | {"parts": parts, "fault": fault, "sampling": sampling})
        return refusal, bundle["about"], bundle["weights"]
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, OperantError):
            raise
        raise OperantError(f"{path} is damaged: {error}; it cannot be replayed") from error


def _batch(plain: dict[str, Any]) -> Batch:
    choices = None if plain.get("choices") is None else Choices(**plain["choices"])
    hinted = None if plain.get("hinted") is None else _batch(plain["hinted"])
    return Batch(**plain | {"choices": choices, "hinted": hinted})


def keep(path: Path, put: Callable[[Path], object]) -> None:
    """Write one more bundle of a run and delete the oldest. Raises: OperantError where the disk refuses."""
    put(path)
    with atomic_io.explained(path.parent, "delete"):
        for old in sorted(path.parent.glob("step-*"), key=lambda p: atomic_io.step_of(p) or 0)[:-KEPT]:
            atomic_io.remove_tree(old)


def first_fault(
    policy: Policy, batch: Batch, objective: Objective, sampling: Sampling, tokens: int
) -> NonFinite | None:
    """Compute forward pass, loss and backward pass of a minibatch as the update does, and return the first fault.

    Returns None if every number is finite. Afterwards the parameters have no gradients.
    """
    given = {"advantage": batch.advantages, "return": batch.returns, "weight": batch.weights}
    if fault := find_at_actions(given, batch):
        return fault
    try:
        for rows in map(torch.tensor, cut(batch, units(batch, objective.unit), tokens)):
            piece = batch.rows(rows)
            out, terms = forward(policy, piece, objective, sampling)
            loss = terms["loss"]
            seen = {"log-prob": out.logprobs, "logsumexp": out.logsumexp, "value": out.values}
            if fault := find_at_actions(seen | ({"loss": loss} if loss.ndim == 2 else {}), piece):
                return replace(fault, row=int(rows[fault.row]))
            whole = losses.total(loss, piece)
            if not bool(whole.isfinite()):
                return NonFinite("loss", str(float(whole.detach())))
            whole.backward()
            for name, p in reversed(list(policy.named_parameters())):  # in the order of the backward pass
                if p.grad is not None and not bool(p.grad.isfinite().all()):
                    return NonFinite(f"gradient of {name}", str(float(p.grad[~p.grad.isfinite()][0])))
        norms = [p.grad.norm() for p in policy.parameters() if p.grad is not None]
        norm = float(torch.stack(norms).norm()) if norms else 0.0
        return None if norm - norm == 0 else NonFinite("gradient norm", str(norm))
    finally:
        policy.zero_grad()
