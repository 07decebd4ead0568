"""The objective that an update minimises, and its gradient, micro-batch by micro-batch.

Micro-batches bound the memory of a pass. Their size changes no number.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from operant import distributed
from operant.bounds import bounded, check_bounds
from operant.distributed import GradientSum
from operant.machine import beat
from operant.metrics import collect
from operant.models.kernels import direct_gradients
from operant.models.logprobs import DIVERGENCES
from operant.models.policy import Policy
from operant.models.twins import add_gradients, both, dealt, twins_of
from operant.objectives import losses
from operant.objectives.kl import EXACT, KLOptions, direct_term, estimate, exact_kl, loss_term
from operant.rollouts.collate import cut, units
from operant.sampling import Sampling
from operant.tally import Tally
from operant.types import Batch, LossFn, OperantError, Outputs

PER = {"token": "token", "reply": "episode", "group": "prompt", "constant": "horizon"}
"""What `update.per` is called in `rollouts.collate.token_weights`."""
FAULTS = "update/faults"
"""The number of sums of a micro-batch that were not finite. The update removes it, so it is not a metric."""


@dataclass(frozen=True)
class Objective:
    """The algorithm's loss, the unit and weights of its mean, and the KL term of the loss."""

    loss: LossFn
    unit: str = "episode"
    per: str = "token"
    horizon: int | None = None
    entropy_gradient: bool = False
    divergences: tuple[str, ...] = DIVERGENCES
    """The exact divergences from a teacher that the loss reads."""
    likeliest: int | None = None
    """How many likeliest tokens they compare."""
    whiten: Callable[[Batch, Tensor], Batch] | None = None
    """The function that whitens advantages within a minibatch: (batch, actions) -> batch."""
    kl: KLOptions | None = None
    reference: Policy | None = None

    @property
    def of_critic(self) -> "Objective":
        """The objective of the critic by itself."""
        return replace(self, loss=partial(losses.value_error, value_clip=None), kl=None, whiten=None)


def critic_and_rest(policy: Policy, what: str) -> tuple[nn.Module, list[nn.Parameter]]:
    """The critic of a policy, and the trained parameters that are not the critic's.

    Raises: OperantError, which begins with `what`, for a policy without one.
    """
    critic = (policy.critic if policy.critic is not None else policy.value_head) if isinstance(policy, Policy) else None
    if critic is None:
        raise OperantError(f"{what} with a {type(policy).__name__}: use a transformers model with a critic")
    apart = {id(p) for p in critic.parameters()}
    return critic, [p for p in policy.trainable() if id(p) not in apart]


