"""The gradient of each KL penalty, and the policy it converges to, by enumeration.

    python -m benchmarks.kl_table

One state, five tokens, rewards and reference fixed: every token is weighted by its probability, so a gradient is an
exact expectation and nothing is sampled. The library's own functions charge the KL and compute advantages and loss;
the gradients that they are compared with are written out here.
"""

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from operant.models.logprobs import divergence
from operant.objectives import advantages, losses
from operant.objectives.groups import with_groups, with_leave_one_out
from operant.objectives.kl import EXACT, SAMPLED, KLOptions, estimate
from operant.sampling import Sampling
from operant.training.objective import Objective, forward
from operant.training.scoring import charge_kl
from operant.types import Batch, Outputs

BETA = 0.5
REWARDS = torch.tensor([0.0, 1.0, 0.4, -0.6, 0.8], dtype=torch.float64)
REFERENCE = torch.tensor([0.30, 0.12, 0.28, 0.20, 0.10], dtype=torch.float64)
TOKENS = len(REWARDS)
WANTED = (REFERENCE.log() + REWARDS / BETA).softmax(0)
"""The optimal policy if a nat of KL(policy || reference) costs BETA: reference * exp(reward / BETA) / Z."""
STEPS, RATE, SHRINK = (200, 150), 4.0, 0.95
"""Steps of gradient descent: at a constant rate, then at a shrinking one, for the kink of the absolute difference."""
GONE = 40.0
"""A token this many nats below the likeliest counts as vanished; logits are clamped there."""
KINDS = (*SAMPLED, *EXACT)
LOSS_KINDS = ("k1", "k2", "k3", "plain_k3", *EXACT)


def candidates(logits: Tensor) -> dict[str, Tensor]:
    """The gradients [V] that a penalty may have at these logits, by the name of the expectation they belong to."""
    z = logits.detach().clone().requires_grad_()
    p, q = z.softmax(0), REFERENCE
    d = p.log() - q.log()
    expected = {
        "KL(policy, reference)": (p * d).sum(),
        "KL(reference, policy)": -(q * d).sum(),
        "E[d^2] / 2": (p * d**2).sum() / 2,
        "E[abs d]": (p * d.abs()).sum(),
        "JS(policy, reference)": sum((x * (x / ((p + q) / 2)).log()).sum() for x in (p, q)) / 2,
        "nothing": 0.0 * z.sum(),
    }
    return {name: torch.autograd.grad(x, z, retain_graph=True)[0] for name, x in expected.items()}


def constant_policy(logits: Tensor, tokens: Tensor) -> Callable[..., Outputs]:
    """A policy without a model that has the same logits [V] before each of the `tokens` [B]."""

    def policy(batch: Batch, sampling: Any, *, divergences: tuple[str, ...] = (), **_: Any) -> Outputs:
        p, q = logits.log_softmax(0), REFERENCE.log()
        spread = partial(_at_actions, batch)
        kl = {kind: divergence(p[None], q[None], kind) for kind in divergences}
        chosen = spread(p[tokens])
        return Outputs(chosen, chosen, kl={name: spread(x.expand(len(tokens))) for name, x in kl.items()})

    return policy


def _at_actions(batch: Batch, x: Tensor) -> Tensor:
    """Scatter one number per row [B] to the action places [B, T]."""
    return torch.zeros(batch.tokens.shape, dtype=x.dtype).masked_scatter(batch.actions, x)


