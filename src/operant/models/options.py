"""Which part of a language model is trained, and in what numbers it computes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from operant.models.embedding import look_up_directly
from operant.types import OperantError

SHORT = 256
"""Tokens of a row up to which `plain_attention` pays."""


@dataclass(frozen=True)
class ModelOptions:
    """What of the model is trained, and how it computes."""

    train_layers: int | str | None = None
    """Train the top blocks only, this many; `auto`: max(2, layers // 6). What is below is a frozen trunk, computed
    once a token. None: every layer."""
    train_head: bool | None = None
    """Train the output head; None: with the whole model, not with a trunk."""
    precision: str = "float32"
    """float32, or bfloat16: the weights that compute. The optimizer then holds float32 masters of what is trained."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass, block by block: less memory, a third more time."""
    packing: str = "auto"
    """Lay the rows of a forward pass end to end, without padding: on, off, or auto: on a processor, and on a GPU that
    has a kernel for it (bfloat16). A model that cannot be packed exactly is padded."""
    states_gb: float = 4.0
    """Memory for a batch's trunk states; past it they are computed again in every pass."""

    def __post_init__(self) -> None:
        layers = self.train_layers
        if isinstance(layers, str) and layers != "auto":
            raise OperantError(f"model.train_layers={layers!r}: it must be a number of blocks, auto, or none")
        if isinstance(layers, int) and layers < 1:
            raise OperantError(f"model.train_layers={layers}: it must be at least 1, or none to train every layer")
        if self.precision not in ("float32", "bfloat16"):
            raise OperantError(f"model.precision={self.precision!r}: it must be float32 or bfloat16")
        if self.packing not in ("auto", "on", "off"):
            raise OperantError(f"model.packing={self.packing!r}: it must be auto, on or off")
        if self.states_gb < 0:
            raise OperantError(f"model.states_gb={self.states_gb}: it must be at least 0")

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32

    def blocks(self, layers: int) -> int | None:
        """How many of a model's blocks are trained; None: all. Raises: OperantError for more than it has."""
        if self.train_layers is None:
            return None
        wanted = max(2, layers // 6) if isinstance(self.train_layers, str) else self.train_layers
        if wanted >= layers:
            raise OperantError(
                f"model.train_layers={self.train_layers} (that is {wanted} of {layers} blocks): nothing would be left "
                "for the frozen trunk; train fewer, or use none to train every layer"
            )
        return wanted


def compute_in(model: Any, precision: str) -> Any:
    """The model, in the numbers that it is to compute in, with torch's own kernels where it has faster ones."""
    fuse_activations(model)
    look_up_directly(model)
    if precision != "bfloat16" or getattr(model, "is_quantized", False):  # quantised: loaded to compute in it
        return model  # a float64 model stays one
    return model.to(torch.bfloat16)


def fuse_activations(model: nn.Module) -> None:
    """Put torch's one kernel for the tanh form of GELU where transformers spells it out in seven.

    The same function to the last bits; a forward and backward pass of GPT-2 124M takes a tenth less time.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ in ("NewGELUActivation", "FastGELUActivation", "BloomGelu"):
                setattr(module, name, nn.GELU(approximate="tanh"))


class StandIn(nn.Module):
    """Stands where a block stood: its attributes are the block's, whose weights stay where they were."""

    def __init__(self, block: nn.Module):
        super().__init__()
        object.__setattr__(self, "block", block)  # no submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "block"), name)


class _Recomputed(StandIn):
    """Keeps only what entered the block; the backward pass computes it again, in the same surroundings."""

    def __init__(self, block: nn.Module, again: "Surroundings"):
        super().__init__(block)
        self.again = again

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        around = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), self.again())}
        return checkpoint(object.__getattribute__(self, "block"), *args, **around, **kwargs)


Surroundings = Callable[[], AbstractContextManager[Any]]


@contextmanager
def recomputing(stacks: Sequence[nn.ModuleList], again: Surroundings = nullcontext) -> Iterator[None]:
    """While this lasts, every block is computed again in the backward pass rather than kept.

    `again`: what is around it then, being around it now. transformers' own way asks for training mode, which would
    switch dropout on.
    """
    held = [(stack, dict(stack._modules)) for stack in stacks]
    try:
        for stack, blocks in held:
            for name, block in blocks.items():
                stack._modules[name] = _Recomputed(block, again)
        yield
    finally:
        for stack, blocks in held:
            stack._modules.update(blocks)


@contextmanager
def plain_attention(states: torch.dtype, device: torch.device, width: int) -> Iterator[None]:
    """While this lasts, attention over short bfloat16 rows on a processor is spelt out.

    The fused kernel's backward pass there takes twice as long up to a few hundred tokens.
    """
    if states != torch.bfloat16 or device.type != "cpu" or width > SHORT:
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield
