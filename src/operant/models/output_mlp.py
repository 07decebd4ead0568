"""An MLP between a frozen language model and its output head: the policy of RLPrompt (arXiv:2205.12548).

    attach(model, first_layers(model, OutputMlpOptions(width=2048), seed=0))
    save(model, "out")          # the MLP alone, with the name and the hash of the model that it belongs to

The head reads MLP(h) in place of the last hidden state h, so with the small first weights all tokens begin almost
equally likely. Caches, packing and positions are those of the frozen model.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from operant.bounds import bounded, check_bounds
from operant.models import lora as adapters
from operant.models.options import ModelOptions
from operant.models.reference import digest
from operant.models.safe_loading import load_tensors
from operant.storage import atomic_io, hub
from operant.types import OperantError

KIND = "OUTPUT_MLP"
"""What stands under `peft_type` in the config of a saved MLP."""
PART = ".output_mlp."


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
        if not self.on and self.logit_bias:
            raise OperantError("output_mlp.logit_bias without output_mlp.width: say how wide the MLP is")

    @property
    def on(self) -> bool:
        """Whether there is an MLP."""
        return self.width > 0


class OutputMlp(nn.Module):
    """ReLU(h A + a) B + b of hidden states [N, D], and a constant that is added to the logits.

    `base`: the name of the model that it belongs to; None if no file holds that model.
    """

    def __init__(self, states: int, width: int, logit_bias: float = 0.0, base: str | None = None):
        super().__init__()
        self.up, self.down = nn.Linear(states, width), nn.Linear(width, states)
        self.logit_bias, self.base = logit_bias, base

    def forward(self, states: Tensor) -> Tensor:
        return self.down(self.up(states).relu())


def check(mlp: OutputMlpOptions, lora: adapters.LoraOptions, soft: Any, options: ModelOptions) -> None:
    """Raises: OperantError for options that train other weights beside an MLP. Nothing is loaded."""
    if mlp.on and (lora.on or soft.on or lora.quantise != "none"):
        raise OperantError(
            f"output_mlp.width={mlp.width} with lora.* or soft_prompt.*: an MLP is trained alone, behind weights that "
            "are neither adapted nor quantised; take it out, output_mlp.width=0, or the others"
        )
    for name in ("train_layers", "train_head"):
        if mlp.on and (value := getattr(options, name)):
            raise OperantError(
                f"model.{name}={value} with output_mlp.width: the MLP is trained alone; leave one of them out"
            )


def find(model: Any) -> OutputMlp | None:
    """The MLP of a model, if it has one."""
    return next((module for module in model.modules() if isinstance(module, OutputMlp)), None)


# --- a model with an MLP ----------------------------------------------------------------------------------------------


def first_layers(model: Any, options: OutputMlpOptions, seed: int) -> OutputMlp:
    """A new MLP of the width of the model's states. Its weights depend on `seed` alone."""
    made = OutputMlp(_head(model).weight.shape[1], options.width, options.logit_bias)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for layer in (made.up, made.down):
            nn.init.xavier_uniform_(layer.weight, gain=options.gain)
            nn.init.constant_(layer.bias, options.bias)
    return made


def attach(model: Any, mlp: OutputMlp, base: str | None = None) -> Any:
    """Freeze the model and put an MLP before its output head; returns the model.

    Raises: OperantError if its width is not that of the model's states.
    """
    head = _head(model)
    if mlp.up.in_features != head.weight.shape[1]:
        raise OperantError(
            f"an MLP for states of width {mlp.up.in_features} does not fit this {type(model).__name__} of width "
            f"{head.weight.shape[1]}: is it of another model?"
        )
    model.requires_grad_(False)
    mlp.base = base
    head.output_mlp = mlp.to(device=head.weight.device, dtype=head.weight.dtype).requires_grad_(True)
    head.forward = MethodType(through_mlp, head)
    return model


def detach(model: Any) -> None:
    """Take the MLP out of a model, which then is the frozen language model again."""
    head = _head(model)
    del head.output_mlp, head.forward


def through_mlp(head: Any, states: Tensor) -> Tensor:
    """[N, V] the logits of states [N, D]."""
    logits = type(head).forward(head, head.output_mlp(states))
    return logits + head.output_mlp.logit_bias if head.output_mlp.logit_bias else logits


def _head(model: Any) -> Any:
    """The output head. Raises: OperantError if the model has none that is one matrix."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(getattr(head, "weight", None), Tensor):
        raise OperantError(
            f"output_mlp.width: {type(model).__name__} has no output head that is one matrix; leave it out, or train "
            "another model"
        )
    return head


def _hash(weights: Mapping[str, Tensor]) -> str:
    """The hash of weights as bfloat16, so that it does not depend on the precision in which they are loaded."""
    return digest({key: x.bfloat16() if x.is_floating_point() else x for key, x in weights.items()})


# --- files ------------------------------------------------------------------------------------------------------------


def save(model: Any, folder: str | Path) -> Path:
    """Write the MLP, with the name and hash of its frozen model, which is saved in `base/` if no file holds it."""
    from safetensors.torch import save_file

    folder, mlp = Path(folder), find(model)
    assert mlp is not None  # the caller has checked
    name, revision = hub.split(mlp.base) if mlp.base else (None, None)
    frozen = {key: x for key, x in model.state_dict().items() if PART not in f".{key}"}
    config = {
        "peft_type": KIND,
        "base_model_name_or_path": name,
        "revision": revision,
        "base_digest": _hash(frozen),
        "width": mlp.up.out_features,
        "states": mlp.up.in_features,
        "logit_bias": mlp.logit_bias,
    }
    with atomic_io.explained(folder, "save the MLP"):
        atomic_io.mkdir(folder)
        atomic_io.write(folder / adapters.CONFIG, json.dumps(config, indent=2))
        with atomic_io.operation("write", folder):
            weights = {key: x.detach().cpu().contiguous() for key, x in mlp.state_dict().items()}
            save_file(weights, folder / adapters.WEIGHTS)
            if mlp.base is None:
                with hub.quietly():
                    model.save_pretrained(folder / adapters.BASE, state_dict=frozen)
    return folder


def attach_saved(model: Any, folder: Path) -> Any:
    """Put the MLP of a folder before the head of its model; returns the model.

    Raises: OperantError if the file is missing or damaged, or the model is not the one that it was trained on.
    """
    config, path = adapters.read_config(folder), folder / adapters.WEIGHTS
    if not path.is_file():
        raise OperantError(f"{path} is missing: {folder} has no MLP; save it again")
    try:
        mlp = OutputMlp(int(config["states"]), int(config["width"]), float(config["logit_bias"]))
        mlp.load_state_dict(load_tensors(path))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise OperantError(
            f"{folder} is damaged: its MLP cannot be read ({' '.join(str(error).split())[:200]})"
        ) from error
    base = adapters.base_of(folder)
    if (found := _hash(model.state_dict())) != config.get("base_digest"):
        raise OperantError(
            f"{base} is not the model that the MLP in {folder} was trained on: its weights have the hash {found}, and "
            f"{config.get('base_digest')} is expected; give the model as it was"
        )
    return attach(model, mlp, base)
