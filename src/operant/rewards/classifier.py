"""A transformers sequence classifier as a score. It reads text with its own tokenizer, never the policy's ids."""

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch

from operant.models.model_passes import BIAS, GAIN, TextModel, encode, load, passes
from operant.types import OperantError, Rollout, Task, Tokenizer, require, said_of

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
            require(value in allowed, f"classifier {name!r}: {option}={value!r} must be {allowed[0]} or {allowed[1]}")
        require(batch >= 1, f"classifier {name!r}: batch={batch} must be at least 1")
        self.name, self.label, self.output, self.text, self.batch = name, label, output, text, batch
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.__name__ = "sentiment" if name == "builtin:sentiment" else "classifier"
        self._loaded: TextModel | None = None

    def __call__(self, rollouts: list[Rollout]) -> list[float]:
        labels = [rollout.task.target for rollout in rollouts] if self.label == OF_TASK else None
        return self.score([getattr(rollout, self.text) for rollout in rollouts], labels)

    @property
    def tokenizer(self) -> Tokenizer:
        """Its own tokenizer. Raises: OperantError as `check`."""
        return self._load().tokenizer

    @property
    def labels(self) -> int:
        """The number of its labels. Raises: OperantError as `check`."""
        return int(self._load().model.config.num_labels)

    def check(self) -> None:
        """Load the model. Raises: OperantError if it cannot be found, is not a classifier, or lacks the label."""
        self._load()

    def check_task(self, task: Task) -> None:
        """Raises: OperantError for a task whose target is no label, if tasks name the labels."""
        if self.label == OF_TASK:
            with said_of(f"task {task.id!r}"):
                self.column(task.target)

    def score(self, texts: Sequence[str | tuple[str, str]], labels: Sequence[object] | None = None) -> list[float]:
        """One number per text, or pair of texts, in their order. labels: one per text, instead of the label of all.

        Raises: OperantError as `check`, on the first call, and for a label that the model does not have.
        """
        columns = [self.column(label) for label in labels or [self.label] * len(texts)]
        return [of_labels[column] for of_labels, column in zip(self.of_labels(texts), columns)]

    @torch.inference_mode()
    def of_labels(self, texts: Sequence[str | tuple[str, str]]) -> list[list[float]]:
        """The numbers of all labels for each text. Raises: OperantError as `check`, on the first call."""
        model, tokenizer, longest, _ = self._load()
        scores: list[list[float]] = [[]] * len(texts)
        encoded = encode(tokenizer, texts, longest) if texts else []
        for rows, _, out in passes(model, tokenizer, encoded, self.batch):
            found = out.logits.float()
            if self.output == "logit":  # gain and bias of a reward model
                found = getattr(model.config, GAIN, 1.0) * found + getattr(model.config, BIAS, 0.0)
            else:
                single = found.shape[1] == 1 or model.config.problem_type == "multi_label_classification"
                found = found.sigmoid() if single else found.softmax(-1)
            for row, of_labels in zip(rows, found.tolist()):
                scores[row] = of_labels
        return scores

    def _load(self) -> TextModel:
        if self._loaded is None:
            from transformers import AutoModelForSequenceClassification

            what, kind = f"classifier {self.name!r}", AutoModelForSequenceClassification
            loaded = load(kind, self.name, what, self.device, truncation_side="left")
            missing, tokenizer = ", ".join(loaded.missing[:3]), loaded.tokenizer
            require(not missing, f"{what} lacks weights ({missing}); is it a trained classifier?")
            # A causal classifier reads at the last token that is not this id; -1: batches then have equal lengths.
            pad = -1 if tokenizer.pad_token is None else tokenizer.pad_token_id
            loaded.model.config.get_text_config().pad_token_id = pad
            if self.label != OF_TASK:
                self.column(self.label, loaded.model.config)
            self._loaded = loaded
        return self._loaded

    def column(self, label: object, config: Any = None) -> int:
        """The index of a label, by its name or number. If there is only one label, any name means it.

        Raises: OperantError as `check`, and for a label that the model does not have.
        """
        config = self._load().model.config if config is None else config
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


def labelled(
    argument: str,
    *,
    label: str | None = None,
    output: str = "probability",
    text: str = "text",
    batch: int = 32,
    device: str | None = None,
) -> Classifier:
    """The classifier of `classifier:NAME#LABEL`. Raises: OperantError for two labels."""
    name, _, after = argument.partition("#")
    require(not (label and after), f"reward 'classifier:{argument}' with label={label!r}: give the label once")
    return Classifier(name, label=label or after or "positive", output=output, text=text, batch=batch, device=device)


@wraps(labelled)
def builtin(name: str, **options: object) -> Classifier:
    """The classifier of `builtin:NAME`, which comes with the package."""
    return labelled(f"builtin:{name}", **options)
