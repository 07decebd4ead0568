"""Repeats a refused step in another process, from its bundle, and locates the first NaN or infinity.

    operant replay runs/x/refused/step-00012
    replay("runs/x/refused/step-00012", policy=model)       # if the model was a Python object

It loads the run's initial model and the trained weights of that step, and repeats the computation in which the value
was found: scoring and advantages, or forward pass, loss and backward pass.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from operant.models import loading
from operant.models.policy_state import PolicyState
from operant.training import refused_step
from operant.training.learner import Learner
from operant.training.nonfinite import NonFinite, RefusedStep, find_in_batch, first, located
from operant.training.saved_learner import is_object, objects_among
from operant.training.stages import TrainingStep, credited
from operant.types import OperantError


@dataclass(frozen=True)
class Replayed:
    """The recorded result and that of the repeated step."""

    recorded: NonFinite
    found: NonFinite | None
    """None if every number is finite this time."""
    module: str | None
    """The first module of the model with NaN or infinity in its output."""

    @property
    def same(self) -> bool:
        return self.found == self.recorded


def replay(path: str | Path, *, policy: object = None, reference: object = None, **options: object) -> Replayed:
    """Repeat the step of a bundle. policy, reference, options: the initial models and the options, if they were Python
    objects."""
    refusal, about, weights = refused_step.read(path)
    objects = {name: model for name, model in (("policy", policy), ("reference", reference)) if model is not None}
    named = {"policy": about["policy"], "reference": about["reference"], **about["options"]}
    models = {option: named[option] for option in loading.MODELS if named.get(option) is not None}
    named |= loading.copies(models, Path(path).resolve().parent.parent, warnings.warn) | objects | options
    for what in ("policy", "reference", *objects_among(about["options"], about["algorithm"])):
        if what not in options and is_object(named[what]):
            how = f"**{{{what!r}: ...}}" if "." in what else f"{what}=..."
            takes = f"operant.runs.replay.replay({str(path)!r}, {how}) takes what the run had at its start"
            raise OperantError(f"the {what} of {path} was a Python object, {named[what]}: {takes}")
    learner = Learner(named.pop("policy"), algorithm=about["algorithm"], total_steps=about["step"] + 1, **named)
    try:
        PolicyState(learner.policy).load_state_dict(weights)
    except RuntimeError as error:
        remedy = "pass the model that the run started from"
        raise OperantError(f"the weights of {path} do not fit its policy: {remedy}") from error
    learner.budget.tokens = refusal.tokens
    with _first_nonfinite_module(learner.policy) as modules:
        found = first(_repeat(learner, refusal, rank) for rank in range(len(refusal.parts)))
    return Replayed(refusal.fault, found, next(iter(modules), None))


def _repeat(learner: Learner, refusal: RefusedStep, rank: int) -> NonFinite | None:
    """Repeat one rank's part of the step, and return its first NaN or infinity."""
    batch, bootstraps = refusal.parts[rank]
    batch = batch.to(learner.policy.device)
    if refusal.stage == "observe":
        step = TrainingStep([], None, refusal.sampling)
        step.batch, step.collated, step.bootstraps = batch, batch, bootstraps
        learner.stages.run(step, "score", "look")
        batch = credited(learner, step.batch, refusal.coef).to("cpu")
        fault = find_in_batch(batch)
    else:
        objective = learner.objective(refusal.sampling)
        fault = refused_step.first_fault(learner.policy, batch, objective, refusal.sampling, refusal.tokens)
    return None if fault is None else located(fault, batch, learner.policy.tokenizer, rank)


@contextmanager
def _first_nonfinite_module(policy: torch.nn.Module) -> Iterator[list[str]]:
    """A list that gets the name of the first module with NaN or infinity in its output."""
    found: list[str] = []

    def check(name: str, module: torch.nn.Module, inputs: tuple[object, ...], out: object) -> None:
        tensor = out[0] if isinstance(out, tuple) else out
        if not found and isinstance(tensor, torch.Tensor) and not bool(tensor.isfinite().all()):
            found.append(name)

    leaves = [(name, module) for name, module in policy.named_modules() if not list(module.children())]
    hooks = [module.register_forward_hook(partial(check, name)) for name, module in leaves]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def print_replay(path: str | Path) -> bool:
    """Replay a bundle and print the result; return whether it is the recorded one."""
    refusal, about, _ = refused_step.read(path)
    where = "before the update" if refusal.stage == "observe" else "in an optimizer step"
    print(f"step {about['step']} of {about['algorithm']} on {about['policy']}: refused {where}")
    print(f"recorded: {refusal.fault.message()}")
    result = replay(path)
    if result.same:
        print("repeated: the same")
    else:
        print(f"repeated: {result.found.message() if result.found else 'every number is finite'}")
        print("another machine, device, version or number of threads can make the difference: see the manifest")
    if result.module:
        print(f"first module: the output of {result.module} has NaN or infinity")
    return result.same
