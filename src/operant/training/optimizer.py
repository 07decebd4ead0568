"""The kinds of optimizer, their options, and the learning rate as a function of progress.

torch's optimizers have float32 copies of 16-bit weights here, so that small steps are not lost in rounding.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from operant import distributed
from operant.bounds import bounded, check_bounds
from operant.import_by_name import Lazy
from operant.models.twins import in_parts
from operant.types import OperantError, require

OWN = "own"
"""The kind of an optimizer that the user has made."""
USED = {
    "adamw": ("lr", "schedule", "warmup", "betas", "eps", "eps_placement", "weight_decay", "states"),
    "rmsprop": ("lr", "schedule", "warmup", "alpha", "momentum", "eps", "weight_decay"),
    "sgd": ("lr", "schedule", "warmup", "momentum", "weight_decay"),
    "muon": ("lr", "schedule", "warmup", "betas", "eps", "weight_decay"),
    OWN: (),
}
"""The options that each kind uses, besides `kind` and `max_grad_norm`."""
OF_THEIRS = "the optimizer is your own, and decides this itself; set it there and leave it out here"


@dataclass(frozen=True)
class RateOptions:
    """The learning rate and the bound of the gradient: the options `optimizer.*` that an update rule needs.

    Raises: OperantError for a value out of range.
    """

    lr: float = bounded(1e-5, at_least=0, at_most=10, rule="in [0, 10]: Adam changes every weight by about this much")
    """Learning rate at its peak."""
    schedule: str = bounded("constant", choices=("constant", "linear", "cosine"))
    """constant | linear (to 0) | cosine (to 0)."""
    warmup: float = bounded(0.0, at_least=0, below=1)
    """Share of the run in which the rate rises to its peak; the schedule starts after it."""
    max_grad_norm: float | None = bounded(1.0, at_least=1e-20)
    """A longer gradient is scaled down to this length; none: not bounded."""

    def __post_init__(self) -> None:
        check_bounds(self, "optimizer")

    def state_bytes(self, *policies: nn.Module) -> float:
        """Bytes of the optimizer's state for the trained weights of some policies."""
        return 0.0


@dataclass(frozen=True)
class OptimizerOptions(RateOptions):
    """Options of the optimizer and its learning rate. Each kind refuses the options that it does not use.

    Raises: OperantError for an unknown kind, or a value out of range.
    """

    kind: str = bounded("adamw", choices=USED)
    """adamw | rmsprop (eps outside the root) | sgd | muon (matrices of hidden layers; AdamW for all else) | own (an
    optimizer from Python: `train(..., optimizer=...)`)."""
    betas: tuple[float, float] = bounded(
        (0.9, 0.999), fits=lambda betas: all(0 <= beta < 1 for beta in betas), rule="two numbers in [0, 1)"
    )
    """Of adamw, and of muon for what is left to AdamW: how much of each moment a step keeps."""
    alpha: float = bounded(0.99, at_least=0, below=1)
    """Of rmsprop: how much of the mean square a step keeps."""
    momentum: float = bounded(0.0, at_least=0, below=1)
    """Of rmsprop and sgd: how much of the last change a step keeps."""
    eps: float = bounded(1e-8, at_least=1e-30)  # else a weight without gradients changes by 0 / 0
    """Of adamw, rmsprop and muon's AdamW: added to the root that divides the gradient."""
    eps_placement: str = bounded("torch", choices=("torch", "tensorflow"))
    """Of adamw. torch: outside the bias correction; tensorflow: inside (eps-hat of arXiv:1412.6980), as OpenAI did."""
    weight_decay: float = 0.0
    """Of matrices, not vectors. adamw and muon shrink the weights; rmsprop and sgd add it to the gradient, as torch."""
    states: str = bounded("float32", choices=("float32", "8bit"))
    """Of adamw. float32, or 8bit: each moment in one byte, 2 bytes per trained weight instead of 8, but slower."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in fields(self):
            if field.name in unused(self.kind) and getattr(self, field.name) != field.default:
                use = f"it uses {', '.join(USED[self.kind])}; leave it out" if USED[self.kind] else OF_THEIRS
                raise OperantError(f"optimizer.{field.name}={getattr(self, field.name)} with kind={self.kind}: {use}")
        if not (0 <= self.weight_decay * self.lr <= 1 and self.weight_decay >= 0):
            raise OperantError(f"optimizer.weight_decay={self.weight_decay}: it must be in [0, 1 / lr]")

    def state_bytes(self, *policies: nn.Module) -> float:
        """As in `RateOptions`. An optimizer of the user's own counts as Adam without master weights."""
        weights = [p for policy in policies for p in distributed.trained(policy).values()]
        if self.kind in ("adamw", "muon", OWN):
            moments = 2.1 if self.states == "8bit" else 8.0
        else:
            moments = 4.0 * (self.kind == "rmsprop") + 4.0 * (self.momentum > 0)
        low = [] if self.kind == OWN else [p for p in weights if p.element_size() < 4]
        hidden = [p for policy in policies for p in MUON["hidden"](policy)] if self.kind == "muon" else []
        master_and_gradient, one_moment = 8.0 * sum(map(Tensor.numel, low)), 4.0 * sum(map(Tensor.numel, hidden))
        return moments * sum(map(Tensor.numel, weights)) + master_and_gradient - one_moment


