"""LoRA: trains small matrices beside the linear layers of a frozen model, which may be quantised.

    adapt(model, LoraOptions(rank=8), seed=0)       # a new adapter; the model's outputs stay bit-identical at first
    adapt(model, LoraOptions(adapter="folder"))     # trains a saved adapter further
    merged(model).save_pretrained("out")            # a copy without an adapter; the model itself is not changed
    save(model, "out/adapter")                      # in peft's format

Adapters need the extra `lora` (peft), quantised weights the extra `quantise` (bitsandbytes) and a GPU. Weights are
never merged in place and subtracted back later: that drifts in bfloat16, and is not bit-identical in float32.
"""

import importlib.util
import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from operant.bounds import bounded, check_bounds
from operant.models.safe_loading import load_tensors
from operant.storage import atomic_io, hub
from operant.types import OperantError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""The beginning of every tensor name in peft's files."""
BASE = "base"
"""Name of a folder inside an adapter's folder with the model that it belongs to. It comes before the config's name."""
PLAIN = {"bias": "none", "modules_to_save": None, "trainable_token_indices": None, "layer_replication": None}
"""Fields of peft's config that train more than matrices beside linear layers, and their values if they do not."""
REWRITES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations of adapters that change the base weights. They are refused."""


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
        if not self.targets:
            raise OperantError("lora.targets is empty: name layers, or use all-linear")
        if self.adapter is not None and (self.rank, self.alpha, self.targets, self.rslora) != _DEFAULTS:
            raise OperantError(
                f"lora.adapter={self.adapter!r} has rank, alpha, targets and scaling of its own: leave lora.rank, "
                "lora.alpha, lora.targets and lora.rslora out, or start a new adapter without lora.adapter"
            )

    @property
    def on(self) -> bool:
        """Whether there is an adapter."""
        return self.rank > 0 or self.adapter is not None


_DEFAULTS = (0, None, ("all-linear",), False)
"""Defaults of the options that a saved adapter fixes itself: rank, alpha, targets, rslora."""


def check(options: LoraOptions, device: torch.device) -> None:
    """Raises: OperantError if the options need a package that is missing, or a GPU. Nothing is loaded."""
    if options.on:
        _peft()
    kind = options.quantise
    if kind == "none":
        return
    if device.type != "cuda":
        raise OperantError(f"lora.quantise={kind} needs a GPU, this is {device.type}: use lora.quantise=none")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise OperantError(f"lora.quantise={kind} needs a package: pip install 'operant[quantise]'")


def quantisation(kind: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
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


def adapt(model: Any, options: LoraOptions, *, base: str | None = None, seed: int = 0) -> Any:
    """Freeze the model and put an adapter beside its layers; returns the model.

    Matrix B of a new adapter is 0, so its output is 0; matrix A is drawn from `seed`. `base`: the model's name, which
    the adapter's config stores.
    Raises: OperantError if peft is missing, or if the adapter or its targets do not fit the model.
    """
    weights = None
    if options.adapter is not None:
        config, weights = _read(Path(options.adapter))
    else:
        config = _new_config(model, options)
        config.base_model_name_or_path, config.revision = hub.split(base) if base else (None, None)
    device = next(model.parameters()).device
    # The adapter depends on `seed` only, and torch's own random numbers go on as if nothing had been drawn.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        _inject(config, model)
    if weights is not None:
        _fill(model, weights, options.adapter)
    return train_adapter(model)


def _use_short_forward(model: Any) -> None:
    """Replace peft's forward pass of plain adapted layers by an equal one of two products and one addition."""
    for layer in model.modules():
        if type(layer).__name__ != "Linear" or not hasattr(layer, "lora_A") or not hasattr(layer, "base_layer"):
            continue
        names = list(layer.lora_A)
        plain = len(names) == 1 and not layer.lora_variant and not any(layer.lora_bias.values())
        if plain and layer.get_base_layer().weight.is_floating_point():
            layer.forward = MethodType(_short_forward, layer)


