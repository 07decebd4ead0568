"""Returns from each turn on, and groups of turns that begin in the same state (GiGPO)."""

import torch
from torch import Tensor

from operant.objectives import advantages
from operant.objectives.advantages import Turns, episode_index, gae, gather, scatter
from operant.objectives.groups import DEVIATIONS, group_relative, with_groups
from operant.types import Batch, require


def turn_returns(batch: Batch, discount: float) -> tuple[Tensor, Turns, Tensor]:
    """Return `episode_index` [E, A], the turns of the episodes, and the return from each turn on, [E, K].

    R_k = r_k + discount * R_{k+1}, where r_k is the sum of the rewards of turn k's actions; a turn in between that is
    not trained on discounts once more.
    """
    index = episode_index(batch)
    turns = Turns.of(gather(batch.turns, index, -1))
    rewards = turns.summed(gather(batch.rewards, index))
    between = discount * turns.count.clamp(max=1).to(rewards)
    if batch.skipped is not None:
        between = between * discount ** turns.summed(gather(batch.skipped, index)).to(rewards)
    none = torch.zeros_like(rewards)
    return index, turns, gae(rewards, none, none, between, none + 1)


def with_turn_returns(batch: Batch, *, turn_gamma: float = 1.0) -> Batch:
    """Give every action of a turn the return from that turn on, R_k = r_k + turn_gamma * R_{k+1}, and no advantage.

    A charge of KL counts in it, and has no gradient of its own. Raises: OperantError for a rate outside 0..1.
    """
    advantages.check_options(turn_gamma=turn_gamma)
    index, turns, returns = turn_returns(batch, turn_gamma)
    return batch.with_(returns=scatter(turns.spread(returns), index, batch.tokens.shape), price=None)


def with_states(
    batch: Batch, *, turn_gamma: float = 0.95, omega: float = 1.0, scale: bool = True, deviation: str = "population"
) -> Batch:
    """Add two comparisons (arXiv:2505.10978, equation 8): of episodes in their group, as `with_groups`, and `omega`
    times that of turns which begin in the same state, by their returns R_k = r_k + turn_gamma * R_{k+1}.

    Episodes are compared by the plain sum of their rewards: `extra` may have `discounted` [B, T], what `collate` has
    taken from those of turns that are not trained on. `scale`, `deviation`: as in `with_groups`, of both. A turn whose
    state no other turn of the group begins in has only the first.
    """
    advantages.check_options(turn_gamma=turn_gamma)
    allowed = DEVIATIONS
    require(deviation in allowed, f"advantage.deviation={deviation!r}: it must be {' or '.join(allowed)}")
    require(omega >= 0, f"advantage.omega={omega}: it must be at least 0")
    assert batch.anchors is not None  # the learner adds them
    plain = batch.with_(rewards=batch.rewards + batch.extra.get("discounted", 0))  # as the method compares episodes
    batch = batch.with_(advantages=with_groups(plain, scale=scale, deviation=deviation).advantages)
    index, turns, returns = turn_returns(batch, turn_gamma)
    played = turns.count > 0
    compared = torch.zeros_like(returns)
    states = turns.first(gather(batch.anchors, index))
    compared[played] = group_relative(returns[played], states[played], scale=scale, deviation=deviation)
    of_states = scatter(turns.spread(compared), index, batch.tokens.shape)
    return batch.with_(advantages=batch.advantages + omega * of_states)
