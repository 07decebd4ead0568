"""Named copies of the policy that no optimizer moves: reference, target network, mask model. One kind, three rules."""

from copy import deepcopy
from hashlib import sha256
from typing import Any

import torch

from operant.policy.policy import Policy
from operant.types import OperantError


class Shadow:
    """A frozen copy of a policy, and the rule by which it follows.

    `"frozen"`: never, the reference. `("polyak", tau)`: shadow += tau * (policy - shadow), a target network.
    `("every", n)`: copied every n updates, NLPO's mask model.
    """

    def __init__(self, policy: Policy, rule: str | tuple[str, float] = "frozen", *, copy: bool = True):
        name = rule if isinstance(rule, str) else rule[0]
        if name not in ("frozen", "polyak", "every"):
            raise OperantError(f"shadow rule {rule!r} is unknown: 'frozen', ('polyak', tau) or ('every', n)")
        self.rule = rule
        self.policy = _bare_copy(policy) if copy else policy
        self.policy.requires_grad_(False)
        self.fingerprint = fingerprint(self.policy)

    @torch.no_grad()
    def update(self, policy: Policy, updates: int) -> None:
        """Follow, after `updates` optimizer updates of the policy."""
        if self.rule == "frozen":
            return
        name, amount = self.rule
        own, theirs = self.policy.model.parameters(), policy.model.parameters()
        if name == "polyak":
            for mine, new in zip(own, theirs, strict=True):
                mine.lerp_(new.to(mine), float(amount))
        elif updates % int(amount) == 0:
            for mine, new in zip(own, theirs, strict=True):
                mine.copy_(new)
        self.fingerprint = fingerprint(self.policy)

    def state_dict(self) -> dict[str, Any]:
        """A frozen shadow is told by its fingerprint; one that follows carries its weights."""
        weights = {} if self.rule == "frozen" else self.policy.model.state_dict()
        return {"fingerprint": self.fingerprint, "weights": weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: OperantError where a frozen shadow is not the one that the run began with."""
        if state["weights"]:
            self.policy.model.load_state_dict(state["weights"])
            self.fingerprint = fingerprint(self.policy)
        if state["fingerprint"] != self.fingerprint:
            raise OperantError(
                f"the reference has fingerprint {self.fingerprint}, the run was started with {state['fingerprint']}: "
                "resume with the model that it began from"
            )


def _bare_copy(policy: Policy) -> Policy:
    """Without value head and critic: a shadow only ever scores."""
    head, critic = policy.value_head, policy.critic
    policy.value_head = policy.critic = None
    try:
        return deepcopy(policy)
    finally:
        policy.value_head, policy.critic = head, critic


def fingerprint(policy: Policy) -> str:
    """A hash of every weight of the language model."""
    digest = sha256()
    for name, weight in sorted(policy.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
