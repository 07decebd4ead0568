"""A refused step once more, in another process: from its bundle to the first number that is not finite.

    operant replay runs/x/refused/step-00012
    replay("runs/x/refused/step-00012", policy=model)       # where the model was a Python object

Loads the model that the run began from, puts the trained weights of that moment into it, and makes the passes again
that found the number: observe, advantage; or forward, loss, backward.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from operant.models.policy_state import PolicyState
from operant.runs import initial_models
from operant.storage import manifest
from operant.training import refused_step
from operant.training.find_nonfinite import first_fault
from operant.training.learner import Learner
from operant.training.nonfinite import NonFinite, find_in_batch, first, located
from operant.types import OperantError


@dataclass(frozen=True)
class Replayed:
    """What was recorded, and what came of doing it again."""

    recorded: NonFinite
    found: NonFinite | None
    """None where every number is finite now."""
    module: str | None
    """The first part of the model whose output was not finite, though all that went in was."""

    @property
    def same(self) -> bool:
        return self.found == self.recorded


def replay(path: str | Path, *, policy: Any = None, reference: Any = None) -> Replayed:
    """Make the step of a bundle again. `policy`, `reference`: what it began from, where that has no name.

    Raises: OperantError where the bundle is damaged, or its models cannot be had.
    """
    refusal, about, weights = refused_step.read(path)
    given = {name: thing for name, thing in (("policy", policy), ("reference", reference)) if thing is not None}
    named = {"policy": about["policy"], "reference": about["reference"], **about["options"]}
    named |= _kept(named, Path(path)) | given
    for what in ("policy", "reference"):
        if str(named[what]).startswith("<"):
            raise OperantError(
                f"the {what} of {path} was a Python object, {named[what]}: "
                f"operant.runs.replay.replay({str(path)!r}, {what}=...) takes one as it was when the run began"
            )
    learner = Learner(named.pop("policy"), algorithm=about["algorithm"], total_steps=about["step"] + 1, **named)
    try:
        PolicyState(learner.policy).load_state_dict(weights)
    except RuntimeError as error:
        raise OperantError(
            f"the weights of {path} do not fit its policy: give the model that the run began from"
        ) from error
    learner.budget.tokens = refusal.tokens
    with _watched(learner.policy) as seen:
        found = first(_again(learner, refusal, rank) for rank in range(len(refusal.parts)))
    return Replayed(refusal.fault, found, seen.module)


def _kept(named: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Of models that were named by a folder, what the bundle's run has kept of them."""
    start = path.resolve().parent.parent / initial_models.START
    if not start.is_dir():
        return {}
    if wrong := manifest.problem(start):
        raise OperantError(f"{start}, which the run began from, is damaged: {wrong}; put it back")
    called = manifest.read(start).get("models", {})
    found = {option: folder for option, folder in initial_models.MODELS.items() if named.get(option) is not None}
    return {option: str(start / folder) for option, folder in found.items() if called.get(option) == named[option]}


def _again(learner: Learner, refusal: refused_step.RefusedStep, rank: int) -> NonFinite | None:
    batch, bootstraps = refusal.parts[rank]
    batch = batch.to(learner.policy.device)
    if refusal.stage == "observe":
        batch = learner.credit(learner.scored(batch, bootstraps, refusal.sampling), refusal.coef).to("cpu")
        fault = find_in_batch(batch)
    else:
        objective = learner.objective(refusal.sampling)
        fault = first_fault(learner.policy, batch, objective, refusal.sampling, refusal.tokens)
    return None if fault is None else located(fault, batch, learner.policy.tokenizer, rank)


class _watched:
    """While this lasts, looks for the first module that makes a number that is none out of numbers."""

    def __init__(self, policy: torch.nn.Module):
        self.module: str | None = None
        named = [(name, m) for name, m in policy.named_modules() if not list(m.children())]
        self.hooks = [m.register_forward_hook(self._look(name)) for name, m in named]

    def _look(self, name: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, given: tuple[Any, ...], out: Any) -> None:
            made = out[0] if isinstance(out, tuple) else out
            if self.module is None and isinstance(made, torch.Tensor) and not bool(made.isfinite().all()):
                self.module = name

        return hook

    def __enter__(self) -> "_watched":
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self.hooks:
            hook.remove()


def tell(path: str | Path, say: Callable[[str], None] = print) -> bool:
    """Replay a bundle and say what came of it; whether it is what was recorded."""
    refusal, about, _ = refused_step.read(path)
    where = "before the update" if refusal.stage == "observe" else "in an optimizer step"
    say(f"step {about['step']} of {about['algorithm']} on {about['policy']}: refused {where}")
    say(f"recorded: {refusal.fault.message()}")
    done = replay(path)
    if done.same:
        say("made again: the same")
    else:
        say(f"made again: {done.found.message() if done.found else 'every number is finite'}")
        say("a difference comes from another machine, other versions or threads, or another device: see its manifest")
    if done.module:
        say(f"first in the model: the output of {done.module}")
    return done.same
