"""Score a batch before its update: add the log-probs, values and reference log-probs that are missing, and KL."""

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor

from operant.models import layout
from operant.models.policy import Policy
from operant.models.twins import both, dealt, twins_of
from operant.objectives.kl import SAMPLED, KLOptions, estimate, exact_kl
from operant.rollouts.collate import cut, units
from operant.sampling import Sampling
from operant.types import Batch, OperantError, Outputs, Rollout


@torch.no_grad()
def score_batch(
    batch: Batch,
    policy: Policy,
    reference: Policy | None,
    sampling: Sampling,
    kl: KLOptions,
    *,
    micro_tokens: int = 8192,
    rescore: bool = False,
) -> Batch:
    """Add missing log-probs, values and reference log-probs, and the per-token KL that is charged in the reward.

    rescore: make a forward pass of the policy even if decoding stored all of its numbers.
    """
    for model, of in ((policy, ""), (policy.critic, " of the critic"), (reference, " of the reference")):
        if model is not None:
            check_rows(batch, model, of)
    batch = with_trunk_states(batch, policy, micro_tokens)
    if batch.unscored is not None:
        batch = _with_unscored(batch, policy, sampling, micro_tokens)
    exact = kl.exact if reference is not None else ()
    lacking = batch.logprobs is None or (policy.has_values and batch.values is None)
    if lacking or exact or rescore or (batch.allowed is not None and batch.raw_logprobs is None):
        out = forward_batch(batch, policy, sampling, micro_tokens, reference if exact else None, exact)
        known = batch.logprobs is not None and not rescore
        if batch.logprobs is None:
            _check_probabilities(batch, out)
        batch = batch.with_(
            logprobs=batch.logprobs if known else out.logprobs,
            raw_logprobs=batch.logprobs if known and batch.allowed is None else out.raw_logprobs,  # of the sampler
            values=batch.values if batch.values is not None and not rescore else out.values,
            kl=exact_kl(out, kl.kind) if exact else None,
        )
    if batch.raw_logprobs is None:
        batch = batch.with_(raw_logprobs=batch.logprobs)
    if reference is None:
        return batch
    bare = reference.drop_foreign_states(batch.with_(allowed=None), policy)
    batch = batch.with_(ref_logprobs=forward_batch(bare, reference, sampling, micro_tokens, None).raw_logprobs)
    if kl.kind in SAMPLED:
        batch = batch.with_(kl=estimate(kl.kind, batch.raw_logprobs, batch.ref_logprobs) * batch.actions)
    return batch


def check_rows(batch: Batch, policy: Policy, of: str = "") -> None:
    """Raises: OperantError for a row that does not fit into the model's context; `of` says which rows these are."""
    reading = layout.sources(batch) if policy.encoder_decoder else ~batch.actions & batch.mask
    lengths = zip(reading.sum(1).tolist(), batch.mask.sum(1).tolist(), strict=True)
    for row, (prompt, length) in enumerate(lengths):
        if (why := policy.misfit(prompt, length - prompt)) is not None:
            raise OperantError(f"row {row}{of} {why}: shorten it, because rows are not cut silently")


def _with_unscored(batch: Batch, policy: Policy, sampling: Sampling, micro_tokens: int) -> Batch:
    """Add log-probs and values at the actions that have none, by a forward pass of their rows; the others are kept."""
    rows = batch.unscored.any(1).nonzero()[:, 0]
    part = batch.rows(rows).with_(allowed=None)
    out = forward_batch(part, policy, sampling, micro_tokens)
    _check_probabilities(part, out)

    def filled(kept: Tensor | None, new: Tensor | None) -> Tensor | None:
        if kept is None or new is None:
            return None
        whole, width = kept.clone(), part.tokens.shape[1]
        whole[rows, :width] = torch.where(batch.unscored[rows, :width], new.to(kept), kept[rows, :width])
        return whole

    known = {"logprobs": filled(batch.logprobs, out.logprobs), "values": filled(batch.values, out.values)}
    return batch.with_(**known, unscored=None)


def with_trunk_states(batch: Batch, policy: Policy, micro_tokens: int) -> Batch:
    """Add the cached hidden states of a frozen trunk, unless they would exceed `model.states_gb`."""
    if policy.trunk is None or batch.choices is not None:
        return batch.with_(states=None)
    width = policy.head.weight.shape[1] * policy.head.weight.element_size()
    if batch.tokens.numel() * width > policy.options.states_gb * 1e9:
        return batch.with_(states=None)
    if batch.states is not None:
        return batch
    pieces = cut(batch, units(batch), micro_tokens, packed=policy.packs(batch))
    states = ((rows, policy.trunk_states(batch.rows(torch.tensor(rows)))) for rows in pieces)
    return batch.with_(states=_whole(batch, states))


def _whole(batch: Batch, pieces: Iterable[tuple[list[int], Tensor | None]]) -> Tensor | None:
    """[B, T] or [B, T, D] numbers of a batch, from those of pieces with some of its rows."""
    whole = None
    for rows, piece in pieces:
        if piece is not None:
            whole = piece.new_zeros(*batch.tokens.shape, *piece.shape[2:]) if whole is None else whole
            whole[torch.tensor(rows), : piece.shape[1]] = piece
    return whole


