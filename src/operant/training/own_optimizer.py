"""An optimizer of the user's own, and its learning rate scheduler: both do what they do anywhere, and are saved."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from operant.models.policy import Policy
from operant.training.optimizer import OF_THEIRS, OWN, OptimizerOptions, unused
from operant.types import OperantError, shown

PASS_A_FUNCTION = "pass a function, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)"


def with_kind(optimizer: object, options: Mapping[str, object]) -> tuple[Any, dict[str, object]]:
    """The user's own optimizer, or None; and the options, where its kind is `own`.

    optimizer: an optimizer, a function that makes one, or a mapping of the options `optimizer.*`.
    """
    if optimizer is None:
        return None, dict(options)
    if isinstance(optimizer, Mapping):
        return None, {**options, "optimizer": optimizer}
    for name in options:
        if str(name).replace("-", "_").removeprefix("optimizer.") in unused(OWN) - {"alpha"}:
            raise OperantError(f"{name}={shown(options[name])} beside an optimizer: {OF_THEIRS}")
    return optimizer, {"optimizer.kind": OWN, **options}


def check_given(options: Mapping[str, object], optimizer: object, lr_scheduler: object) -> None:
    """Check that the composed options and the user's objects go together, before anything loads."""
    kind = made.kind if isinstance(made := options.get("optimizer"), OptimizerOptions) else None  # a rule has its own
    if optimizer is None and kind == OWN:
        raise OperantError(
            "optimizer.kind=own: the optimizer is a Python object, so start and resume from Python, with "
            "operant.train(..., optimizer=...) or Learner(..., optimizer=...); or use adamw, rmsprop, sgd or muon"
        )
    if optimizer is not None and kind != OWN:
        raise OperantError(f"optimizer.kind={kind} beside an optimizer of your own: leave one of them out")
    if lr_scheduler is not None and optimizer is None:
        raise OperantError("lr_scheduler without optimizer: pass the optimizer, too, or set optimizer.schedule")
    if not (optimizer is None or callable(optimizer) or isinstance(optimizer, Optimizer)):
        raise OperantError(
            f"optimizer={shown(optimizer)} is of type {type(optimizer).__name__}: pass a torch.optim.Optimizer, or a "
            "function from the list of trained parameters to one"
        )


class OwnOptimizer:
    """A torch optimizer that the user made, and its scheduler, as one part of a run's state.

    optimizer: the optimizer, or a function that makes it from the list of trained parameters. lr_scheduler: a scheduler
    of that optimizer, or a function that makes it from the optimizer; it makes a step after every training step.
    """

    def __init__(self, policy: Policy, optimizer: Any, lr_scheduler: object = None):
        made = optimizer if isinstance(optimizer, Optimizer) else optimizer(policy.trainable())
        if not isinstance(made, Optimizer):
            raise OperantError(f"optimizer: the function returned {shown(made)}, and not a torch.optim.Optimizer")
        if needed := [p.name for p in inspect.signature(made.step).parameters.values() if p.default is p.empty]:
            raise OperantError(f"optimizer: step() of {type(made).__name__} needs {needed[0]}, which is not supported")
        there = {id(p) for group in made.param_groups for p in group["params"]}
        trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        if missed := [name for name, p in trained.items() if id(p) not in there]:
            raise OperantError(
                f"optimizer lacks {len(missed)} of the {len(trained)} trained parameters, such as {missed[0]}: "
                f"{PASS_A_FUNCTION}, or freeze those parameters"
            )
        if foreign := len(there - {id(p) for p in trained.values()}):
            raise OperantError(f"optimizer has {foreign} parameters that this policy does not train: {PASS_A_FUNCTION}")
        schedule = lr_scheduler(made) if callable(lr_scheduler) else lr_scheduler
        if schedule is not None and (not isinstance(schedule, LRScheduler) or isinstance(schedule, ReduceLROnPlateau)):
            raise OperantError(
                f"lr_scheduler={shown(lr_scheduler)}: pass a torch.optim.lr_scheduler.LRScheduler whose step() takes "
                "no metric, or a function from the optimizer to one"
            )
        if schedule is not None and schedule.optimizer is not made:
            raise OperantError("lr_scheduler schedules another optimizer than the one that was passed; pass that one")
        self.optimizer, self.lr_scheduler = made, schedule

    def schedule(self) -> None:
        """Make a step of the scheduler, if there is one."""
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def state_dict(self) -> Mapping[str, object]:
        schedule = {} if self.lr_scheduler is None else {"lr_scheduler": self.lr_scheduler.state_dict()}
        return {"optimizer": self.optimizer.state_dict()} | schedule

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if ("lr_scheduler" in state) != (self.lr_scheduler is not None):
            raise ValueError("an lr_scheduler is on one side only")
        self.optimizer.load_state_dict(state["optimizer"])
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
