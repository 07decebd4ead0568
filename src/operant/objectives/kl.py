"""KL between policy and reference: estimators, the charge in the reward, loss terms, controllers of the coefficient.

At a sampled token, d = log policy - log reference, both scaled by the temperature and untruncated.

| kind     | per token                | the reward's own gradient    | in the loss                     |
|----------|--------------------------|------------------------------|---------------------------------|
| k1       | d                        | 0 in expectation             | ratio * d                       |
| k2       | d^2 / 2 (TRL's `mse`)    | detached ratio * d^2 / 2     | detached ratio * d^2 / 2        |
| k3       | exp(-d) - 1 + d          | detached ratio * it          | ratio * (exp(-d) - 1 + d)       |
| absolute | abs(d), no KL estimator  | detached ratio * abs(d)      | refused                         |
| reverse  | sum_v p log(p / q)       | itself                       | itself                          |
| forward  | sum_v q log(q / p)       | itself                       | itself                          |
| jensen_shannon | the mean of both to the mixture (p + q) / 2 | itself | itself                      |
| plain_k3 | exp(-d) - 1 + d          | refused                      | without the ratio               |

In the loss, the gradient of every kind but `plain_k3` is in expectation that of the state's KL, on policy and off.
`plain_k3` is the term of GRPO as published, whose gradient is another.

A charge in the reward depends on the policy in two ways. The first is the choice of tokens, whose gradient is the
policy gradient of the reward. The second is the value of the charge at the drawn token or state, whose gradient is 0 in
expectation for k1 only. For the other kinds the update adds it (third column), unless `reward_gradient` is `score`.
docs/methods/ppo.md has the gradient and the optimum of every kind in both places.

Estimators: http://joschu.net/blog/kl-approx.html; gradients: arXiv:2506.09477.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from operant.bounds import bounded, check_bounds
from operant.types import OperantError, Outputs

SAMPLED = ("k1", "k2", "k3", "absolute")
"""Kinds that are estimated from the sampled token."""
EXACT = ("reverse", "forward", "jensen_shannon")
"""Kinds that are computed from the whole distributions."""
OF_THE_LOSS = ("k1", "k2", "k3", "plain_k3", *EXACT)
"""Kinds of a term in the loss; `absolute` is for the reward only."""
_LOSS_RULE = f"{', '.join(OF_THE_LOSS)} ('absolute' is for the reward only)"
OF_THE_REWARD = ("coef", "kind", "reward_gradient", "control", "target", "horizon", "end_coef")
"""Options of the KL charge in the reward."""
HORIZONS, UNKNOWN_RUN = 10, 10_000.0
"""Of the adaptive controller by default: horizons in a run, and the replies of one where its length is unknown."""


@dataclass(frozen=True)
class KLOptions:
    """The price of divergence from the reference.

    Raises: OperantError for an unknown kind or controller, or a number out of range.
    """

    coef: float = bounded(0.1, at_least=0)
    """Price of one nat of KL in the reward; an adaptive controller starts from it. 0: no KL in the reward."""
    kind: str = bounded("k1", choices=SAMPLED + EXACT)
    """k1 | k2 | k3 | absolute | reverse | forward | jensen_shannon: the divergence charged in the reward, per token."""
    reward_gradient: str = bounded("full", choices=("full", "score"))
    """full: the gradient of the expected charge. score: without the gradient of the charge itself, as in TRL; then
    every kind but k1 has another optimum (docs/methods/ppo.md)."""
    loss_coef: float = bounded(0.0, at_least=0)
    """Weight of a KL term in the loss. It can be combined with a KL charge in the reward (`coef`)."""
    loss_kind: str = bounded("k1", choices=OF_THE_LOSS, rule=_LOSS_RULE)
    """k1 | k2 | k3 | reverse | forward | jensen_shannon | plain_k3: the divergence of the loss."""
    control: str = bounded("fixed", choices=("fixed", "adaptive", "per_token", "linear"))
    """fixed | adaptive (Ziegler et al. 2019, per reply) | per_token (RL4LMs) | linear (to `end_coef`)."""
    target: float = bounded(6.0, above=0)
    """KL that the controller aims at: nats per reply for `adaptive`, nats per token for `per_token`."""
    horizon: float | None = bounded(None, at_least=1, rule="at least 1 reply")
    """Number of replies over which `adaptive` corrects an error of 100 %; it counts an error as 20 % at most. None: a
    tenth of the run's replies, but at least those of a step; 10,000 where the length of the run is unknown."""
    end_coef: float = bounded(0.0, at_least=0)
    """The coefficient at the end of the run with `linear`."""

    def __post_init__(self) -> None:
        check_bounds(self, "kl")

    @property
    def charges(self) -> bool:
        """Whether the reward contains a KL charge at any step."""
        return self.coef > 0 or (self.control == "linear" and self.end_coef > 0)

    @property
    def exact(self) -> tuple[str, ...]:
        """Names of the exact divergences that the reward needs."""
        return (self.kind,) if self.charges and self.kind in EXACT else ()

    @property
    def direct(self) -> bool:
        """Whether the update adds the gradient of the charge's own value."""
        return self.charges and self.kind != "k1" and self.reward_gradient == "full"


