"""What rewards made of rewards share, so that whatever looks for something in a reward looks in its parts too."""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any, TypeVar

from operant.rewards.evaluate import Judged, check, judge
from operant.rewards.text_scores import RewardBase
from operant.types import RewardFn, Rollout, Tokenizer, Total, name_of, with_defaults

Part = TypeVar("Part")


class Wrapper(RewardBase):
    """A reward around another, `reward`; one around several has its own `parts` and `rebuilt`."""

    reward: RewardFn
    """The inner reward."""

    __name__: Any = property(lambda self: name_of(self.reward))

    @property
    def parts(self) -> Sequence[RewardFn]:
        return [self.reward]

    def __call__(self, rollouts: list[Rollout]) -> list[Total]:
        return self.judged(rollouts).scores

    def judged(self, rollouts: list[Rollout]) -> Judged:
        """The checked answers. Raises: OperantError for what cannot be judged."""
        return judge(self.reward, rollouts)

    def rebuilt(self, change: Callable[[RewardFn], RewardFn]) -> RewardFn:
        """The same around what `change` makes of each inner reward."""
        same = copy(self)
        object.__setattr__(same, "reward", change(self.reward))  # some are frozen dataclasses
        return same

    def check(self) -> None:
        for part in self.parts:
            check(part)

    def for_held_out(self) -> RewardFn:
        return self.rebuilt(held_out)


def held_out(reward: RewardFn) -> RewardFn:
    """The reward as it judges single replies, such as held-out ones: compared with no others, and without a critic."""
    return with_defaults(reward, RewardBase).for_held_out() or reward


def every_part(reward: object) -> Iterator[object]:
    """A reward and all that it is made of: the parts of a sum, what it changes, and what it calls."""
    if reward is not None:
        yield reward
        # What a reward of the user's calls `parts` may be anything.
        for part in reward.parts if isinstance(reward, RewardBase) else ():
            yield from every_part(part)


def described_parts(reward: RewardFn | None) -> list[RewardBase]:
    """The same, with the defaults of what a part does not have."""
    return [with_defaults(part, RewardBase) for part in every_part(reward)]


def compared_with_greedy(reward: RewardFn | None) -> list[RewardBase]:
    """The parts of a reward that compare replies with the policy's greedy ones (`see_greedy`)."""
    return [part for part in described_parts(reward) if part.wants_greedy]


def parts_of(reward: RewardFn | None, kind: type[Part]) -> list[Part]:
    """The rewards of a class among its parts."""
    return [part for part in every_part(reward) if isinstance(part, kind)]


def read_with(reward: RewardFn | None, tokenizer: Tokenizer | None) -> None:
    """Give the policy's tokenizer to the parts of a reward that read the beginnings of replies."""
    for part in described_parts(reward):
        if part.reads_tokens:
            part.tokenizer = tokenizer
