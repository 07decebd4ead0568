"""VAPO (arXiv:2504.05118): two lambdas of GAE, and the likelihood of right replies beside PPO's loss."""

import torch
from torch import Tensor

from operant import distributed
from operant.objectives import advantages, losses
from operant.objectives.advantages import discounts_of, episode_index, gae, gather, next_values, normalised, scatter
from operant.types import Batch, Outputs, require


def with_two_lambdas(
    batch: Batch,
    *,
    gamma: float = 1.0,
    critic_lam: float = 1.0,
    alpha: float = 0.05,
    turn_gamma: float = 1.0,
    right: float = 1.0,
    whiten_scope: str = "rollout",
    unbiased: bool = False,
) -> Batch:
    """GAE with one lambda for the critic's targets, and one that grows with the length of a reply for the advantages.

    The policy's lambda in an episode of l actions is 1 - 1 / (`alpha` l), at least 0 (equation 8 of the paper); the
    critic's is `critic_lam`. `right`: the least return of a right reply; `extra["right"]` [B, T] is then, at each of
    its actions, the actions of the step divided by those of right replies, so that a weighted mean over all tokens is
    the mean over those of right ones. Other options: see `advantages.with_gae`.
    """
    advantages.check_options(critic_lam=critic_lam)
    require(alpha > 0, f"advantage.alpha={alpha}: it must be above 0")
    targets = advantages.with_gae(
        batch, gamma=gamma, lam=critic_lam, turn_gamma=turn_gamma, whiten_scope=whiten_scope, unbiased=unbiased
    )
    index = episode_index(batch)
    values, discounts = gather(batch.values, index), discounts_of(batch, index, gamma, turn_gamma)
    lengths = (index >= 0).sum(1)
    lambdas = (1 - 1 / (alpha * lengths.clamp(min=1))).clamp(min=0).to(values)[:, None].expand_as(values)
    rewards = gather(batch.rewards, index)
    ahead = next_values(values, lengths, batch.bootstrap)
    gains = scatter(gae(rewards, values, ahead, discounts, lambdas), index, batch.tokens.shape)
    of_right = torch.where(rewards.sum(1, keepdim=True) >= right, 1.0, 0.0).to(values).expand_as(values)
    chosen = scatter(of_right, index, batch.tokens.shape)
    count = distributed.total_float(float(chosen.sum()))
    share = distributed.total_float(float(batch.actions.sum())) / max(count, 1.0)
    batch = batch.with_(advantages=gains, returns=targets.returns, extra={**batch.extra, "right": chosen * share})
    return normalised(batch, batch.actions, unbiased=unbiased) if whiten_scope == "rollout" else batch


def ppo_and_right_replies(
    out: Outputs,
    batch: Batch,
    *,
    clip: float = 0.2,
    clip_high: float = 0.28,
    value_clip: float | None = 0.2,
    value_coef: float = 0.1,
    right_coef: float = 0.1,
    entropy_coef: float = 0.0,
) -> dict[str, Tensor]:
    """PPO's loss [B, T] with an upper bound of its own, + `right_coef` times the cross-entropy of right replies.

    Raises: OperantError for a bound that is not above 0.
    """
    policy = losses.clipped(out, batch, low=clip, high=clip_high)
    value = losses.value_error(out, batch, value_clip=value_clip)
    loss = policy.pop("loss") + value_coef * value.pop("loss")
    if right_coef:
        loss = loss - right_coef * batch.extra["right"] * out.logprobs
    return {"loss": losses.less_entropy(loss, out, entropy_coef), **policy, **value}
