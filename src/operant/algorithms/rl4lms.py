"""The configurations that RL4LMs shipped, as presets `rl4lms-TASK-METHOD`. docs/other-names.md explains them.

A row has the numbers of its YAML file, in its units: a buffer of so many tokens, minibatches of 64 tokens, a KL target
per token. They become replies and options here. Tasks, rewards and models are those of the recipes. `rl4lms-TASK-sft`
has the learning rate of the supervised configuration.
"""

from typing import NamedTuple

PASSES = {
    "optimizer.weight_decay": 1e-6,
    "update.epochs": 5,
    "loss.clip": 0.2,
    "loss.value_clip": None,
    "advantage.whiten_scope": "minibatch",
    "advantage.unbiased": True,
}
"""PPO's and NLPO's values."""
METHODS: dict[str, dict[str, object]] = {
    "ppo": PASSES,
    "nlpo": PASSES | {"sampling.top_p_least": 100, "sampling.keep_stops": True},
    "a2c": {"advantage.lam": 1.0},
    "trpo": {
        "update.solver_steps": 15,
        "update.fisher_share": 1.0,
        "update.critic_epochs": 10,
        "update.target_kl": 0.01,
        "update.damping": 0.1,
    },
}
"""What all configurations of a method have. RMSProp and the rest of A2C are its defaults here, too."""


class Row(NamedTuple):
    """A configuration of RL4LMs."""

    tokens: int
    """Of the rollout buffer: n_steps times n_envs."""
    length: int
    """Most tokens of a reply."""
    lr: float
    coef: float
    """Of KL, charged in the reward."""
    target: float
    """Of the controller of that coefficient, in nats per token."""
    steps: int
    least: int = 0
    """Least tokens of a reply; `length` means that all have as many."""
    top_k: int = 0
    """Of the rollouts."""
    mask: tuple[float, int] | None = None
    """NLPO's top-p, and the steps between two refreshes of its mask."""
    more: dict[str, object] = {}  # noqa: RUF012 - nobody changes it

    def options(self, method: str) -> dict[str, object]:
        """The options of this configuration under a method."""
        found: dict[str, object] = {
            "algorithm": method,
            "steps": self.steps,
            "batch": max(1, round(self.tokens / self.length)),
            "sampling.max_tokens": self.length,
            "optimizer.lr": self.lr,
            "optimizer.max_grad_norm": 0.5,
            "kl.coef": self.coef,
            "kl.control": "per_token",
            "kl.target": self.target,
            "loss.value_coef": 1.0,  # their 0.5 times a squared error that is not halved
            "advantage.gamma": 0.99,
            "advantage.lam": 0.95,
            "value.critic": "copy",
            **METHODS[method],
        }
        if method in ("ppo", "nlpo"):
            found["update.minibatch"] = max(1, round(64 / self.length))
        if method == "trpo":
            found.pop("loss.value_coef")
        found |= {"sampling.fixed_length": True} if self.least == self.length else {"sampling.min_tokens": self.least}
        if self.top_k or self.mask:
            found |= {"sampling.top_k": self.top_k, "sampling.truncation": "stored"}
        if self.mask:
            found |= {"sampling.top_p": self.mask[0], "mask.every": self.mask[1]}
        return found | self.more


