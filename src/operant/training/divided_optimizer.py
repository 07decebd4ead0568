"""The state of an optimizer of which each rank has its share, as a part of a run's state."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from operant.distributed import Shards, rows_of
from operant.types import Divided


class DividedOptimizer:
    """The state of an optimizer whose parameters are rows of divided ones, as a part of `RunState`."""

    def __init__(self, optimizer: Any, shards: Shards):
        self.optimizer, self.shards = optimizer, shards
        names = {id(p): name for name, p in shards.trained.items()}
        names |= {id(master): names[id(p)] for p, master in getattr(optimizer, "pairs", ())}
        self.names = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        """The name of each parameter, in the order of the optimizer's own numbers."""
        self.mastered = [names[id(p)] for p, _ in getattr(optimizer, "pairs", ())]

    def state_dict(self) -> dict[str, Any]:
        def divided(name: str, x: Any) -> Any:
            whole = not isinstance(x, Tensor) or x.shape != self.shards.local[name].shape
            return x if whole else self.shards.part(name, x)

        return self._converted(self.optimizer.state_dict(), divided)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        def rows(name: str, x: Any) -> Any:
            known = isinstance(x, Divided) or (isinstance(x, Tensor) and x.shape == self.shards.own[name].shape)
            return rows_of(x) if known else x

        self.optimizer.load_state_dict(self._converted(state, rows))

    def renew(self) -> None:
        """As `MasterWeights.renew`."""
        if hasattr(self.optimizer, "renew"):
            self.optimizer.renew()

    def _converted(self, state: dict[str, Any], convert: Callable[[str, Any], Any]) -> dict[str, Any]:
        """The state with `convert(name of the parameter, x)` in the place of each moment and master weight x."""
        by_number = {
            number: {what: convert(self.names[number], x) for what, x in values.items()}
            for number, values in state["state"].items()
        }
        masters = [convert(name, x) for name, x in zip(self.mastered, state.get("masters", []), strict=True)]
        return state | {"state": by_number} | ({"masters": masters} if "masters" in state else {})
