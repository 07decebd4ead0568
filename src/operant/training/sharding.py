"""`learner.parallel=fsdp`: policy, copies and optimizer states are divided over the ranks (docs/scale.md).

What a rank has of each parameter are some of its rows, which are plain tensors to the optimizer. So an optimizer that
treats every number alike makes the same step as on the whole tensor; others are refused.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from operant import distributed
from operant.distributed import GradientSum, bounds, world
from operant.models.policy import Policy
from operant.models.reference import PolicyCopy
from operant.models.safe_loading import LanguageModel
from operant.objectives.kl import EXACT, KLOptions
from operant.training.optimizer import masters
from operant.training.options import LearnerOptions, OptionGroups
from operant.training.update import GradientUpdate, OnePass, find_rule
from operant.types import Batch, Divided, OperantError, Outputs, with_defaults


def check(update: object, options: OptionGroups) -> None:
    """Check that the options of a learner go together with `learner.parallel=fsdp`, before any model loads."""
    own, rule = options["learner"], find_rule(update)
    if rule not in (GradientUpdate, OnePass):
        raise OperantError(
            f"learner.parallel=fsdp with the update rule {rule.__name__}: it moves whole weights, and each rank has "
            "some rows of them; use learner.parallel=ddp, or a method that follows the gradient, such as ppo"
        )
    if options["optimizer"].kind in ("own", "muon"):
        raise OperantError(
            f"learner.parallel=fsdp with optimizer.kind={options['optimizer'].kind}: it would see some rows of each "
            "matrix on every rank, which only some optimizers allow; use adamw, rmsprop or sgd, or learner.parallel=ddp"
        )
    if options["optimizer"].states == "8bit":
        raise OperantError(
            "learner.parallel=fsdp with optimizer.states=8bit: 256 numbers share a scale, and the ranks would cut "
            "these blocks; leave states out, because each rank has only its share of them"
        )
    if own.keep_gradients:
        raise OperantError(
            "learner.keep_gradients with learner.parallel=fsdp: each rank has some rows of the gradients; leave it out"
        )


class Shards(GradientSum):
    """A module whose parameters are divided over the ranks while it is trained, by torch's FSDP2 (`fully_shard`).

    Between updates the module itself is whole on every rank, so that generation, scoring and export know of nothing.
    `free` empties its parameters, and `gather` fills them again from the parts of all ranks. Passes with gradients run
    on a twin of the module, which has only parts: each of its units is gathered for its forward pass, again for its
    backward pass, and freed after both. Gradients are summed, in float32 or wider, and a rank keeps its rows of them.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Callable[[Any], Iterable[nn.Module]],
        *,
        shared: Iterable[Tensor] = (),
        offload: bool = False,
    ):
        """units: the parts of a twin of the module that are gathered one at a time; what is left is gathered for the
        whole pass. shared: parameters that belong to another module, which are not divided here. offload: the rows of
        this rank, their gradients and the optimizer's states are in the CPU's memory."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        elsewhere = {id(p) for p in shared}
        self.own = {name: p for name, p in module.named_parameters() if id(p) not in elsewhere}
        """The parameters that are divided, by name."""
        device = next(module.parameters()).device.type
        self.is_whole, memory = True, {id(x): x for x in [*module.parameters(), *module.buffers()]}
        self.module: Any = deepcopy(module, memory)
        """The twin, which computes what the module computes."""
        mesh, pinned = init_device_mesh(device, (world(),)), device == "cuda"
        low = any(p.dtype in (torch.bfloat16, torch.float16) for p in self.own.values())
        how: dict[str, Any] = {"mesh": mesh, "ignored_params": {p for p in module.parameters() if id(p) in elsewhere}}
        how["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.float32 if low else None)
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()
        self.root: Any = _Fields(self.module)
        outer = [m for m in (self.module, getattr(self.module, "critic", None)) if m is not None]
        inner = [m.model for m in outer if isinstance(getattr(m, "model", None), nn.Module) and m.model is not m]
        for m in outer:
            if isinstance(head := m._modules.pop("head", None), nn.Module):  # it belongs to the model, with its weights
                object.__setattr__(m, "head", head)
        try:
            for unit in units(self.module):
                fully_shard(unit, **how)
            for model in inner:  # the output head is used after the call of the model, so nothing is freed before
                fully_shard(model, reshard_after_forward=False, **how)
            fully_shard(self.root, **how)
        except (NotImplementedError, AssertionError, ValueError, RuntimeError) as error:
            raise OperantError(
                f"learner.parallel=fsdp: torch cannot divide this model over the ranks ({error}); use ddp"
            ) from error
        divided = [m for m in self.root.modules() if hasattr(m, "unshard")]
        for unit in divided:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it sums
        paths = {f"{path}.": m for path, m in self.root.named_modules(prefix="root") if m in divided}
        self.units: dict[Any, list[str]] = {unit: [] for unit in divided}
        """Each unit, and the names of the parameters that are gathered with it."""
        for name in self.own:
            nearest = max((path for path in paths if f"root.inside.{name}".startswith(path)), key=len)
            self.units[paths[nearest]].append(name)
        self.parts: dict[str, Any] = {name: self.module.get_parameter(name) for name in self.own}
        """The divided parameters of the twin, as torch's DTensors."""
        self.gather(again=True)  # FSDP arranges the memory of the parts when they are first gathered
        with torch.no_grad():
            self.local = {name: part.to_local().detach() for name, part in self.parts.items()}
        self.trained = {name: nn.Parameter(self.local[name]) for name, p in self.own.items() if p.requires_grad}
        """This rank's rows of the parameters that the optimizer changes, by name. They share the memory of `parts`."""

    def __call__(self, *args: object, **kwargs: object) -> Outputs:
        with warnings.catch_warnings():  # a block of T5 returns its position bias, a view, which nothing changes
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
            return Outputs(**self.root(*args, **kwargs))

    @contextmanager
    def gathering(self, last: bool) -> Iterator[None]:
        """Context for the forward and backward pass of a micro-batch. After the `last`, `trained` has the gradients.

        They are summed in every micro-batch: until then, each rank would keep gradients of the whole module.
        """
        yield
        for name, p in self.trained.items() if last else ():
            part = self.parts[name]
            p.grad = None if part.grad is None else part.grad.to_local()
            part.grad = None

    def free(self, *, frozen: bool = True) -> None:
        """Empty the parameters of the module itself: each is one NaN that is read everywhere, so that none is used.

        frozen: also those that are not trained.
        """
        self.is_whole = False
        for name, p in self.own.items():
            if frozen or name in self.trained:
                p.data = torch.full((), torch.nan, dtype=p.dtype, device=p.device).expand(p.shape)

    @torch.no_grad()
    def gather(self, *, again: bool = False) -> None:
        """Make the module whole, unit by unit. Every rank must call. again: also if it is whole, with other numbers."""
        if self.is_whole and not again:
            return
        for unit, names in self.units.items():
            unit.unshard()
            for name in names:
                self.own[name].data = self.module.get_parameter(name).detach().clone()
            unit.reshard()
        self.is_whole = True

    def part(self, name: str, x: Tensor | None = None) -> Divided:
        """This rank's rows of a parameter; or `x`, as rows of a tensor of its sizes."""
        return Divided(self.local[name] if x is None else x, tuple(self.own[name].shape))

    def divided(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor | Divided]:
        """Weights of the module by any name, with this rank's rows in the place of the parameters that are divided."""
        names = {id(p): name for name, p in self.own.items()}
        return {name: self.part(names[id(x)]) if id(x) in names else x.detach() for name, x in weights.items()}

    @torch.no_grad()
    def load(self, weights: Mapping[str, tuple[Tensor, Tensor | Divided]]) -> list[str]:
        """Set weights of the module, given with what they become, and gather them. Every rank must call.

        Returns the names of those that are no divided parameters, and have not been set.
        """
        names = {id(p): name for name, p in self.own.items()}
        for mine, x in weights.values():
            if id(mine) in names:
                self.local[names[id(mine)]].copy_(rows_of(x))
        self.gather(again=True)
        return [name for name, (mine, _) in weights.items() if id(mine) not in names]