def _short_forward(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """x W + s x A' B', where one call computes the last product and the sum. There is no dropout."""
    out = layer.base_layer(x, *args, **kwargs)
    name = next(iter(layer.lora_A))
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    narrow = nn.functional.linear(x.to(a.dtype), a) * layer.scaling[name]
    rows, narrow = out.flatten(0, -2), narrow.flatten(0, -2).to(out.dtype)
    # In place without gradients. With gradients, the in-place form would make autograd copy them.
    add = rows.addmm if torch.is_grad_enabled() else rows.addmm_
    return add(narrow, b.T.to(out.dtype)).view_as(out)


def train_adapter(model: Any) -> Any:
    """Freeze all weights but the adapter's; returns the model.

    Raises: OperantError for an adapter on the output head or the embedding.
    """
    for name, p in model.named_parameters():
        p.requires_grad_(".lora_" in name)
    _use_short_forward(model)
    for what, part in (("output head", model.get_output_embeddings()), ("embedding", model.get_input_embeddings())):
        if hasattr(part, "base_layer"):
            raise OperantError(f"the adapter changes the {what}: adapt the layers of the blocks (lora.targets) alone")
    return model


def adapted(model: Any) -> bool:
    """Whether a model has an adapter beside its layers."""
    return bool(getattr(model, "peft_config", None))


def unwrapped(model: Any) -> Any:
    """The model inside peft's wrapper, with its adapter trainable. A model without a wrapper is returned unchanged.

    Raises: OperantError for an adapter of another kind than LoRA, or for several.
    """
    if not (adapted(model) and hasattr(model, "get_base_model")):
        return model
    if len(model.peft_config) != 1:
        raise OperantError(f"the model has adapters {', '.join(model.peft_config)}: keep one, with delete_adapter")
    config = next(iter(model.peft_config.values()))
    if not hasattr(config, "init_lora_weights"):
        raise OperantError(
            f"the model has an adapter of kind {config.peft_type.value}: only LORA can be trained here, and "
            "PROMPT_TUNING as the folder that save_pretrained writes"
        )
    _check(config, "the model")
    return train_adapter(model.get_base_model())


def is_adapter(folder: Path) -> bool:
    """Whether a folder contains an adapter but no model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").exists()


def base_of(folder: Path) -> str:
    """The name or folder of the model that an adapter was trained on. Raises: OperantError if it is not stored."""
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


def critics_of(folder: Path) -> list[Path]:
    """The folder of the critic beside a model or an exported adapter, in a list; an empty list if there is none."""
    candidates = [folder / "critic"] + ([folder.parent / "critic"] if is_adapter(folder) else [])
    return [path for path in candidates if path.is_dir()][:1]


# --- saving -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def merged(model: Any) -> Any:
    """A copy without an adapter that computes the same. It shares the weights that have no adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    copy = deepcopy(model, {id(p): p for name, p in model.named_parameters() if ".lora_" not in name})
    for name, layer in list(copy.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            inner: Any = layer.get_base_layer()
            inner.weight = nn.Parameter(inner.weight.detach().clone(), requires_grad=False)  # no longer shared
            layer.merge()
            copy.set_submodule(name, inner)
    del copy.peft_config
    return copy


def save(model: Any, folder: str | Path) -> Path:
    """Write the adapter, without the model, in peft's format: `PeftModel.from_pretrained(base, folder)` reads it."""
    from safetensors.torch import save_file

    folder = Path(folder)
    weights = {PREFIX + k: v.detach().cpu().contiguous() for k, v in tensors(model).items()}
    config = replace(next(iter(model.peft_config.values())), inference_mode=True)
    with atomic_io.explained(folder, "save the adapter"):
        atomic_io.mkdir(folder)
        with atomic_io.operation("write", folder):
            save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
            config.save_pretrained(str(folder))
    return folder


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """The adapter's tensors, under peft's names."""
    name = next(iter(model.peft_config))
    # By default, peft would check the embeddings of the base model on the Hub. No embedding has an adapter here.
    return _peft().get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)


def transplant(model: Any, onto: Any) -> Any:
    """Put a copy of the model's adapter on another model with the same layers; returns the other model."""
    config = deepcopy(next(iter(model.peft_config.values())))
    _inject(config, onto)
    _fill(onto, tensors(model), "the adapter")
    return onto


# --- loading ----------------------------------------------------------------------------------------------------------


def _peft() -> Any:
    """The package peft. Raises: OperantError if it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise OperantError(
            "an adapter (lora.rank, lora.adapter) needs a package: pip install 'operant[lora]'"
        ) from error
    return peft


def _new_config(model: Any, options: LoraOptions) -> Any:
    """peft's config of a new adapter."""
    every = options.targets == ("all-linear",)
    widest = max(min(p.shape) for p in model.parameters() if p.ndim == 2)
    if options.rank > widest:
        raise OperantError(f"lora.rank={options.rank}: it must be at most {widest}, the width of the widest layer here")
    return _peft().LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank if options.alpha is None else options.alpha,
        target_modules="all-linear" if every else list(options.targets),
        use_rslora=options.rslora,
        fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in model.modules()),  # GPT-2's are transposed
        task_type="SEQ_2_SEQ_LM" if getattr(model.config, "is_encoder_decoder", False) else "CAUSAL_LM",
    )


