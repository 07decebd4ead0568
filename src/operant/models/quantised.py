"""Frozen weights in 8 or 4 bits under an adapter, on a GPU. Needs the extra `quantise` (bitsandbytes)."""

import importlib.util
from typing import Any

import torch

from operant.types import OperantError


def check(kind: str, device: torch.device) -> None:
    """Refuse before anything loads what cannot be computed with here. `kind`: none, 8bit or 4bit."""
    if kind == "none":
        return
    if device.type != "cuda":
        raise OperantError(f"lora.quantise={kind} needs a GPU, this is {device.type}: use lora.quantise=none")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise OperantError(f"lora.quantise={kind} needs a package: pip install 'operant[quantise]'")


def loading(kind: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained`. `dtype`: what is computed in, and what the other weights are held in."""
    if kind == "none":
        return {}
    from transformers import BitsAndBytesConfig

    if kind == "8bit":
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype, "bnb_4bit_use_double_quant": True}
        config = BitsAndBytesConfig(load_in_4bit=True, **four)
    return {"quantization_config": config, "device_map": {"": device}}


def is_quantised(model: Any) -> bool:
    return bool(getattr(model, "is_quantized", False))
