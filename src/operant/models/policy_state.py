"""The state of a policy in a checkpoint: its trained weights, and a hash of its frozen ones."""

from collections.abc import Mapping
from typing import Any

from operant.models.policy import Policy
from operant.models.reference import digest, load_stored, stored, trained_weights
from operant.types import OperantError, require


class PolicyState:
    """A policy as a part of `RunState`. Frozen weights are not written: a resumed run loads them as it did at first.

    Their hash is computed by the constructor, and compared at every save and on resume. shards: the policy is divided
    over the ranks; the state has this rank's rows.
    """

    def __init__(self, policy: Policy, shards: Any = None):
        self.policy, self.shards = policy, shards
        self.frozen = self._frozen()

    def state_dict(self) -> Mapping[str, object]:
        """Raises: OperantError if the frozen weights have changed."""
        if self.frozen is None:
            return stored(self.policy.state_dict(keep_vars=True), self.shards)
        if self._frozen() != self.frozen:
            raise OperantError(
                "frozen weights have changed since the run began: something writes into the base model (a reward or "
                "callback that merges an adapter, say); nothing was saved, resume from an older checkpoint"
            )
        return {"trained": stored(trained_weights(self.policy), self.shards), "frozen": self.frozen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: OperantError if the checkpoint has other frozen weights, or other trained ones."""
        if self.frozen is None and "trained" not in state:
            weights = self.policy.state_dict(keep_vars=True)
            here, then = ({name: list(x.shape) for name, x in part.items()} for part in (weights, state))
            changed = [name for name in here if name in then and here[name] != then[name]]
            missing, new = len(then.keys() - here.keys()), len(here.keys() - then.keys())
            differences = [f"{name} has the sizes {here[name]}, and there {then[name]}" for name in changed[:1]]
            differences += [f"{missing} weights of the checkpoint are missing"] if missing else []
            differences += [f"{new} weights are new"] if new else []
            require(not differences, f"this is another policy than the run began with ({'; '.join(differences)})")
            load_stored(weights, state, self.shards)
            return
        weights, then = trained_weights(self.policy), state.get("trained", state)
        odd = sorted(weights.keys() ^ then.keys())
        if odd:
            named = ", ".join(odd[:3])
            raise OperantError(f"the checkpoint trains other weights ({named} ...)")
        if state["frozen"] != self.frozen:
            raise OperantError(
                f"the frozen weights have the hash {self.frozen}, the run was started with {state['frozen']}: "
                "resume with the model that it began from, in the same precision"
            )
        load_stored(weights, then, self.shards)

    def _frozen(self) -> str | None:
        frozen = {name: p for name, p in self.policy.named_parameters() if not p.requires_grad}
        return digest(frozen) if frozen else None
