"""Options of the language model: the trained part, precision, packing; and blocks that stand in for its own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from operant.bounds import at_least_one, bounded, check_bounds
from operant.types import OperantError, Tokenizer, require

BLOCKS = "a number of blocks from 1, auto, or none to train every layer"


@dataclass(frozen=True)
class ModelOptions:
    """The trained part of the model, and how it computes."""

    train_layers: int | str | None = bounded(None, fits=at_least_one, rule=BLOCKS)
    """Train only this many of the top blocks; `auto`: max(2, layers // 6). The blocks below are a frozen trunk, which
    is computed once per token. None: train every layer."""
    train_head: bool | None = None
    """Train the output head. None: yes if every layer is trained, no with a frozen trunk."""
    precision: str = bounded("float32", choices=("float32", "bfloat16"))
    """float32 | bfloat16: type of the weights in forward and backward passes. With bfloat16, the optimizer has float32
    master copies of the trained weights."""
    head_precision: str = bounded("same", choices=("same", "float32"))
    """same | float32: with bfloat16, the type that the output head computes in, in training and in the engine `native`.
    Each call makes a float32 copy of the head's weights (arXiv:2506.13585, arXiv:2510.13786)."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, block by block: less memory, a third more time."""
    packing: str = bounded("auto", choices=("auto", "on", "off"))
    """Pack the rows of a forward pass end to end, without padding: on, off, or auto (on a CPU, and on a GPU that has a
    kernel for it, with bfloat16). If packing is not exact for a model, its rows are padded."""
    chat_template: str | None = None
    """A chat template (Jinja), for tasks that are messages and a tokenizer that has no template; exported with it."""
    states_gb: float = bounded(4.0, at_least=0)
    """Memory in GB for the cached trunk states of a batch. If they need more, every pass computes them again."""

    def __post_init__(self) -> None:
        check_bounds(self, "model")

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32

    def check_frozen(self, why: str) -> None:
        """Refuse to train a part of the model's own weights with `why`."""
        for name, value in (("train_layers", self.train_layers), ("train_head", self.train_head)):
            require(not value, f"model.{name}={value} with {why}")

    def templated(self, tokenizer: Tokenizer | None) -> Tokenizer | None:
        """The tokenizer, with the chat template where it has none."""
        if self.chat_template is not None:
            if tokenizer is None:
                raise OperantError("model.chat_template: the policy has no tokenizer that could apply it; leave it out")
            tokenizer = copy(tokenizer)  # the caller's stays as it is
            tokenizer.chat_template = tokenizer.chat_template or self.chat_template
        return tokenizer

    def blocks(self, layers: int) -> int | None:
        if self.train_layers is None:
            return None
        wanted = max(2, layers // 6) if isinstance(self.train_layers, str) else self.train_layers
        if wanted >= layers:
            raise OperantError(
                f"model.train_layers={self.train_layers} (that is {wanted} of {layers} blocks): nothing would be left "
                "for the frozen trunk; train fewer, or use none to train every layer"
            )
        return wanted


class StandIn(nn.Module):
    """Takes the place of a block in a stack, and has the block's attributes. The block's weights are not copied."""

    def __init__(self, block: nn.Module):
        super().__init__()
        object.__setattr__(self, "block", block)  # not registered as a submodule

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "block"), name)


class _Recomputed(StandIn):
    """Stores only the input of a block; the backward pass computes the block again."""

    def __init__(self, block: nn.Module, context: "ContextFactory"):
        super().__init__(block)
        self.context = context

    def forward(self, *args: object, **kwargs: object) -> object:
        contexts = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), _Anew(self.context))}
        return checkpoint(object.__getattribute__(self, "block"), *args, **contexts, **kwargs)


ContextFactory = Callable[[], AbstractContextManager[object]]


class _Anew(AbstractContextManager[None]):
    """Makes its context anew whenever it is entered: a second derivative computes a block more than once."""

    def __init__(self, make: ContextFactory):
        self.make, self.entered = make, ExitStack()

    def __enter__(self) -> None:
        self.entered.enter_context(self.make())

    def __exit__(self, *error: object) -> None:
        self.entered.close()


@contextmanager
def recomputing(stacks: Sequence[nn.ModuleList], context: ContextFactory = nullcontext) -> Iterator[None]:
    """Inside this context, the activations of every block are recomputed in the backward pass instead of stored.

    `context`: makes the context of the recomputation, equal to that of the forward pass. transformers' own gradient
    checkpointing needs training mode, which would switch dropout on.
    """
    originals = [(stack, dict(stack._modules)) for stack in stacks]
    try:
        for stack, blocks in originals:
            for name, block in blocks.items():
                stack._modules[name] = _Recomputed(block, context)
        yield
    finally:
        for stack, blocks in originals:
            stack._modules.update(blocks)