def charge_kl(batch: Batch, coef: float, *, direct: bool = False) -> Batch:
    """Subtract `coef` times the per-token KL from the rewards; `direct`: the update adds the charge's own gradient."""
    if batch.kl is None or not coef:
        return batch
    price = coef * batch.actions.to(batch.rewards) if direct else None
    return batch.with_(rewards=batch.rewards - coef * batch.kl, price=price)


def forward_batch(
    batch: Batch,
    policy: Policy,
    sampling: Sampling,
    micro_tokens: int,
    against: Policy | None = None,
    divergences: tuple[str, ...] = (),
) -> Outputs:
    """Run one forward pass over the whole batch, in micro-batches.

    against: the model to which the exact divergences are measured.
    """

    def passes(
        groups: list[list[int]], tokens: int, policy: Policy, against: Policy | None
    ) -> list[tuple[list[int], Outputs]]:
        pieces = [(r, batch.rows(torch.tensor(r))) for r in cut(batch, groups, tokens, packed=policy.packs(batch))]
        return [(r, policy.forward(p, sampling, against=against, divergences=divergences)) for r, p in pieces]

    groups, twins = units(batch), twins_of(policy, against)
    if twins is None or len(groups) == 1:
        pieces = passes(groups, micro_tokens, policy, against)
    else:
        (first, second), tokens = dealt(groups, batch.sizes()), max(micro_tokens // 2, 1)
        with policy.kernels(batch):  # as in an update
            mine, other = both(lambda: passes(first, tokens, policy, against), lambda: passes(second, tokens, *twins))
        pieces = mine + other

    def whole(pick) -> Tensor | None:
        return _whole(batch, ((rows, pick(out)) for rows, out in pieces))

    return Outputs(
        **{name: whole(attrgetter(name)) for name in ("logprobs", "raw_logprobs", "entropy", "logsumexp", "values")},
        kl={n: whole(lambda o, n=n: o.kl[n]) for n in pieces[0][1].kl or ()} or None,
        q={n: whole(lambda o, n=n: o.q[n]) for n in pieces[0][1].q or ()} or None,
    )


Bootstraps = dict[int, tuple[list[int], list[int]]]
"""For each episode that was cut: the prompt and the reply so far of the state whose value is added to its rewards."""


def bootstrap_prompts(rollouts: list[Rollout], *, lengths_too: bool = False) -> Bootstraps:
    """The state at the end of each episode that was cut, whose value stands for the rewards that would have followed.

    lengths_too: also of replies that hit their length limit.
    """
    found: Bootstraps = {}
    for i, rollout in enumerate(rollouts):
        last = rollout.turns[-1]
        if last.next_value:
            continue
        if rollout.end in ("cut", "outgrown") and rollout.following is not None:
            found[i] = (rollout.following, [])
        elif lengths_too and rollout.end == "length":
            found[i] = (last.prompt, last.action)
    return found


@torch.no_grad()
def with_bootstraps(
    batch: Batch, after: Mapping[int, Sequence[list[int]]], policy: Policy, micro_tokens: int = 8192
) -> Batch:
    """Add the critic's value of the state at the end of each episode that was cut."""
    if not after:
        return batch
    for prompt, reply in after.values():
        if (why := policy.misfit(len(prompt), len(reply) + policy.encoder_decoder)) is not None:  # its start token
            raise OperantError(
                f"an episode was cut, and the critic evaluates the state after it: its prompt {why}; shorten it"
            )
    # The value of a state is that of the token after it; the model does not see this 0.
    rows = Batch.given([prompt for prompt, _ in after.values()], [[*reply, 0] for _, reply in after.values()])
    values, last = torch.zeros(len(rows), dtype=batch.bootstrap.dtype), rows.mask.sum(1) - 1
    for some in cut(rows, units(rows), micro_tokens, packed=policy.packs(rows)):
        index = torch.tensor(some)
        found = policy.values(rows.rows(index))  # there are bootstraps only with a critic
        values[index] = found.cpu()[torch.arange(len(some)), last[index]].to(values)
    known = batch.bootstrap.clone()
    known[torch.tensor(list(after), device=known.device)] = values.to(known)
    return batch.with_(bootstrap=known)


def _check_probabilities(batch: Batch, out: Outputs) -> None:
    """Refuse replies from elsewhere that contain a token of probability 0."""
    sound = batch.actions if out.logsumexp is None else batch.actions & out.logsumexp.isfinite()
    bad = ((out.logprobs == -torch.inf) & sound).nonzero()
    if len(bad):
        row, column = bad[0].tolist()
        raise OperantError(
            f"row {row} has token {int(batch.tokens[row, column])} at column {column}, which the policy cannot "
            "generate: it is banned, or a stop token before min_tokens; leave that reply out, or declare how it was "
            "sampled"
        )
