r"""RLOO: each reply is compared with the mean of the other replies to its prompt; no critic.

[Ahmadian et al. 2024](https://arxiv.org/abs/2402.14740). Each reply is held against the mean of the others of its
group. KL (`k1`) is part of the return, before that mean is taken off, as published. The loss sums over a reply's
tokens.
"""

from operant.algorithms.base import Algorithm, Needs
from operant.objectives import advantages, losses

DEFAULTS: dict[str, object] = {"samples": 4, "update.epochs": 1}

ALGORITHM = Algorithm(
    losses.surrogate,
    advantages.with_leave_one_out,
    per="sequence",
    copies={"reference": "frozen"},
    needs=Needs(samples=2),
    kl=("reward", "loss"),
    defaults=DEFAULTS,
)

PRESETS: dict[str, dict[str, object]] = {}