def exact_kl(out: Outputs, kind: str) -> Tensor:
    """[B, T] the divergence that the policy has computed. Raises: OperantError if its `forward` computes none."""
    if out.kl is None:
        raise OperantError("the policy computed no divergence: `Outputs.kl` of its `forward` must be that to `against`")
    return out.kl[kind]


def estimate(kind: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The sampled term of `kind` at each token, in the shape of the arguments. Raises: OperantError for other kinds."""
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
    """[B, T] the loss form of a sampled estimator: its gradient is in expectation that of the state's KL.

    The expectation is over `behaviour`, the log-probs of the policy that sampled. The gradient flows through the ratio
    and the log-prob (k1, k3), or only through the square (k2). `plain_k3` has no ratio: it is the published GRPO term,
    whose gradient is not the KL's. All arguments are [B, T].
    """
    if kind == "plain_k3":
        return estimate("k3", logprobs, ref_logprobs)
    ratio = torch.exp(logprobs - behaviour)
    return (ratio.detach() if kind == "k2" else ratio) * estimate(kind, logprobs, ref_logprobs)


def direct_term(kind: str, logprobs: Tensor, behaviour: Tensor, ref_logprobs: Tensor) -> Tensor:
    """[B, T] the loss term whose gradient is that of the value of a charge in the reward, for a sampled estimator.

    It is weighted by the detached ratio, so that its expectation over `behaviour` is that over the policy. Together
    with the policy gradient of the charge, it is the gradient of the expected charge.
    """
    return torch.exp(logprobs - behaviour).detach() * estimate(kind, logprobs, ref_logprobs)


class Controller:
    """A coefficient that stays constant. Subclasses change it by the measured KL or the progress of the run."""

    def __init__(self, options: KLOptions):
        self.options, self.coef = options, options.coef

    def begin(self, progress: float, steps: int | None = None) -> None:
        """Called before a step; `progress` in [0, 1) is that of the run of so many steps, None if that is unknown."""

    def update(self, per_reply: float, per_token: float, replies: int) -> None:
        """Called after a step with the mean k1 per reply and per token, and the number of replies, over all ranks."""

    def state_dict(self) -> dict[str, float]:
        """The state that a checkpoint keeps."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore what `state_dict` returned."""
        self.coef = state["coef"]


class Adaptive(Controller):
    """coef *= 1 + clip(KL / target - 1, +-0.2) * replies / horizon (arXiv:1909.08593, section 2.2).

    The horizon of that paper is a hundredth of its runs or less. A short run that used its 10,000 replies would end
    before the price had moved, so by default the horizon is a share of the run: with a fiftieth the price runs away.
    """

    steps: int | None = None
    """Of the run; None if that is unknown."""

    def begin(self, progress: float, steps: int | None = None) -> None:
        self.steps = steps

    def update(self, per_reply: float, per_token: float, replies: int) -> None:
        error = min(max(per_reply / self.options.target - 1, -0.2), 0.2)
        usual = HORIZONS / self.steps if self.steps else replies / UNKNOWN_RUN
        self.coef *= 1 + error * min(replies / self.options.horizon if self.options.horizon else usual, 1.0)


class PerToken(Controller):
    """coef *= 1 + 0.1 * clip((KL - target) / target, +-0.2), KL per token, once a step (RL4LMs, arXiv:2210.01241)."""

    def update(self, per_reply: float, per_token: float, replies: int) -> None:
        error = min(max((per_token - self.options.target) / self.options.target, -0.2), 0.2)
        self.coef *= 1 + 0.1 * error


class Linear(Controller):
    """Changes linearly from `coef` at the first step to `end_coef` at the end of the run."""

    def begin(self, progress: float, steps: int | None = None) -> None:
        self.coef = self.options.coef + (self.options.end_coef - self.options.coef) * progress


CONTROLLERS = {"fixed": Controller, "adaptive": Adaptive, "per_token": PerToken, "linear": Linear}
"""The controllers by the name of `kl.control`."""


def controller(options: KLOptions) -> Controller:
    """The controller that the options name."""
    return CONTROLLERS[options.control](options)
