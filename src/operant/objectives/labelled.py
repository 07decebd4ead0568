"""What losses over labelled replies share: episodes, groups and pairs of a batch; and the losses of reward models.

The label of an episode is the sum of its rewards. A group is the replies to one prompt, and none is cut by a
micro-batch. Tensors have one entry for each episode [E] or row [B]; B = E where every episode has one row.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from operant.tally import ROUNDING
from operant.types import Batch, Outputs, require


@dataclass(frozen=True)
class Groups:
    """The episodes of a batch, their labels and their groups: `Groups.of(batch)`."""

    rows: Tensor
    """[B] int: the number of each row's episode, 0..E-1."""
    labels: Tensor
    """[E] the sum of the rewards of each episode."""
    numbers: Tensor
    """[E] int: the number of each episode's group, 0..G-1."""

    @staticmethod
    def of(batch: Batch) -> "Groups":
        """The groups of a batch. A label that is above the next one of its group by rounding alone is equal to it."""
        rows = torch.unique(batch.episodes, return_inverse=True)[1]
        count = int(rows.max()) + 1
        paid = (batch.rewards * batch.actions).sum(1)
        labels = paid.new_zeros(count).index_add(0, rows, paid)
        group = batch.groups.new_zeros(count).scatter(0, rows, batch.groups)
        numbers = torch.unique(group, return_inverse=True)[1]
        order = labels.argsort()
        order = order[numbers[order].argsort(stable=True)]
        ordered, within = labels[order], numbers[order]
        largest = torch.zeros_like(labels).scatter_reduce(0, numbers, labels.abs(), "amax")
        apart = (within.diff() > 0) | (ordered.diff() > ROUNDING * largest[within[1:]])
        apart = torch.cat([apart.new_ones(1), apart])
        return Groups(rows, labels.index_copy(0, order, ordered[apart][apart.cumsum(0) - 1]), numbers)

    @property
    def count(self) -> int:
        """G, the number of groups."""
        return int(self.numbers.max()) + 1

    def sums(self, x: Tensor, batch: Batch) -> Tensor:
        """[E] the sum of a [B, T] tensor over the actions of each episode."""
        of_rows = torch.where(batch.actions, x, 0.0).sum(1)
        return of_rows.new_zeros(len(self.labels)).index_add(0, self.rows, of_rows)

    def sizes(self) -> Tensor:
        """[G] the number of episodes of each group."""
        return torch.bincount(self.numbers, minlength=self.count)

    def pairs(self, *, ties: bool = False) -> tuple[Tensor, Tensor]:
        """[P], [P] int: the better and the worse episode of every pair of a group; ties: the equal ones, once each."""
        same, labels = self.numbers[:, None] == self.numbers, self.labels
        found = torch.triu(same & (labels[:, None] == labels), 1) if ties else same & (labels[:, None] > labels)
        one, other = found.nonzero().T
        return one, other

    def mean(self, x: Tensor, of: Tensor) -> Tensor:
        """[B] for each row the mean of `x` [P] over the entries of its group; their groups are `of` [P]. 0 of none."""
        total = x.new_zeros(self.count).index_add(0, of, x)
        found = torch.bincount(of, minlength=self.count).clamp(min=1)
        return (total / found)[self.numbers[self.rows]]

    def extremes(self) -> tuple[Tensor, Tensor]:
        """[E], [E] bool: the episodes with the highest and with the lowest label of their group."""
        same = self.numbers[:, None] == self.numbers
        highest = torch.where(same, self.labels, -torch.inf).amax(1)
        lowest = torch.where(same, self.labels, torch.inf).amin(1)
        return self.labels == highest, self.labels == lowest

    def reported(self, x: Tensor, of: Tensor) -> Tensor:
        """[B] a metric of groups: `mean(x, of)` at the first row of each group; NaN at its others, and without x."""
        group = self.numbers[self.rows]
        places = torch.arange(len(group), device=group.device)
        first = places.new_full((self.count,), len(group)).scatter_reduce(0, group, places, "amin")
        known = (first[group] == places) & (torch.bincount(of, minlength=self.count) > 0)[group]
        return torch.where(known, self.mean(x.detach(), of), torch.nan)

    def once(self, x: Tensor) -> Tensor:
        """[B] a metric [E] at the first row of each episode, NaN at its others."""
        first = torch.ones_like(self.rows, dtype=torch.bool)
        first[1:] = self.rows[1:] != self.rows[:-1]
        return torch.where(first, x.detach()[self.rows], torch.nan)


def at_last(x: Tensor, batch: Batch) -> Tensor:
    """[B] a [B, T] tensor at the last action of each row."""
    places = torch.arange(x.shape[1], device=x.device) * batch.actions
    return x.gather(1, places.argmax(1, keepdim=True))[:, 0]


def right(gap: Tensor) -> Tensor:
    """Whether each difference is above 0: 1.0, or 0.5 at 0, else 0.0."""
    return (gap > 0).to(gap) + 0.5 * (gap == 0).to(gap)


KINDS = ("pairwise", "ranking", "best", "rating", "good")


