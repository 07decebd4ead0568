"""How far the policy has gone from the reference: estimators, what is charged for it, and who sets the price.

At a sampled token, d = log policy - log reference, both scaled by the temperature and untruncated.

| kind     | per token                | the reward's own gradient    | in the loss                     |
|----------|--------------------------|------------------------------|---------------------------------|
| k1       | d                        | 0 in expectation             | ratio * d                       |
| k2       | d^2 / 2 (TRL's `mse`)    | detached ratio * d^2 / 2     | detached ratio * d^2 / 2        |
| k3       | exp(-d) - 1 + d          | detached ratio * it          | ratio * (exp(-d) - 1 + d)       |
| absolute | |d| (no KL estimator)    | detached ratio * |d|         | refused                         |
| reverse  | sum_v p log(p / q)       | itself                       | itself                          |
| forward  | sum_v q log(q / p)       | itself                       | itself                          |
| plain_k3 | exp(-d) - 1 + d          | refused                      | without the ratio               |

In the loss, all but `plain_k3` have the gradient of the state's KL in expectation, on policy and off; `plain_k3`
is GRPO as published, and its gradient is not the KL's.

A charge in the reward depends on the policy in two ways: by which tokens are drawn, which the policy gradient of the
reward covers, and by its own value at the drawn token or state. Only for k1 is the second part 0 in expectation. For
the others the update adds it (the third column), unless `reward_gradient` is `score`. docs/kl.md has the gradient and
the optimum of every kind in both places.

Estimators: http://joschu.net/blog/kl-approx.html; gradients: arXiv:2506.09477.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from operant.types import OperantError

SAMPLED = ("k1", "k2", "k3", "absolute")
EXACT = ("reverse", "forward")


OF_THE_REWARD = ("coef", "kind", "reward_gradient", "control", "target", "horizon", "end_coef")
"""Options that say how the reward is charged."""


@dataclass(frozen=True)
class KLOptions:
    """What divergence from the reference costs."""

    coef: float = 0.1
    """Price of one nat in the reward; where an adaptive controller starts. 0: no KL in the reward."""
    kind: str = "k1"
    """k1 | k2 | k3 | absolute | reverse | forward: what the reward is charged per token."""
    reward_gradient: str = "full"
    """full: the gradient of the expected charge. score: without the part through the charge itself, as TRL; then every
    kind but k1 has another optimum (docs/kl.md)."""
    loss_coef: float = 0.0
    """Weight of the KL term of the loss; with `coef` above 0 as well, both are in force."""
    loss_kind: str = "k1"
    """k1 | k2 | k3 | reverse | forward | plain_k3: the loss's own term."""
    control: str = "fixed"
    """fixed | adaptive (Ziegler et al. 2019, per reply) | per_token (RL4LMs) | linear (to `end_coef`)."""
    target: float = 6.0
    """Nats a reply for `adaptive`, nats a token for `per_token`: the two are not interchangeable."""
    horizon: float = 10_000.0
    """Replies over which `adaptive` corrects an error of 100 %."""
    end_coef: float = 0.0
    """Where `linear` ends."""

    def __post_init__(self) -> None:
        def check(name: str, good: bool, rule: str) -> None:
            if not good:
                raise OperantError(f"kl.{name}={getattr(self, name)!r}: it must be {rule}")

        check("kind", self.kind in SAMPLED + EXACT, f"one of {', '.join(SAMPLED + EXACT)}")
        losses = ("k1", "k2", "k3", "plain_k3", *EXACT)
        check("loss_kind", self.loss_kind in losses, f"one of {', '.join(losses)} ('absolute' is for the reward only)")
        check("reward_gradient", self.reward_gradient in ("full", "score"), "full or score")
        check("control", self.control in CONTROLLERS, f"one of {', '.join(CONTROLLERS)}")
        check("coef", self.coef >= 0, "at least 0")
        check("loss_coef", self.loss_coef >= 0, "at least 0")
        check("target", self.target > 0, "above 0")
        check("horizon", self.horizon >= 1, "at least 1 reply")
        check("end_coef", self.end_coef >= 0, "at least 0")

    @property
    def charges(self) -> bool:
        """Whether the reward is ever charged."""
        return self.coef > 0 or (self.control == "linear" and self.end_coef > 0)

    @property
    def exact(self) -> tuple[str, ...]:
        """The exact divergences that have to be computed for the reward."""
        return (self.kind,) if self.charges and self.kind in EXACT else ()

    @property
    def direct(self) -> bool:
        """Whether the update adds the gradient of the reward's charge through its own value."""
        return self.charges and self.kind != "k1" and self.reward_gradient == "full"


