"""Losses: one pure function per objective, (Outputs, Batch) -> named [B, T] tensors, one of them `loss`.

The other tensors are metrics, which are averaged over actions. None of the functions averages: `total` adds up with
`batch.weights`, which sum to 1 over a minibatch, so cutting it into micro-batches changes nothing.
"""

import torch
from torch import Tensor

from operant.types import Batch, Outputs, require


def total(x: Tensor, batch: Batch) -> Tensor:
    """The weighted sum of a [B, T] (or [B]) tensor. No other function turns a loss into one number."""
    weights = batch.weights if x.ndim == 2 else batch.weights.sum(1)
    # Off actions a tensor may contain anything. As 0 * nan is nan, these numbers are replaced, and not multiplied by 0.
    return (torch.where(weights != 0, x, 0.0) * weights).sum()


def check_above(least: float, **options: float | None) -> None:
    """Raises: OperantError for an option that is not above `least`; infinity is."""
    for name, value in options.items():
        require(value is None or value > least, f"loss.{name}={value}: it must be above {least:g}")


def less_entropy(loss: Tensor, out: Outputs, coef: float) -> Tensor:
    """The loss [B, T] less `coef` times the entropy, which is there only for a `coef` that is not 0."""
    return loss - coef * out.entropy if coef else loss


def ratio_terms(
    loss: Tensor, log_ratio: Tensor, limited: Tensor, out: Outputs, entropy_coef: float = 0.0
) -> dict[str, Tensor]:
    """The loss [B, T] and the metrics of all that have a ratio. `limited` [B, T] bool: a bound took effect there."""
    log_ratio = log_ratio.detach()
    return {
        "loss": less_entropy(loss, out, entropy_coef),
        "policy/loss": loss.detach(),
        "policy/clip_fraction": limited.float(),
        "policy/approx_kl": 0.5 * log_ratio**2,
        "policy/old_new_kl": -log_ratio,
        "policy/ratio_mean": log_ratio.exp(),
    }


def sft(out: Outputs, batch: Batch) -> dict[str, Tensor]:
    """Supervised training: the cross-entropy of the actions, [B, T]."""
    return {"loss": -out.logprobs, "supervised/loss": -out.logprobs.detach()}


def imitation(out: Outputs, batch: Batch, *, entropy_coef: float = 0.0) -> dict[str, Tensor]:
    """The cross-entropy of the policy's own actions [B, T], less `entropy_coef` times the entropy."""
    return {"loss": less_entropy(-out.logprobs, out, entropy_coef), "policy/loss": -out.logprobs.detach()}


def clipped(
    out: Outputs, batch: Batch, *, low: float = 0.2, high: float = 0.2, dual_clip: float | None = None
) -> dict[str, Tensor]:
    """The clipped surrogate [B, T], max(-A r, -A clip(r, 1 - low, 1 + high)) (arXiv:1707.06347, equation 7).

    `dual_clip` c > 1: the loss of a bad action that became likely is at most -A c (arXiv:1912.09729, equation 5).
    Raises: OperantError if `low` or `high` is not above 0, or `dual_clip` not above 1.
    """
    check_above(0, clip=low, clip_high=high)
    check_above(1, dual_clip=dual_clip)
    log_ratio = out.logprobs - batch.logprobs
    ratio = torch.exp(log_ratio)
    free, limited = -batch.advantages * ratio, -batch.advantages * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(free, limited)
    if dual_clip is not None:
        loss = torch.where(batch.advantages < 0, torch.minimum(loss, -batch.advantages * dual_clip), loss)
    return ratio_terms(loss, log_ratio, loss != free, out)


def surrogate(
    out: Outputs, batch: Batch, *, clip: float = 0.2, clip_high: float | None = None, entropy_coef: float = 0.0
) -> dict[str, Tensor]:
    """The clipped surrogate [B, T] without a critic, as in GRPO (arXiv:2402.03300, equation 3; its KL is in `kl.py`).

    `clip_high`: the upper bound, if it shall differ from the lower one (arXiv:2503.14476); None: `clip`.
    Raises: OperantError for a bound that is not above 0.
    """
    terms = clipped(out, batch, low=clip, high=clip if clip_high is None else clip_high)
    return terms | {"loss": less_entropy(terms["loss"], out, entropy_coef)}


def value_error(out: Outputs, batch: Batch, *, value_clip: float | None = 0.2) -> dict[str, Tensor]:
    """Half the squared error of the critic [B, T], clipped around the old value as in the code of arXiv:1707.06347.

    `value_clip`: largest change of a value that counts; None: no clipping.
    Raises: OperantError if it is not above 0.
    """
    check_above(0, value_clip=value_clip)
    error = (out.values - batch.returns) ** 2
    limited = error
    if value_clip is not None:
        # Within the range it is the value itself, to the bit: a sum of differences would differ by rounding.
        near = out.values.clamp(batch.values - value_clip, batch.values + value_clip)
        limited = (near - batch.returns) ** 2
    loss = 0.5 * torch.maximum(error, limited)
    return {
        "loss": loss,
        "value/loss": loss.detach(),
        "value/error": error.detach(),
        "value/prediction": out.values.detach(),
        "value/clip_fraction": (limited > error).float(),
    }


def ppo(
    out: Outputs,
    batch: Batch,
    *,
    clip: float = 0.2,
    value_clip: float | None = 0.2,
    value_coef: float = 0.1,
    entropy_coef: float = 0.0,
    dual_clip: float | None = None,
) -> dict[str, Tensor]:
    """Proximal policy optimisation, [B, T]: clipped surrogate + value_coef * value error - entropy_coef * entropy.

    Raises: OperantError for a bound that is not above 0.
    """
    check_above(0, clip=clip, value_clip=value_clip)
    policy = clipped(out, batch, low=clip, high=clip, dual_clip=dual_clip)
    value = value_error(out, batch, value_clip=value_clip)
    loss = policy.pop("loss") + value_coef * value.pop("loss")
    return {"loss": less_entropy(loss, out, entropy_coef), **policy, **value}


def score_function(out: Outputs, batch: Batch, *, entropy_coef: float = 0.0) -> dict[str, Tensor]:
    """REINFORCE [B, T]: minus advantage times log-prob (Williams, 1992). Its gradient is the policy gradient of the
    policy that drew the replies, so each reply is used once."""
    loss = -batch.advantages * out.logprobs
    return {"loss": less_entropy(loss, out, entropy_coef), "policy/loss": loss.detach()}


def actor_critic(
    out: Outputs, batch: Batch, *, value_coef: float = 0.5, entropy_coef: float = 0.0
) -> dict[str, Tensor]:
    """Advantage actor-critic [B, T] (arXiv:1602.01783): REINFORCE's loss + value_coef * value error."""
    policy = score_function(out, batch, entropy_coef=entropy_coef)
    value = value_error(out, batch, value_clip=None)
    return {**policy, **value, "loss": policy["loss"] + value_coef * value["loss"]}


def trust_region(out: Outputs, batch: Batch, *, entropy_coef: float = 0.0) -> dict[str, Tensor]:
    """TRPO's surrogate [B, T], minus advantage times ratio (arXiv:1502.05477, equation 14). The update rule bounds the
    step and trains the critic, so neither a clip nor a value stands here."""
    log_ratio = out.logprobs - batch.logprobs
    loss = -batch.advantages * torch.exp(log_ratio)
    total_loss = less_entropy(loss, out, entropy_coef)
    return {"loss": total_loss, "policy/loss": loss.detach(), "policy/approx_kl": 0.5 * log_ratio.detach() ** 2}
