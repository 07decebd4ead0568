"""The state of a policy in a checkpoint: its trained weights, and a hash of its frozen ones."""

from typing import Any

import torch

from operant.models.policy import Policy
from operant.models.reference import digest
from operant.types import OperantError


class PolicyState:
    """A policy as a part of `RunState`. Frozen weights are not written: a resumed run loads them as it did at first.

    Their hash is computed by the constructor, and compared at every save and on resume. shards: the policy is divided
    over the ranks; the state has this rank's rows.
    """

    def __init__(self, policy: Policy, shards: Any = None):
        self.policy, self.shards = policy, shards
        self.frozen = self._frozen()

    def state_dict(self) -> dict[str, Any]:
        """Raises: OperantError if the frozen weights have changed."""
        if self.frozen is None:
            return self._divided(self.policy.state_dict(keep_vars=True))
        if self._frozen() != self.frozen:
            raise OperantError(
                "frozen weights have changed since the run began: something writes into the base model (a reward or "
                "callback that merges an adapter, say); nothing was saved, resume from an older checkpoint"
            )
        return {"trained": self._divided(self._trained()), "frozen": self.frozen}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: OperantError if the checkpoint has other frozen weights, or other trained ones."""
        if self.frozen is None and "trained" not in state:
            here = {name: list(x.shape) for name, x in self.policy.state_dict().items()}
            then = {name: list(x.shape) for name, x in state.items()}
            changed = [name for name in here if name in then and here[name] != then[name]]
            differences = [f"{name} has the sizes {here[name]}, and there {then[name]}" for name in changed[:1]]
            differences += [f"{len(then.keys() - here.keys())} weights of the checkpoint are missing"] * bool(
                then.keys() - here
            )
            differences += [f"{len(here.keys() - then.keys())} weights are new"] * bool(here.keys() - then)
            if differences:
                raise OperantError(f"this is another policy than the run began with ({'; '.join(differences)})")
            if self.shards is None:
                self.policy.load_state_dict(state)
            else:
                self._load_rows(self.policy.state_dict(keep_vars=True), state)
            return
        own, theirs = set(self._trained()), set(state.get("trained", state))
        if own != theirs:
            odd = ", ".join(sorted(own ^ theirs)[:3])
            raise OperantError(
                f"the checkpoint trains other weights than this run ({odd} ...): resume with its options"
            )
        if state["frozen"] != self.frozen:
            raise OperantError(
                f"the frozen weights have the hash {self.frozen}, the run was started with {state['frozen']}: "
                "resume with the model that it began from, in the same precision"
            )
        if self.shards is not None:
            self._load_rows(self._trained(), state["trained"])
            return
        for name, weight in self._trained().items():
            weight.copy_(state["trained"][name])

    def _trained(self) -> dict[str, torch.Tensor]:
        return {name: p for name, p in self.policy.named_parameters() if p.requires_grad}

    def _divided(self, weights: dict[str, torch.Tensor]) -> dict[str, Any]:
        """The weights, with this rank's rows of those that are divided."""
        return (
            {name: x.detach() for name, x in weights.items()} if self.shards is None else self.shards.divided(weights)
        )

    def _load_rows(self, own: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        """Set the divided weights to those of the state, and copy the others, which are buffers."""
        for name in self.shards.load({name: (own[name], x) for name, x in state.items()}):
            own[name].copy_(state[name])

    def _frozen(self) -> str | None:
        frozen = {name: p for name, p in self.policy.named_parameters() if not p.requires_grad}
        return digest(frozen) if frozen else None