def estimate(kind: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The per-token term of `kind` at sampled tokens, same shape as the arguments."""
    d = logprobs - ref_logprobs
    match kind:
        case "k1":
            return d
        case "k2":
            return d**2 / 2
        case "k3":
            return torch.expm1(-d) + d
        case "absolute":
            return d.abs()
    raise OperantError(f"KL estimator {kind!r} is unknown; one of {', '.join(SAMPLED)}")


def loss_term(kind: str, logprobs: Tensor, behaviour: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The loss form of a sampled estimator: in expectation over `behaviour` its gradient is that of the state's KL.

    The gradient flows through the ratio and through the log-prob (k1, k3), or through the square alone (k2), on policy
    and off. `plain_k3` has no ratio: the published GRPO term, whose gradient is not the KL's. All arguments [B, T].
    """
    if kind == "plain_k3":
        return estimate("k3", logprobs, ref_logprobs)
    ratio = torch.exp(logprobs - behaviour)
    return (ratio.detach() if kind == "k2" else ratio) * estimate(kind, logprobs, ref_logprobs)


def direct_term(kind: str, logprobs: Tensor, behaviour: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Of a sampled estimator in the reward: the term whose gradient is that of its value at the drawn tokens, [B, T].

    Weighted by the detached ratio, so that its expectation over `behaviour` is one over the policy. With the policy
    gradient of the charge it makes the gradient of the expected charge.
    """
    return torch.exp(logprobs - behaviour).detach() * estimate(kind, logprobs, ref_logprobs)


# --- who sets the price -----------------------------------------------------------------------------------------------


class Controller:
    """A coefficient, and the rule by which it follows what was measured. Registers in `RunState`."""

    def __init__(self, options: KLOptions):
        self.options, self.coef = options, options.coef

    def begin(self, progress: float) -> None:
        """Before a step, at `progress` in [0, 1) of the run."""

    def update(self, per_reply: float, per_token: float, replies: int) -> None:
        """After a step. `per_reply` and `per_token` are k1 sums over all ranks, `replies` their number."""

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = state["coef"]


class Adaptive(Controller):
    """coef *= 1 + clip(KL / target - 1, +-0.2) * replies / horizon (arXiv:1909.08593, section 2.2)."""

    def update(self, per_reply: float, per_token: float, replies: int) -> None:
        error = min(max(per_reply / self.options.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * replies / self.options.horizon


class PerToken(Controller):
    """coef *= 1 + 0.1 * clip((KL - target) / target, +-0.2), KL a token, once a rollout (RL4LMs, arXiv:2210.01241)."""

    def update(self, per_reply: float, per_token: float, replies: int) -> None:
        error = min(max((per_token - self.options.target) / self.options.target, -0.2), 0.2)
        self.coef *= 1 + 0.1 * error


class Linear(Controller):
    """From `coef` at the first step towards `end_coef` at the end of the run, with the learning rate's progress."""

    def begin(self, progress: float) -> None:
        self.coef = self.options.coef + (self.options.end_coef - self.options.coef) * progress


CONTROLLERS: dict[str, type[Controller]] = {
    "fixed": Controller,
    "adaptive": Adaptive,
    "per_token": PerToken,
    "linear": Linear,
}


def controller(options: KLOptions) -> Controller:
    """The controller that the options name."""
    return CONTROLLERS[options.control](options)
