"""Rejection sampling: the update learns only from the best replies of a step, over all ranks.

RAFT (arXiv:2304.06767), ReST (arXiv:2308.08998). Whatever a method computes from the replies of a step, such as the
mean of a group, it computes from all of them; the others are then left out of the update.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from operant import distributed
from operant.objectives.advantages import gather, scatter
from operant.objectives.turn_returns import turn_returns
from operant.tally import Tally
from operant.training.select import parse
from operant.types import Batch


def best(
    batch: Batch, select: str, unit: str, places: Sequence[int | None], *, discount: float, kl_coef: float
) -> tuple[Tensor, Tally]:
    """The actions [B, T] bool of the best episodes or turns over all ranks, and the metrics. Every rank must call.

    An episode scores the sum of its rewards; a turn its return R_k = r_k + discount * R_{k+1}. KL is charged at
    `kl_coef` a nat to the unit in which it arose. Of equal scores the first stays: by `places` [E], the index of each
    episode over all ranks, then by turn. Demonstrations always stay, and are not counted.
    """
    index, turns, returns = turn_returns(batch, discount)
    own = turns.count > 0
    if batch.demonstrated is not None:
        given = torch.zeros(len(own), dtype=torch.bool, device=own.device)
        given[batch.episodes[batch.demonstrated]] = True
        own = own & ~given[:, None]
    charge = kl_coef * turns.summed(gather(batch.kl, index)) if batch.kl is not None else torch.zeros_like(returns)
    if unit == "episode":
        total = turns.summed(gather(batch.rewards, index)).sum(1) - charge.sum(1)
        scores = [(score, episode, 0) for episode, score in enumerate(total.tolist()) if bool(own[episode].any())]
    else:
        net = (returns - charge).tolist()
        scores = [(net[episode][turn], episode, turn) for episode, turn in own.nonzero().tolist()]
    rank = distributed.rank()
    group_of = dict(zip(batch.episodes.tolist(), batch.groups.tolist(), strict=True))
    mine = [(-score, -1 if (at := places[e]) is None else at, turn, rank, e, group_of[e]) for score, e, turn in scores]
    ranked = sorted(unit for part in distributed.gathered(mine) for unit in part)
    kind, number = parse(select)
    if kind == "above":
        kept = [unit for unit in ranked if -unit[0] > number]
    elif kind == "group":  # all replies of a group are on one rank, and ranks number their groups for themselves
        better = Counter[tuple[int, int]]()
        kept = []
        for unit in ranked:
            better[unit[3], unit[5]] += 1
            if better[unit[3], unit[5]] <= number:
                kept.append(unit)
    else:
        kept = ranked[: int(number) if kind == "count" else max(1, int(len(ranked) * number / 100 + 1e-9))]
    chosen = ~own & (turns.count > 0)  # demonstrations
    for _, _, turn, where, episode, _ in kept:
        if where == rank:
            chosen[episode, turn if unit == "turn" else slice(None)] = True
    tally = Tally()
    tally.add("select/share", len(kept), len(ranked))
    if kept:
        tally.add("select/threshold", -kept[-1][0])
        tally.add("select/score", -sum(unit[0] for unit in kept), len(kept))
    return scatter(turns.spread(chosen.long()), index, batch.tokens.shape) > 0, tally


def only(batch: Batch, kept: Tensor) -> Batch:
    """The batch with no other actions than `kept` [B, T], without rows that have none; one row stays if all have."""
    rows = kept.any(1).nonzero()[:, 0].cpu()
    return batch.with_(actions=batch.actions & kept).rows(rows if len(rows) else torch.tensor([0]))