def rows_of(x: Tensor | Divided) -> Tensor:
    """This rank's rows of a whole tensor, or of one that is divided already."""
    return x.rows if isinstance(x, Divided) else x[bounds(len(x))]


class _Fields(nn.Module):
    """Returns the fields of the module's `Outputs` as a dict: FSDP waits for the gradients of what it finds in one."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.inside = module

    def forward(self, *args: object, **kwargs: object) -> dict[str, object]:
        return dict(vars(self.inside(*args, **kwargs)))


def divide(policy: Policy, copies: Sequence[PolicyCopy], own: LearnerOptions) -> None:
    """Divide the policy and the own weights of these copies, if there are several ranks."""
    offload = own.offload
    if distributed.world() == 1:
        if offload != "none":
            raise OperantError(
                f"learner.offload={offload} in one process: only what is divided over several ranks is offloaded; "
                "start them by torchrun --nproc-per-node 2 -m operant ..., or leave it out"
            )
        return
    if with_defaults(policy.model, LanguageModel).is_quantized:
        raise OperantError(
            "learner.parallel=fsdp with a quantised model: its weights cannot be divided; use learner.parallel=ddp, or "
            "load the model unquantised"
        )
    both = [policy.model, policy.critic.model] if policy.critic is not None else []
    if len({id(p) for m in both for p in m.parameters()}) < sum(len([*m.parameters()]) for m in both):
        raise OperantError(
            "learner.parallel=fsdp with value.critic=copy of a model with frozen weights: both have the same ones, and "
            "each would divide them; use a value head (value.critic=none), or learner.parallel=ddp"
        )
    of_policy = {id(p) for p in policy.parameters()}
    for copied in copies:
        others = [p for p in copied.policy.parameters() if id(p) in of_policy]
        if len([*copied.policy.parameters()]) > len(others):
            copied.shards = Shards(copied.policy, _units, shared=others, offload=offload in ("reference", "both"))
    policy.shards = Shards(policy, _units, offload=offload in ("optimizer", "both"))
    for copied in copies:
        if copied.shards is not None:
            copied.shards.free()


def _units(policy: Policy) -> list[nn.Module]:
    """What is gathered one at a time: the blocks, if every rank calls each of them once in a pass."""
    models = [m for m in (policy, policy.critic) if m is not None and hasattr(m, "blocks")]
    once = all(m.modes.padded for m in models)
    return [block for m in models for stack in m.blocks() for block in stack] if once else []


@contextmanager
def updating(
    policy: Policy, present: Callable[[], AbstractContextManager[None]], kl: KLOptions, batch: Batch
) -> Iterator[None]:
    """A context for an update, in which each rank has only its parts of a divided policy. Every rank must call.

    present: the context in which copies of the policy are whole.
    """
    shards = policy.shards
    if distributed.largest(int(batch.choices is not None)):
        raise OperantError(
            "learner.parallel=fsdp with a world that offers choices: the ranks would call the model unequally often in "
            "a pass, and wait for each other; use learner.parallel=ddp"
        )
    # The loss may read the reference, which shares frozen weights with the policy: they are whole then.
    reads = (kl.loss_coef > 0 and kl.loss_kind in EXACT) or (kl.direct and kl.kind in EXACT) or batch.hinted is not None
    with present() if reads else nullcontext():
        shards.module.modes = policy.modes
        shards.free(frozen=not reads)
        yield
        shards.gather()


class DividedOptimizer:
    """The state of an optimizer whose parameters are rows of divided ones, as a part of `RunState`."""

    def __init__(self, optimizer: Any, shards: Shards):
        self.optimizer, self.shards = optimizer, shards
        names = {id(p): name for name, p in shards.trained.items()}
        names |= {id(master): names[id(p)] for p, master in masters(optimizer)}
        self.names = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        """The name of each parameter, in the order of the optimizer's own numbers."""
        self.mastered = [names[id(p)] for p, _ in masters(optimizer)]

    def state_dict(self) -> dict[str, object]:
        def divided(name: str, x: object) -> object:
            whole = not isinstance(x, Tensor) or x.shape != self.shards.local[name].shape
            return x if whole else self.shards.part(name, x)

        return self._converted(self.optimizer.state_dict(), divided)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        def rows(name: str, x: object) -> object:
            known = isinstance(x, Divided) or (isinstance(x, Tensor) and x.shape == self.shards.own[name].shape)
            return rows_of(x) if known else x

        self.optimizer.load_state_dict(self._converted(state, rows))

    def renew(self) -> None:
        """As `MasterWeights.renew`."""
        if hasattr(self.optimizer, "renew"):
            self.optimizer.renew()

    def _converted(self, state: dict[str, Any], convert: Callable[[str, object], object]) -> dict[str, Any]:
        """The state with `convert(name of the parameter, x)` in the place of each moment and master weight x."""
        by_number = {
            number: {what: convert(self.names[number], x) for what, x in values.items()}
            for number, values in state["state"].items()
        }
        masters = [convert(name, x) for name, x in zip(self.mastered, state.get("masters", []), strict=True)]
        return state | {"state": by_number} | ({"masters": masters} if "masters" in state else {})
