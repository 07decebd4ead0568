"""Frozen weights in 8 or 4 bits (bitsandbytes), beside which an adapter is trained."""

import importlib.util
from typing import Any

import torch

from operant.types import OperantError


def check(kind: str, device: torch.device) -> None:
    """Raises: OperantError if `kind` (none, 8bit or 4bit) needs a GPU or a package that is missing."""
    if kind == "none":
        return
    if device.type != "cuda":
        raise OperantError(f"lora.quantise={kind} needs a GPU, this is {device.type}: use lora.quantise=none")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise OperantError(f"lora.quantise={kind} needs a package: pip install 'operant[quantise]'")


def arguments(kind: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained` that quantise the weights. `kind`: none, 8bit or 4bit.

    `dtype`: the type that the model computes in, and that weights which are not quantised have.
    """
    if kind == "none":
        return {}
    from transformers import BitsAndBytesConfig

    if kind == "8bit":
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype, "bnb_4bit_use_double_quant": True}
        config = BitsAndBytesConfig(load_in_4bit=True, **four)
    return {"quantization_config": config, "device_map": {"": device}}
