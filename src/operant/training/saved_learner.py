"""A learner on disk, which goes on bit-identically: `Learner.save` and `Learner.load`.

    folder/learner.json     marks the folder; the models that the learner began from, by name and by hash
    folder/start/           copies of those that are plain folders (`models.loading`)
    folder/step-00012/      a checkpoint (`storage.checkpoint`) with everything that changes, and the options

Python objects, such as a model or an optimizer, cannot be stored: what is restored from them is their state, and
`load` asks for the objects again.
"""

import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch

from operant import distributed
from operant.algorithms import find
from operant.models.loading import MODELS, Trained, copies, copy_models
from operant.options import kinds, resolve
from operant.storage import atomic_io, hub, old_names
from operant.storage.checkpoint import Part, RunState, read_extra
from operant.storage.checkpoint_store import Retention, newest_whole
from operant.training.options import checked_options, schema
from operant.training.parts import LearnerParts, name_of_model
from operant.types import OperantError, require, shown

MARK = "learner.json"
SCHEMA = 1
HASHES = {"policy": "frozen", "reference": "fingerprint"}
"""The parts of a learner that keep a hash of weights that do not change, and the attribute that has it."""

L = TypeVar("L", bound=LearnerParts)


def save(learner: LearnerParts, folder: Path) -> Path:
    """Write a learner, as `Learner.save`."""
    if learner.updating:
        raise OperantError("the last step failed half-way, so the weights are those of no step: nothing was saved")
    attempts = distributed.gathered(learner.attempts.state_dict())
    state, first = _state(learner), distributed.rank() == 0
    content = distributed.together(lambda: prepare(learner, folder, attempts, state) if first else None)
    if first or state.ranks is not None:
        state.save(folder, learner.progress.step, content, retention=Retention(keep=1))
    return folder


def prepare(learner: LearnerParts, folder: Path, attempts: Sequence[object], state: RunState) -> dict[str, object]:
    """Write what a learner's folder has beside the checkpoint, and return what the checkpoint has beside the state.

    attempts: the state of those of every rank. Raises: OperantError as `Learner.save`.
    """
    options = learner.options
    started = {**learner.named, "lora.adapter": options["lora"].adapter, "value.critic": options["value"].critic}
    by_name = {option: started[option] for option in MODELS if started[option] not in (None, "copy", "none")}
    models = {option: str(name) for option, name in by_name.items() if not is_object(name)}
    called = {option: learner.copied.get(name) or hub.pinned(name) for option, name in models.items()}
    kept = {name: p for name, p in state.parts.items() if name != "reference" or learner.reference.rule == "frozen"}
    hashes = {name: getattr(kept.get(name), of, None) for name, of in HASHES.items()}
    mark = {"schema": SCHEMA, "models": called, "hashes": hashes}
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        there = _read_mark(folder)
        require(there is not None, f"{folder} is there already and is no folder of a saved learner: choose another one")
        if there != mark:
            raise OperantError(
                f"{folder} holds a learner that began from other weights ({_listed(there)}; this one: "
                f"{_listed(mark)}): choose another folder, or delete that one"
            )
    content = {
        "given": learner.given,
        "total_steps": learner.total_steps,
        "options": {"schema": old_names.SCHEMA}
        | {name: plain_option(x) for name, x in learner.option_values().items()},
        "decided": measured_modes(learner),
        "history": learner.history,
        "attempts": attempts,
    }
    with atomic_io.explained(folder, "save the learner to"):
        atomic_io.mkdir(folder)
    atomic_io.write(folder / MARK, json.dumps(mark, indent=1))
    copy_models(models, folder, called)
    # Strict JSON turns NaN into null, because a checkpoint refuses NaN and infinity.
    return json.loads(atomic_io.strict_json(content))


def load(kind: type[L], folder: Path, objects: Mapping[str, object], options: Mapping[str, object]) -> L:
    """Make a learner from its folder, as `Learner.load`.

    objects: the constructor's arguments that may be Python objects; None: not given.
    """
    mark, path = _read_mark(folder), newest_whole(folder, warnings.warn) if folder.is_dir() else None
    if mark is None or path is None:
        raise OperantError(f"{folder} {why_none(folder)}")
    content = read_extra(path)
    made, stored = dict(content["given"]), old_names.current(content["options"], path)
    given = {name: thing for name, thing in objects.items() if thing is not None}
    if surplus := [name for name in given if not is_object(made[name])]:
        raise OperantError(
            f"{surplus[0]}={shown(given[surplus[0]])}: the learner in {folder} has {surplus[0]}={made[surplus[0]]!r}, "
            "which is loaded with it; leave it out"
        )
    if needed := [f"{name}={what}" for name, what in made.items() if is_object(what) and name not in given]:
        names = ", ".join(f"{name.partition('=')[0]}=..." for name in needed)
        raise OperantError(
            f"{folder} was saved with {', '.join(needed)}, which no file can hold: give the same again, as it was at "
            f"first: Learner.load({str(folder)!r}, {names})"
        )
    algorithm = given.get("algorithm", made["algorithm"])
    again = resolve(schema(find(algorithm)), options)
    if fixed := [name for name in again if not is_object(stored.get(name))]:
        raise OperantError(
            f"{fixed[0]}={shown(again[fixed[0]])}: a loaded learner goes on with its own options, "
            f"{fixed[0]}={stored.get(fixed[0])!r}; leave it out"
        )
    if needed := [f"{name}={stored[name]}" for name in objects_among(stored, algorithm) if name not in again]:
        raise OperantError(f"{folder} was saved with {', '.join(needed)}, which no file can hold: give the same again")
    models = copies(mark["models"], folder, warnings.warn)
    started = {**mark["models"], **models}
    stored |= {option: name for option, name in started.items() if "." in option}
    arguments = {**made, **{option: name for option, name in started.items() if "." not in option}, **given}
    composed = checked_options(algorithm, {**stored, **again})
    learner = kind(arguments.pop("policy"), total_steps=content["total_steps"], composed=composed, **arguments)
    learner.given, learner.copied = made, {where: mark["models"][option] for option, where in models.items()}
    step, _ = _state(learner).load(path)
    set_modes(learner, content["decided"])
    learner.policy.version = step
    learner.engine.sync(learner.policy, step)
    learner.history = [{name: math.nan if x is None else x for name, x in row.items()} for row in content["history"]]
    if len(content["attempts"]) == distributed.world():
        learner.attempts.load_state_dict(content["attempts"][distributed.rank()])
    return learner


