"""Each algorithm, as a choice of parts. Adding one is adding a row; nothing outside this table asks which one runs."""

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from operant.objectives import advantages, losses
from operant.types import AdvantageFn, LossFn, OperantError, shown


@dataclass(frozen=True)
class Needs:
    """What a row cannot do without; checked before anything loads."""

    critic: bool = False
    samples: int = 1
    """Replies to one prompt: a method that compares them needs two."""


@dataclass(frozen=True)
class Algorithm:
    """One row: what is descended on, from what, and in which units."""

    loss: LossFn
    advantage: AdvantageFn | None = None
    source: str = "play"
    """play: rollouts of the policy, which a reward judges. data: given replies (`Task.replies`), without reward."""
    unit: str = "episode"
    """What is shuffled and cut: episode | pair."""
    per: str = "token"
    """What the mean is over: see `batch.token_weights`."""
    shadows: Mapping[str, str | tuple[str, float]] = field(default_factory=dict)
    """Named copies of the policy and the rule by which each follows."""
    needs: Needs = Needs()
    kl: tuple[str, ...] = ()
    """Where a KL penalty may be charged: in the `reward`, in the `loss`."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of its own, where the options' general defaults do not suit it."""
    update: str = "gradient"
    """How it is descended on: a key of `UPDATES`."""


ALGORITHMS: dict[str, Algorithm] = {
    "ppo": Algorithm(
        losses.ppo,
        advantages.with_gae,
        shadows={"reference": "frozen"},
        needs=Needs(critic=True),
        kl=("reward", "loss"),
    ),
    # Shao et al. (2024), arXiv:2402.03300: KL stands in the loss, so that equal scores have advantage 0 whatever KL is.
    # At their price of 0.04 the demo ends at 69 nats a reply with one word in three the same, at 0.2 at 7 (docs).
    "grpo": Algorithm(
        losses.surrogate,
        advantages.with_groups,
        per="episode",
        shadows={"reference": "frozen"},
        needs=Needs(samples=2),
        kl=("loss",),
        defaults={"samples": 8, "update.epochs": 1, "kl.coef": 0.0, "kl.loss_coef": 0.2, "kl.loss_kind": "k3"},
    ),
    # Ahmadian et al. (2024), arXiv:2402.14740: k1 is part of the return, before the mean of the others is taken off.
    "rloo": Algorithm(
        losses.surrogate,
        advantages.with_leave_one_out,
        per="sequence",
        shadows={"reference": "frozen"},
        needs=Needs(samples=2),
        kl=("reward", "loss"),
        defaults={"samples": 4, "update.epochs": 1},
    ),
    "sft": Algorithm(losses.sft, source="data", defaults={"update.epochs": 1, "kl.coef": 0.0}),
}


DEFAULT = "ppo"
"""The algorithm of a run that names none."""

PRESETS: dict[str, dict[str, object]] = {
    # Ziegler et al. (2019) as released, style tasks: arXiv:1909.08593 and openai/lm-human-preferences.
    "openai": {
        "algorithm": "ppo",
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
        "algorithm": "ppo",
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
        "kl.reward_gradient": "score",
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
        "algorithm": "ppo",
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
        "algorithm": "ppo",
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


def fitting(options: Mapping[str, Any], name: str, known: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """What of a recipe or preset goes with algorithm `name`, whose options are `known`; and the names left out.

    Options of another method are those that this one does not have; and, where the recipe was written for another,
    those that either method sets for itself.
    """
    theirs = options.get("algorithm") or DEFAULT
    own = () if theirs == name else (*find(name).defaults, *find(str(theirs)).defaults)
    kept = {k: v for k, v in options.items() if k in known and k not in own and (k != "algorithm" or theirs == name)}
    return kept, sorted(k for k in options if k not in kept and k != "algorithm")


def left_out_says(source: str, names: Sequence[str], algorithm: str) -> str:
    """A line about options of a recipe or preset that do not go with the chosen method."""
    return f"{source} was written for another method; left out with algorithm={algorithm}: {', '.join(names)}"


def _row(table: Mapping, name: str, what: str):
    if not isinstance(name, str) or name not in table:
        near = difflib.get_close_matches(str(name)[:100], table, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(table)}"
        raise OperantError(f"{what} {shown(name)} is unknown; {hint}")
    return table[name]