def reward_model(
    out: Outputs, batch: Batch, *, kind: str = "pairwise", margin: float = 0.0, ties: str = "none", tie: float = 1.0
) -> dict[str, Tensor]:
    r"""The loss of a reward model [B], from its score s of each whole reply and the labels y.

    pairwise: $-\log\sigma(s_i - s_j - m\,(y_i - y_j))$ for every pair with $y_i > y_j$ (Bradley-Terry), with m =
    `margin`. ranking: $-\sum_i (s_i - \log\sum_{j: y_j \le y_i} e^{s_j})$ over all i that are not last (Plackett-Luce),
    divided by their number; equal labels share a sum (Breslow). best: the same, where only the highest label counts:
    the softmax over k of Ziegler et al. rating: $(s - y)^2$, the mean over the group. good: the cross-entropy of
    $\sigma(s)$ with y, 0 or 1, the sum over the group: steps are labelled until the first wrong one, so that a mean
    would give the labels of short solutions, which are the wrong ones, a larger weight.
    ties, of pairwise: none: pairs of equal labels are left out. davidson (1970), with $\nu$ = `tie`, $d = s_i - s_j$:
    $P(i > j) = e^{d/2} / (e^{d/2} + e^{-d/2} + \nu)$. rao-kupper (1967), with $\theta$ = 1 + `tie`: $P(i > j) =
    e^d / (e^d + \theta)$. What is left of 1 is the probability of a tie.
    """
    require(kind in KINDS, f"loss.kind={kind!r}: it must be {', '.join(KINDS[:-1])} or {KINDS[-1]}")
    require(ties in ("none", "davidson", "rao-kupper"), f"loss.ties={ties!r}: it must be none, davidson or rao-kupper")
    require(margin >= 0 and tie > 0, f"loss.margin={margin:g} must be at least 0, and loss.tie={tie:g} above 0")
    what = f"loss.{'margin' if margin else 'ties'} with loss.kind={kind}: it is for pairwise"
    require(kind == "pairwise" or (not margin and ties == "none"), f"{what}; leave it out")
    groups = Groups.of(batch)
    scores = out.values.new_zeros(len(groups.labels)).index_copy(0, groups.rows, at_last(out.values, batch))
    labels = groups.labels
    if kind == "pairwise":
        loss = _of_pairs(scores, groups, margin, ties, tie)
    elif kind in ("ranking", "best"):
        highest, lowest = groups.extremes()
        chosen = ~lowest & highest if kind == "best" else ~lowest
        among = (groups.numbers[:, None] == groups.numbers) & (labels <= labels[:, None])
        rest = torch.logsumexp(torch.where(among, scores, -torch.inf), 1)
        loss = groups.mean((rest - scores)[chosen], groups.numbers[chosen])
    elif kind == "rating":
        loss = groups.mean((scores - labels) ** 2, groups.numbers)
    else:
        loss = groups.mean(softplus(scores) - labels * scores, groups.numbers)
        loss = loss * groups.sizes()[groups.numbers[groups.rows]]
    metrics = _metrics(loss, scores.detach(), groups, batch)
    if kind in ("ranking", "best") or (kind == "pairwise" and ties == "none"):  # no loss without a pair
        metrics["preference/loss"] = metrics["preference/loss"] + 0 * metrics["preference/accuracy"]
    if kind == "good":  # there may be no pairs
        toward = scores.detach() * (2 * labels - 1)
        metrics["preference/accuracy"] = groups.reported(right(toward), groups.numbers)
        metrics["preference/confidence"] = groups.reported(torch.sigmoid(toward.abs()), groups.numbers)
    return {"loss": loss, **metrics}


def _metrics(loss: Tensor, scores: Tensor, groups: Groups, batch: Batch) -> dict[str, Tensor]:
    """[B] each: how the scores order the replies, and how much of that is their length."""
    better, worse = groups.pairs()
    of, gap, every = groups.numbers[better], scores[better] - scores[worse], groups.numbers
    lengths = groups.sums(torch.ones_like(batch.rewards), batch)
    longer, shorter = replace(groups, labels=lengths).pairs()
    top, _ = replace(groups, labels=scores).extremes()
    high, low = groups.extremes()
    chosen = top & ~(high & low)  # all labels of a group are equal where both hold
    return {
        "preference/loss": groups.reported(loss, every[groups.rows]),
        "preference/accuracy": groups.reported(right(gap), of),
        "preference/confidence": groups.reported(torch.sigmoid(gap.abs()), of),
        "preference/best": groups.reported(high[chosen].to(scores), every[chosen]),
        "preference/longer_is_better": groups.reported(right(lengths[better] - lengths[worse]), of),
        "preference/prefers_longer": groups.reported(right(scores[longer] - scores[shorter]), every[longer]),
        "preference/score": groups.reported(scores, every),
    }


def _of_pairs(scores: Tensor, groups: Groups, margin: float, ties: str, tie: float) -> Tensor:
    """[B] Bradley-Terry, and its forms with ties."""
    better, worse = groups.pairs()
    gap = scores[better] - scores[worse] - margin * (groups.labels[better] - groups.labels[worse])
    if ties == "none":
        return groups.mean(-logsigmoid(gap), groups.numbers[better])
    one, other = groups.pairs(ties=True)
    even = scores[one] - scores[other]
    if ties == "davidson":
        both = lambda d: torch.logsumexp(torch.stack([d / 2, -d / 2, torch.full_like(d, math.log(tie))]), 0)  # noqa: E731
        won, tied = both(gap) - gap / 2, both(even) - math.log(tie)
    else:
        theta = math.log1p(tie)
        won = softplus(theta - gap)
        # P(tie) = (theta^2 - 1) / ((1 + theta e^-d) (1 + theta e^d))
        tied = softplus(theta - even) + softplus(theta + even) - math.log(math.expm1(2 * theta))
    return groups.mean(torch.cat([won, tied]), groups.numbers[torch.cat([better, one])])
