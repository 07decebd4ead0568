"""The base of a policy of your own, and the table of policies by name.

    class Tabular(PolicyBase):
        def forward(self, batch, sampling=..., **kwargs): ...     # log-probs and entropy at every action
        def generate(self, prompts, sampling, keys): ...          # completions

A transformers model needs none of this: `Policy` wraps it. Nor does a module around one that has its `config`, its
`get_output_embeddings()` and its `forward(**kwargs)`: a soft prompt or an adapter is such a module.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from operant.import_by_name import Table
from operant.models.hidden_states import Modes
from operant.models.options import ModelOptions
from operant.sampling import Sampling
from operant.types import Batch, Completion, OperantError, Outputs, Rollout, Tokenizer, require

POLICIES = Table(
    "policy",
    "operant.policies",
    {
        "outcome_critic": "operant.apps.code.outcome_critic:OutcomeCritic",
        "reward_model": "operant.apps.rlhf.reward_model:RewardModel",
    },
)
"""The class or function that makes each policy; its arguments are the options `policy.*`."""


class PolicyBase(nn.Module):
    """A policy that is no transformers model: a `types.TrainablePolicy` that lacks `forward` and `generate`.

    Set `vocabulary` in the constructor, and `tokenizer`, `stop_tokens`, `context` where there are any. With
    `has_values = True`, write `values` too, and fill `Outputs.values`.
    """

    vocabulary: int
    """Number of token ids."""
    tokenizer: Tokenizer | None = None
    """None if prompts are token ids."""
    stop_tokens: tuple[int, ...] = ()
    """The ids that end a reply."""
    context: int | None = None
    """Most tokens of a prompt with its reply; None: no limit."""
    has_values = False
    """Whether the policy has a critic."""
    version = 0
    """The training step that made the weights."""
    options = ModelOptions()
    """Which layers are trained, and with which precision: these options, and all below, are a transformers model's."""
    modes = Modes()
    """The measured ways of computing: there are none to choose from."""
    encoder_decoder = False
    """Whether an encoder reads the prompt."""
    rounds = False
    """Whether the weights are of a 16-bit type, so that generation and scoring differ visibly by rounding."""
    critic: Any = None
    """A second network that computes the values."""
    value_head: Any = None
    """The head that computes the values from hidden states."""
    trunk: Any = None
    """The frozen lower layers, whose states are cached."""
    shards: Any = None
    """The `training.sharding.Shards` of a policy that is divided over ranks."""
    as_reward: str | None = None
    """What stands before its run in --reward; None: it is no reward."""

    @property
    def model(self) -> "PolicyBase":
        """The module that is copied for the reference: the policy itself."""
        return self

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def numbers(self) -> torch.dtype:
        """The dtype of log-probs and values."""
        return torch.promote_types(next(self.parameters()).dtype, torch.float32)

    def forward(self, batch: Batch, sampling: Sampling = Sampling(), **kwargs: object) -> Outputs:
        """Compute log-probs and entropy, under `sampling`'s temperature, at every action: each [B, T], 0 elsewhere."""
        raise NotImplementedError

    def generate(self, prompts: Sequence[list[int]], sampling: Sampling, keys: Sequence[int]) -> list[Completion]:
        """Generate one completion for each prompt; `keys`: one random-number key per prompt (`sampling.uniforms`)."""
        raise NotImplementedError

    def values(self, batch: Batch) -> Tensor | None:
        """[B, T] the value of the state before each action; None without a critic."""
        return None

    def check(self) -> None:
        """Raises: OperantError that names what the class lacks, before anything is generated."""
        lacking = [] if hasattr(self, "vocabulary") else ["a number `vocabulary`"]
        needed = ("forward", "values") if self.has_values else ("forward",)
        lacking += [f"a method `{name}`" for name in needed if getattr(type(self), name) is getattr(PolicyBase, name)]
        lacking += [] if any(True for _ in self.parameters()) else ["parameters"]
        require(not lacking, f"policy {type(self).__name__} lacks {' and '.join(lacking)}: see docs/extending.md")

    def trainable(self) -> list[nn.Parameter]:
        """The parameters that an optimizer changes."""
        return [p for p in self.parameters() if p.requires_grad]

    def export(self, folder: Path) -> None:
        """Write files beside the trained weights and the name that made the policy; by default, none."""

    def misfit(self, prompt: int, reply: int) -> str | None:
        """Why a prompt and reply of these lengths do not fit, as the end of a sentence; None if they fit."""
        if self.context is None or prompt + reply <= self.context:
            return None
        tokens = f"has {prompt} token{'s' * (prompt != 1)}"
        return f"{tokens}, and with {reply} of the reply does not fit into the context of {self.context}"

    def packs(self, batch: Batch) -> bool:
        """Whether rows are packed end to end: never."""
        return False

    def drop_foreign_states(self, batch: Batch, states_of: object) -> Batch:
        """The batch without cached states of another model."""
        return batch.with_(states=None)

    def train(self, mode: bool = True) -> "PolicyBase":
        """Stay in evaluation mode, so that scores depend on weights and tokens only."""
        return super().train(False)


class ReadingPolicy(PolicyBase):
    """A policy that reads labelled replies and generates none, such as a reward model or a critic of outcomes."""

    as_reward: str | None = ""
    """What stands before its run in --reward."""
    trained_by = ""
    """The method that trains it."""
    whole_texts = False
    """Whether it reads a prompt and its reply as one text."""
    calibrated_on: str | None = None
    """`labels` or a file: the replies that `calibrate` gets before and after training; None: it has no scale to set."""

    def calibrate(self, rows: Sequence[list[int]]) -> None:
        """Set the scale of its scores by the token ids of some replies."""

    def measure(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """The metrics of held-out labelled replies by name, beside those of the method's loss."""
        return {}

    def judged_labels(self, rollouts: Sequence[Rollout], *, single: bool) -> dict[str, object] | None:
        """What its page shows of held-out labels; single: they are of single replies, which are not compared."""
        return None

    def generate(self, prompts: Sequence[list[int]], sampling: Sampling, keys: Sequence[int]) -> list[Completion]:
        """Raises: OperantError, because it generates nothing."""
        raise OperantError(f"this policy judges replies and generates none: train it with algorithm={self.trained_by}")