@contextmanager
def frozen(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside this context, the parameters need no gradient."""
    changed = [p for p in parameters if p.requires_grad]
    for p in changed:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in changed:
            p.requires_grad_(True)


def backward(
    policy: GradientSum, batch: Batch, objective: Objective, sampling: Sampling, tally: Tally, *, gap: bool
) -> None:
    """Add the gradient of a micro-batch to the parameters, and its metrics to the tally.

    A micro-batch without weights of any kind, which a rank computes while others have more, adds no metrics.
    gap: also add the metrics that compare log-probs before the first optimizer step with those of the batch.
    """
    out, terms = forward(policy, batch, objective, sampling)
    whole = losses.total(terms.pop("loss"), batch)
    whole.backward()
    if batch.importance is not None or bool(batch.weights.any()):
        _record(tally, out, batch, terms | {"loss/total": whole.detach()}, gap)


def forward(
    policy: Policy | GradientSum, batch: Batch, objective: Objective, sampling: Sampling
) -> tuple[Outputs, dict[str, Tensor]]:
    """Run one forward pass, and return its outputs and its terms: `loss`, with the KL term added, and metrics."""
    kl = objective.kl
    in_loss = kl is not None and kl.loss_coef > 0
    exact = {kl.loss_kind} if in_loss else set[str]()
    exact |= {kl.kind} if batch.price is not None and kl is not None else set()
    exact |= {*objective.divergences} if batch.hinted is not None else set()
    exact &= {*EXACT}
    compared = {"against": objective.reference if exact else None, "divergences": tuple(sorted(exact))}
    compared |= {} if objective.likeliest is None else {"likeliest": objective.likeliest}
    out = policy(batch, sampling, **compared, entropy_gradient=objective.entropy_gradient)
    terms = objective.loss(out, batch)
    if in_loss:
        divergence = _kl_term(out, batch, kl.loss_kind, loss_term)
        terms["kl/in_loss"] = divergence.detach()
        terms["loss"] = terms["loss"] + kl.loss_coef * divergence
    if kl is not None and batch.price is not None:
        terms["loss"] = terms["loss"] + batch.price * _kl_term(out, batch, kl.kind, direct_term)
    return out, terms


def _kl_term(out: Outputs, batch: Batch, kind: str, sampled: Callable[..., Tensor]) -> Tensor:
    """[B, T] The divergence of a kind: computed exactly, or estimated by `sampled` from the log-probs.

    It is 0 at demonstrations, whose tokens the policy has not drawn: an estimate from them has the wrong sign.
    """
    behaviour = batch.raw_logprobs if batch.raw_logprobs is not None else batch.logprobs
    found = exact_kl(out, kind) if kind in EXACT else sampled(kind, out.raw_logprobs, behaviour, batch.ref_logprobs)
    return found if batch.demonstrated is None else torch.where(batch.demonstrated[:, None], 0.0, found)


def _record(tally: Tally, out: Outputs, batch: Batch, terms: dict[str, Tensor], gap: bool) -> None:
    """Add metrics as sums over actions and their number; all sums leave the device in one transfer."""
    if batch.demonstrated is not None:  # demonstrations have metrics of their own: the terms that are called given/...
        at = batch.actions & batch.demonstrated[:, None]
        for name in [name for name in terms if name.startswith("given/")]:
            tally.mean(name, terms.pop(name).detach(), at)
    for name in [name for name, x in terms.items() if x.ndim == 1]:  # [B], NaN at rows that have no such number
        of_rows = terms.pop(name).detach()
        tally.mean(name, of_rows[~of_rows.isnan()])
    at = batch.actions if batch.demonstrated is None else batch.actions & ~batch.demonstrated[:, None]
    sums = {name: x.double() if x.ndim == 0 else x[at].double().sum() for name, x in terms.items()}
    if out.entropy is not None:  # a reward model draws nothing
        sums["policy/entropy"] = out.entropy.detach()[at].double().sum()
    # A sum in float64 is finite if and only if all its terms are.
    made = [x for x in (out.logprobs, out.logsumexp, out.values) if x is not None]
    checked = [x.detach()[batch.actions].double().sum() for x in made]
    *numbers, count = torch.stack([*checked, *sums.values(), at.sum().double()]).tolist()
    totals = dict(zip(sums, numbers[len(checked) :], strict=True))
    bad = [x for x in (*numbers[: len(checked)], totals["loss/total"]) if not math.isfinite(x)]
    tally.add(FAULTS, len(bad), 0.0)
    for name, total in totals.items():
        tally.add(name, total, 0.0 if name == "loss/total" else count)
    if batch.logprobs is None or not count:
        return
    log_ratio = (out.logprobs.detach() - batch.logprobs)[at].cpu()
    ratio = log_ratio.exp()
    tally.histogram("ratio", ratio)
    tally.add("policy/old_new_k3", float(estimate("k3", -log_ratio, torch.zeros_like(log_ratio)).sum()), count)
    if "policy/ratio_mean" not in terms:  # the loss needs none
        tally.mean("policy/ratio_mean", ratio)
    tally.spread("policy/ratio_std", ratio)
    tally.extreme("policy/ratio_max", float(ratio.max()))
    tally.extreme("policy/ratio_min", float(ratio.min()))
    current = at if batch.staleness is None else at & (batch.staleness == 0)  # the others differ for a good reason
    if gap and bool(current.any()):
        tally.extreme("rollout/logprob_gap", float(log_ratio[current[at].cpu()].abs().max()))
        collect.of_likelihood(tally, batch, out, current)


LEAST = 64
"""The smallest budget in tokens. If memory runs out with less, something else uses it."""


class TokenBudget:
    """The tokens of one forward and backward pass, including padding if rows are padded; halved if memory runs out.

    It is part of the state of a run, so a resumed run starts with the size that fitted.
    """

    def __init__(self, tokens: int, *, fixed: bool = False):
        self.tokens, self.fixed = tokens, fixed

    def halve(self, error: BaseException) -> None:
        """Raises: OperantError where the size is fixed, or nothing is left to halve."""
        if self.fixed or self.tokens <= LEAST:
            asked = "micro_batch=fixed" if self.fixed else f"at {self.tokens} tokens a pass"
            raise OperantError(
                f"memory ran out in the update ({asked}): lower update.micro_tokens (now {self.tokens}), train fewer "
                "layers (preset=trunk), or set model.gradient_checkpointing; `operant doctor --plan` estimates the need"
            ) from error
        self.tokens //= 2

    def state_dict(self) -> dict[str, int]:
        return {"tokens": self.tokens}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.tokens = min(self.tokens, state["tokens"])


@dataclass(frozen=True)
class MicroBatchOptions:
    """How a batch is averaged, and cut to fit into memory: the options `update.*` that every update rule has."""

    micro_tokens: int = bounded(8192, at_least=1)
    """Tokens of one forward and backward pass, padding included. It bounds memory, and changes no number."""
    micro_batch: str = bounded("auto", choices=("auto", "fixed"))
    """If memory runs out, auto: micro_tokens is halved and the optimizer step repeated; fixed: an error."""
    per: str | None = bounded(None, choices=(None, *PER), rule="token, reply, group, constant or none")
    """What the loss is a mean over: token: all tokens of a minibatch. reply: replies, of each the mean of its tokens.
    group: groups, of each the mean of all its tokens; with update.minibatch, of those in the minibatch. constant:
    replies, of each the sum of its tokens divided by sampling.max_tokens. none: the method's own."""

    def __post_init__(self) -> None:
        check_bounds(self, "update")

    @property
    def copies(self) -> int:
        """Number of further copies of the trained weights that an update keeps."""
        return 0

    def budget(self) -> TokenBudget:
        """The tokens of a micro-batch, which are halved if memory runs out."""
        return TokenBudget(self.micro_tokens, fixed=self.micro_batch == "fixed")


def accumulate(
    policy: GradientSum, whole: Batch, objective: Objective, sampling: Sampling, budget: TokenBudget, *, gap: bool
) -> Tally:
    """Add the gradients of a minibatch over all ranks, micro-batch by micro-batch, and return its metrics.

    If memory runs out, it starts again with half the token budget; with several ranks, which wait for each other, that
    is an error. The parameters must have no gradients before.
    """
    while True:
        try:
            with direct_gradients(distributed.world() == 1):
                return _accumulated(policy, whole, objective, sampling, budget.tokens, gap)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            # Without a GPU, torch raises a RuntimeError with this text.
            exhausted = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
            if not exhausted or distributed.world() > 1:
                raise
            failed = error.with_traceback(None)  # the frames of the failed pass would keep its tensors alive
        policy.module.zero_grad()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        budget.halve(failed)


def _accumulated(
    policy: GradientSum, whole: Batch, objective: Objective, sampling: Sampling, tokens: int, gap: bool
) -> Tally:
    """Add the gradients of a minibatch once, side by side in two halves if that pays; their sums have a fixed order."""
    module = policy.module
    packed = module.packs(whole)

    def summed(policy: GradientSum, objective: Objective, groups: list[list[int]], tokens: int) -> Tally:
        tally, pieces = Tally(), micro_batches(whole, groups, tokens, packed=packed)
        for number, piece in enumerate(pieces, 1):
            beat()
            with policy.gathering(last=number == len(pieces)):
                backward(policy, piece, objective, sampling, tally, gap=gap)
        return tally

    groups, twins = units(whole, objective.unit), twins_of(module, objective.reference)
    if twins is None or len(groups) == 1:
        return summed(policy, objective, groups, tokens)
    (first, second), half = dealt(groups, whole.sizes()), max(tokens // 2, 1)
    twin, other = GradientSum(twins[0]), replace(objective, reference=twins[1])
    with module.kernels(whole):  # one setting of the process, which neither half may take back from the other
        tally, of_twin = both(lambda: summed(policy, objective, first, half), lambda: summed(twin, other, second, half))
    add_gradients(module, twin.module)
    tally.merge(of_twin)
    return tally


def micro_batches(batch: Batch, groups: list[list[int]], budget: int, *, packed: bool = False) -> list[Batch]:
    """Put groups of rows of similar length together within a budget of tokens. Every rank makes the same number."""
    parts = [batch.rows(torch.tensor(rows)) for rows in cut(batch, groups, budget, packed=packed)]
    missing = range(len(parts), distributed.largest(len(parts)))
    one = parts[0].rows(slice(0, 1))
    return parts + [one.with_(weights=torch.zeros_like(one.weights), importance=None) for _ in missing]