def unused(kind: str) -> set[str]:
    """The options that a kind of optimizer does not use."""
    return {name for names in USED.values() for name in names} - set(USED[kind])


def without_unused(options: Mapping[str, object], kind: object) -> dict[str, object]:
    """The options of a recipe or preset, by full name, without those that the kind of optimizer does not use."""
    left_out = {f"optimizer.{name}" for name in unused(kind)} if kind in [*USED] else set()
    return {name: value for name, value in options.items() if name not in left_out}


class MasterWeights(torch.optim.Optimizer):
    """Before one of torch's optimizers: it changes float32 master weights of every 16-bit parameter, and all others.

    A step of 1e-5 is lost in a bfloat16 weight, which has eight bits. It is added to the master weight, and the weight
    is the rounded master weight (Micikevicius et al., 2018, arXiv:1710.03740).
    """

    def __init__(self, groups: list[dict[str, Any]], **settings: object):
        low = [p for group in groups for p in group["params"] if p.dtype in (torch.bfloat16, torch.float16)]
        self.pairs: list[tuple[Tensor, Tensor]] = [(p, p.detach().float().requires_grad_()) for p in low]
        """Each 16-bit parameter and its master weight."""
        instead = {id(p): master for p, master in self.pairs}
        for group in groups:
            group["params"] = [instead.get(id(p), p) for p in group["params"]]
        super().__init__(groups, **settings)

    @torch.no_grad()
    def step(self, closure: None = None, *, shrink: float = 1.0) -> None:
        """Make a step with the gradients times `shrink` on the master weights, and round them to the parameters."""
        for p, master in self.pairs:
            if p.grad is None or master.grad is None:
                master.grad = None if p.grad is None else p.grad.float()
            else:
                master.grad.copy_(p.grad)
        self.move(shrink)
        if self.pairs:
            torch._foreach_copy_([p for p, _ in self.pairs], [master for _, master in self.pairs])

    def move(self, shrink: float) -> None:
        """Make one step of the weights that the optimizer has: master weights, and parameters without them."""
        if shrink != 1:
            torch._foreach_mul_(gradients(self), shrink)
        super().step()

    @torch.no_grad()
    def renew(self) -> None:
        """Set the master weights to the parameters, after these were changed from outside."""
        for p, master in self.pairs:
            master.copy_(p)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the parameters, and of the master weights."""
        super().zero_grad(set_to_none)
        for p, _ in self.pairs:
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"masters": [master.detach() for _, master in self.pairs]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        for (p, master), saved in zip(self.pairs, state.pop("masters", []), strict=True):
            master.copy_(saved)
            p.copy_(saved)
        super().load_state_dict(state)


class MasterAdamW(MasterWeights, torch.optim.AdamW):
    """AdamW, with `fused=True`."""

    def move(self, shrink: float) -> None:
        """Make one step of the weights that the optimizer has; the gradients are clipped while they are read."""
        self.grad_scale = self.found_inf = None
        weights = [p for group in self.param_groups for p in group["params"]]
        if shrink != 1 and any(p.dtype == torch.float64 for p in weights):  # the scale below is a float32
            torch._foreach_mul_(gradients(self), shrink)
        elif shrink != 1:
            # torch's fused kernel divides the gradients by a scale while it reads them, which saves a pass over them.
            self.grad_scale, self.found_inf = torch.tensor(1 / shrink), torch.zeros(())
        if self.state:
            in_parts(self._move_some, weights)
        else:  # the states are made, in the order of the parameters
            super().move(1.0)

    def _move_some(self, weights: list[Tensor]) -> None:
        chosen, part = {id(p) for p in weights}, object.__new__(type(self))
        groups = [{**group, "params": [p for p in group["params"] if id(p) in chosen]} for group in self.param_groups]
        vars(part).update(vars(self), param_groups=groups)
        torch.optim.AdamW.step(part)  # an optimizer of these weights alone, with the states of this one


class MasterRMSprop(MasterWeights, torch.optim.RMSprop):
    """RMSprop: eps is added outside the root."""


class MasterSGD(MasterWeights, torch.optim.SGD):
    """SGD, with or without momentum."""


def masters(optimizer: torch.optim.Optimizer | None) -> list[tuple[Tensor, Tensor]]:
    """Each 16-bit parameter of an optimizer, and its master weight."""
    return optimizer.pairs if isinstance(optimizer, MasterWeights) else []


def gradients(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The gradients of all parameters that have one."""
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


