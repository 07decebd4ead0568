"""The files of adapters, in peft's format: LoRA (`lora`), soft prompts (`soft_prompt`), an MLP (`output_mlp`).

folder/adapter_config.json          the kind, and the name of the model that it belongs to
folder/adapter_model.safetensors    what was trained
folder/base/                        that model, if no name finds it; it comes before the name
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from operant.models.safe_loading import LanguageModel, load_tensors
from operant.storage import atomic_io, hub
from operant.types import OperantError

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base"
PARTS = (".soft_prompt.", ".output_mlp.")
"""What stands in the names of weights that are trained beside a frozen model."""


class TrainedPart(nn.Module):
    """Layers that are trained beside a frozen model."""

    base: str | None = None
    """The name of the model that they belong to; None if no file holds it."""
    ids: Sequence[int] = ()
    """The virtual tokens that begin every row."""
    alone = ""
    """What stands behind options that train the model's own weights, where such layers have virtual tokens."""

    def belongs_to(self) -> dict[str, object]:
        name, revision = hub.split(self.base) if self.base else (None, None)
        return {"base_model_name_or_path": name, "revision": revision}


P = TypeVar("P", bound=TrainedPart)


def find(model: nn.Module, kind: type[P]) -> P | None:
    return next((module for module in model.modules() if isinstance(module, kind)), None)


def frozen_weights(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model without its `TrainedPart`."""
    return {name: x for name, x in model.state_dict().items() if not any(part in f".{name}" for part in PARTS)}


def is_adapter(folder: Path) -> bool:
    """Whether a folder contains an adapter but no model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").exists()


def read_config(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise OperantError(f"{folder} is damaged: {CONFIG} cannot be read ({error}); save it again") from error


def base_of(folder: Path) -> str:
    """The name or folder of the model that an adapter was trained on."""
    if (folder / BASE / "config.json").is_file():
        return str(folder / BASE)
    config = read_config(folder)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not base:
        raise OperantError(
            f"{folder} does not name the model that it belongs to: write it into its {CONFIG} "
            f"(base_model_name_or_path), or give the model, and for LoRA lora.adapter={folder}"
        )
    return f"{base}@{revision}" if revision and hub.split(f"{base}@{revision}")[1] else base


def read(folder: Path, what: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the tensors of an adapter; `what` is its name in errors."""
    config = read_config(folder)
    if not (folder / WEIGHTS).is_file():
        raise OperantError(f"{folder} has no {WEIGHTS}: save the {what} again with safetensors (peft's default)")
    return config, load_tensors(folder / WEIGHTS)


@torch.no_grad()
def write(
    folder: Path, what: str, config: Mapping[str, object], tensors: Mapping[str, Tensor], model: LanguageModel = None
) -> Path:
    """Write an adapter, and the model that it belongs to, if that is to be in `base/`."""
    from safetensors.torch import save_file

    with atomic_io.explained(folder, f"save the {what}"):
        atomic_io.mkdir(folder)
        # peft has sets in its configs.
        atomic_io.write(folder / CONFIG, json.dumps(dict(config), indent=2, sort_keys=True, default=sorted))
        with atomic_io.operation("write", folder), hub.quietly():
            contiguous = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
            save_file(contiguous, folder / WEIGHTS, metadata={"format": "pt"})
            if model is not None:
                model.save_pretrained(folder / BASE, state_dict=frozen_weights(model))
    return folder
