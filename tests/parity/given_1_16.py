"""What TRL 1.16.0's trainers and our learner are given alike: a model, prompts, replies, scores, and every option."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GPT2Config, OPTConfig

NUM_PROMPTS, SAMPLES, VOCABULARY, MAX_QUERY, MAX_REPLY = 3, 6, 19, 6, 9
ROWS, TEMPERATURE = NUM_PROMPTS * SAMPLES, 0.8
LOW, HIGH, BETA = 0.1, 0.3, 0.15
EPS, LR, NORM = 1e-2, 5e-2, 0.3  # an epsilon above the rounding of gradients that are 0
END = VOCABULARY - 1
WIDTH = {"vocab_size": VOCABULARY, "bos_token_id": END, "eos_token_id": END}
OPT = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
OPT |= {"max_position_embeddings": 32, "dropout": 0.0, "attention_dropout": 0.0, "init_std": 0.3, "pad_token_id": 0}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "initializer_range": 0.3}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
SHAPES = {
    # Learnt positions, counted from the attention mask: padding on the left moves none of them.
    "opt": OPTConfig(**WIDTH, **OPT),
    # Learnt positions, counted from the start of the row unless the caller says them.
    "gpt2": GPT2Config(**WIDTH, **GPT2),
}
# Whatever moves a number has its value here or in the comparison; none is left to a default.
SETTINGS = {"use_cpu": True, "bf16": False, "fp16": False, "gradient_checkpointing": False}
SETTINGS |= {"use_liger_kernel": False, "disable_dropout": True, "use_vllm": False}
SETTINGS |= {"use_transformers_continuous_batching": False, "pad_to_multiple_of": None, "shuffle_dataset": False}
SETTINGS |= {"num_generations": SAMPLES, "per_device_train_batch_size": ROWS, "gradient_accumulation_steps": 1}
SETTINGS |= {"num_iterations": 2, "max_completion_length": MAX_REPLY, "mask_truncated_completions": False}
SETTINGS |= {"temperature": TEMPERATURE, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
SETTINGS |= {"reward_weights": None, "sync_ref_model": False, "beta": BETA, "epsilon": LOW, "epsilon_high": HIGH}
SETTINGS |= {"optim": "adamw_torch", "learning_rate": LR, "lr_scheduler_type": "constant", "warmup_steps": 0}
SETTINGS |= {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": EPS, "weight_decay": 0.0, "max_grad_norm": NORM}
SETTINGS |= {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "seed": 0}
GRPO = {"loss_type": "grpo", "scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize"}
GRPO |= {"importance_sampling_level": "token", "use_bias_correction_kl": True, "delta": None}
GRPO |= {"top_entropy_quantile": 1.0, "entropy_coef": 0.0, "use_adaptive_entropy": False}
GRPO |= {"off_policy_mask_threshold": None, "cast_lm_head_to_fp32": False}
OWN = {"grpo": GRPO, "rloo": {"normalize_advantages": False, "reward_clip_range": None}}
HALVES = {"per_device_train_batch_size": ROWS // 2, "gradient_accumulation_steps": 2}
# The same of ours. Micro-batches are small, so that every gradient is a sum of several.
OPTIONS = {"device": "cpu", "watch_every": 0, "sampling.temperature": TEMPERATURE, "sampling.max_tokens": MAX_REPLY}
OPTIONS |= {"loss.clip": LOW, "loss.clip_high": HIGH, "kl.coef": 0.0, "kl.loss_coef": 0.0, "update.epochs": 2}
OPTIONS |= {"update.minibatch": None, "update.micro_tokens": 64, "optimizer.lr": LR, "optimizer.betas": (0.9, 0.999)}
OPTIONS |= {"optimizer.eps": EPS, "optimizer.weight_decay": 0.0, "optimizer.max_grad_norm": NORM}
IN_LOSS = {"kl.loss_coef": BETA, "kl.loss_kind": "k3", "advantage.scale": True, "advantage.deviation": "sample"}
IN_REWARD = {"kl.coef": BETA, "kl.kind": "k1"}

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Numbers:
    """What both sides compute in, and what counts as equal."""

    exact: bool
    """float64 throughout, TRL's output head replaced by a plain one; False: float32, and TRL as it is."""

    @property
    def kind(self) -> torch.dtype:
        return torch.float64 if self.exact else torch.float32

    @property
    def bound(self) -> float:
        return 1e-10 if self.exact else 1e-5

    @contextmanager
    def by_default(self) -> Iterator[None]:
        """TRL's rewards come in torch's default numbers."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.kind)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


class Case:
    """Prompts of unequal length, replies of unequal length to each, and their scores."""

    def __init__(self, seed: int, *, longest: int = MAX_REPLY, flush: bool = False, ended: bool = False):
        """`flush`: prompts of one length. `ended`: replies end with the end token, unless they are as long as may be.

        Padding and end are ids that may also be said.
        """
        draw = torch.Generator().manual_seed(seed)
        pick = lambda low, high: int(torch.randint(low, high + 1, (), generator=draw))  # noqa: E731
        ids = lambda count: [pick(0, END) for _ in range(count)]  # noqa: E731
        # The first id tells the prompts apart, so that no two of them are equal by chance.
        self.prompts = [[first, *ids(MAX_QUERY - 1 if flush else pick(0, MAX_QUERY - 1))] for first in (3, 7, 11)]
        self.queries = [prompt for prompt in self.prompts for _ in range(SAMPLES)]
        self.replies = [ids(pick(1, longest)) for _ in range(ROWS)]
        if ended:
            self.replies = [[*reply[:-1], END if len(reply) < MAX_REPLY else 5] for reply in self.replies]
        # Sixty-fourths, which float32 holds as well: TRL keeps what a reward says in it.
        self.scores: list[float | None] = [pick(-128, 128) / 64 for _ in range(ROWS)]
        self.groups = [row // SAMPLES for row in range(ROWS)]
        self.seed = seed

    def judged(self, scores: dict[int, float | None]) -> "Case":
        """The same with other scores of some rows; None: the reward abstains."""
        other = Case.__new__(Case)
        other.__dict__ = self.__dict__ | {"scores": [scores.get(i, s) for i, s in enumerate(self.scores)]}
        return other

    def moved(self, weights: Weights, size: float, number: int) -> Weights:
        """Weights at some distance from others."""
        draw = torch.Generator().manual_seed(1000 * number + self.seed)
        noise = {name: torch.randn(w.shape, generator=draw, dtype=torch.float64) for name, w in weights.items()}
        return {name: w + size * noise[name].to(w) for name, w in weights.items()}
