"""Each algorithm, as a choice of parts. Adding one is adding a row; nothing outside this table asks which one runs."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from operant import advantages, losses
from operant.types import AdvantageFn, LossFn, OperantError, Rollout
from operant.updates import gradient


@dataclass(frozen=True)
class Algorithm:
    """One row: what is descended on, from what, and in which units."""

    loss: LossFn
    advantage: AdvantageFn | None = None
    source: str = "play"
    """play: rollouts of the policy. data: replies that somebody else wrote."""
    select: Callable[[Sequence[Rollout], Sequence[float]], list[int]] | None = None
    """Which rollouts are learnt from; None: all."""
    unit: str = "episode"
    """What is shuffled and cut: episode | pair."""
    per: str = "token"
    """What the mean is over: see `batch.token_weights`."""
    shadows: Mapping[str, str | tuple[str, float]] = field(default_factory=dict)
    """Named copies of the policy and the rule by which each follows."""
    needs_values: bool = False
    update: Callable = gradient.update


ALGORITHMS: dict[str, Algorithm] = {
    "ppo": Algorithm(losses.ppo, advantages.with_gae, shadows={"reference": "frozen"}, needs_values=True),
    "sft": Algorithm(losses.sft, source="data"),
}


def find(name: str) -> Algorithm:
    """The row of that name. Raises: OperantError with the nearest."""
    if name not in ALGORITHMS:
        near = difflib.get_close_matches(name, ALGORITHMS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(ALGORITHMS)}"
        raise OperantError(f"algorithm {name!r} is unknown; {hint}")
    return ALGORITHMS[name]
