"""The update rule of TRPO: one natural-gradient step a training step, whose KL to the policy before it is bounded.

In this order: the surrogate's gradient over the whole batch, conjugate gradients with the Fisher matrix, the line
search, and then the critic alone (arXiv:1502.05477, appendix C).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from operant import distributed
from operant.bounds import bounded
from operant.models.policy import Policy
from operant.models.reference import PolicyCopy
from operant.objectives import losses
from operant.objectives.kl import estimate
from operant.rollouts.collate import units
from operant.sampling import Sampling
from operant.training.objective import MicroBatchOptions, Objective, critic_and_rest, forward, frozen, micro_batches
from operant.training.optimizer import RateOptions, make_optimizer
from operant.training.update import (
    GradientUpdate,
    UpdateOptions,
    UpdateResult,
    UpdateRun,
    minibatches,
    numbered_units,
    update,
    weighted,
)
from operant.types import Batch, OperantError, require

vector = nn.utils.parameters_to_vector
LEAST = 4
"""Replies that the Fisher matrix is computed from, whatever share is asked for: that of one reply knows it alone."""


@dataclass(frozen=True)
class TrustRegionOptions(MicroBatchOptions):
    """The bound of a step, how its direction is found, and how often the critic sees the batch."""

    target_kl: float = bounded(0.01, above=0)
    """The most nats per token that a step may move the policy: KL(old || new), mean over the tokens of the batch."""
    kl: str = bounded("exact", choices=("exact", "sampled"))
    """exact: that KL over the whole vocabulary. sampled: its k3 estimate at the drawn tokens, without any copy."""
    solver_steps: int = bounded(10, at_least=1)
    """Steps of conjugate gradients, each a product of the Fisher matrix and a vector."""
    damping: float = bounded(0.1, at_least=0)
    """Added to the diagonal of the Fisher matrix while the direction is found."""
    fisher_share: float = bounded(0.2, above=0, at_most=1)
    """The share of the replies that the Fisher matrix is computed from, but at least four replies, or all of fewer.
    They are drawn among those of all ranks."""
    backtracks: int = bounded(10, at_least=1)
    """Lengths that the line search tries."""
    shrink: float = bounded(0.8, above=0, below=1)
    """Each is this share of the one before."""
    critic_epochs: int = bounded(5, at_least=1)
    """Passes over the batch that train the critic."""
    critic_minibatch: int | None = bounded(None, at_least=1)
    """Replies per optimizer step of the critic, over all ranks; None: the whole batch."""

    @property
    def copies(self) -> int:
        return int(self.kl == "exact")  # the policy before the step


class TrustRegion(GradientUpdate):
    """TRPO's step. The options `optimizer.*` are those of the critic; the policy has no optimizer."""

    update_options = TrustRegionOptions

    def __init__(self, policy: Policy, options: Mapping[str, Any], own: object = None):
        require(own is None, "optimizer: algorithm trpo computes the policy's step itself; leave it out, or use ppo")
        self.critic, self.moved = critic_and_rest(policy, "algorithm trpo")
        if any(p.dtype in (torch.float16, torch.bfloat16) for p in self.moved):
            raise OperantError(
                "algorithm trpo with 16-bit weights: a step within the bound would be lost in their rounding; load the "
                "policy in float32 (model.precision=float32)"
            )
        super().__init__(policy, options)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the critic."""
        return make_optimizer(self.critic, self.options["optimizer"])

    def update(
        self, batch: Batch, objective: Objective, sampling: Sampling, *, lr: float, **run: Unpack[UpdateRun]
    ) -> UpdateResult:
        """Move the policy once, then train the critic."""
        options: TrustRegionOptions = self.options["update"]
        train = partial(update, self.policy, self.optimizer, batch, sampling=sampling)
        plain = replace(objective, whiten=None, per="token")
        rows, numbers = numbered_units(batch, objective.unit, run["places"])
        count = math.ceil(options.fisher_share * distributed.total_float(len(numbers)))
        drawn = minibatches(numbers, max(count, LEAST), run["seed"], run["step"], 0)
        first = drawn[0] if drawn else []  # none, if a threshold has kept no reply
        even = batch.with_(importance=None)
        whole = weighted(even, range(len(batch)), plain).with_(importance=batch.importance)
        share = weighted(even, [row for unit in first for row in rows[unit]], plain)
        given, found = (whole, share, objective, sampling), dict[str, float]()
        with frozen(self.critic.parameters()):
            result = train(
                objective,
                options=UpdateOptions(epochs=1),
                optimizer_options=RateOptions(max_grad_norm=None),
                **run,
                step_on=lambda trained, shrink: found.update(self._move(trained, *given, run["budget"].tokens)),
            )
        for name, number in found.items():
            result.tally.add(name, number)
        if result.refused is not None:
            return result
        gradients = [p.grad for p in self.moved]  # kept, if they are wanted: the critic's passes would clear them
        with frozen(self.moved):
            of_critic = train(
                objective.of_critic,
                options=UpdateOptions(epochs=options.critic_epochs, minibatch=options.critic_minibatch),
                optimizer_options=self.options["optimizer"],
                **{**run, "detailed": False, "keep_gradients": False},
                step_on=lambda minibatch, shrink: self.step(minibatch, sampling, lr=lr, shrink=shrink),
            )
        for p, gradient in zip(self.moved, gradients, strict=True):
            p.grad = gradient if of_critic.refused is None else None
        for name, (total, count) in of_critic.tally.sums.items():
            if name.startswith("value/"):
                result.tally.add(name, total, count)
        refused = of_critic.refused  # the policy has moved, even if the critic has not
        return UpdateResult(result.tally, refused and replace(refused, first=False))

    def _move(
        self, trained: Batch, whole: Batch, share: Batch, objective: Objective, sampling: Sampling, tokens: int
    ) -> dict[str, float]:
        """Take the step along the natural gradient that the line search accepts, and return its metrics.

        The gradients are in place. trained: the batch with the weights of the surrogate. whole, share: all of it, and
        what the Fisher matrix is computed from, both with the weights of a mean over tokens, into which no importance
        weight is multiplied.
        """
        options: TrustRegionOptions = self.options["update"]
        gradient = vector([torch.zeros_like(p) if p.grad is None else p.grad for p in self.moved])
        fisher = self.fisher(share, sampling, tokens)
        direction, residual = conjugate_gradients(
            lambda v: fisher(v) + options.damping * v, gradient, options.solver_steps
        )
        curvature = float(direction.dot(gradient - residual) - options.damping * direction.dot(direction))
        if curvature <= 0:  # only if the gradient is 0, or rounding
            return {"trust/accepted": 0.0}
        full = math.sqrt(2 * options.target_kl / curvature) * direction
        before = vector(self.moved).clone()

        def pieces(batch: Batch) -> list[Batch]:
            return micro_batches(batch, units(batch, objective.unit), tokens, packed=self.policy.packs(batch))

        loss_now = partial(
            self._mean, pieces(trained), lambda p: forward(self.policy, p, objective, sampling)[1]["loss"]
        )
        kl_now = partial(self._mean, *self._distance(pieces(whole), sampling))
        start = loss_now()
        for tried in range(options.backtracks):
            length = options.shrink**tried
            self._put(before - length * full)
            if (kl := kl_now()) <= options.target_kl and (loss := loss_now()) < start:
                break
        else:
            self._put(before)
            return {"trust/accepted": 0.0}
        taken = {"trust/accepted": 1.0, "trust/kl": kl, "trust/backtracks": float(tried)}
        return taken | {"trust/improvement": start - loss, "trust/predicted": length * float(gradient.dot(full))}

    @torch.no_grad()
    def _distance(self, pieces: list[Batch], sampling: Sampling) -> tuple[list[Batch], Callable[[Batch], Tensor]]:
        """Micro-batches and a number of each token: its weighted mean is the KL from the policy of now to a later one.

        `sampled` weighs each token by its probability under the policy of now over that under its sampler, because
        earlier weights may have drawn it; the weights are divided by their sum.
        """
        if self.options["update"].kl == "exact":
            old = PolicyCopy(self.policy).policy
            compared = partial(self.policy, sampling=sampling, against=old, divergences=("forward",))
            return pieces, lambda piece: compared(piece).kl["forward"]
        drawn = []
        for piece in pieces:
            now = self.policy(piece, sampling).logprobs
            ratio = (now - piece.logprobs).exp() if piece.importance is None else piece.importance
            weights = torch.where(piece.weights != 0, piece.weights * ratio, 0.0)
            drawn.append(piece.with_(logprobs=now, weights=weights))
        total = distributed.total_float(math.fsum(float(piece.weights.sum()) for piece in drawn))
        drawn = [piece.with_(weights=piece.weights / total) for piece in drawn]
        return drawn, lambda piece: estimate("k3", piece.logprobs, self.policy(piece, sampling).logprobs)

    @torch.no_grad()
    def _put(self, weights: Tensor) -> None:
        """Write a vector of weights into the policy's parameters."""
        for p, part in zip(self.moved, weights.split([p.numel() for p in self.moved]), strict=True):
            p.copy_(part.view_as(p))

    def fisher(self, batch: Batch, sampling: Sampling, tokens: int) -> Callable[[Tensor], Tensor]:
        """The function from a vector of the policy's parameters to its product with the Fisher matrix.

        The matrix is the second derivative, at the policy itself, of the weighted mean over tokens of the KL from the
        policy to its neighbours. If the batch is one micro-batch, the graph of its first derivative is kept.
        """
        pieces = micro_batches(batch, units(batch), tokens)

        def slopes(piece: Batch) -> Tensor:
            kl = self.policy(piece, sampling, against=self.policy, divergences=("forward",)).kl["forward"]
            total = losses.total(kl, piece)
            return vector(torch.autograd.grad(total, self.moved, create_graph=True, materialize_grads=True))

        with self.policy.double_backward():
            kept = slopes(pieces[0]) if len(pieces) == 1 else None

        def product(v: Tensor) -> Tensor:
            out = torch.zeros_like(v)
            for piece in pieces:
                with self.policy.double_backward():
                    along = (slopes(piece) if kept is None else kept).dot(v)
                    again = torch.autograd.grad(along, self.moved, retain_graph=True, materialize_grads=True)
                out += vector(again)
            return distributed.total(out)

        return product

    @staticmethod
    @torch.no_grad()
    def _mean(pieces: Sequence[Batch], number: Callable[[Batch], Tensor]) -> float:
        """The weighted mean over all ranks of a number of each token, which micro-batches have."""
        return distributed.total_float(math.fsum(float(losses.total(number(piece), piece)) for piece in pieces))


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], wanted: Tensor, steps: int, tolerance: float = 1e-10
) -> tuple[Tensor, Tensor]:
    """The x with product(x) = wanted, and the residual, both of the length of `wanted`.

    It ends after so many steps, or when the squared residual is below `tolerance` times that of x = 0.
    """
    x, residual = torch.zeros_like(wanted), wanted.clone()
    towards, square = residual.clone(), wanted.dot(wanted)
    enough = tolerance * square
    for _ in range(steps):
        if square <= enough:
            break
        image = product(towards)
        length = square / towards.dot(image)
        x, residual = x + length * towards, residual - length * image
        square, before = residual.dot(residual), square
        towards = residual + square / before * towards
    return x, residual
