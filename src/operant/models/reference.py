"""Copies of the policy that no optimizer changes: the reference, a target network, a mask model.

A copy shares all frozen weights with the policy. So with a frozen trunk or an adapter, it only costs the memory of the
trained weights.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from hashlib import sha256
from typing import Any

import torch
from torch import nn

from operant.models.policy import Policy
from operant.types import Divided, OperantError, require


class PolicyCopy:
    """A copy of a policy, and the rule by which it is updated. Frozen weights are shared with the policy.

    `"frozen"`: it never changes (the reference). `("polyak", tau)`: copy += tau * (policy - copy) (a target network).
    `("every", n)`: it becomes equal to the policy every n updates (NLPO's mask model). values: copy the critic too.
    """

    def __init__(
        self, policy: Policy, rule: str | tuple[str, float] = "frozen", *, copy: bool = True, values: bool = False
    ):
        if (rule if isinstance(rule, str) else rule[0]) not in ("frozen", "polyak", "every"):
            raise OperantError(f"rule {rule!r} of a policy copy is unknown: 'frozen', ('polyak', tau) or ('every', n)")
        self.rule = rule
        kept = shared(policy if values else policy.model) if copy else {}
        self._copied, self._shared, self._values = copy, set(kept), values
        self.shards: Any = None
        """The `training.sharding.Shards` of its own weights, if they are divided over ranks."""
        self.wide: dict[str, torch.Tensor] = {}
        """By name, in float32: 16-bit weights that follow by a share of the distance, which rounding would undo."""
        head, critic = policy.value_head, policy.critic
        if copy and not values:  # the values are not copied, so they are taken away meanwhile
            policy.value_head = policy.critic = None
        try:
            self.policy: Policy = deepcopy(policy, dict(kept)) if copy else policy
        finally:
            policy.value_head, policy.critic = head, critic
        self.policy.requires_grad_(False)
        self._fingerprint: str | None = fingerprint(self.policy) if rule == "frozen" else None
        self._moved = False

    @property
    def fingerprint(self) -> str:
        """A hash of every weight of its language model. One that follows the policy is hashed only when it is asked."""
        self._fingerprint = self._fingerprint or fingerprint(self.policy)
        return self._fingerprint

    @torch.no_grad()
    def update(self, policy: Policy, updates: int) -> None:
        """Apply the rule. `updates`: number of optimizer updates of the policy so far."""
        if self.rule == "frozen":
            return
        name, amount = self.rule
        with self.present():
            own, theirs = self._module(self.policy).named_parameters(), self._module(policy).parameters()
            for (key, mine), new in zip(own, theirs, strict=True):
                if name == "polyak" and mine is not new:
                    wide = mine if mine.element_size() > 2 else self.wide.setdefault(key, mine.float())
                    mine.copy_(wide.lerp_(new.to(wide), float(amount)))
                elif name == "every" and updates % int(amount) == 0:
                    mine.copy_(new)
            if self.shards is not None:
                self.shards.load({own: (p, p) for own, p in self.shards.own.items()})
        self._fingerprint = None

    def follow(self, policy: Policy) -> None:
        """Become equal to the policy, whose weights were loaded, unless the copy is frozen."""
        if (rule := self.rule) != "frozen":
            self.rule, self.wide = ("every", 1), {}
            self.update(policy, 0)
            self.rule = rule

    def is_copy_of(self, policy: Policy) -> bool:
        """Whether it was copied from the policy, whose weights have not changed since: their replies are the same."""
        mine, theirs = self.policy.state_dict(keep_vars=True), policy.state_dict(keep_vars=True)
        whole = self._copied and self.shards is None
        return whole and all(theirs[name] is x or torch.equal(theirs[name], x) for name, x in mine.items())

    @contextmanager
    def present(self) -> Iterator[None]:
        """Inside this context, all of its weights are in place. Of a divided copy, every rank must call."""
        if self.shards is None or self.shards.is_whole:
            yield
            return
        self.shards.gather()
        try:
            yield
        finally:
            self.shards.free()

    def _module(self, policy: Policy) -> nn.Module:
        return policy if self._values else policy.model

    def own(self) -> dict[str, torch.Tensor]:
        """The weights that are not shared, by name. A tied weight appears under each of its names."""
        weights = self._module(self.policy).state_dict(keep_vars=True)
        return {name: weight for name, weight in weights.items() if id(weight) not in self._shared}

    def state_dict(self) -> dict[str, object]:
        """The fingerprint and, unless the copy has always been frozen, the weights that it does not share."""
        weights = stored({} if self.rule == "frozen" and not self._moved else self.own(), self.shards)
        with self.present():
            return {"fingerprint": self.fingerprint, "weights": weights, **({"wide": self.wide} if self.wide else {})}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: OperantError if a frozen copy is not the one that the run began with."""
        if weights := state["weights"]:
            own, self._moved = self.own(), True
            odd = ", ".join(sorted(own.keys() ^ weights.keys())[:3])
            require(not odd, f"the policy copy has other weights than this run ({odd} ...)")
            load_stored(own, weights, self.shards)
            self.wide = {name: x.to(self.policy.device) for name, x in state.get("wide", {}).items()}
            self._fingerprint = None
        with self.present():
            then, found = state["fingerprint"], self.fingerprint
        why = f"the reference has fingerprint {found}, the run was started with {then}"
        require(found == then, f"{why}: resume with the model that it began from, as it was then")


def trained_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """The weights that training changes, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def stored(weights: Mapping[str, torch.Tensor], shards: Any) -> dict[str, torch.Tensor | Divided]:
    """Weights for a checkpoint. shards: they are divided over ranks, and this rank's rows are stored."""
    return {name: x.detach() for name, x in weights.items()} if shards is None else shards.divided(weights)


@torch.no_grad()
def load_stored(weights: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor | Divided], shards: Any) -> None:
    """Set weights to those that `stored` returned."""
    # Divided ones take their rows; those that are not divided, such as buffers, are copied.
    for name in state if shards is None else shards.load({name: (weights[name], x) for name, x in state.items()}):
        weights[name].copy_(state[name])


def shared(model: nn.Module) -> dict[int, object]:
    """The objects that a copy of the model can share with it, by id.

    They are frozen parameters, buffers, and the state of quantised layers. A frozen parameter that lies in the memory
    of a trained one changes with it, so it is not shared.
    """
    trained = {p.untyped_storage().data_ptr() for p in model.parameters() if p.requires_grad}
    weights = [*model.parameters(), *model.buffers()]  # buffers do not change: no model is ever in train mode
    objects: list[Any] = [w for w in weights if w.untyped_storage().data_ptr() not in trained]
    objects += [vars(m)["state"] for m in model.modules() if type(vars(m).get("state")).__name__ == "MatmulLtState"]
    return {id(thing): thing for thing in objects}


def fingerprint(policy: Policy) -> str:
    """A hash of every weight of the language model."""
    return digest(policy.model.state_dict())


def digest(weights: Mapping[str, torch.Tensor]) -> str:
    """A hash of named tensors: 16 hexadecimal digits."""
    whole = sha256()
    for name, weight in sorted(weights.items()):
        whole.update(name.encode())
        whole.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return whole.hexdigest()[:16]
