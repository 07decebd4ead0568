"""Losses of GRPO's relatives, which differ in what they do with the ratio r = exp(log pi - log old) of a token.

Each is (Outputs, Batch) -> named [B, T] tensors, as in `losses`. Their rows in one table: docs/algorithms.md.
"""

import torch
from torch import Tensor

from operant.objectives.losses import check_above, ratio_terms
from operant.types import Batch, OperantError, Outputs, require


def sequence_ratio(
    out: Outputs,
    batch: Batch,
    *,
    clip: float = 3e-4,
    clip_high: float = 4e-4,
    ratio: str = "reply",
    entropy_coef: float = 0.0,
) -> dict[str, Tensor]:
    """GSPO [B, T]: the surrogate with one ratio for each reply, s = exp(mean_t log r_t) (arXiv:2507.18071).

    The loss of each token of a reply is max(-A s, -A clip(s, 1 - clip, 1 + clip_high)), equation 5. A reply is a row:
    the actions that were written in one context. `ratio`: reply, or token (GSPO-token, equation 13), where the ratio
    has the value of s and the gradient of the token's own r_t, for advantages that differ from token to token.
    """
    check_above(0, clip=clip, clip_high=clip_high)
    require(ratio in ("reply", "token"), f"loss.ratio={ratio!r}: it must be reply or token")
    log_ratio = torch.where(batch.actions, out.logprobs - batch.logprobs, 0.0)
    mean = (log_ratio.sum(1, keepdim=True) / batch.actions.sum(1, keepdim=True).clamp(min=1)).expand_as(log_ratio)
    if ratio == "token":
        mean = mean.detach() + log_ratio - log_ratio.detach()
    weight = mean.exp()
    free, clipped = -batch.advantages * weight, -batch.advantages * weight.clamp(1 - clip, 1 + clip_high)
    loss = torch.maximum(free, clipped)
    terms = ratio_terms(loss, log_ratio, loss != free, out, entropy_coef)
    return terms | {"policy/ratio_mean": weight.detach()}


def clipped_weight(
    out: Outputs,
    batch: Batch,
    *,
    high: float = 5.0,
    bound: str = "weight",
    low: float | None = None,
    entropy_coef: float = 0.0,
) -> dict[str, Tensor]:
    """CISPO [B, T]: REINFORCE with the ratio as a weight that is cut and has no gradient: -stop(w) A log pi.

    `bound` names which of its two published meanings `high` has. weight: w = min(r, high), as in ScaleRL
    (arXiv:2510.13786) and TRL. excess: w = min(r, 1 + high), as in MiniMax-M1 (arXiv:2506.13585, equation 5).
    `low`: w is at least 1 - low; None, as in both papers: no lower bound.
    """
    check_above(0, high=high, low=low)
    if bound not in ("weight", "excess"):
        raise OperantError(f"loss.bound={bound!r}: it must be weight (at most high) or excess (at most 1 + high)")
    least, most = 0.0 if low is None else 1 - low, high if bound == "weight" else 1 + high
    require(least < most, f"loss.low={low}, loss.high={high}: {least:g} to {most:g}; did you mean loss.bound=excess?")
    log_ratio = out.logprobs - batch.logprobs
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(min=least, max=most)
    loss = -weight * batch.advantages * out.logprobs
    return ratio_terms(loss, log_ratio, weight != ratio, out, entropy_coef)


def soft_gate(
    out: Outputs,
    batch: Batch,
    *,
    temperature: float = 1.0,
    temperature_negative: float = 1.05,
    entropy_coef: float = 0.0,
) -> dict[str, Tensor]:
    """SAPO [B, T]: a sigmoid of the ratio instead of a clip (arXiv:2511.20347): -A (4 / t) sigmoid(t (r - 1)).

    t is `temperature` where the advantage is above 0 and `temperature_negative` elsewhere. At r = 1 value and gradient
    differ from the surrogate's by a constant only; far from it the gradient fades.
    Raises: OperantError for a temperature that is not above 0.
    """
    check_above(0, temperature=temperature, temperature_negative=temperature_negative)
    log_ratio = out.logprobs - batch.logprobs
    t = torch.full_like(batch.advantages, temperature_negative).masked_fill(batch.advantages > 0, temperature)
    loss = -batch.advantages * torch.sigmoid(t * (log_ratio.exp() - 1)) * 4 / t
    return ratio_terms(loss, log_ratio, torch.zeros_like(batch.actions), out, entropy_coef)


def divergence_mask(
    out: Outputs,
    batch: Batch,
    *,
    distance: str = "tv",
    max_distance: float = 0.15,
    ratio_cap: float = 20.0,
    entropy_coef: float = 0.0,
) -> dict[str, Tensor]:
    """DPPO [B, T]: -A min(r, ratio_cap), without a gradient where the policy has moved too far (arXiv:2602.04879).

    Elsewhere its gradient is -A min(r, ratio_cap) grad log p: a ratio above the cap keeps the weight of the cap.

    A token is masked if its divergence is above `max_distance` and its advantage would move it farther: A > 0 with
    r > 1, or A < 0 with r < 1. The divergence is that of the two outcomes "this token" and "another", with
    probabilities p (now) and q (when it was drawn): tv is |p - q|; kl is KL(q || p), for which the paper takes 0.05.
    """
    check_above(0, max_distance=max_distance, ratio_cap=ratio_cap)
    require(distance in ("tv", "kl"), f"loss.distance={distance!r}: it must be tv or kl")
    log_ratio = out.logprobs - batch.logprobs
    now, then = out.logprobs.detach(), batch.logprobs
    p, q = now.exp(), then.exp()
    if distance == "tv":
        moved = (p - q).abs()
    else:
        rest = torch.finfo(p.dtype).tiny
        others = (1 - q) * ((1 - q).clamp(min=rest).log() - (1 - p).clamp(min=rest).log())
        moved = q * (then - now) + others
    outward = batch.advantages * log_ratio.detach() > 0
    masked = outward & (moved > max_distance)
    weight = log_ratio.detach().exp().clamp(max=ratio_cap)
    loss = -batch.advantages * (weight * (log_ratio - log_ratio.detach()).exp())
    return ratio_terms(torch.where(masked, loss.detach(), loss), log_ratio, masked, out, entropy_coef)