ADAM = Lazy({"float32": MasterAdamW, "8bit": "operant.training.eight_bit:EightBit"})
"""The classes of adamw, by the type of their moments."""
MUON = Lazy({"class": "operant.training.muon:Muon", "hidden": "operant.training.muon:hidden_matrices"})


def make_optimizer(policy: nn.Module, options: OptimizerOptions) -> torch.optim.Optimizer:
    """The optimizer of the trainable weights, without decay of vectors; 16-bit weights get float32 masters."""
    trained = distributed.trained(policy).values()
    matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    decays = ((matrices, options.weight_decay), (vectors, 0.0))
    groups = [{"params": params, "weight_decay": decay} for params, decay in decays if params]
    require(groups, "policy: none of its weights is trained (requires_grad=False): unfreeze those that shall learn")
    if options.kind == "rmsprop":
        return MasterRMSprop(groups, lr=options.lr, alpha=options.alpha, eps=options.eps, momentum=options.momentum)
    if options.kind == "sgd":
        return MasterSGD(groups, lr=options.lr, momentum=options.momentum)
    kwargs = {"lr": options.lr, "betas": options.betas, "eps": options.eps}
    if options.kind == "muon":
        return MUON["class"](groups, policy, **kwargs)
    return ADAM[options.states](groups, **kwargs, fused=True)


def rate(options: RateOptions, step: int, total: int | None) -> float:
    """The learning rate of a step, counted from 0, in a run of `total` steps.

    It rises over the first W = ceil(warmup * total) steps as (step + 1) / (W + 1) and has its peak at step W, where
    the schedule begins. The rate is above 0 in every step before the end.
    """
    if total is None:
        return options.lr
    warm = math.ceil(options.warmup * total)
    if step < warm:
        return options.lr * (step + 1) / (warm + 1)
    done = min((step - warm) / max(total - warm, 1), 1.0)
    shape = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return options.lr * shape[options.schedule]


def apply(
    optimizer: torch.optim.Optimizer, options: OptimizerOptions, *, lr: float | None = None, shrink: float = 1.0
) -> None:
    """Make an optimizer step at the rate `lr` (None: `options.lr`), with the gradients times `shrink`.

    An optimizer of the user's own keeps its rate. The tensorflow placement of epsilon is the torch one with
    eps / sqrt(1 - beta2^t); t counts the steps of each parameter.
    """
    for group in optimizer.param_groups if options.kind != OWN else ():
        group["lr"] = options.lr if lr is None else lr
    with _by_age(optimizer, options) if options.eps_placement == "tensorflow" else nullcontext():
        if isinstance(optimizer, MasterWeights):
            optimizer.step(shrink=shrink)
            return
        if shrink != 1:
            torch._foreach_mul_(gradients(optimizer), shrink)
        optimizer.step()


@contextmanager
def _by_age(optimizer: torch.optim.Optimizer, options: OptimizerOptions) -> Iterator[None]:
    """Inside this context, a group has parameters that have made equally many steps, and the eps of the next one."""
    groups, optimizer.param_groups = optimizer.param_groups, []
    for group in groups:
        aged: dict[int, list[Tensor]] = {}
        for p in group["params"]:
            aged.setdefault(int(optimizer.state.get(p, {}).get("step", 0)) + 1, []).append(p)
        for t, params in aged.items():
            group["eps"] = options.eps / math.sqrt(1 - options.betas[1] ** t)
            optimizer.param_groups.append({**group, "params": params})
    try:
        yield
    finally:
        optimizer.param_groups = groups
