"""Loads untrusted folders of transformers models: runs no code from them, and reports damaged files by name.

    load_model(folder)        # weights from safetensors only, and all finite
    load_tokenizer(folder)    # None if the folder has no tokenizer

The libraries that read these files raise many kinds of exceptions; here each becomes an `OperantError`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from operant.storage.hub import quietly
from operant.types import OperantError, Tokenizer, with_defaults

PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt", "*.h5", "*.msgpack")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
TOKENIZERS += ("sentencepiece.bpe.model",)
"""A folder with a tokenizer has at least one of these files."""
HERE: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
"""Arguments of `from_pretrained` that run no code from the folder, and download nothing."""


class LanguageModel(nn.Module):
    """What transformers' models have beside `nn.Module`, with the values that hold where one lacks a part."""

    config: Any = None
    generation_config: Any = None
    tokenizer: Tokenizer | None = None
    peft_config: Mapping[str, Any] = {}
    name_or_path: str | None = None
    dtype: torch.dtype
    is_quantized = False
    get_encoder: Callable[[], nn.Module]
    get_decoder: Callable[[], nn.Module]
    get_base_model: Callable[[], "LanguageModel"]
    save_pretrained: Callable[..., None]
    generate: Callable[..., Any]
    get_output_embeddings: Callable[[], Any] = staticmethod(lambda: None)
    get_input_embeddings: Callable[[], Any] = staticmethod(lambda: None)


class PlainConfig:
    """Parts that some configs of transformers lack, with the values that then hold."""

    architectures: list[str] | None = None
    auto_map: Mapping[str, str] | None = None
    is_encoder_decoder = False
    max_position_embeddings: int | None = None
    rope_parameters: Mapping[str, Any] | None = None
    eos_token_id: int | list[int] | None = None
    decoder_start_token_id: int | None = None
    _attn_implementation: str | None = None


@contextmanager
def _explained(folder: str | Path, what: str) -> Iterator[None]:
    """Turn any exception inside this context into an OperantError that names the folder."""
    try:
        yield
    except OperantError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or "no reason given"
        raise OperantError(
            f"{folder} does not load as {what} ({type(error).__name__}: {reason}): is it complete, and of transformers?"
        ) from error


def load_config(folder: str | Path) -> Any:
    from transformers import AutoConfig

    with _explained(folder, "a language model's config"):
        config = AutoConfig.from_pretrained(folder, **HERE)
        if "/" in str(with_defaults(config, PlainConfig)._attn_implementation):
            raise OperantError(f"{folder} asks for attention code from elsewhere: remove attn_implementation there")
        return config


def load_model(folder: Path, dtype: torch.dtype = torch.float32, **more: object) -> LanguageModel:
    """The language model in a folder. `more`: further arguments of `from_pretrained`."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config, generation = load_config(folder), folder / "generation_config.json"
    if generation.exists():  # it lists the tokens that end a reply; transformers silently ignores a damaged one
        with _explained(folder, "a language model with its generation_config.json"):
            dict(json.loads(generation.read_text(encoding="utf-8")))
    if any("ForSequenceClassification" in name for name in with_defaults(config, PlainConfig).architectures or []):
        raise OperantError(
            f"{folder} is a classifier or a reward model, and no language model: use it as a reward, as in "
            f"--reward reward_model:{folder}"
        )
    auto = AutoModelForSeq2SeqLM if with_defaults(config, PlainConfig).is_encoder_decoder else AutoModelForCausalLM
    model, notes = load_any(auto, folder, "a language model", dtype=dtype, **more)
    if notes["missing_keys"]:
        raise OperantError(
            f"{folder} lacks weights of a {type(model).__name__} ({', '.join(sorted(notes['missing_keys'])[:3])} ...): "
            "a policy needs a language model with its output head"
        )
    return model


@contextmanager
def unreported() -> Iterator[None]:
    """Loading without transformers' report of weights that are missing or left over, which the caller judges."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def load_any(auto: Any, folder: str | Path, what: str, **kwargs: object) -> tuple[LanguageModel, dict[str, list[str]]]:
    """Load a folder with `auto`, a model class of transformers; returns the model and its loading info.

    Raises: OperantError for weights that are damaged, pickled, or in another folder.
    """
    path = Path(folder)
    index = path / "model.safetensors.index.json"
    if index.is_file():
        with _explained(path, "a model in several files"):
            names = set(map(str, json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if odd := sorted(name for name in names if Path(name).name != name):
            raise OperantError(f"{index} leads out of its folder, to {odd[0]!r}: put the file beside it")
    pickled = [found.name for pattern in PICKLES for found in path.glob(pattern)]
    if pickled and not any(path.glob("*.safetensors")):
        raise OperantError(
            f"{path} has its weights in {pickled[0]}, and reading such a file may run any program: "
            "convert it where you trust it, with save_pretrained, to safetensors"
        )
    with quietly(), _explained(folder, what):
        model, notes = auto.from_pretrained(folder, **HERE, use_safetensors=True, output_loading_info=True, **kwargs)
    check_finite(dict(model.named_parameters()), folder)
    return model, notes


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    with _explained(path, "a file of safetensors"):
        tensors = load_file(path)
    check_finite(tensors, path)
    return tensors


def unlike(some: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of tensors that are not in both, or that differ in shape."""
    shapes = [{(name, x.shape) for name, x in tensors.items()} for tensors in (some, others)]
    return sorted({name for name, _ in shapes[0] ^ shapes[1]})


def check_finite(tensors: Mapping[str, torch.Tensor], where: object) -> None:
    """Raises: OperantError that names the first tensor with NaN or infinity."""
    for name, tensor in tensors.items():
        x = tensor.detach()
        # A sum is quick. If it is not finite, it may have overflowed, so the numbers themselves are checked.
        passes = not x.is_floating_point() or x.is_meta or bool(x.sum().isfinite())
        if not passes and (odd := int((~x.isfinite()).sum())):
            raise OperantError(
                f"{where}: {name} holds {odd} numbers of {x.numel()} that are not finite: the weights are damaged, "
                "or were saved after a training that went wrong; take earlier ones"
            )


def check_model(model: nn.Module) -> None:
    """Raises: OperantError for an object that is no language model, or for a model with NaN or infinity."""
    if not hasattr(model, "config") or not hasattr(model, "get_output_embeddings"):
        raise OperantError(
            f"a {type(model).__name__} is no language model of transformers: it has no config and no "
            "get_output_embeddings; give one, its folder, or a policy of your own (docs/extending.md)"
        )
    check_finite(dict(model.named_parameters()), f"the {type(model).__name__}")


def load_tokenizer(folder: str | Path, **kwargs: object) -> Tokenizer | None:
    """The tokenizer in a folder, or None if there is none; prompts of token ids do not need one."""
    from transformers import AutoTokenizer

    has_files = any((Path(folder) / name).exists() for name in TOKENIZERS)
    try:
        with _explained(folder, "a tokenizer"):
            made = AutoTokenizer.from_pretrained(folder, **HERE, **kwargs)
            # From a config.json alone transformers makes one without a vocabulary, or with special tokens alone.
            return made if has_files else None
    except OperantError:
        if has_files:
            raise
        return None
