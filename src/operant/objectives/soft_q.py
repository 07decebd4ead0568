"""Soft Q-learning over token logits: path consistency of a policy with a copy that follows it slowly.

Q of an action is its logit, V of a state the logsumexp of its logits over the whole vocabulary, and A = Q - V is the
log-prob. Q', V' and A' are those of the copy. With a reference, its own Q and V are subtracted from all of them.
"""

from torch import Tensor

from operant.objectives.advantages import episode_index, gather, moments, scatter, whiten
from operant.objectives.groups import group_relative
from operant.types import Batch, OperantError, Outputs, require

VERSIONS = ("v1", "v2", "v3", "v2_v3")


def soft_q(
    out: Outputs, batch: Batch, *, version: str = "v2_v3", forward_share: float = 0.5, freeze_later: bool = False
) -> dict[str, Tensor]:
    """The losses of soft Q-learning [B, T] (arXiv:2106.07704, section 3.2; RLPrompt's code has these versions).

    With T the last action, r its reward, and V'_{T+1} = 0:

    v1  (Q_t - r_t - V'_{t+1})^2
    v2  (A_t - r_t - V'_{t+1} + V'_t)^2
    v3  (sum_{l >= t} A_l - sum_{l >= t} r_l + V'_t)^2
    v2_v3  the mean of both, which is the default there, too (`v2_v2r_v3_v3r`)

    Its v0, (V_t - V'_t)^2, is refused: the copy begins equal to the policy, so that it would stay 0.

    version: which of these. forward_share: c in c L + (1 - c) L_reversed, where policy and copy change roles in the
    reversed form; v2 and v3 have one. A alone has a gradient in L, and V alone in L_reversed, so with c = 1 nothing
    trains V: the policy then regresses rewards on a V that stays near its beginning, and is at the optimum only if that
    V is right. freeze_later: in v3, no gradient goes through the A of later actions.
    The batch contains whole episodes, and `extra` has `target_q` and `target_v`, with a reference also
    `reference_q` and `reference_v`, each [B, T].
    """
    if version == "v0":
        why = "it has no reward in it, and is 0 while the copy equals the policy, as at the start"
        raise OperantError(f"loss.version=v0: {why}, so nothing would ever move; use {', '.join(VERSIONS)}")
    require(version in VERSIONS, f"loss.version={version!r}: it must be {', '.join(VERSIONS)}")
    require(0 <= forward_share <= 1, f"loss.forward_share={forward_share}: it must lie in 0..1")
    index = episode_index(batch)
    numbers = (out.raw_logprobs, out.logsumexp, batch.extra["target_q"], batch.extra["target_v"], batch.rewards)
    a, v, target_q, target_v, rewards = (gather(x, index) for x in numbers)
    if "reference_v" in batch.extra:
        reference_q, reference_v = (gather(batch.extra[f"reference_{name}"], index) for name in "qv")
        a, v = a - (reference_q - reference_v), v - reference_v
        target_q, target_v = target_q - reference_q, target_v - reference_v
    target_a = target_q - target_v
    kinds, share = [version] if version != "v2_v3" else ["v2", "v3"], forward_share
    loss = sum(_errors(kind, a, v, target_v, rewards, freeze_later) for kind in kinds) / len(kinds)
    if share < 1 and version != "v1":
        turned = sum(_errors(kind, target_a, target_v, v, rewards, freeze_later) for kind in kinds) / len(kinds)
        loss = share * loss + (1 - share) * turned
    known = {"q": a + v, "v": v, "a": a, "target_q": target_q, "target_v": target_v, "target_a": target_a}
    spread = {f"soft_q/{name}": scatter(x.detach(), index, batch.tokens.shape) for name, x in known.items()}
    return {"loss": scatter(loss, index, batch.tokens.shape), **spread}


def _errors(kind: str, a: Tensor, v: Tensor, target_v: Tensor, rewards: Tensor, freeze_later: bool) -> Tensor:
    """[E, A] the squared errors of a version; 0 in, 0 out at padding, which `scatter` leaves out."""
    ahead = target_v.roll(-1, 1)
    ahead[:, -1:] = 0  # padding is 0 already, so V' behind the last action of a shorter episode is 0, too
    if kind == "v1":
        return (a + v - rewards - ahead) ** 2
    if kind == "v2":
        return (a - rewards - ahead + target_v) ** 2
    to_go = (a.detach() if freeze_later else a).flip(1).cumsum(1).flip(1)
    sums = a - a.detach() + to_go if freeze_later else to_go
    return (sums - rewards.flip(1).cumsum(1).flip(1) + target_v) ** 2


def with_shaped_rewards(
    batch: Batch, *, standardise: str = "none", shape: tuple[float, ...] = (0.0, 1.0, 0.0, 1.0)
) -> Batch:
    """The batch with the total reward of each episode standardised and mapped linearly, paid to its last action.

    standardise: step, (R - mean) / deviation over all episodes of the step; rlprompt, the same with the population's
    deviation plus 1e-4, as there; group, over those of a task (of one input); none. Equal rewards become 0. shape:
    (a, b, c, d), the line that maps a to c and b to d.
    """
    if standardise not in ("none", "step", "rlprompt", "group"):
        raise OperantError(f"advantage.standardise={standardise!r}: it must be none, step, rlprompt or group")
    if len(shape) != 4 or shape[0] == shape[1]:
        raise OperantError(f"advantage.shape={shape}: give four numbers, as in 0,1,0,5: it maps 0 to 0 and 1 to 5")
    index = episode_index(batch)
    totals, taken = gather(batch.rewards, index).sum(1), index >= 0
    has_actions = taken.any(1)
    if standardise == "step":
        totals = whiten(totals, has_actions, unbiased=True)
    elif standardise == "rlprompt":
        mean, deviation = moments(totals, has_actions)
        # `moments` returns sqrt(variance + 1e-8).
        totals = ((totals - mean) / (max(deviation**2 - 1e-8, 0.0) ** 0.5 + 1e-4)).where(has_actions, 0.0)
    elif standardise == "group":
        groups = batch.groups.new_zeros(len(totals)).scatter(0, batch.episodes, batch.groups)
        totals = group_relative(totals, groups, deviation="population")  # as numpy's std, of RLPrompt
    low, high, new_low, new_high = shape
    totals = new_low + (totals - low) * (new_high - new_low) / (high - low)
    last = taken.cumsum(1) == taken.sum(1, keepdim=True)  # and padding, which `scatter` leaves out
    paid = totals[:, None].where(last, 0.0)
    return batch.with_(rewards=scatter(paid, index, batch.tokens.shape))