def _state(learner: LearnerParts) -> RunState:
    """Everything that changes in the learner, its environment and its engine."""
    state = RunState()
    state.ranks = distributed if learner.policy.shards is not None else None
    of_user = (*stateful_parts("env", learner.env), *stateful_parts("engine", learner.engine))
    for name, part in (*learner.parts().items(), *of_user):
        state.register(name, part)
    return state


def plain_option(value: object) -> object:
    """An option's value for a file; a Python object is its class in angle brackets."""
    if isinstance(value, (list, tuple)):
        return [plain_option(x) for x in value]
    if isinstance(value, Mapping):
        return {str(name): plain_option(x) for name, x in value.items()}
    return value if isinstance(value, (bool, int, float)) else name_of_model(value)


def is_object(value: object) -> bool:
    """Whether a recorded option stands for an object of a Python program, such as `<function f>`."""
    return re.fullmatch(r"<(function \S+|\w+( of \d+)?)>", str(value)) is not None


def objects_among(stored: Mapping[str, object], algorithm: object) -> list[str]:
    """The options that stand for Python objects; where text is expected, one in angle brackets is itself."""
    types = kinds(schema(find(algorithm)))
    return [n for n, x in stored.items() if is_object(x) and str not in (types.get(n), *get_args(types.get(n)))]


def _read_mark(folder: Path) -> dict[str, Any] | None:
    """The content of a learner's mark; None if there is none."""
    path = folder / MARK
    if not path.is_file():
        return None
    try:
        with atomic_io.explained(path, "read"):
            mark = json.loads(path.read_text(encoding="utf-8"))
        if mark["schema"] == SCHEMA and isinstance(mark["models"], dict) and isinstance(mark["hashes"], dict):
            return mark
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, OperantError):
            raise
    raise OperantError(f"{path} is damaged, or of a newer version of operant: nothing was read or written")


def _listed(mark: Mapping[str, Any]) -> str:
    """The models of a mark and their hashes, for an error."""
    pairs = [*mark["models"].items(), *((f"hash of {name}", value) for name, value in mark["hashes"].items())]
    return ", ".join(f"{name} {value}" for name, value in pairs if value)


def why_none(folder: Path) -> str:
    """Why there is no learner to load."""
    if not folder.exists():
        return "does not exist: Learner.save writes such a folder"
    if (folder / MARK).is_file():
        return "holds no complete save of a learner: save again, or use another folder"
    if (folder / "config.yaml").is_file():
        return f"is the folder of a run, not of a learner: operant.train(resume=True, out={str(folder)!r}) resumes it"
    if (folder / "config.json").is_file():
        return f"is a model, not a saved learner: Learner({str(folder)!r}) starts from it"
    return "is no folder of a saved learner: Learner.save writes one"


def stateful_parts(name: str, thing: Any) -> Iterator[tuple[str, Part]]:
    """The parts with a state, by name: `thing` (a reward, an environment, a task source), or the parts of a reward.

    An object without `state_dict` and `load_state_dict` counts as stateless, and a torch module, such as a reward
    model, as constant.
    """
    if isinstance(thing, torch.nn.Module):
        return
    if all(callable(getattr(thing, method, None)) for method in ("state_dict", "load_state_dict")):
        yield name, thing
        return
    rewards = getattr(thing, "rewards", None)
    for part, reward in rewards.items() if isinstance(rewards, Mapping) else ():
        yield from stateful_parts(f"{name}/{part}", reward[0] if isinstance(reward, tuple) else reward)
    if getattr(thing, "reward", None) is not None:
        yield from stateful_parts(name, thing.reward)


def measured_modes(learner: LearnerParts) -> dict[str, object]:
    """The measured modes of each model: which faster ways to compute give the same results."""
    return {name: {k: v for k, v in asdict(model.modes).items() if k != "finish"} for name, model in _models(learner)}


def set_modes(learner: LearnerParts, modes: Mapping[str, dict[str, object]]) -> None:
    """Set the modes from a checkpoint, so that a resumed run computes as before instead of measuring them again."""
    for name, model in _models(learner):
        known, decided = asdict(model.modes), modes.get(name)
        if decided:
            decided = {"continued": False, "branched_on": False} | decided  # a run from before there were these ways
            model.modes = replace(model.modes, **{k: v for k, v in decided.items() if k in known})


def _models(learner: LearnerParts) -> Iterator[tuple[str, Trained]]:
    yield "policy", learner.policy
    if learner.policy.critic is not None:
        yield "critic", learner.policy.critic
    if learner.reference is not None:
        yield "reference", learner.reference.policy
