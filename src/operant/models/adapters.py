"""What is trained beside a frozen model: LoRA (`lora`), a soft prompt (`soft_prompt`), an MLP (`output_mlp`).

Here are their options, and their files, in peft's format:

folder/adapter_config.json          the kind, and the name of the model that it belongs to
folder/adapter_model.safetensors    what was trained
folder/base/                        that model, if no name finds it; it comes before the name
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from operant.bounds import bounded, check_bounds
from operant.models.options import ModelOptions
from operant.models.safe_loading import LanguageModel, load_tensors
from operant.storage import atomic_io, hub
from operant.types import OperantError, require, with_defaults

CONFIG, WEIGHTS, BASE = "adapter_config.json", "adapter_model.safetensors", "base"
PARTS = (".soft_prompt.", ".output_mlp.")
"""What stands in the names of weights that are trained beside a frozen model."""


@dataclass(frozen=True)
class LoraOptions:
    """Train an adapter (LoRA) beside frozen weights. Gradients, checkpoints and the reference are then small, too."""

    rank: int = bounded(0, at_least=0, rule="at least 1, or 0 for no adapter")
    """Width of the matrices; 0: no adapter, the weights themselves are trained."""
    alpha: float | None = bounded(None, above=0, rule="above 0, or none for twice the rank")
    """The adapter's output is multiplied by alpha / rank; none: alpha is twice the rank, so the factor is 2."""
    targets: tuple[str, ...] = ("all-linear",)
    """Layers with an adapter, by the last part of their name (q_proj,v_proj); all-linear: all but the output head."""
    adapter: str | None = None
    """A folder in peft's format: train this adapter further. The reference is then the adapter as it was loaded."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank (rank-stabilised LoRA)."""
    quantise: str = bounded("none", choices=("none", "8bit", "4bit"))
    """none | 8bit | 4bit: quantise the frozen weights. It needs a GPU and the extra `quantise` (bitsandbytes)."""

    def __post_init__(self) -> None:
        check_bounds(self, "lora")
        require(self.targets, "lora.targets is empty: name layers, or use all-linear")
        if self.adapter is not None and replace(self, adapter=None) != LoraOptions(quantise=self.quantise):
            raise OperantError(
                f"lora.adapter={self.adapter!r} has rank, alpha, targets and scaling of its own: leave lora.rank, "
                "lora.alpha, lora.targets and lora.rslora out, or start a new adapter without lora.adapter"
            )

    @property
    def on(self) -> bool:
        return self.rank > 0 or self.adapter is not None


@dataclass(frozen=True)
class SoftPromptOptions:
    """Train vectors in front of every prompt, and leave the language model as it is. Checkpoints are then small."""

    tokens: int = bounded(0, at_least=0, rule="at least 1, or 0 for no soft prompt")
    """Number of vectors, which count as tokens of the context; 0: no soft prompt."""
    init: str = bounded("random", choices=("random", "words"))
    """random: normal, with the deviation of the model's embeddings | words: the embeddings of soft_prompt.text."""
    text: str | None = None
    """The words that it begins as. A text of fewer tokens is repeated."""

    def __post_init__(self) -> None:
        check_bounds(self, "soft_prompt")
        words, text = self.init == "words", self.text is not None
        require(words == text, "soft_prompt.init=words and soft_prompt.text belong together: set both, or neither")
        require(self.on or not text, "soft_prompt.text without soft_prompt.tokens: say how many vectors are trained")

    @property
    def on(self) -> bool:
        return self.tokens > 0


@dataclass(frozen=True)
class OutputMlpOptions:
    """Train an MLP between the language model and its output head, and leave both as they are."""

    width: int = bounded(0, at_least=0, rule="at least 1, or 0 for no MLP")
    """Width of the hidden layer; 0: no MLP."""
    gain: float = 1e-4
    """The weights begin as Xavier's uniform numbers times this."""
    bias: float = -1e-4
    """Both biases begin as this."""
    logit_bias: float = 0.0
    """Added to every logit. It changes no probability, but the value of soft Q-learning, the logsumexp."""

    def __post_init__(self) -> None:
        check_bounds(self, "output_mlp")
        biased = bool(self.logit_bias)
        require(self.on or not biased, "output_mlp.logit_bias without output_mlp.width: say how wide the MLP is")

    @property
    def on(self) -> bool:
        return self.width > 0


HEAD_ALONE = "model.train_head with lora.*: an adapter is trained alone; leave one of the two out"
MLP_ALONE = "output_mlp.width: the MLP is trained alone; leave one of them out"
PROMPT_ALONE = "a soft prompt: it is trained alone, below all layers; leave one of them out"


def check_alone(lora: LoraOptions, soft: SoftPromptOptions, mlp: OutputMlpOptions, options: ModelOptions) -> None:
    """Raises: OperantError for options that train other weights beside a soft prompt or an MLP. Nothing is loaded."""
    adapts = lora.on or lora.quantise != "none"
    require(not (adapts and options.train_head), HEAD_ALONE)
    if soft.on and adapts:
        raise OperantError(
            f"soft_prompt.tokens={soft.tokens} with lora.*: a soft prompt is trained alone, before weights that are "
            "neither adapted nor quantised; leave one of them out"
        )
    if mlp.on and (adapts or soft.on):
        raise OperantError(
            f"output_mlp.width={mlp.width} with lora.* or soft_prompt.*: an MLP is trained alone, behind weights that "
            "are neither adapted nor quantised; take it out, output_mlp.width=0, or the others"
        )
    if soft.on or mlp.on:
        options.check_frozen(PROMPT_ALONE if soft.on else MLP_ALONE)


class TrainedPart(nn.Module):
    """Layers that are trained alone beside a frozen model, into which they cannot be merged."""

    kind = ""
    """What stands under `peft_type` in the config of its files."""
    base: str | None = None
    """The name of the model that they belong to; None if no file holds it."""
    ids: Sequence[int] = ()
    """The virtual tokens that begin every row."""

    def belongs_to(self) -> dict[str, object]:
        name, revision = hub.split(self.base) if self.base else (None, None)
        return {"base_model_name_or_path": name, "revision": revision}


def adapted(model: LanguageModel) -> bool:
    """Whether a model has a LoRA adapter."""
    return bool(with_defaults(model, LanguageModel).peft_config)


P = TypeVar("P", bound=TrainedPart)


def find(model: nn.Module, kind: type[P]) -> P | None:
    return next((module for module in model.modules() if isinstance(module, kind)), None)


def frozen_weights(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model without its `TrainedPart`."""
    return {name: x for name, x in model.state_dict().items() if not any(part in f".{name}" for part in PARTS)}


def is_adapter(folder: Path) -> bool:
    """Whether a folder contains an adapter but no model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").exists()


def read_config(folder: Path) -> dict[str, object]:
    try:
        return dict(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise OperantError(f"{folder} is damaged: {CONFIG} cannot be read ({error}); save it again") from error


def base_of(folder: Path) -> str:
    """The name or folder of the model that an adapter was trained on."""
    if (folder / BASE / "config.json").is_file():
        return str((folder / BASE).resolve())
    config = read_config(folder)
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not base:
        raise OperantError(
            f"{folder} does not name the model that it belongs to: write it into its {CONFIG} "
            f"(base_model_name_or_path), or give the model, and for LoRA lora.adapter={folder}"
        )
    return f"{base}@{revision}" if revision and hub.split(f"{base}@{revision}")[1] else str(base)


def read(folder: Path, what: str) -> tuple[dict[str, object], dict[str, Tensor]]:
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

    require(not (folder / "config.json").exists(), f"{folder} holds a model: choose another folder for the {what}")
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
