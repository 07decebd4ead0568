"""A transformers sequence classifier as a reward. It reads text with its own tokenizer, never the policy's ids."""

from collections.abc import Iterator
from typing import Any

import torch

from operant import machine
from operant.models.reward_model import BIAS, GAIN
from operant.models.safe_loading import load_any, load_tokenizer
from operant.storage.hub import find_model
from operant.types import OperantError, Rollout

OF_TASK = "task.target"
"""The value of `label` with which each task's target names the label."""


class Classifier:
    """The probability, or the logit, of one label: `Classifier("builtin:sentiment", label="positive")(rollouts)`.

    `name` is a folder, `builtin:NAME` or a Hub name. The model is loaded by `check` or the first call. It runs in
    float32 without dropout, over batches of similar length; text that is too long is truncated on the left.
    `label="task.target"`: for each rollout the label that the target of its task names.
    Raises: OperantError for an unknown `output` or `text`, or a `batch` below 1.
    """

    def __init__(
        self,
        name: str,
        *,
        label: str | int = "positive",
        output: str = "probability",
        text: str = "text",
        batch: int = 32,
        device: str | None = None,
    ):
        for option, value, allowed in (("output", output, ("probability", "logit")), ("text", text, ("text", "reply"))):
            if value not in allowed:
                raise OperantError(f"classifier {name!r}: {option}={value!r} must be {allowed[0]} or {allowed[1]}")
        if batch < 1:
            raise OperantError(f"classifier {name!r}: batch={batch} must be at least 1")
        self.name, self.label, self.output, self.text, self.batch = name, label, output, text, batch
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.__name__ = "sentiment" if name == "builtin:sentiment" else "classifier"
        self._loaded: tuple[Any, Any, int] | None = None

    def __call__(self, rollouts: list[Rollout]) -> list[float]:
        labels = [rollout.task.target for rollout in rollouts] if self.label == OF_TASK else None
        return self.score([getattr(rollout, self.text) for rollout in rollouts], labels)

    @property
    def tokenizer(self) -> Any:
        """Its own tokenizer. Raises: OperantError as `check`."""
        return self._load()[1]

    @property
    def labels(self) -> int:
        """The number of its labels. Raises: OperantError as `check`."""
        return int(self._load()[0].config.num_labels)

    def check(self) -> None:
        """Load the model. Raises: OperantError if it cannot be found, is not a classifier, or lacks the label."""
        self._load()

    @torch.inference_mode()
    def score(self, texts: list[str], labels: list[Any] | None = None) -> list[float]:
        """One number per text, in the order of `texts`. labels: one per text, instead of the label of all.

        Raises: OperantError as `check`, on the first call, and for a label that the model does not have.
        """
        model, tokenizer, max_tokens = self._load()
        columns = [self._label_index(model.config, label) for label in labels or [self.label] * len(texts)]
        ids = tokenizer(texts, truncation=True, max_length=max_tokens).input_ids
        ids = [row or _ids_of_empty_text(tokenizer) for row in ids]
        scores = [0.0] * len(texts)
        for rows in _batches([len(row) for row in ids], self.batch, pad=tokenizer.pad_token is not None):
            inputs = {k: v.to(self.device) for k, v in _padded(tokenizer, [ids[row] for row in rows]).items()}
            with machine.threads(machine.worth(inputs["input_ids"].numel(), machine.largest(model))):
                values = self._read(model, model(**inputs).logits.float())
            for row, of_labels in zip(rows, values.tolist()):
                scores[row] = of_labels[columns[row]]
        return scores

    def _read(self, model: Any, logits: torch.Tensor) -> torch.Tensor:
        """Scores [B, labels] from `logits` [B, labels]."""
        if self.output == "logit":  # gain and bias of a reward model
            return getattr(model.config, GAIN, 1.0) * logits + getattr(model.config, BIAS, 0.0)
        single = logits.shape[1] == 1 or model.config.problem_type == "multi_label_classification"
        return logits.sigmoid() if single else logits.softmax(-1)

    def _load(self) -> tuple[Any, Any, int]:
        """The model, its tokenizer, and the maximal number of tokens."""
        if self._loaded is None:
            from transformers import AutoModelForSequenceClassification

            folder = find_model(self.name)
            kind = AutoModelForSequenceClassification
            model, found = load_any(kind, folder, f"classifier {self.name!r}", dtype=torch.float32)
            tokenizer = load_tokenizer(folder, truncation_side="left", padding_side="right")
            if tokenizer is None:
                raise OperantError(f"classifier {self.name!r}: {folder} has no tokenizer, which it needs to read text")
            if found["missing_keys"]:
                missing = ", ".join(sorted(found["missing_keys"])[:3])
                raise OperantError(f"classifier {self.name!r} lacks weights ({missing}); is it a trained classifier?")
            config = model.config.get_text_config()
            positions = getattr(config, "max_position_embeddings", None) or tokenizer.model_max_length
            if "roberta" in config.model_type or config.model_type == "camembert":
                positions -= config.pad_token_id + 1  # RoBERTa counts positions from behind its padding id
            max_tokens = min(positions, tokenizer.model_max_length)
            # A causal classifier reads at the last token that is not this id; -1: batches then have equal lengths.
            config.pad_token_id = -1 if tokenizer.pad_token is None else tokenizer.pad_token_id
            if self.label != OF_TASK:
                self._label_index(model.config, self.label)
            self._loaded = model.to(self.device).eval(), tokenizer, max_tokens
        return self._loaded

    def _label_index(self, config: Any, label: Any) -> int:
        """The column of a label. If there is only one label, any name means it."""
        names = {i: str(name) for i, name in config.id2label.items()}
        if isinstance(label, str) and not label.isdecimal():
            found = [i for i, name in names.items() if name.lower() == label.lower()]
            found = found or ([0] if len(names) == 1 else [])
        else:
            found = [int(label)] if isinstance(label, (int, str)) and int(label) in names else []
        if not found:
            known = ", ".join(f"{i}: {name}" for i, name in names.items())
            raise OperantError(f"classifier {self.name!r} has no label {label!r}; its labels are {known}")
        return found[0]


def _ids_of_empty_text(tokenizer: Any) -> list[int]:
    """One id for an empty text, if the tokenizer adds no special tokens to it."""
    ids = [t for t in (tokenizer.bos_token_id, tokenizer.eos_token_id) if t is not None]
    return ids[:1] or [0]


def _batches(lengths: list[int], size: int, *, pad: bool) -> Iterator[list[int]]:
    """Indices in batches of similar length, or of equal length if the tokenizer has no padding token (`pad`)."""
    rows: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if rows and (len(rows) == size or (not pad and lengths[i] != lengths[rows[0]])):
            yield rows
            rows = []
        rows.append(i)
    if rows:
        yield rows


def _padded(tokenizer: Any, ids: list[list[int]]) -> dict[str, torch.Tensor]:
    lengths = torch.tensor([len(row) for row in ids])
    width = int(lengths.max())
    filler = tokenizer.pad_token_id or 0
    tokens = torch.tensor([row + [filler] * (width - len(row)) for row in ids])
    return {"input_ids": tokens, "attention_mask": (torch.arange(width) < lengths[:, None]).long()}
