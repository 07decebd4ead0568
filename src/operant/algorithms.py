"""Each algorithm, as a choice of parts. Adding one is adding a row; nothing outside this table asks which one runs."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from operant import advantages, losses
from operant.types import AdvantageFn, LossFn, OperantError, Rollout, shown
from operant.updates import gradient
from operant.updates.objective import Objective, minibatch_whitening


@dataclass(frozen=True)
class Algorithm:
    """One row: what is descended on, from what, and in which units."""

    loss: LossFn
    advantage: AdvantageFn | None = None
    source: str = "play"
    """play: rollouts of the policy. data: replies that somebody else wrote."""
    select: Callable[[Sequence[Rollout], Sequence[float]], list[int]] | None = None
    """Which rollouts are learnt from; None: all."""
    unit: str = "episode"
    """What is shuffled and cut: episode | pair."""
    per: str = "token"
    """What the mean is over: see `batch.token_weights`."""
    shadows: Mapping[str, str | tuple[str, float]] = field(default_factory=dict)
    """Named copies of the policy and the rule by which each follows."""
    needs_values: bool = False
    update: Callable = gradient.update

    def objective(self, options: Mapping[str, Any], horizon: int, reference: Any = None) -> Objective:
        """What is descended on under a learner's options."""
        advantage = options["advantage"]
        return Objective(
            loss=partial(self.loss, **options["loss"]),
            unit=self.unit,
            per=self.per,
            horizon=horizon,
            entropy_gradient=bool(options["loss"].get("entropy_coef")),
            whiten=minibatch_whitening(advantage.get("whiten_scope", "none"), advantage.get("unbiased", False)),
            kl=options["kl"],
            reference=reference,
        )


ALGORITHMS: dict[str, Algorithm] = {
    "ppo": Algorithm(losses.ppo, advantages.with_gae, shadows={"reference": "frozen"}, needs_values=True),
    "grpo": Algorithm(losses.surrogate, advantages.with_groups, per="episode", shadows={"reference": "frozen"}),
    "rloo": Algorithm(losses.surrogate, advantages.with_leave_one_out, per="sequence", shadows={"reference": "frozen"}),
    "sft": Algorithm(losses.sft, source="data"),
}


PRESETS: dict[str, dict[str, object]] = {
    # Ziegler et al. (2019) as released, style tasks: arXiv:1909.08593 and openai/lm-human-preferences.
    "openai": {
        "steps": 1953,
        "batch": 512,
        "sampling.temperature": 0.7,
        "sampling.fixed_length": True,
        "sampling.max_tokens": 24,
        "optimizer.lr": 1e-5,
        "optimizer.schedule": "linear",
        "optimizer.eps": 1e-5,
        "optimizer.eps_placement": "tensorflow",
        "optimizer.max_grad_norm": None,
        "update.epochs": 4,
        "update.minibatch": None,
        "kl.coef": 0.15,
        "kl.control": "adaptive",
        "kl.target": 6.0,
        "kl.horizon": 10_000,
        "loss.clip": 0.2,
        "loss.value_clip": 0.2,
        "loss.value_coef": 0.1,
        "advantage.gamma": 1.0,
        "advantage.lam": 0.95,
        "advantage.whiten_scope": "minibatch",
        "advantage.whiten_rewards": True,
        "value.init": "zero",
    },
    # TRL 0.11.4's PPOConfig and value head.
    "trl": {
        "batch": 128,
        "optimizer.lr": 1.41e-5,
        "optimizer.max_grad_norm": None,
        "update.epochs": 4,
        "update.minibatch": 128,
        "update.ratio_threshold": 10.0,
        "kl.coef": 0.2,
        "kl.control": "adaptive",
        "kl.target": 6.0,
        "kl.horizon": 10_000,
        "loss.clip": 0.2,
        "loss.value_clip": 0.2,
        "loss.value_coef": 0.1,
        "advantage.gamma": 1.0,
        "advantage.lam": 0.95,
        "advantage.whiten_scope": "rollout",
        "advantage.unbiased": True,
        "value.init": "torch",
    },
    # RL4LMs, imdb/gpt2_ppo: 1,280 tokens a rollout are 27 replies of 48, a minibatch of 64 tokens is one of them;
    # its plain squared error times 0.5 is our halved one times 1.
    "rl4lms": {
        "steps": 50,
        "batch": 27,
        "sampling.fixed_length": True,
        "sampling.max_tokens": 48,
        "optimizer.lr": 1e-6,
        "optimizer.weight_decay": 1e-6,
        "optimizer.max_grad_norm": 0.5,
        "update.epochs": 5,
        "update.minibatch": 1,
        "kl.coef": 0.1,
        "kl.control": "per_token",
        "kl.target": 0.1,
        "loss.clip": 0.2,
        "loss.value_clip": None,
        "loss.value_coef": 1.0,
        "advantage.gamma": 0.99,
        "advantage.lam": 0.95,
        "advantage.whiten_scope": "minibatch",
        "advantage.unbiased": True,
        "value.critic": "copy",
    },
    # The TextWorld fork of TRL: no KL unless asked for, two discounts, nothing but the next value crosses a turn.
    "textworld": {
        "batch": 128,
        "sampling.max_tokens": 20,
        "optimizer.lr": 1e-6,
        "optimizer.max_grad_norm": None,
        "update.epochs": 1,
        "update.minibatch": 8,
        "kl.coef": 0.0,
        "loss.clip": 0.2,
        "loss.value_clip": 0.2,
        "loss.value_coef": 0.5,
        "advantage.gamma": 1.0,
        "advantage.lam": 0.95,
        "advantage.turn_gamma": 0.6,
        "advantage.turn_lam": 0.0,
        "advantage.whiten_scope": "none",
        "value.layers": 2,
        "value.init": "torch",
    },
    # The top sixth is trained, on kept states of the rest; goes with any other: preset="trl,trunk".
    "trunk": {"model.train_layers": "auto"},
}
"""Named sets of option values: those of the systems that they are called after, and `trunk`."""


def preset(name: str | None) -> dict[str, object]:
    """The options of a preset, or of several by comma, later over earlier. Raises: OperantError with the nearest."""
    names = [part.strip() for part in str(name or "").split(",") if part.strip()]
    return {k: v for part in names for k, v in _row(PRESETS, part, "preset").items()}


def find(name: str) -> Algorithm:
    """The row of that name. Raises: OperantError with the nearest."""
    return _row(ALGORITHMS, name, "algorithm")


def _row(table: Mapping, name: str, what: str):
    if not isinstance(name, str) or name not in table:
        near = difflib.get_close_matches(str(name)[:100], table, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(table)}"
        raise OperantError(f"{what} {shown(name)} is unknown; {hint}")
    return table[name]
