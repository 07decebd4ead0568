"""Texts through a model of transformers that reads them with its own tokenizer: loaded safely, in padded batches."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from operant import machine
from operant.models.layout import pad
from operant.models.safe_loading import LanguageModel, PlainConfig, load_any, load_tokenizer, unreported
from operant.storage.hub import find_model
from operant.types import Tokenizer, require, with_defaults

LONGEST = 1 << 20
"""Most tokens of a text for models without a limit."""
GAIN, BIAS = "reward_gain", "reward_bias"
"""Names in the config of a reward model, whose score is gain * output + bias."""
Encoded = dict[str, list[int]]
"""The token ids of a text, or of a pair of texts with the number of the text that each token belongs to."""


class TextModel(NamedTuple):
    """A model in float32 on its device, its tokenizer, and the most tokens that it reads."""

    model: Any
    tokenizer: Any
    longest: int
    missing: list[str]
    """Names of weights that its folder lacks."""


def load(auto: Any, name: str, what: str, device: str, *, truncation_side: str = "right") -> TextModel:
    """Load a folder, `builtin:NAME` or Hub name with `auto`, a class of transformers; `what` names it in errors."""
    folder = find_model(name)
    with unreported():
        model, found = load_any(auto, folder, what, dtype=torch.float32)
    tokenizer = load_tokenizer(folder, truncation_side=truncation_side, padding_side="right")
    require(tokenizer is not None, f"{what}: {folder} has no tokenizer, which it needs to read text")
    return TextModel(model.to(device).eval(), tokenizer, longest_of(model, tokenizer), sorted(found["missing_keys"]))


def longest_of(model: LanguageModel, tokenizer: Tokenizer | None) -> int:
    config = model.config.get_text_config()
    positions = with_defaults(config, PlainConfig).max_position_embeddings or tokenizer.model_max_length
    if any(kind in config.model_type for kind in "roberta camembert mpnet longformer data2vec ibert luke".split()):
        positions -= config.pad_token_id + 1  # they count positions from behind their padding id
    return min(positions, tokenizer.model_max_length, LONGEST)  # a tokenizer without a limit says 1e30


def encode(tokenizer: Tokenizer, texts: Sequence[str | tuple[str, str]], longest: int) -> list[Encoded]:
    """Token ids of texts, or of pairs of texts, cut to `longest` tokens."""
    pairs = [text for text in texts if not isinstance(text, str)]
    given = [list(side) for side in zip(*pairs)] if pairs else [list(texts)]
    made = tokenizer(*given, truncation=True, max_length=longest)
    # One id for an empty text, if the tokenizer adds no special tokens to it.
    empty = [t for t in (tokenizer.bos_token_id, tokenizer.eos_token_id) if t is not None][:1] or [0]
    names = ["input_ids", *(["token_type_ids"] if pairs and "token_type_ids" in made else [])]
    return [{name: made[name][i] or empty for name in names} for i in range(len(texts))]


def batches(lengths: Sequence[int], size: int, *, pads: bool) -> Iterator[list[int]]:
    """Indices in batches of similar length, or of equal length if the tokenizer has no padding token (`pads`)."""
    rows: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if rows and (len(rows) == size or (not pads and lengths[i] != lengths[rows[0]])):
            yield rows
            rows = []
        rows.append(i)
    if rows:
        yield rows


def passes(
    model: LanguageModel, tokenizer: Tokenizer, encoded: Sequence[Encoded], size: int, **more: object
) -> Iterator[tuple[list[int], dict[str, torch.Tensor], Any]]:
    """Yield (indices, inputs, outputs) of batches of at most `size` texts; `more`: arguments of the model."""
    for rows in batches([len(one["input_ids"]) for one in encoded], size, pads=tokenizer.pad_token is not None):
        inputs = dict[str, torch.Tensor]()
        for name in encoded[rows[0]]:
            filler = (tokenizer.pad_token_id or 0) if name == "input_ids" else 0
            inputs[name], mask = pad([encoded[row][name] for row in rows], "right", model.device, filler)
            inputs["attention_mask"] = mask.long()
        with machine.threads(machine.worth(inputs["input_ids"].numel(), machine.largest(model))):
            outputs = model(**inputs, **more)
        yield rows, inputs, outputs
