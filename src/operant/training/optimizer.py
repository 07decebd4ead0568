"""Adam with either placement of epsilon, and the learning rate as a function of progress."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from operant.training.eight_bit import EightBit
from operant.training.master_weights import MasterAdamW, gradients
from operant.types import OperantError


@dataclass(frozen=True)
class OptimizerOptions:
    """Options of the optimizer and its learning rate."""

    lr: float = 1e-5
    schedule: str = "constant"
    """constant | linear (to 0) | cosine (to 0)."""
    warmup: float = 0.0
    """Share of the run in which the rate rises to its peak; the schedule starts after it."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    eps_placement: str = "torch"
    """torch: outside the bias correction. tensorflow: inside it (eps-hat of arXiv:1412.6980), as in OpenAI's code."""
    weight_decay: float = 0.0
    max_grad_norm: float | None = 1.0
    states: str = "float32"
    """float32, or 8bit: each of Adam's two moments in one byte, 2 bytes per trained weight instead of 8, but slower."""

    def __post_init__(self) -> None:
        checks = [
            ("lr", 0 <= self.lr <= 10, "in [0, 10]: Adam changes every weight by about this much"),
            ("betas", all(0 <= beta < 1 for beta in self.betas), "two numbers in [0, 1)"),
            # A weight whose gradients were all 0 changes by 0 / (0 + eps).
            ("eps", self.eps >= 1e-30, "at least 1e-30"),
            ("weight_decay", 0 <= self.weight_decay * self.lr <= 1 and self.weight_decay >= 0, "in [0, 1 / lr]"),
            ("max_grad_norm", self.max_grad_norm is None or self.max_grad_norm >= 1e-20, "at least 1e-20, or none"),
        ]
        for name, good, rule in checks:
            if not good:
                raise OperantError(f"optimizer.{name}={getattr(self, name)}: it must be {rule}")
        if self.schedule not in ("constant", "linear", "cosine"):
            raise OperantError(f"optimizer.schedule={self.schedule!r}: it must be constant, linear or cosine")
        if self.eps_placement not in ("torch", "tensorflow"):
            raise OperantError(f"optimizer.eps_placement={self.eps_placement!r}: it must be torch or tensorflow")
        if self.states not in ("float32", "8bit"):
            raise OperantError(f"optimizer.states={self.states!r}: it must be float32 or 8bit")
        if not 0 <= self.warmup < 1:
            raise OperantError(f"optimizer.warmup={self.warmup}: it must lie in [0, 1)")


def make_optimizer(policy: nn.Module, options: OptimizerOptions) -> torch.optim.Optimizer:
    """AdamW of the trainable weights, without decay of vectors and biases; 16-bit weights get float32 masters."""
    trained = [p for p in policy.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((matrices, options.weight_decay), (vectors, 0.0))
        if params
    ]
    kind = EightBit if options.states == "8bit" else MasterAdamW
    return kind(groups, lr=options.lr, betas=options.betas, eps=options.eps, fused=True)


def rate(options: OptimizerOptions, step: int, total: int | None) -> float:
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


def apply(optimizer: torch.optim.Optimizer, options: OptimizerOptions, *, shrink: float = 1.0) -> None:
    """Make an optimizer step at the rate `options.lr`, with the gradients times `shrink`.

    The tensorflow placement of epsilon is the torch one with eps / sqrt(1 - beta2^t).
    """
    for group in optimizer.param_groups:
        group["lr"] = options.lr
    if options.eps_placement == "tensorflow":
        for group in optimizer.param_groups:
            state = optimizer.state.get(group["params"][0], {})
            t = int(state["step"]) + 1 if "step" in state else 1
            group["eps"] = options.eps / math.sqrt(1 - options.betas[1] ** t)
    if shrink == 1:
        optimizer.step()
    elif isinstance(optimizer, MasterAdamW):
        optimizer.step(shrink=shrink)
    else:
        torch._foreach_mul_(gradients(optimizer), shrink)
        optimizer.step()
