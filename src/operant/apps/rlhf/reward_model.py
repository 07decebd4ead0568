"""A reward model: a transformers sequence classifier with one output, which scores a whole text.

    RewardModel("builtin:reviews-lm")              # a language model or an encoder becomes the trunk; the head is new
    RewardModel("runs/reward-model")             # one that was trained already

The last token's state is read (of an encoder: what its classification head reads). The score is gain * output + bias;
both are part of the model's config, and are set so that replies of a given policy have mean 0 and variance 1.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from operant.apps.rlhf import judged_labels
from operant.models.base import ReadingPolicy
from operant.models.layout import pad
from operant.models.model_passes import BIAS, GAIN, longest_of
from operant.models.safe_loading import check_finite, load_any, load_config, load_tokenizer, unreported
from operant.sampling import Sampling
from operant.storage.hub import find_model
from operant.types import Batch, OperantError, Outputs, Rollout, require


class RewardModel(ReadingPolicy):
    """A policy for `algorithm=reward-model`: its values are scores of whole texts, and it generates nothing.

    trunk: a folder, a run, `builtin:NAME` or a Hub name: a causal language model or an encoder, whose new head is drawn
    with standard deviation 1 / sqrt(D + 1) as in Ziegler et al. (2019), or a classifier with one label. normalise: set
    gain and bias before and after training on `labels`, the labelled replies, or on a file of replies, which should
    be those of the policy that is trained against it later; `none`: leave them. seed: of the new head.
    """

    trained_by = "reward-model"
    whole_texts = True
    scale: Tensor
    """[2] gain and bias."""

    def __init__(self, trunk: str = "builtin:reviews-lm", normalise: str = "labels", seed: int = 0):
        from transformers import AutoModelForSequenceClassification

        super().__init__()
        folder = Path(trunk).expanduser() / "export"
        folder = Path(find_model(str(folder) if folder.is_dir() else trunk))
        kind, what, saved = AutoModelForSequenceClassification, f"a reward model, of {trunk}", load_config(folder)
        require(not saved.is_encoder_decoder, f"policy.trunk={trunk!r} is an encoder-decoder: give a causal model")
        trained = any("SequenceClassification" in name for name in saved.architectures or ())
        labels = f"policy.trunk={trunk!r} is a classifier with {saved.num_labels} labels; a reward model has one output"
        require(not trained or saved.num_labels == 1, labels)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            with unreported():
                network, found = load_any(kind, folder, what, dtype=torch.float32, num_labels=1)
            inside = f"{network.base_model_prefix}."
            missing = [name for name in found["missing_keys"] if name.startswith(inside) and "pooler" not in name]
            if missing:
                raise OperantError(f"policy.trunk={trunk!r} lacks weights ({min(missing)} ...): is it complete?")
            if found["missing_keys"]:
                # The last layer of a new head, with standard deviation 1 / sqrt(D + 1) (Ziegler et al., 2019).
                layers = [m for name, m in network.named_modules() if f"{name}.weight" in found["missing_keys"]]
                linear = [layer for layer in layers if isinstance(layer, torch.nn.Linear)]
                last = next(layer for layer in reversed(linear) if layer.out_features == 1)
                torch.nn.init.normal_(last.weight, std=(last.in_features + 1) ** -0.5)
                if last.bias is not None:
                    torch.nn.init.zeros_(last.bias)
        check_finite(dict(network.named_parameters()), folder)
        self.network: Any = network.eval()
        self.calibrated_on = None if normalise == "none" else normalise
        self.tokenizer = load_tokenizer(folder, truncation_side="left", padding_side="right")
        if self.tokenizer is None:
            raise OperantError(f"policy.trunk={trunk!r}: {folder} has no tokenizer, which a reward model needs")
        config = network.config.get_text_config()
        self.vocabulary = config.vocab_size
        self.context = longest_of(network, self.tokenizer)
        config.pad_token_id = -1 if self.tokenizer.pad_token is None else self.tokenizer.pad_token_id
        scale = [getattr(network.config, GAIN, 1.0), getattr(network.config, BIAS, 0.0)]
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float64))

    @property
    def model(self) -> Any:
        """The transformers model; its config has the gain and the bias."""
        gain, bias = self.scale.tolist()
        setattr(self.network.config, GAIN, gain)
        setattr(self.network.config, BIAS, bias)
        return self.network

    def forward(self, batch: Batch, sampling: Sampling = Sampling(), **kwargs: object) -> Outputs:
        """`Outputs.values` [B, T] has the score of each row at its last token, and 0 elsewhere; the others are 0."""
        scores = self.scores([row[at].tolist() for row, at in zip(batch.tokens.cpu(), batch.mask.cpu())])
        last = torch.arange(batch.tokens.shape[1], device=self.device) == batch.mask.sum(1, keepdim=True) - 1
        values = torch.where(last, scores[:, None], 0.0)
        off = torch.zeros_like(values)
        return Outputs(off, off, values=values)

    def scores(self, rows: Sequence[list[int]]) -> Tensor:
        """[B] the score of each row of token ids. Without a padding token, rows of equal length are read together."""
        found: list[tuple[list[int], Tensor]] = []
        filler = self.tokenizer.pad_token_id if self.tokenizer.pad_token is not None else None
        for length in sorted({len(row) for row in rows}) if filler is None else [None]:
            together = [i for i, row in enumerate(rows) if length in (None, len(row))]
            ids, mask = pad([rows[i] for i in together], "right", self.device, filler or 0)
            found.append((together, self.network(input_ids=ids, attention_mask=mask.long()).logits[:, 0].float()))
        order = torch.tensor([i for together, _ in found for i in together], device=self.device)
        scores = torch.cat([part for _, part in found])
        gain, bias = self.scale.tolist()
        return gain * torch.zeros_like(scores).index_copy(0, order, scores) + bias

    @torch.no_grad()
    def scores_of(self, rows: Sequence[list[int]], batch: int = 32) -> list[float]:
        """The score of each row of token ids, read `batch` at a time, without gradients."""
        return torch.cat([self.scores(rows[i : i + batch]) for i in range(0, len(rows), batch)]).tolist()

    def calibrate(self, rows: Sequence[list[int]]) -> None:
        """Set gain and bias so that the scores of these rows have mean 0 and variance 1."""
        found = torch.tensor(self.scores_of(rows), dtype=torch.float64)
        mean, spread = found.mean(), found.std(correction=0)
        rounding = 1e-6 * float(found.abs().max())  # equal rows of one batch may differ by that
        if not float(spread) > rounding:
            raise OperantError(
                f"the reward model gives {len(rows)} replies the same score, {float(mean):g}: there is nothing to "
                "normalise; look at the replies, or use policy.normalise=none"
            )
        gain, bias = self.scale.tolist()
        self.scale.copy_(torch.tensor([gain / float(spread), (bias - float(mean)) / float(spread)]))

    def judged_labels(self, rollouts: Sequence[Rollout], *, single: bool) -> dict[str, object]:
        scores = self.scores_of([rollout.turns[0].prompt + rollout.turns[0].action for rollout in rollouts])
        return judged_labels.summary(list(judged_labels.judgements(rollouts, scores, single=single)))
