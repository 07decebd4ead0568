"""Resuming a run: its configuration and what may change in it, the state of the user's own parts, what was measured.

An option that is given beside `--resume` is a changed one: checked, recorded in `changes.jsonl`, in force from the next
step. What the checkpoint was made of cannot change, and is refused before anything loads.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from operant.options import is_none, resolve
from operant.runs.config import Config, as_mapping, config_schema, configure
from operant.runs.folder import read_config
from operant.storage import atomic_io, old_names
from operant.storage.checkpoint_store import about, to_resume
from operant.training.learner import Learner
from operant.types import OperantError

OBJECTS = ("policy", "tasks", "reward", "reference", "evaluate")
"""Options that may be Python objects, which no file holds: they have to be given again."""
_WEIGHTS = "the checkpoint's weights are of that shape"
_BEGAN = "the run began so, and what it drew and learnt since rests on it"
FIXED = {
    "algorithm": _BEGAN,
    "policy": _BEGAN,
    "reference": _BEGAN,
    "preset": "its values stand in config.yaml one by one: give those by name",
    "learner.seed": _BEGAN,
    "lora.": _WEIGHTS,
    "value.layers": _WEIGHTS,
    "value.critic": _WEIGHTS,
    "value.init": _BEGAN,
    "model.train_layers": _WEIGHTS,
    "model.train_head": _WEIGHTS,
    "model.precision": _WEIGHTS,
}
"""What cannot change on the way, and why; a name that ends in a dot is a whole group."""
FIXED_OPTIMIZER = {"optimizer.states": "the optimizer's state is of that shape; --fresh-optimizer begins it anew"}


@dataclass(frozen=True)
class Change:
    """An option that a resumed run goes on with in another way."""

    name: str
    old: Any
    new: Any


def stored(out: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the run in `out`, with those that are given laid over them, by full name.

    Raises: OperantError where `out` is no run, or where what was a Python object there is not given again.
    """
    held = read_config(out)
    for name in OBJECTS:
        if _is_object(held.get(name)) and name not in given:
            raise OperantError(
                f"{out} was started from Python with {name}={held[name]}: go on from there, with "
                f"operant.train(..., {name}=..., out={str(out)!r}, resume=True)"
            )
    began = held.get("algorithm", "ppo")
    if given.get("algorithm", began) != began:  # whose options have other names
        raise _refused(Change("algorithm", began, given["algorithm"]), FIXED["algorithm"])
    known = config_schema(began)
    old_names.refuse(given)
    whole, own = resolve(known, held), resolve(known, given)
    if is_none(whole.get("reference", "copy")):  # earlier versions wrote down a price that nothing was charged
        whole = {name: value for name, value in whole.items() if name not in ("kl.coef", "kl.loss_coef")}
    pinned = {n for n in ("policy", "reference") if str(whole.get(n)).startswith(f"{own.get(n)}@")}
    return whole | {name: value for name, value in own.items() if name not in pinned}


def _is_object(value: Any) -> bool:
    return str(value).startswith("<")


def changes(out: Path, config: Config, *, fresh_optimizer: bool = False) -> list[Change]:
    """What `config` has otherwise than the run in `out`. Raises: OperantError for what cannot change."""
    old, new = _flat(read_config(out)), _flat(as_mapping(config))
    found = [Change(name, old[name], value) for name, value in new.items() if name in old and old[name] != value]
    fixed = FIXED if fresh_optimizer else FIXED | FIXED_OPTIMIZER
    for change in found:
        named = change.name if change.name in fixed else change.name.partition(".")[0] + "."
        if named in fixed and not (_is_object(change.old) and change.name in OBJECTS):
            raise _refused(change, fixed[named])
    return found


def _refused(change: Change, why: str) -> OperantError:
    return OperantError(
        f"{change.name}={change.new!r} beside --resume: the run has {change.old!r}, and {why}; "
        "leave it out, or start a new run"
    )


def _flat(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """By full name. A reward is a mapping, too, and stays one."""
    flat = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping) and key not in OBJECTS:
            flat |= {f"{key}.{inner}": v for inner, v in value.items()}
        else:
            flat[key] = value
    return flat


def changed_since(out: Path, step: int, config: Config) -> list[Change]:
    """Changes that an earlier resume recorded, which the checkpoint of `step` does not know of yet."""
    now = _flat(as_mapping(config))
    told = [record for record in atomic_io.records(out / "changes.jsonl") if record["step"] >= step]
    return [Change(r["name"], r["old"], r["new"]) for r in told if now.get(r["name"]) == r["new"]]


def in_force(found: list[Change], learner: Learner) -> None:
    """What a checkpoint brings back as it was, though its option has changed since."""
    names = {change.name for change in found}
    if names & {"kl.coef", "kl.control"}:
        learner.controller.coef = learner.kl.coef
    if names & {"update.micro_tokens", "update.micro_batch"}:
        learner.budget = learner.options["update"].budget()
    options = learner.options["optimizer"]
    for group in learner.optimizer.param_groups:
        group |= {n: getattr(options, n) for n in ("betas", "eps") if f"optimizer.{n}" in names}
        if "optimizer.weight_decay" in names and all(p.ndim > 1 for p in group["params"]):
            group["weight_decay"] = options.weight_decay


def finished(out: Path, given: Mapping[str, Any], *, fresh_optimizer: bool = False) -> str | None:
    """Where nothing is left to do: a sentence that says so. Raises: OperantError as `stored` and `changes`."""
    config = configure(stored(out, given))
    changes(out, config, fresh_optimizer=fresh_optimizer)
    steps = config.train.steps
    exported = (out / "export" / "config.json").is_file()
    path = to_resume(out / "checkpoints", lambda text: None, fresh_optimizer=True) if exported else None
    done = about(path)["step"] if path else 0
    if path is None or done < steps:
        return None
    return f"{out} is finished: {done} of {steps} steps; --steps {2 * steps} would go on"


# --- state of the run's own ------------------------------------------------------------------------------------------


def stateful_parts(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """Whatever has `state_dict` and `load_state_dict`, by name: a reward (or parts of one), a world, a task source.

    One without is taken as stateless. A torch module is taken as fixed, as a reward model is.
    """
    if isinstance(thing, torch.nn.Module):
        return
    if all(callable(getattr(thing, method, None)) for method in ("state_dict", "load_state_dict")):
        yield name, thing
        return
    inside = getattr(thing, "rewards", None)
    for part, held in inside.items() if isinstance(inside, Mapping) else ():
        yield from stateful_parts(f"{name}/{part}", held[0] if isinstance(held, tuple) else held)
    if getattr(thing, "reward", None) is not None:
        yield from stateful_parts(name, thing.reward)


def decided(learner: Learner) -> dict[str, Any]:
    """What the probe found out about each model: which ways of computing agree there."""
    return {name: {k: v for k, v in asdict(model.modes).items() if k != "finish"} for name, model in _models(learner)}


def decide(learner: Learner, held: Mapping[str, Any]) -> None:
    """Take that from the run's beginning, so that a resumed run computes in the same way."""
    for name, model in _models(learner):
        known = asdict(model.modes)
        model.modes = replace(model.modes, **{k: v for k, v in held.get(name, {}).items() if k in known})


def _models(learner: Learner) -> Iterator[tuple[str, Any]]:
    yield "policy", learner.policy
    if learner.policy.critic is not None:
        yield "critic", learner.policy.critic
    if learner.reference is not None:
        yield "reference", learner.reference.policy