IMDB = (1280, 48, 1e-6, 0.1, 0.1, 50, 48)
ROWS: dict[str, Row] = {
    "imdb-ppo": Row(*IMDB),
    "imdb-nlpo": Row(*IMDB, mask=(0.9, 5)),
    "imdb-supervised-ppo": Row(*IMDB),
    "imdb-supervised-nlpo": Row(*IMDB, mask=(0.9, 5)),
    "imdb-a2c": Row(96, 48, 1e-6, 0.1, 0.5, 100, 48),
    "commongen-ppo": Row(2560, 20, 2e-6, 0.001, 2.0, 200, 5, more={"loss.entropy_coef": 0.01}),
    "commongen-nlpo": Row(1280, 20, 2e-6, 0.001, 2.0, 100, 10, 50, (0.9, 20)),
    "commongen-supervised-ppo": Row(1280, 20, 2e-6, 0.01, 1.0, 100, 5, 50, more={"loss.entropy_coef": 0.01}),
    "commongen-supervised-nlpo": Row(1280, 20, 2e-6, 0.01, 1.0, 100, 5, 50, (0.9, 20), {"loss.entropy_coef": 0.01}),
    "summarize-ppo": Row(5120, 100, 2e-6, 0.001, 0.2, 100, 50, 50),
    "summarize-nlpo": Row(5120, 100, 2e-6, 0.001, 0.2, 100, 50, 100, (0.9, 20)),
    "summarize-supervised-ppo": Row(5120, 100, 2e-6, 0.01, 0.2, 50, 50, 100),
    "summarize-supervised-nlpo": Row(5120, 100, 2e-6, 0.01, 0.2, 50, 50, 100, (0.9, 30)),
    "totto-ppo": Row(2560, 50, 2e-6, 0.001, 2.0, 100, 10),
    "totto-nlpo": Row(2560, 50, 2e-6, 0.001, 2.0, 100, 10, 0, (0.9, 20)),
    "totto-supervised-ppo": Row(2560, 50, 5e-7, 0.01, 0.2, 100, 10, 50),
    "totto-supervised-nlpo": Row(2560, 50, 5e-7, 0.01, 0.2, 100, 10, 0, (0.9, 20)),
    "narrativeqa-ppo": Row(2560, 50, 2e-6, 0.001, 1.0, 100, 0, 50),
    "narrativeqa-nlpo": Row(2560, 50, 2e-6, 0.001, 1.0, 100, 0, 50, (0.9, 20)),
    "narrativeqa-supervised-ppo": Row(5120, 50, 5e-7, 0.001, 0.2, 100, 0, 50),
    "narrativeqa-supervised-nlpo": Row(2560, 50, 5e-7, 0.001, 0.2, 100, 0, 50, (0.9, 20)),
    "translate-ppo": Row(5120, 128, 1e-6, 0.001, 0.2, 50, 0, 10),
    "translate-nlpo": Row(5120, 128, 1e-6, 0.001, 0.2, 50, 0, 10, (0.5, 20)),
    "translate-supervised-ppo": Row(5120, 128, 5e-7, 0.001, 0.2, 50, 0, 5),
    "translate-supervised-nlpo": Row(5120, 128, 5e-7, 0.001, 0.2, 50, 0, 10, (0.5, 20)),
    "dialog-ppo": Row(1280, 20, 1e-6, 0.2, 0.5, 50, 2, 20),
    "dialog-nlpo": Row(1280, 20, 1e-6, 0.2, 0.5, 100, 2, 20, (0.9, 20)),
    "dialog-supervised-ppo": Row(1280, 20, 1e-6, 0.2, 0.05, 50, 2, 20),
    "dialog-supervised-nlpo": Row(1280, 20, 1e-6, 0.2, 0.05, 50, 2, 20, (0.9, 20)),
    "numbers-ppo": Row(1280, 20, 1e-6, 0.02, 2.0, 100),
    "numbers-nlpo": Row(
        1280, 20, 1e-5, 0.02, 2.0, 200, 20, mask=(0.9, 100), more={"loss.value_coef": 0.2, "advantage.lam": 0.9}
    ),
    "numbers-trpo": Row(40, 20, 1e-5, 0.01, 2.0, 1000),
    "numbers-a2c": Row(200, 20, 1e-5, 0.02, 2.0, 500),
    "numbers-t5-ppo": Row(1280, 20, 1e-6, 1e-5, 3.0, 100, 20, 200, more={"loss.entropy_coef": 0.001}),
    "numbers-t5-nlpo": Row(1280, 20, 2e-6, 0.001, 2.0, 100, 20, 200, (0.9, 20)),
    "numbers-blenderbot-ppo": Row(1280, 20, 1e-6, 1e-5, 3.0, 100, 20, 200, more={"loss.entropy_coef": 0.001}),
    "numbers-bart-ppo": Row(1280, 20, 1e-7, 1e-4, 3.0, 100, 20, 50, more={"update.minibatch": 6}),
    "dates-ppo": Row(1280, 30, 1e-5, 0.02, 2.0, 100, more={"loss.entropy_coef": 0.001}),
}
"""The configurations by task and method. Where a reply's least length is missing there, it is 0 here."""

SUPERVISED = {"imdb": 1e-5, "commongen": 1e-5, "dialog": 1e-5, "translate": 1e-5, "summarize": 1e-4, "totto": 1e-4}
"""The learning rates of supervised training."""

PRESETS: dict[str, dict[str, object]] = {
    f"rl4lms-{name}": row.options(name.rpartition("-")[2]) for name, row in ROWS.items()
}
PRESETS |= {f"rl4lms-{task}-sft": {"algorithm": "sft", "optimizer.lr": lr} for task, lr in SUPERVISED.items()}
PRESETS["rl4lms-nlpo-as-released"] = PRESETS["rl4lms-imdb-nlpo"] | {"mask.every": 0}
