"""What rewards made of rewards share, so that whatever looks for something in a reward looks in its parts too."""

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

from operant.text_scores import Score
from operant.types import RewardFn


class Wrapper:
    """A reward around another, `reward`; one around several has its own `inner` and `rebuilt`."""

    reward: RewardFn
    """The inner reward."""
    reads_tokens = False
    """Whether it reads the beginnings of replies, with the policy's tokenizer in its field `tokenizer`."""

    def inner(self) -> list[RewardFn]:
        """The rewards that it is made of."""
        return [self.reward]

    def rebuilt(self, change: Callable[[Any], Any]) -> Any:
        """The same around what `change` makes of each inner reward."""
        same = copy(self)
        object.__setattr__(same, "reward", change(self.reward))  # some are frozen dataclasses
        return same

    def held_out(self) -> Any:
        """The reward as it judges single replies, such as held-out ones."""
        return self


def held_out(reward: Any) -> Any:
    """The reward as it judges single replies, such as held-out ones: without what compares the replies of a step, and
    without a critic, so that its score is that of the outcome."""
    return reward.held_out() if isinstance(reward, Wrapper) else reward


def every_part(reward: Any) -> Iterator[Any]:
    """A reward and all that it is made of: the parts of a sum, what it changes, and what it `uses`."""
    yield reward
    inner = reward.inner() if isinstance(reward, Wrapper) else reward.uses if isinstance(reward, Score) else ()
    for part in inner:
        yield from every_part(part)


def parts_of(reward: Any, kind: type) -> list[Any]:
    """The rewards of a class among its parts."""
    return [part for part in every_part(reward) if isinstance(part, kind)]


def read_with(reward: Any, tokenizer: Any) -> None:
    """Give the policy's tokenizer to the parts of a reward that read the beginnings of replies."""
    for part in every_part(reward):
        if getattr(part, "reads_tokens", False):
            part.tokenizer = tokenizer
