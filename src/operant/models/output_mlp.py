"""An MLP between a frozen language model and its output head: the policy of RLPrompt (arXiv:2205.12548).

    attach(model, first_layers(model, OutputMlpOptions(width=2048), seed=0))
    save(model, "out")          # the MLP alone, with the name and the hash of the model that it belongs to

The head reads MLP(h) in place of the last hidden state h, so with the small first weights all tokens begin almost
equally likely. Caches, packing and positions are those of the frozen model.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from operant.models import adapters
from operant.models.adapters import OutputMlpOptions
from operant.models.reference import digest
from operant.models.safe_loading import LanguageModel
from operant.types import OperantError, require, with_defaults


class OutputMlp(adapters.TrainedPart):
    """ReLU(h A + a) B + b of hidden states [N, D], and a constant that is added to the logits."""

    kind = "OUTPUT_MLP"

    def __init__(self, states: int, width: int, logit_bias: float = 0.0):
        super().__init__()
        self.up, self.down = nn.Linear(states, width), nn.Linear(width, states)
        self.logit_bias = logit_bias

    def forward(self, states: Tensor) -> Tensor:
        return self.down(self.up(states).relu())


def find(model: LanguageModel) -> OutputMlp | None:
    return adapters.find(model, OutputMlp)


def first_layers(model: LanguageModel, options: OutputMlpOptions, seed: int) -> OutputMlp:
    """A new MLP of the width of the model's states. Its weights depend on `seed` alone."""
    made = OutputMlp(_head(model).weight.shape[1], options.width, options.logit_bias)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for layer in (made.up, made.down):
            nn.init.xavier_uniform_(layer.weight, gain=options.gain)
            nn.init.constant_(layer.bias, options.bias)
    return made


def attach(model: LanguageModel, mlp: OutputMlp, base: str | None = None) -> LanguageModel:
    """Freeze the model and put an MLP before its output head; returns the model."""
    head = _head(model)
    why = f"does not fit this {type(model).__name__} of width {head.weight.shape[1]}: is it of another model?"
    require(mlp.up.in_features == head.weight.shape[1], f"an MLP for states of width {mlp.up.in_features} {why}")
    model.requires_grad_(False)
    mlp.base = base
    head.output_mlp = mlp.to(device=head.weight.device, dtype=head.weight.dtype).requires_grad_(True)
    head.forward = MethodType(through_mlp, head)
    return model


def detach(model: LanguageModel) -> None:
    """Take the MLP out of a model, which then is the frozen language model again."""
    head = _head(model)
    del head.output_mlp, head.forward


def through_mlp(head: Any, states: Tensor) -> Tensor:
    logits = type(head).forward(head, head.output_mlp(states))
    return logits + head.output_mlp.logit_bias if head.output_mlp.logit_bias else logits


def _head(model: LanguageModel) -> nn.Linear:
    head = with_defaults(model, LanguageModel).get_output_embeddings()
    why = f"output_mlp.width: {type(model).__name__} has no output head that is one matrix; take another model"
    require(isinstance(getattr(head, "weight", None), Tensor), why)
    return head


def _hash(weights: Mapping[str, Tensor]) -> str:
    """The hash of weights as bfloat16, so that it does not depend on the precision in which they are loaded."""
    return digest({key: x.bfloat16() if x.is_floating_point() else x for key, x in weights.items()})


def save(model: LanguageModel, folder: Path) -> Path:
    """Write the MLP, with the name and hash of its frozen model, which is saved in `base/` if no file holds it."""
    mlp = find(model)
    config = mlp.belongs_to() | {
        "peft_type": mlp.kind,
        "base_digest": _hash(adapters.frozen_weights(model)),
        "width": mlp.up.out_features,
        "states": mlp.up.in_features,
        "logit_bias": mlp.logit_bias,
    }
    return adapters.write(folder, "MLP", config, mlp.state_dict(), model if mlp.base is None else None)


def attach_saved(model: LanguageModel, folder: Path) -> LanguageModel:
    """Put the MLP of a folder before the head of the model that it was trained on; returns the model."""
    config, weights = adapters.read(folder, "MLP")
    try:
        mlp = OutputMlp(int(config["states"]), int(config["width"]), float(config["logit_bias"]))
        mlp.load_state_dict(weights)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise OperantError(f"{folder} is damaged: its MLP cannot be read ({reason})") from error
    base = adapters.base_of(folder)
    if (found := _hash(model.state_dict())) != config.get("base_digest"):
        raise OperantError(
            f"{base} is not the model that the MLP in {folder} was trained on: its weights have the hash {found}, and "
            f"{config.get('base_digest')} is expected; give the model as it was"
        )
    return attach(model, mlp, base)
