"""A frozen trunk: the lower blocks of a model, computed once a token and shared by policy, reference, value and epochs.

    policy = Policy(model, options=ModelOptions(train_layers=2))
    states = policy.trunk_states(batch)             # [B, T, D] what enters the first trained block
    policy.forward(batch.with_(states=states))      # the top two blocks and the head alone

Written once for every architecture: the longest list of modules is the stack of blocks; the lower ones are stood in for
while the model runs, and the kept states are put where the first trained block begins. What lies below that place, and
is frozen, is whatever a gradient reaches from there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from operant.models.options import ModelOptions, StandIn
from operant.types import OperantError


class Reached(Exception):
    """The first trained block was reached, and nothing above it is asked for."""


class Skip(StandIn):
    """Hands a block's input on, in the shape in which the block returned it."""

    def __init__(self, block: nn.Module, extras: list[int | str | None] | None):
        super().__init__(block)
        self.extras = extras

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        if self.extras is None:
            return hidden
        given = {None: None, **dict(enumerate(args)), **kwargs}
        return (hidden, *(given.get(name) for name in self.extras))


class Trunk:
    """The blocks of a model below the `trained` top ones.

    Raises: OperantError for a model without a stack of blocks, or with too few of them.
    """

    def __init__(self, model: Any, options: ModelOptions):
        self.stack = find_blocks(model)
        trained = options.blocks(len(self.stack))
        assert trained is not None  # by the caller, who asked for a trunk
        self.cut = len(self.stack) - trained
        self.last: Tensor | None = None
        """[B, S, D] what entered the first trained block in the last call of the model; padding included."""
        self._given: Tensor | None = None
        self._stop = False
        self._skips: dict[int, Skip] = {}
        self.stack[self.cut].register_forward_pre_hook(self._enter, with_kwargs=True)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note what enters the first trained block, or put the kept states there instead."""
        if self._given is None:
            self.last = (args[0] if args else kwargs["hidden_states"]).detach()
            if self._stop:
                raise Reached
            return None
        if args:
            return (self._given, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._given}

    @contextmanager
    def starting_from(self, states: Tensor) -> Iterator[None]:
        """While this lasts, the model begins at its first trained block, with `states` [B, S, D]."""
        held = {i: self.stack[i] for i in self._skips}
        self._given = states
        try:
            for i, skip in self._skips.items():
                self.stack._modules[str(i)] = skip
            yield
        finally:
            self._given = None
            for i, block in held.items():
                self.stack._modules[str(i)] = block

    def below(self, run: Callable[[], Any]) -> Tensor:
        """[B, S, D] what would enter the first trained block; `run` calls the model, and nothing above is computed."""
        self._stop = True
        try:
            run()
        except Reached:
            pass
        finally:
            self._stop = False
        assert self.last is not None  # the hook has just been there
        return self.last

    def learn_to_skip(self, run: Callable[[], Any]) -> None:
        """Find out in one call of the model how each lower block hands on what it does not compute itself."""
        seen: dict[int, list[int | str | None] | None] = {}
        own: set[int] = set()

        def note(i: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
                if not isinstance(out, tuple):
                    seen[i] = None
                    return
                names = {id(v): k for k, v in [*enumerate(args), *kwargs.items()] if v is not None}
                seen[i] = [names.get(id(extra)) for extra in out[1:]]
                if any(isinstance(e, Tensor) and id(e) not in names for e in out[1:]):
                    own.add(i)  # it makes something that the blocks above are handed, T5's position bias say

            return hook

        hooks = [self.stack[i].register_forward_hook(note(i), with_kwargs=True) for i in range(self.cut)]
        try:
            run()
        finally:
            for hook in hooks:
                hook.remove()
        self._skips = {i: Skip(self.stack[i], seen[i]) for i in range(self.cut) if i not in own}

    def freeze(self, model: Any, head: nn.Module, run: Callable[[], Any], *, train_head: bool | None) -> None:
        """Freeze what lies below the first trained block, and the head unless it is asked for.

        Raises: OperantError where the head is asked for and is also the embedding, which lies below.
        """
        # Quantised weights are whole numbers, and frozen as they are.
        held = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
        before = {name: p.requires_grad for name, p in held.items()}
        for p in held.values():
            p.requires_grad_(True)
        with torch.enable_grad():
            reached = _reached(self, list(held.values()), run)
        below = {name for name, hit in zip(held, reached, strict=True) if hit}
        tied = [name for name in below if held[name] is head.weight]
        if train_head and tied:
            raise OperantError(
                f"model.train_head=True with a trunk: the output head is also the input embedding ({tied[0]}), which "
                "belongs to the frozen trunk; leave train_head out, or train every layer"
            )
        heads = {id(p) for p in head.parameters()}
        for name, p in held.items():
            frozen = name in below or (id(p) in heads and not train_head)
            p.requires_grad_(before[name] and not frozen)


def _reached(trunk: Trunk, parameters: list[nn.Parameter], run: Callable[[], Any]) -> list[bool]:
    """Which parameters have a part in what enters the first trained block."""
    kept: list[Tensor] = []
    block = trunk.stack[trunk.cut]

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept.append(args[0] if args else kwargs["hidden_states"])

    hook = block.register_forward_pre_hook(look, with_kwargs=True, prepend=True)
    try:
        trunk.below(run)
    finally:
        hook.remove()
    # The graph alone says so: computing the gradient would take a model's worth of memory.
    leaves, seen = set[int](), set[Any]()
    todo: list[Any] = [kept[0].grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        todo += [following for following, _ in node.next_functions]
    return [id(p) in leaves for p in parameters]


def find_blocks(model: Any) -> nn.ModuleList:
    """The stack of (decoder) blocks: the longest list of modules. Raises: OperantError where there is none."""
    part = model.get_decoder() if getattr(model.config, "is_encoder_decoder", False) else model
    lists = [m for m in part.modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise OperantError(f"{type(model).__name__} has no list of blocks: it cannot have a trunk; train every layer")
    return max(lists, key=len)
