"""Options of the language model: the trained part, precision, packing. Also the changes that they make to a model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from operant.bounds import at_least_one, bounded, check_bounds
from operant.models.safe_loading import LanguageModel, is_quantised
from operant.types import OperantError, Tokenizer, require

SHORT = 256
"""Longest row, in tokens, for which `plain_attention` is faster."""


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

    def templated(self, tokenizer: Tokenizer | None) -> Any:
        """The tokenizer, with the chat template where it has none."""
        if self.chat_template is not None:
            if tokenizer is None:
                raise OperantError("model.chat_template: the policy has no tokenizer that could apply it; leave it out")
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


def compute_in(model: LanguageModel, precision: str) -> LanguageModel:
    """Convert the model to its precision, and use faster kernels for activations and embeddings; returns the model."""
    fuse_activations(model)
    look_up_directly(model)
    if precision != "bfloat16" or is_quantised(model):  # a quantised one is loaded in its precision
        return model  # in float32 or float64, as it was loaded
    return model.to(torch.bfloat16)


def fuse_activations(model: nn.Module) -> None:
    """Replace the tanh form of GELU, for which transformers calls seven kernels, by torch's single kernel.

    Results agree up to the last bits. A forward and backward pass of GPT-2 124M takes a tenth less time.
    """
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ in ("NewGELUActivation", "FastGELUActivation", "BloomGelu"):
                setattr(module, name, nn.GELU(approximate="tanh"))


class StandIn(nn.Module):
    """Takes the place of a block in a stack, and has the block's attributes. The block's weights are not copied."""

    def __init__(self, block: nn.Module):
        super().__init__()
        object.__setattr__(self, "block", block)  # not registered as a submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "block"), name)


class _Recomputed(StandIn):
    """Stores only the input of a block; the backward pass computes the block again."""

    def __init__(self, block: nn.Module, context: "ContextFactory"):
        super().__init__(block)
        self.context = context

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        contexts = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), _Anew(self.context))}
        return checkpoint(object.__getattribute__(self, "block"), *args, **contexts, **kwargs)


ContextFactory = Callable[[], AbstractContextManager[Any]]


class _Anew(AbstractContextManager[None]):
    """Makes its context anew whenever it is entered: a second derivative computes a block more than once."""

    def __init__(self, make: ContextFactory):
        self.make, self.entered = make, ExitStack()

    def __enter__(self) -> None:
        self.entered.enter_context(self.make())

    def __exit__(self, *error: Any) -> None:
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


@contextmanager
def plain_attention(states: torch.dtype, device: torch.device, width: int) -> Iterator[None]:
    """Inside this context, attention over short bfloat16 rows on a CPU uses torch's unfused implementation.

    There, the backward pass of the fused kernel takes twice as long for up to a few hundred tokens.
    """
    if states != torch.bfloat16 or device.type != "cpu" or width > SHORT:
        yield
        return
    with sdpa_kernel(SDPBackend.MATH):
        yield


# --- an embedding whose backward pass only touches the rows that were looked up ---------------------------------------
#
# For a few hundred looked-up rows, torch makes a gradient of the whole table: 154 MB for GPT-2, filled with zeros and
# added to the gradient of the tied head, in every backward pass. Inside `direct_gradients`, the rows are added to the
# parameter's own gradient instead.

_direct = False


@contextmanager
def direct_gradients(on: bool = True) -> Iterator[None]:
    """Inside this context, `backward` adds looked-up rows to `weight.grad` itself, so hooks of the weight do not run.

    It must not be used with `torch.autograd.grad`, gradients of gradients, or hooks that sum gradients over ranks.
    """
    global _direct
    before, _direct = _direct, on
    try:
        yield
    finally:
        _direct = before


class Lookup(nn.Embedding):
    """`nn.Embedding` that adds gradients directly inside `direct_gradients`."""

    def forward(self, input: Tensor) -> Tensor:
        plain = self.max_norm is not None or self.scale_grad_by_freq or self.sparse
        if not _direct or plain or not self.weight.requires_grad or self.weight.device.type != "cpu":
            return super().forward(input)
        # With an edge to the weight, autograd would hold a tied head's gradient back until this one is computed too.
        anchor = torch.zeros((), requires_grad=True)
        return _Rows.apply(anchor, input, (self.weight,), self.padding_idx)


class _Rows(torch.autograd.Function):
    """Look up rows of a weight; the backward pass adds to the weight's gradient.

    The weight is passed in a tuple, so that autograd does not see it. `anchor` makes the result require a gradient.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, ids: Tensor, weights: tuple[Tensor], padding: int | None) -> Tensor:
        (weight,) = weights
        ctx.weight, ctx.padding = weight, padding
        ctx.save_for_backward(ids)
        return nn.functional.embedding(ids, weight.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        if torch.is_grad_enabled():  # only where the backward pass has create_graph=True
            raise OperantError("direct_gradients has no gradients of gradients: leave it for create_graph=True")
        (ids,), weight = ctx.saved_tensors, ctx.weight
        rows, flat = grad.reshape(-1, grad.shape[-1]), ids.flatten()
        if ctx.padding is not None:  # as in nn.Embedding, the padding row has no gradient
            rows = rows * (flat != ctx.padding)[:, None]
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, flat, rows.to(weight.grad.dtype))
        return None, None, None, None


def look_up_directly(model: nn.Module) -> None:
    """Turn every embedding whose class is exactly `nn.Embedding` into a `Lookup` with the same weight."""
    for module in model.modules():
        if type(module) is nn.Embedding:
            module.__class__ = Lookup
