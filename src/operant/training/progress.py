"""Counters of a training run, and the data of its last step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from operant.sampling import Sampling
from operant.types import Batch, Rollout


class Progress:
    """The number of steps, of episodes that were trained on, and of refused steps in a row up to now."""

    def __init__(self) -> None:
        self.step, self.episodes, self.refused = 0, 0, 0

    def share(self, total: int | None) -> float:
        """The finished share of a run of `total` steps, in [0, 1]; 0 if the total is unknown."""
        return min(self.step / total, 1.0) if total else 0.0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "episodes": self.episodes, "refused": self.refused}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.episodes, self.refused = state["step"], state["episodes"], state.get("refused", 0)


@dataclass(frozen=True)
class LastStep:
    """The data of the last training step."""

    rollouts: list[Rollout]
    """All rollouts that were passed to the step."""
    scores: Sequence[Any]
    """One for each rollout, as the reward returned it."""
    batch: Batch
    places: list[int]
    """The indices of the rollouts in the batch."""
    sampling: Sampling
