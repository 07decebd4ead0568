"""Advantages of replies that are compared within their group: GRPO's and RLOO's. Others are in `group_baselines`."""

from collections.abc import Callable

import torch
from torch import Tensor

from operant.objectives.advantages import moments
from operant.tally import ROUNDING
from operant.types import Batch, OperantError

DEVIATIONS = {"population": (0, 1e-6), "sample": (1, 1e-4)}
"""(d, added) of each kind of deviation: the variance divides by n - d, and `added` is added to the deviation."""


def group_relative(returns: Tensor, groups: Tensor, *, scale: bool = True, deviation: str = "population") -> Tensor:
    """Centre (and scale) each return [E] by the returns of its group (arXiv:2402.03300), in two passes in float64.

    A group of one is exactly 0. So is a constant group and, with `scale`, one whose deviation is no larger than
    rounding. `deviation`: see `with_groups`.
    """
    index = torch.unique(groups, return_inverse=True)[1]
    x = returns.double()
    size = int(index.max()) + 1 if len(index) else 0
    count = x.new_zeros(size).index_add(0, index, torch.ones_like(x))
    # The mean of equal numbers may differ from them by rounding; the mean of their differences to one of them cannot.
    anchor = x.new_zeros(size).scatter(0, index, x)
    gap = x - anchor[index]
    centred = gap - (x.new_zeros(size).index_add(0, index, gap) / count)[index]
    if scale:
        fewer, added = DEVIATIONS[deviation]
        squares = x.new_zeros(size).index_add(0, index, centred**2)
        std = (squares / (count - fewer).clamp(min=1)).sqrt()
        largest = x.new_zeros(size).scatter_reduce(0, index, x.abs(), "amax")
        centred = torch.where((std > ROUNDING * largest)[index], centred / (std[index] + added), 0.0)
    return centred.to(returns.dtype)


def leave_one_out(returns: Tensor, groups: Tensor) -> Tensor:
    """Each return [E] minus the mean of the others of its group (RLOO, arXiv:2402.14740); 0 for a group of one.

    It is computed as the difference to the mean of the whole group, times n / (n - 1).
    """
    index = torch.unique(groups, return_inverse=True)[1]
    count = torch.bincount(index).to(torch.float64)[index]
    centred = group_relative(returns.double(), groups, scale=False)
    return (centred * count / (count - 1).clamp(min=1)).to(returns.dtype)


def with_groups(batch: Batch, *, scale: bool = True, deviation: str = "population") -> Batch:
    """Give every action of an episode the episode's return, relative to its group (GRPO, arXiv:2402.03300).

    `scale`: divide by the group's standard deviation; False is Dr. GRPO (arXiv:2503.20783). `deviation`: population
    (divides by n, plus 1e-6), sample (divides by n - 1, plus 1e-4, as in TRL) or batch (that of all replies of the step
    around the means of their groups, arXiv:2510.13786).
    Raises: OperantError for another `deviation`.
    """
    if deviation not in (*DEVIATIONS, "batch"):
        raise OperantError(f"advantage.deviation={deviation!r}: it must be one of {', '.join(DEVIATIONS)}, batch")

    def rule(returns: Tensor, groups: Tensor, _: Tensor) -> Tensor:
        if deviation != "batch":
            return group_relative(returns, groups, scale=scale, deviation=deviation)
        centred = group_relative(returns, groups, scale=False)
        spread = moments(centred, torch.ones_like(centred, dtype=torch.bool))[1]
        return centred / spread if scale and spread else centred

    return of_episodes(batch, rule)


def with_leave_one_out(batch: Batch) -> Batch:
    """Give every action of an episode the episode's return minus the mean of the others of its group."""
    return of_episodes(batch, lambda returns, groups, _: leave_one_out(returns, groups))


def of_episodes(batch: Batch, rule: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Batch:
    """The batch in which every action has the advantage of its episode.

    `rule(returns, groups, episodes)` gets the sum of each episode's rewards, its group and its number, each [E], and
    returns the advantages [E]. A row without actions, which a rank without replies has, is no episode.
    """
    acting = batch.actions.any(1)
    numbers, row = torch.unique(batch.episodes[acting], return_inverse=True)
    paid = (batch.rewards * batch.actions).sum(1)[acting]
    returns = batch.rewards.new_zeros(len(numbers)).index_add(0, row, paid)
    groups = batch.groups.new_zeros(len(numbers)).scatter(0, row, batch.groups[acting])
    advantages = torch.zeros_like(batch.rewards)
    advantages[acting] = rule(returns, groups, numbers)[row][:, None] * batch.actions[acting]
    return batch.with_(advantages=advantages)
