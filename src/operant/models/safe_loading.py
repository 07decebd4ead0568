"""Folders of transformers models, from whomever they come: nothing in them is run, and what is damaged is named.

    load_model(folder)        # weights from safetensors alone, every number finite
    load_tokenizer(folder)    # None where there is none

What is read here was written by others, and the libraries that read it raise whatever they happen to.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from operant.storage.hub import quietly
from operant.types import OperantError

PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt", "*.h5", "*.msgpack")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""One of them stands in every folder that has a tokenizer."""
HERE: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
"""No program out of the folder is run, and no other place is asked."""


@contextmanager
def _explained(folder: str | Path, what: str) -> Iterator[None]:
    try:
        yield
    except OperantError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or "no reason given"
        raise OperantError(
            f"{folder} does not load as {what} ({type(error).__name__}: {reason}): is it whole, and of transformers?"
        ) from error


def load_config(folder: str | Path) -> Any:
    """The config of a model's folder. Raises: OperantError for what is none, or asks for a program of its own."""
    from transformers import AutoConfig

    with _explained(folder, "a language model's config"):
        config = AutoConfig.from_pretrained(folder, **HERE)
        if "/" in str(getattr(config, "_attn_implementation", None)):
            raise OperantError(
                f"{folder} asks for attention from elsewhere: take attn_implementation out of its config"
            )
        return config


def load_model(folder: Path, dtype: torch.dtype = torch.float32, more: Mapping[str, Any] | None = None) -> Any:
    """The language model of a folder. `more`: further arguments of `from_pretrained`.

    Raises: OperantError for weights that are a pickle, damaged, missing or not finite.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config, generation = load_config(folder), folder / "generation_config.json"
    if generation.exists():  # it names the tokens that end a reply; transformers leaves a damaged one out in silence
        with _explained(folder, "a language model with its generation_config.json"):
            dict(json.loads(generation.read_text(encoding="utf-8")))
    auto = AutoModelForSeq2SeqLM if getattr(config, "is_encoder_decoder", False) else AutoModelForCausalLM
    model, notes = load_any(auto, folder, "a language model", dtype=dtype, **(more or {}))
    if notes["missing_keys"]:
        raise OperantError(
            f"{folder} lacks weights of a {type(model).__name__} ({', '.join(sorted(notes['missing_keys'])[:3])} ...): "
            "a policy needs a language model with its output head"
        )
    return model


def load_any(auto: Any, folder: str | Path, what: str, **how: Any) -> tuple[Any, dict[str, Any]]:
    """What a class of transformers makes of a folder, and its notes. Raises: OperantError as `load_model`."""
    _only_safe(Path(folder))
    with quietly(), _explained(folder, what):
        model, notes = auto.from_pretrained(folder, **HERE, use_safetensors=True, output_loading_info=True, **how)
    check_finite(dict(model.named_parameters()), folder)
    return model, notes


def _only_safe(folder: Path) -> None:
    """Raises: OperantError for weights that are a pickle, or that stand in another folder."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        with _explained(folder, "a model in several files"):
            names = set(map(str, json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        if odd := sorted(name for name in names if Path(name).name != name):
            raise OperantError(f"{index} leads out of its folder, to {odd[0]!r}: put the file beside it")
    if any(folder.glob("*.safetensors")):
        return
    for pattern in PICKLES:
        for path in folder.glob(pattern):
            raise OperantError(
                f"{folder} has its weights in {path.name}, and reading such a file may run any program: "
                "convert it where you trust it, with save_pretrained, to safetensors"
            )


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, all finite. Raises: OperantError for any other."""
    from safetensors.torch import load_file

    with _explained(path, "a file of safetensors"):
        tensors = load_file(path)
    check_finite(tensors, path)
    return tensors


def check_finite(tensors: Mapping[str, torch.Tensor], where: Any) -> None:
    """Raises: OperantError that names the first tensor with a number that is not finite."""
    for name, tensor in tensors.items():
        x = tensor.detach()
        if not x.is_floating_point() or x.is_meta or bool(x.sum().isfinite()):  # a sum is quick, and may overflow
            continue
        if odd := int((~x.isfinite()).sum()):
            raise OperantError(
                f"{where}: {name} holds {odd} numbers of {x.numel()} that are not finite: the weights are damaged, "
                "or were saved after a training that went wrong; take earlier ones"
            )


def check_model(model: nn.Module) -> None:
    """The same of a model from Python. Raises: OperantError also for what is no language model."""
    if not hasattr(model, "config") or not hasattr(model, "get_output_embeddings"):
        raise OperantError(f"a {type(model).__name__} is no language model of transformers: give one, or its folder")
    check_finite(dict(model.named_parameters()), f"the {type(model).__name__}")


def load_tokenizer(folder: str | Path, **how: Any) -> Any:
    """The tokenizer of a folder; None where there is none: prompts as token ids need none.

    Raises: OperantError for one that is there and does not load.
    """
    from transformers import AutoTokenizer

    there = any((Path(folder) / name).exists() for name in TOKENIZERS)
    try:
        with _explained(folder, "a tokenizer"):
            return AutoTokenizer.from_pretrained(folder, **HERE, **how)
    except OperantError:
        if there:
            raise
        return None
