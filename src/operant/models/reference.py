"""Named copies of the policy that no optimizer moves: reference, target network, mask model. One kind, three rules.

A copy holds what is trained and shares the rest with the policy: below a frozen trunk, or under an adapter, it costs
only what is trained.
"""

from collections.abc import Mapping
from copy import deepcopy
from hashlib import sha256
from typing import Any

import torch
from torch import nn

from operant.models.policy import Policy
from operant.types import OperantError


class PolicyCopy:
    """A copy of a policy that no optimizer moves, and the rule by which it is updated. Frozen weights are shared.

    `"frozen"`: never, the reference. `("polyak", tau)`: copy += tau * (policy - copy), a target network.
    `("every", n)`: copied every n updates, NLPO's mask model.
    """

    def __init__(self, policy: Policy, rule: str | tuple[str, float] = "frozen", *, copy: bool = True):
        name = rule if isinstance(rule, str) else rule[0]
        if name not in ("frozen", "polyak", "every"):
            raise OperantError(f"rule {rule!r} of a policy copy is unknown: 'frozen', ('polyak', tau) or ('every', n)")
        self.rule = rule
        held = shared(policy.model) if copy else {}
        self._shared = set(held)
        self.policy = _bare_copy(policy, held) if copy else policy
        self.policy.requires_grad_(False)
        self.fingerprint = fingerprint(self.policy)

    @torch.no_grad()
    def update(self, policy: Policy, updates: int) -> None:
        """Follow, after `updates` optimizer updates of the policy."""
        if self.rule == "frozen":
            return
        name, amount = self.rule
        both = zip(self.policy.model.parameters(), policy.model.parameters(), strict=True)
        moved = [(mine, new) for mine, new in both if mine is not new]
        if name == "polyak":
            for mine, new in moved:
                mine.lerp_(new.to(mine), float(amount))
        elif updates % int(amount) == 0:
            for mine, new in moved:
                mine.copy_(new)
        self.fingerprint = fingerprint(self.policy)

    def _own(self) -> dict[str, Any]:
        """What is not shared, by name. A tied weight has every one of its names."""
        held = self.policy.model.state_dict(keep_vars=True)
        return {name: weight.detach() for name, weight in held.items() if id(weight) not in self._shared}

    def state_dict(self) -> dict[str, Any]:
        """The fingerprint; where the copy is updated, also the weights that it does not share."""
        weights = {} if self.rule == "frozen" else self._own()
        return {"fingerprint": self.fingerprint, "weights": weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: OperantError where a frozen copy is not the one that the run began with."""
        if state["weights"]:
            _put(state["weights"], self._own())
            self.fingerprint = fingerprint(self.policy)
        if state["fingerprint"] != self.fingerprint:
            raise OperantError(
                f"the reference has fingerprint {self.fingerprint}, the run was started with {state['fingerprint']}: "
                "resume with the model that it began from"
            )


@torch.no_grad()
def _put(weights: dict[str, Any], own: dict[str, Any]) -> None:
    if set(weights) != set(own):
        odd = ", ".join(sorted(set(weights) ^ set(own))[:3])
        raise OperantError(f"the policy copy has other weights than this run ({odd} ...): resume with its own options")
    for name, weight in own.items():
        weight.copy_(weights[name])


def shared(model: nn.Module) -> dict[int, Any]:
    """What a copy of the model may share with it, by id: frozen parameters, buffers, and a quantised layer's state.

    A frozen parameter in the memory of a trained one moves with it, so it is not among them.
    """
    moved = {_memory(p) for p in model.parameters() if p.requires_grad}
    weights = [*model.parameters(), *model.buffers()]  # nothing is trained in train mode: no buffer is moved
    held: list[Any] = [w for w in weights if _memory(w) not in moved]
    held += [vars(m)["state"] for m in model.modules() if type(vars(m).get("state")).__name__ == "MatmulLtState"]
    return {id(thing): thing for thing in held}


def _memory(weight: torch.Tensor) -> int:
    return weight.untyped_storage().data_ptr()


def _bare_copy(policy: Policy, held: dict[int, Any]) -> Policy:
    """A copy without value head and critic: it only ever scores."""
    head, critic = policy.value_head, policy.critic
    policy.value_head = policy.critic = None
    try:
        return deepcopy(policy, dict(held))
    finally:
        policy.value_head, policy.critic = head, critic


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