def gradient(logits: Tensor, kl: KLOptions, *, samples: int = 1, scale: bool = False) -> Tensor:
    """The expected gradient [V] of the loss with respect to the logits, over every group of `samples` tokens.

    samples: 1 learns as PPO without a critic; more compares the replies of a group, as GRPO (`scale`) and RLOO do.
    """
    z = logits.detach().clone().requires_grad_()
    p = z.detach().softmax(0)
    groups, batch = attempts(samples)
    tokens = groups.flatten()
    likely = p[groups].prod(1).repeat_interleave(samples) / samples
    spread = partial(_at_actions, batch)
    chosen, reference = p.log()[tokens], REFERENCE.log()[tokens]
    charged = estimate(kl.kind, chosen, reference) if kl.kind not in EXACT else _exact(p, kl.kind, len(tokens))
    batch = batch.with_(
        groups=torch.arange(len(groups)).repeat_interleave(samples),
        rewards=spread(REWARDS[tokens]),
        logprobs=spread(chosen),
        raw_logprobs=spread(chosen),
        ref_logprobs=spread(reference),
        values=torch.zeros(batch.tokens.shape, dtype=torch.float64),
        bootstrap=torch.zeros(len(tokens), dtype=torch.float64),
        kl=spread(charged) if kl.charges else None,
        weights=spread(likely),
    )
    batch = charge_kl(batch, kl.coef, direct=kl.direct)
    if samples == 1:
        batch = advantages.with_gae(batch, lam=1.0, whiten_scope="none")
    else:
        batch = with_groups(batch) if scale else with_leave_one_out(batch)
    objective = Objective(losses.surrogate, kl=kl, reference=object())  # pyright: ignore[reportArgumentType]
    _, terms = forward(constant_policy(z, tokens), batch, objective, Sampling())  # pyright: ignore[reportArgumentType]
    return torch.autograd.grad(losses.total(terms["loss"], batch), z)[0]


def _exact(p: Tensor, kind: str, count: int) -> Tensor:
    return divergence(p.log()[None], REFERENCE.log()[None], kind).expand(count)


@cache
def attempts(samples: int) -> tuple[Tensor, Batch]:
    """Every group of `samples` tokens [G, samples], and a batch with a row for each token."""
    groups = torch.tensor(list(product(range(TOKENS), repeat=samples)))
    return groups, Batch.given([[0]] * groups.numel(), [[token] for token in groups.flatten().tolist()])


def named(kl: KLOptions) -> str:
    """The name of the expectation that the penalty descends, checked at two random policies; or `none`."""
    names: set[str] = set()
    for seed in (0, 1):
        logits = torch.randn(TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        own = (gradient(logits, kl) - gradient(logits, KLOptions(coef=0.0))) / BETA
        names.add(next((n for n, x in candidates(logits).items() if float((own - x).abs().max()) < 1e-9), "none"))
    return names.pop() if len(names) == 1 else "none"


def end(kl: KLOptions, **more: Any) -> Tensor:
    """The policy [V] that gradient descent reaches from the reference."""
    logits = REFERENCE.log().clone()
    for step in range(sum(STEPS)):
        change = gradient(logits, kl, **more)
        if float(change.abs().max()) < 1e-7:
            break
        logits = logits - RATE * SHRINK ** max(step - STEPS[0], 0) * change
        logits = (logits - logits.max()).clamp(min=-GONE)
    return logits.softmax(0)


def apart(p: Tensor, q: Tensor) -> float:
    """The total variation distance of two distributions."""
    return float((p - q).abs().sum() / 2)


def rows() -> list[tuple[str, str, str, str, float]]:
    """Rows of (place, kind, reward_gradient, name of its expectation, distance of its optimum from WANTED)."""
    found = []
    for kind in KINDS:
        for how in ("full", "score") if kind != "k1" else ("full",):
            kl = KLOptions(coef=BETA, kind=kind, reward_gradient=how)
            found.append(("reward", kind, how, named(kl), apart(end(kl), WANTED)))
    for kind in LOSS_KINDS:
        kl = KLOptions(coef=0.0, loss_coef=BETA, loss_kind=kind)
        found.append(("loss", kind, "", named(kl), apart(end(kl), WANTED)))
    return found


@cache
def table() -> str:
    """The rows as a Markdown table."""
    lines = [
        "| in the | kind | `kl.reward_gradient` | is the gradient of | distance of its optimum |",
        "|---|---|---|---|---|",
    ]
    for place, kind, how, of, far in rows():
        lines.append(f"| {place} | `{kind}` | {f'`{how}`' if how else ''} | {of} | {far:.3f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
