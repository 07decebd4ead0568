"""Resuming a run: its options and their changes.

An option passed with `--resume` changes the run: it is checked, recorded in `changes.jsonl` and applied from the next
step on. An option that the checkpoint depends on cannot change, and is refused before any model loads.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, get_args

from operant.data.sources import share
from operant.options import defaults, flat, is_none, kinds, resolve
from operant.runs import named_parts
from operant.runs.config import Config, as_mapping, config_schema, configure, describe, named_in, with_short_names
from operant.runs.folder import GOING_ON, RunFolder, as_line, is_export, read_config, state
from operant.runs.run import Run
from operant.storage import atomic_io, old_names
from operant.storage.checkpoint_store import about, to_resume
from operant.training.learner import Learner
from operant.training.optimizer import without_unused
from operant.training.saved_learner import is_object
from operant.types import OperantError

OBJECTS = ("policy", "tasks", "replies", "reward", "env", "engine", "reference", "evaluate")
"""Options that may be Python objects: no file can hold them, so a resume needs them again."""
_BEGAN = """algorithm policy reference env rollouts_ahead learner.seed value.init evaluate evaluation.samples
evaluation.seeds evaluation.sampling evaluation.beams evaluation.length_penalty""".split()
_WEIGHTS = """policy. lora. soft_prompt. output_mlp. value.layers value.critic model.train_layers model.train_head
model.precision""".split()
FIXED = {
    **dict.fromkeys(_BEGAN, "it cannot change on resume, as the results so far depend on it"),
    **dict.fromkeys(_WEIGHTS, "the checkpoint's weights have that shape"),
    "preset": "its values are in config.yaml one by one; change those by name",
}
"""Options that cannot change on resume, and the reason; a name that ends in a dot is a whole group."""
_STATE = "the optimizer's state has that format; --fresh-optimizer starts with a new one"
FIXED_OPTIMIZER = dict.fromkeys(("optimizer.kind", "optimizer.states", "optimizer.momentum"), _STATE)


class Change(NamedTuple):
    """An option that a resume changes."""

    name: str
    old: Any
    new: Any


def stored_options(out: Path, changed: Mapping[str, object]) -> dict[str, object]:
    """The options of the run in `out`, overridden by the `changed` ones, by full name.

    Raises: OperantError if `out` is not a run folder, or if an option was a Python object and is missing in `changed`.
    """
    config = named_parts.flattened(read_config(out))
    changed = named_parts.flattened(with_short_names({}, changed)[1])
    above = {name: describe(value) for name, value in changed.items()}
    for others in named_parts.replaced(config, above).values():
        config = {name: value for name, value in config.items() if name not in others}
    of_parts = [n for kind in named_parts.KINDS for n in named_parts.options_of(config, kind)]
    odd = [name for name in (*OBJECTS, *of_parts) if of_python(config.get(name)) and name not in changed]
    if odd and odd[0] not in OBJECTS:
        parts = named_parts.groups(named_in(changed, config))
        types, usual = kinds(parts), {f"{g}.{n}": x for g, p in parts.items() for n, x in defaults(p).items()}
        config = {n: x for n, x in config.items() if n not in odd or describe(usual.get(n)) != x}
        texts = {n for n in odd if isinstance(usual.get(n), str) or str in (kind := types.get(n), *get_args(kind))}
        odd = [n for n in odd if n in config and n not in texts]
    for name in odd[:1]:
        how = f"operant.train(..., {name}=..., out={str(out)!r}, resume=True)" if name in OBJECTS else "that option"
        why = f"{out} was started from Python with {name}={config[name]}"
        raise OperantError(f"{why}: resume it from Python, with {how}")
    algorithm = config.get("algorithm", "ppo")
    if changed.get("algorithm", algorithm) != algorithm:  # another algorithm has other options
        raise _refused(Change("algorithm", algorithm, changed["algorithm"]), FIXED["algorithm"])
    known = config_schema(algorithm, named_in(changed, config))
    old_names.refuse(changed)
    options, overrides = resolve(known, config), resolve(known, changed)
    if is_none(options.get("reference", "copy")):  # earlier versions recorded a KL coefficient that was never applied
        options = {name: value for name, value in options.items() if name not in ("kl.coef", "kl.loss_coef")}
    if "optimizer.kind" in overrides:
        options = without_unused(options, overrides["optimizer.kind"])
    pinned = {n for n in ("policy", "reference") if str(options.get(n)).startswith(f"{overrides.get(n)}@")}
    return options | {name: value for name, value in overrides.items() if name not in pinned}


def of_python(value: object) -> bool:
    """Whether a recorded option stands for an object. Earlier versions wrote `<Task>` and `<int64>` into lists."""
    listed = str(value) if isinstance(value, list) else ""
    return is_object(value) or bool(re.fullmatch(r"\[('<Task>'(, )?)+\]|.*'<(u?int|float|bool)\d*_?>'.*", listed))


@contextmanager
def elsewhere(out: Path) -> Iterator[None]:
    """Let an error say where the run was started, if the error is about a file that is there and not here."""
    try:
        yield
    except OperantError as error:
        began, lies_there = Path(), False
        with suppress(OperantError, OSError, ValueError, TypeError, KeyError):
            began = Path(json.loads((out / "environment.json").read_text(encoding="utf-8"))["folder"])
            names = re.findall(r"[^:,'\"{}\[\]]+", str(read_config(out)))
            missing = {name for name in names if (began / name).exists() and not Path(name).exists()}
            lies_there = any(name in str(error) for name in missing)
        if not lies_there:
            raise
        command = f"cd {shlex.quote(str(began))} && operant train --resume {shlex.quote(str(out.resolve()))}"
        raise OperantError(f"{error}; {out} was started in {began}, so resume it there: {command}") from error


def changes(out: Path, config: Config, *, fresh_optimizer: bool = False) -> list[Change]:
    """The options of `config` that differ from the run in `out`. Raises: OperantError for one that cannot change."""
    old, new = by_name(read_config(out)), by_name(as_mapping(config))
    found = [Change(name, old[name], value) for name, value in new.items() if name in old and old[name] != value]
    fixed = FIXED if fresh_optimizer else FIXED | FIXED_OPTIMIZER
    evaluates = config.train.evaluates and (old.get("evaluate") or old.get("tasks") is None)
    for change in found:
        if change.name.startswith("evaluat") and not evaluates:  # it begins or ends, so that nothing is compared
            continue
        if change.name == "partial_rollout_tokens" and not (change.old and change.new):
            raise _refused(change, "it can have another number, but neither begin nor end on resume")
        if change.name == "samples" and config.train.partial_rollout_tokens:
            raise _refused(change, "so many replies to each prompt have begun (partial_rollout_tokens)")
        if change.name.startswith("sampling.") and config.train.partial_rollout_tokens:
            raise _refused(change, "replies that have begun were drawn with it (partial_rollout_tokens)")
        named = change.name if change.name in fixed else change.name.partition(".")[0] + "."
        if named in fixed and not (of_python(change.old) and change.name in OBJECTS):
            raise _refused(change, fixed[named])
    return found


def _refused(change: Change, why: str) -> OperantError:
    has = f"the run has {change.old!r}, and {why}; leave it out, or start a new run"
    return OperantError(f"{change.name}={change.new!r} with --resume: {has}")


def by_name(config: Mapping[str, object]) -> dict[str, object]:
    """Options by full name. What may be an object, such as a mapping of rewards, stays one value."""
    return flat(named_parts.flattened(config), OBJECTS)


def changes_after(out: Path, step: int, config: Config) -> list[Change]:
    """Changes that an earlier resume recorded at `step` or later, so that the checkpoint of `step` lacks them."""
    now, path, found = by_name(as_mapping(config)), out / "changes.jsonl", []
    for record in atomic_io.records(path):
        (name,) = old_names.current({"schema": record.get("schema", 1), record["name"]: None}, path)
        if record["step"] >= step and now.get(name) == record["new"]:
            found.append(Change(name, record["old"], record["new"]))
    return found


def apply_changes(found: list[Change], learner: Learner) -> None:
    """Apply changed options to the parts of the learner that a checkpoint has restored with their old values."""
    names, done = {change.name for change in found}, learner.progress.step
    if fewer := next((change.new for change in found if change.name == "steps" and change.new < done), None):
        raise OperantError(f"steps={fewer} with --resume: the run has done {done} steps; give at least as many")
    if names & {"kl.coef", "kl.control"}:
        learner.controller.coef = learner.kl.coef
    if names & {"update.micro_tokens", "update.micro_batch"}:
        fresh = learner.options["update"].budget()
        learner.budget.tokens, learner.budget.fixed = fresh.tokens, fresh.fixed  # the object that checkpoints save
    names |= {"optimizer.eps"} if "optimizer.eps_placement" in names else set()  # tensorflow leaves its last step's
    options = learner.options.get("optimizer")
    for group in learner.optimizer.param_groups if learner.optimizer is not None else ():
        group |= {n: getattr(options, n) for n in ("betas", "eps", "alpha") if f"optimizer.{n}" in names}
        if "optimizer.weight_decay" in names and all(p.ndim > 1 for p in group["params"]):
            group["weight_decay"] = options.weight_decay


def finished_message(out: Path, changed: Mapping[str, object], *, fresh_optimizer: bool = False) -> str | None:
    """A sentence for the user if the run in `out` has no step left, else None.

    Raises: OperantError like `stored_options` and `changes`.
    """
    with elsewhere(out):
        config = configure(stored_options(out, changed))
    found = changes(out, config, fresh_optimizer=fresh_optimizer)
    path = to_resume(out / "checkpoints", lambda _: None, fresh_optimizer=True) if is_export(out / "export") else None
    done = about(path)["step"] if path else 0
    if state(out, done, config.train.steps) != "finished":
        return None
    given = " and ".join(change.name for change in found if change.name != "steps")
    more = f"; {given} would change with it, and is not stored" if given else ""
    return f"{out} is finished: {done} of {done} steps; --steps {2 * done} would continue it{more}"


def go_on(run: Run, path: Path | None, changed: list[Change], *, fresh_optimizer: bool) -> None:
    """Load the checkpoint at `path`, and truncate the logs to its step. Without one, the run starts again."""
    folder = run.folder
    step = run.checkpoints.resume(path, fresh_optimizer=fresh_optimizer) if path is not None else 0
    # Other ranks than the first have a folder of their own, and the changes are in that of the first.
    found = changed + changes_after(folder.checkpoints.parent, step, run.config)
    apply_changes(found, run.learner)
    if run.evaluation.changed({change.name: (change.old, change.new) for change in found}):
        run.checkpoints.best = None  # its number is of the old kind
    if mixed := run.parts.order.others and share(run.config.train.evaluate) is not None:
        run.evaluation.before = None
    if run.first:
        others = ["the tasks are others than those before: the run goes on with these"] * run.parts.order.others
        others += ["it may have trained on some that are held out now; results from before are left out"] * mixed
        for said in others + cut_after(folder, step, about(path)["lengths"] if path is not None else None):
            run.trackers.warn(said)
        run.metrics = folder.metrics()
        if step < run.config.train.steps:  # what was judged at an earlier end says nothing of the next one
            with atomic_io.explained(folder.path):
                atomic_io.remove(folder.path / "evaluation.json")
        if changed:
            folder.change_config(as_mapping(run.config), [{"step": step, **change._asdict()} for change in changed])
            listed = "; ".join(f"{change.name} is {change.new!r}, was {change.old!r}" for change in changed)
            folder.log_message(f"changed from step {step + 1} on: {listed}")
        fresh = f", of {path.name}, with a fresh optimizer" if path is not None and fresh_optimizer else ""
        folder.log_message(f"{GOING_ON}{step}{fresh}")
        folder.going_on = True
    if path is not None and not (changed or fresh_optimizer):
        run.checkpoints.save_last(to_go_on=True)  # a kill may have come between two kinds


def cut_after(folder: RunFolder, step: int, lengths: Mapping[str, int] | None = None) -> list[str]:
    """Delete the records of a run folder of the steps after `step`, since a resumed run repeats these steps.

    lengths: the result of `lengths` in the checkpoint; empty for a checkpoint of an older version.
    Returns a sentence for each file that lacks lines of earlier steps. Raises: OperantError if the disk refuses.
    """
    lengths, lost = lengths or {}, list[str]()
    for path in (folder.metrics_path, folder.distributions_path):
        if path.exists() and step:
            _cut_lines(path, step, lengths.get(path.name))
        elif path.exists():
            with atomic_io.explained(path):
                atomic_io.truncate(path, 0)
        missing = sorted(set(range(1, step + 1)) - {record["step"] for record in atomic_io.records(path)})
        if missing and (path.exists() or lengths.get(path.name)):
            named = ", ".join(map(str, missing[:5])) + (" ..." if len(missing) > 5 else "")
            lacks = f"{path} lacks its lines of {len(missing)} of {step} steps ({named})"
            how = "to have them back, stop, put back a copy of that file and resume again"
            lost.append(f"{lacks}, so charts and findings do without them; {how}")
    for part in (folder.rollouts_path, folder.probes_path, folder.path / "refused"):
        for left in part.glob("step-*"):
            if (atomic_io.step_of(left) or 0) > step:
                with atomic_io.explained(left, "delete"):
                    (atomic_io.remove_tree if left.is_dir() else atomic_io.remove)(left)
    return lost


def _cut_lines(path: Path, step: int, length: int | None) -> None:
    """Cut a file of lines to `length` bytes; to the lines up to `step` where that is not the end of such a line."""
    with atomic_io.explained(path, "read"):
        held = path.read_bytes()
    whole = length is not None and len(held) >= length and (length == 0 or held[:length].endswith(b"\n"))
    if whole and all(record["step"] <= step for record in atomic_io.records(path, length)):
        with atomic_io.explained(path):
            atomic_io.truncate(path, length)
    else:
        atomic_io.write(path, "".join(as_line(one) for one in atomic_io.records(path) if one["step"] <= step))
