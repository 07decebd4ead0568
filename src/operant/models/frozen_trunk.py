"""A frozen trunk: the lower blocks of a model, whose hidden states are computed once per token and cached.

    policy = Policy(model, options=ModelOptions(train_layers=2))
    states = policy.trunk_states(batch)             # [B, T, D] the input of the first trained block
    policy.forward(batch.with_(states=states))      # computes the top two blocks and the head only

Policy, reference, value head and all epochs share the cached states. The code is the same for every architecture: the
longest list of modules is the stack of blocks. While the model runs on cached states, its lower blocks are replaced by
modules that compute nothing, and the states become the input of the first trained block. Frozen are all parameters that
a gradient from that input reaches.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from operant.models.options import ModelOptions, StandIn
from operant.models.safe_loading import LanguageModel, PlainConfig
from operant.types import OperantError, require, with_defaults


class Reached(Exception):
    """Ends a call of the model at the first trained block, if nothing above is needed."""


class Skip(StandIn):
    """Returns a block's input, in the form in which the block returned its output."""

    def __init__(self, block: nn.Module, extras: list[int | str | None] | None):
        """`extras`: the arguments that the block returned after its hidden state; None: it returned no tuple."""
        super().__init__(block)
        self.extras = extras

    def forward(self, *args: object, **kwargs: object) -> object:
        hidden = args[0] if args else kwargs["hidden_states"]
        if self.extras is None:
            return hidden
        arguments = {None: None, **dict(enumerate(args)), **kwargs}
        return (hidden, *(arguments.get(name) for name in self.extras))


class Trunk:
    """The blocks of a model below the `trained` top ones."""

    def __init__(self, model: LanguageModel, options: ModelOptions):
        self.stack = find_blocks(model)
        trained = options.blocks(len(self.stack))
        self.cut = len(self.stack) - trained
        """Index of the first trained block."""
        self.last = torch.empty(0)
        """[B, S, D] the input of the first trained block in the last call of the model, padding included."""
        self._cached: Tensor | None = None
        self._stop = False
        self._skips: dict[int, Skip] = {}
        self.stack[self.cut].register_forward_pre_hook(self._before_first_trained, with_kwargs=True)

    def _before_first_trained(self, module: object, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Any:
        """Store the input of the first trained block, or replace it by the cached states."""
        if self._cached is None:
            self.last = (args[0] if args else kwargs["hidden_states"]).detach()
            if self._stop:
                raise Reached
            return None
        if args:
            return (self._cached, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._cached}

    @contextmanager
    def starting_from(self, states: Tensor) -> Iterator[None]:
        """Inside this context, the model begins at its first trained block, with the cached `states` [B, S, D]."""
        blocks = {i: self.stack[i] for i in self._skips}
        self._cached = states
        try:
            for i, skip in self._skips.items():
                self.stack._modules[str(i)] = skip
            yield
        finally:
            self._cached = None
            for i, block in blocks.items():
                self.stack._modules[str(i)] = block

    def below(self, run: Callable[[], object]) -> Tensor:
        """[B, S, D] the input of the first trained block. `run` calls the model, which stops there."""
        self._stop = True
        try:
            with suppress(Reached):
                run()
        finally:
            self._stop = False
        return self.last

    def learn_to_skip(self, run: Callable[[], object]) -> None:
        """Find out in one call of the model which of its arguments each lower block returns, to make its `Skip`."""
        seen: dict[int, list[int | str | None] | None] = {}
        own: set[int] = set()

        def record(i: int, module: object, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], out: object) -> None:
            if not isinstance(out, tuple):
                seen[i] = None
                return
            names = {id(v): k for k, v in [*enumerate(args), *kwargs.items()] if v is not None}
            seen[i] = [names.get(id(extra)) for extra in out[1:]]
            if any(isinstance(e, Tensor) and id(e) not in names for e in out[1:]):
                own.add(i)  # it computes something for the blocks above it, such as T5's position bias

        hooks = [self.stack[i].register_forward_hook(partial(record, i), with_kwargs=True) for i in range(self.cut)]
        try:
            run()
        finally:
            for hook in hooks:
                hook.remove()
        self._skips = {i: Skip(self.stack[i], seen[i]) for i in range(self.cut) if i not in own}

    def freeze(
        self, model: LanguageModel, head: nn.Module, run: Callable[[], object], *, train_head: bool | None
    ) -> None:
        """Freeze the parameters below the first trained block, and the head unless `train_head` is True."""
        # Quantised weights are integers, and frozen anyway.
        parameters = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
        before = {name: p.requires_grad for name, p in parameters.items()}
        for p in parameters.values():
            p.requires_grad_(True)
        reached, inputs = set[int](), list[Tensor]()

        def record(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            inputs.append(args[0] if args else kwargs["hidden_states"])

        hook = self.stack[self.cut].register_forward_pre_hook(record, with_kwargs=True, prepend=True)
        try:
            with torch.enable_grad():
                self.below(run)
        finally:
            hook.remove()
        # What the input of the first trained block depends on is read off the autograd graph: computing the gradient
        # would take as much memory as the model.
        seen, waiting = set[Any](), [inputs[0].grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if (leaf := getattr(node, "variable", None)) is not None:
                reached.add(id(leaf))
            waiting += [following for following, _ in node.next_functions]
        below = {name for name, p in parameters.items() if id(p) in reached}
        tied = [name for name in below if parameters[name] is head.weight]
        if train_head and tied:
            raise OperantError(
                f"model.train_head=True with a trunk: the output head is also the input embedding ({tied[0]}), which "
                "belongs to the frozen trunk; leave train_head out, or train every layer"
            )
        heads = {id(p) for p in head.parameters()}
        for name, p in parameters.items():
            frozen = name in below or (id(p) in heads and not train_head)
            p.requires_grad_(before[name] and not frozen)


def find_blocks(model: LanguageModel) -> nn.ModuleList:
    """The model's (decoder's) stack of blocks: its longest list of modules that is in no block of another list."""
    part = model.get_decoder() if with_defaults(model.config, PlainConfig).is_encoder_decoder else model
    lists = [m for m in part.modules() if isinstance(m, nn.ModuleList)]
    require(lists, f"{type(model).__name__} has no list of blocks: it cannot have a trunk; train every layer")
    inside = {id(m) for outer in lists if len(outer) > 1 for m in outer.modules() if m is not outer}  # such as experts
    return max((m for m in lists if id(m) not in inside), key=len)