def _read(folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """The config and tensors of an adapter's folder. Raises: OperantError if it has no complete LoRA adapter."""
    if not (folder / CONFIG).is_file():
        raise OperantError(f"lora.adapter={folder}: the folder has no {CONFIG}, so it holds no adapter of peft's")
    if not (folder / WEIGHTS).is_file():
        raise OperantError(f"{folder} has no {WEIGHTS}: save the adapter again with safetensors (peft's default)")
    kind = read_config(folder).get("peft_type")
    if kind != "LORA":
        raise OperantError(
            f"{folder} holds an adapter of kind {kind}: only LORA can be trained here, and PROMPT_TUNING as the policy"
        )
    weights = load_tensors(folder / WEIGHTS)
    try:
        config = _peft().PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # peft may raise anything on an untrusted file
        raise OperantError(f"{folder} is damaged: {' '.join(str(error).split())[:160]}; save it again") from error
    _check(config, str(folder))
    config.init_lora_weights = True  # the file's numbers replace them; other initialisations would read the base
    return config, weights


def read_config(folder: Path) -> dict[str, Any]:
    """The config of an adapter as plain data."""
    try:
        return dict(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise OperantError(f"{folder} is damaged: {CONFIG} cannot be read ({error}); save it again") from error


def _check(config: Any, what: str) -> None:
    """Raises: OperantError for an adapter that changes base weights, or trains more than LoRA matrices."""
    if str(config.init_lora_weights).lower().startswith(REWRITES_THE_BASE):
        raise OperantError(
            f"{what} was started with {config.init_lora_weights}, which changes the base weights: convert it to plain "
            "LoRA first (peft's path_initial_model_for_weight_conversion)"
        )
    for name, usual in PLAIN.items():
        if (asked := getattr(config, name, usual)) not in (usual, [], {}):
            raise OperantError(
                f"{what} has an adapter with {name}={asked}, which trains more than matrices beside linear layers: "
                "merge it into its model with peft first, then start a new one"
            )


def _inject(config: Any, model: Any) -> None:
    """Put peft's layers with an adapter in place of the model's. Raises: OperantError if the targets do not fit."""
    try:
        _peft().inject_adapter_in_model(config, model)
    except (ValueError, TypeError, KeyError) as error:
        linear = {n.split(".")[-1] for n, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv1D")}
        raise OperantError(
            f"the adapter does not fit this {type(model).__name__} ({str(error).splitlines()[0][:120]}): "
            f"its linear layers are {', '.join(sorted(linear))}"
        ) from error


def _fill(model: Any, weights: Mapping[str, torch.Tensor], what: Any) -> None:
    """Load an adapter's tensors into the model. Raises: OperantError if any is missing, unknown or of another shape."""
    wanted = {name.removeprefix(PREFIX) for name in tensors(model)}
    odd = wanted ^ {name.removeprefix(PREFIX) for name in weights}
    if odd:
        raise OperantError(
            f"{what} does not fit this {type(model).__name__} ({', '.join(sorted(odd)[:3])}): is it of "
            "another model, or damaged?"
        )
    try:
        name = next(iter(model.peft_config))
        _peft().set_peft_model_state_dict(model, dict(weights), adapter_name=name)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1].strip()[:160]
        raise OperantError(f"{what} does not fit this {type(model).__name__}: {reason}") from error
