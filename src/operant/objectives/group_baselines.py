"""Advantages of replies that are compared within their group, beyond GRPO's and RLOO's. Pure functions, [E] -> [E]."""

from collections.abc import Callable
from math import comb

import torch
from torch import Tensor

from operant.objectives.advantages import normalised
from operant.objectives.groups import group_relative, of_episodes
from operant.types import Batch, OperantError, require


def _within(returns: Tensor, groups: Tensor, rule: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The results of `rule(returns, places)` of each group, put back in order. It gets float64 and indices into [E]."""
    found = torch.zeros_like(returns)
    for group in groups.unique():
        places = (groups == group).nonzero().squeeze(1)
        found[places] = rule(returns[places].double(), places).to(returns.dtype)
    return found


def by_length(returns: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """OPO [E]: each return less the mean of its group weighted by length, sum(l r) / sum(l) (arXiv:2505.23585).

    That baseline gives the gradient the least variance if the squared norm of a reply's gradient grows with its length.
    """

    def rule(mine: Tensor, places: Tensor) -> Tensor:
        weights = lengths[places].double()
        gap = mine - mine[0]  # equal returns give exactly 0
        return gap - (weights * gap).sum() / weights.sum()

    return _within(returns, groups, rule)


def by_success(returns: Tensor, groups: Tensor) -> Tensor:
    """MaxRL [E]: (r - mean) / mean of the group, and 0 where the mean is 0 (arXiv:2602.02710).

    With rewards of 0 and 1 its mean over n replies is an unbiased gradient of the sum over k < n of pass@k / k, the
    first terms of the log-likelihood of a right reply.
    """
    if len(returns) and float(returns.min()) < 0:
        divides = "maxrl divides by the mean return of a group, which is the rate of success"
        how = "rewards must not be negative; charge KL in the loss (kl.loss_coef), not in the reward"
        raise OperantError(f"a return of {float(returns.min()):.4g}: {divides}, so {how}")

    def rule(mine: Tensor, _: Tensor) -> Tensor:
        mean = mine.mean()
        return (mine - mean) / mean if mean > 0 and mine.max() > mine.min() else torch.zeros_like(mine)

    return _within(returns, groups, rule)


def best_of(returns: Tensor, groups: Tensor, k: int | None = None) -> Tensor:
    """pass@k [E]: what a reply adds to the best of k (arXiv:2503.19595), averaged over the subsets of its group.

    A_i = k mean_S [max(S) - max(S without i)] over all S of k replies that contain i. With k the size of the group
    (None) it is k times the lead of the best reply, and 0 for the others. Its mean over the group is an unbiased
    gradient of E[max of k returns].
    """

    def rule(mine: Tensor, _: Tensor) -> Tensor:
        n = len(mine)
        best = n if k is None else min(k, n)  # of a group that has lost replies: all
        if best == 1:
            return mine
        value, order = mine.sort()
        # Reply p is the best of S and reply q < p the second best in C(q, k - 2) of the C(n - 1, k - 1) subsets.
        counts = torch.tensor([comb(q, best - 2) for q in range(n)], dtype=mine.dtype, device=mine.device)
        lead = (value[:, None] - value[None, :]).tril(-1) @ counts
        return torch.zeros_like(mine).scatter(0, order, best * lead / comb(n - 1, best - 1))

    return _within(returns, groups, rule)


def with_length_baseline(batch: Batch) -> Batch:
    """Give every action of an episode the episode's return, less OPO's baseline: see `by_length`."""
    counts = batch.actions.sum(1)
    lengths = torch.zeros_like(batch.bootstrap).index_add(0, batch.episodes, counts.to(batch.bootstrap.dtype))
    return of_episodes(batch, lambda returns, groups, episodes: by_length(returns, groups, lengths[episodes]))


def with_success_rate(batch: Batch) -> Batch:
    """Give every action of an episode MaxRL's advantage of the episode: see `by_success`. Raises: OperantError, too."""
    return of_episodes(batch, lambda returns, groups, _: by_success(returns, groups))


def with_best_of(batch: Batch, *, k: int | None = None) -> Batch:
    """Give every action of an episode what the episode adds to the best of `k`: see `best_of`."""
    require(k is None or k >= 1, f"advantage.k={k}: it must be at least 1")
    return of_episodes(batch, lambda returns, groups, _: best_of(returns, groups, k))


def with_group_mean(batch: Batch, *, unbiased: bool = False) -> Batch:
    """Give every action the return of its episode less the mean of its group, whitened over all actions of the batch.

    REINFORCE++ with a baseline (arXiv:2501.03262). `unbiased`: see
    `advantages.whiten`.
    """
    centred = of_episodes(batch, lambda returns, groups, _: group_relative(returns, groups, scale=False))
    return normalised(centred, batch.actions, unbiased=unbiased)
