r"""PPO: a clipped policy gradient with a critic.

[Its own page](methods/ppo.md): equation, details, presets, measured curves. In one file without the library:
[`recipes/minimal_ppo.py`](../recipes/minimal_ppo.py).
"""

from operant.algorithms.base import Needs, Rewarded
from operant.objectives import advantages, losses

ALGORITHM = Rewarded(losses.ppo, advantages.with_gae, needs=Needs(critic=True))

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
    # RL4LMs, imdb/gpt2_ppo: 1,280 tokens per rollout are 27 replies of 48 tokens, and a minibatch of 64 tokens is one
    # reply. Its squared error times 0.5 equals our halved squared error times 1.
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
    # The TextWorld fork of TRL: no KL by default, two discounts, and GAE crosses a turn only by the next value.
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
}
"""The published settings of other systems, by name."""

# The sentiment notebook of TRL 0.11: GPT-2 tuned on IMDB, a logit of a classifier, 2 to 8 tokens of a review as prompt.
# TRL draws one length of 4 to 15 tokens for all replies of a step; here a reply ends by itself between the two.
PRESETS["imdb-gpt2"] = PRESETS["trl"] | {
    "policy": "lvwerra/gpt2-imdb",
    "tasks": "imdb",
    "data.min_chars": 200,
    "data.query_tokens": "2-8",
    "reward": "classifier:lvwerra/distilbert-imdb#POSITIVE",
    "reward.output": "logit",
    "steps": 100,
    "batch": 256,
    "sampling.min_tokens": 4,
    "sampling.max_tokens": 15,
}
