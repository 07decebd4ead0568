"""LoRA: trains small matrices beside the linear layers of a frozen model, which may be quantised.

    adapt(model, LoraOptions(rank=8), seed=0)       # a new adapter; the model's outputs stay bit-identical at first
    adapt(model, LoraOptions(adapter="folder"))     # trains a saved adapter further
    merged(model).save_pretrained("out")            # a copy without an adapter; the model itself is not changed

Adapters need the extra `lora` (peft), quantised weights the extra `quantise` (bitsandbytes) and a GPU. Weights are
never merged in place and subtracted back later: that drifts in bfloat16, and is not bit-identical in float32.
"""

import importlib.util
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from operant.import_by_name import extra
from operant.models import adapters
from operant.models.adapters import LoraOptions
from operant.models.safe_loading import LanguageModel, PlainConfig
from operant.storage import hub
from operant.types import OperantError, require, with_defaults

if TYPE_CHECKING:
    from peft import LoraConfig

KIND = "LORA"
"""peft's name of the method."""
PREFIX = "base_model.model."
"""The beginning of every tensor name in peft's files."""
PLAIN = {"bias": "none", "lora_bias": False, "modules_to_save": None}
PLAIN |= {"trainable_token_indices": None, "layer_replication": None}
"""Fields of peft's config that train more than matrices beside linear layers, and their values if they do not."""
REWRITES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations of adapters that change the base weights. They are refused."""


def check(options: LoraOptions, device: torch.device) -> None:
    """Raises: OperantError if the options need a package that is missing, or a GPU. Nothing is loaded."""
    if options.on:
        _peft()
    if (kind := options.quantise) != "none":
        on_gpu, installed = device.type == "cuda", importlib.util.find_spec("bitsandbytes") is not None
        require(on_gpu, f"lora.quantise={kind} needs a GPU, this is {device.type}: use lora.quantise=none")
        require(installed, f"lora.quantise={kind} needs a package: pip install 'operant[quantise]'")


def quantisation(kind: str, dtype: torch.dtype, device: torch.device) -> dict[str, object]:
    """Arguments of `from_pretrained` that quantise the weights. `kind`: 8bit or 4bit.

    `dtype`: the type that the model computes in, and that weights which are not quantised have.
    """
    from transformers import BitsAndBytesConfig

    four = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype, "bnb_4bit_use_double_quant": True}
    how = {"load_in_8bit": True} if kind == "8bit" else {"load_in_4bit": True, **four}
    return {"quantization_config": BitsAndBytesConfig(**how), "device_map": {"": device}}


def adapt(model: LanguageModel, options: LoraOptions, *, base: str | None = None, seed: int = 0) -> LanguageModel:
    """Freeze the model and put an adapter beside its layers; returns the model.

    Matrix B of a new adapter is 0, so its output is 0; matrix A is drawn from `seed`. `base`: the model's name.
    """
    if options.adapter is not None:
        config, weights = _read(Path(options.adapter))
    else:
        config, weights = _new_config(model, options), None
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


def _short_forward(layer: Any, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """As peft's forward, x W + s x A' B', with one call for the last product and the sum, and no dropout."""
    if layer.disable_adapters or layer.merged:  # by peft's own methods, on the caller's model
        return type(layer).forward(layer, x, *args, **kwargs)
    out = layer.base_layer(x, *args, **kwargs)
    name = next(iter(layer.lora_A))
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    narrow = nn.functional.linear(x.to(a.dtype), a) * layer.scaling[name]
    rows, narrow = out.flatten(0, -2), narrow.flatten(0, -2).to(out.dtype)
    # In place without gradients. With gradients, the in-place form would make autograd copy them.
    add = rows.addmm if torch.is_grad_enabled() else rows.addmm_
    return add(narrow, b.T.to(out.dtype)).view_as(out)


def train_adapter(model: LanguageModel) -> LanguageModel:
    """Freeze all weights but the adapter's; returns the model."""
    for name, p in model.named_parameters():
        p.requires_grad_(".lora_" in name)
    layers: list[Any] = list(model.modules())
    for layer in layers:
        if type(layer).__name__ != "Linear" or not hasattr(layer, "lora_A") or not hasattr(layer, "base_layer"):
            continue
        plain = len(layer.lora_A) == 1 and not layer.lora_variant and not any(layer.lora_bias.values())
        if plain and layer.get_base_layer().weight.is_floating_point():
            layer.forward = MethodType(_short_forward, layer)
    for what, part in (("output head", model.get_output_embeddings()), ("embedding", model.get_input_embeddings())):
        if hasattr(part, "base_layer"):
            raise OperantError(f"the adapter changes the {what}: adapt the layers of the blocks (lora.targets) alone")
    return model


def unwrapped(model: LanguageModel) -> LanguageModel:
    """The model inside peft's wrapper, if any, with its adapter trainable."""
    if len(model.peft_config) != 1:
        raise OperantError(f"the model has adapters {', '.join(model.peft_config)}: keep one, with delete_adapter")
    config = next(iter(model.peft_config.values()))
    if not hasattr(config, "init_lora_weights"):
        raise OperantError(
            f"the model has an adapter of kind {config.peft_type.value}: only LORA can be trained here, and "
            "PROMPT_TUNING as the folder that save_pretrained writes"
        )
    _check(config, "the model")
    return train_adapter(model.get_base_model() if hasattr(model, "get_base_model") else model)


@torch.no_grad()
def merged(model: LanguageModel) -> LanguageModel:
    """A copy without an adapter that computes the same. It shares the weights that have no adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    copy = deepcopy(model, {id(p): p for name, p in model.named_parameters() if ".lora_" not in name})
    for name, layer in reversed(list(copy.named_modules())):  # experts have one adapter around another
        if isinstance(layer, BaseTunerLayer):
            inner, adapted = layer.get_base_layer(), vars(layer).get("parameter_name", "weight")
            own = getattr(inner, adapted).detach().clone()  # no longer shared
            setattr(inner, adapted, nn.Parameter(own, requires_grad=False))
            layer.merge()
            copy.set_submodule(name, inner)
    del copy.peft_config
    copy._hf_peft_config_loaded, copy._weight_conversions = False, None  # of a model that transformers gave the adapter
    return copy


def save(model: LanguageModel, folder: Path) -> Path:
    """Write the adapter without the model: `PeftModel.from_pretrained(base, folder)` reads it."""
    config = replace(next(iter(model.peft_config.values())), inference_mode=True).to_dict()
    return adapters.write(folder, "adapter", config, {PREFIX + name: x for name, x in tensors(model).items()})


def tensors(model: LanguageModel) -> dict[str, torch.Tensor]:
    """The adapter's tensors, under peft's names."""
    name = next(iter(model.peft_config))
    # By default, peft would check the embeddings of the base model on the Hub. No embedding has an adapter here.
    return _peft().get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)


def transplant(model: LanguageModel, onto: LanguageModel) -> LanguageModel:
    """Put a copy of the model's adapter on another model with the same layers; returns the other model."""
    _inject(deepcopy(next(iter(model.peft_config.values()))), onto)
    _fill(onto, tensors(model), "the adapter")
    return onto


def _peft() -> ModuleType:
    with extra("an adapter (lora.rank, lora.adapter) needs a package", "lora"):
        import peft
    return peft


def _new_config(model: LanguageModel, options: LoraOptions) -> "LoraConfig":
    every = options.targets == ("all-linear",)
    widest = max(min(p.shape) for p in model.parameters() if p.ndim == 2)
    if options.rank > widest:
        raise OperantError(f"lora.rank={options.rank}: it must be at most {widest}, the width of the widest layer here")
    here = [f".{name}" for name, _ in model.named_modules()] if not every else []
    odd = [one for one in options.targets if here and not any(name.endswith(f".{one}") for name in here)]
    require(len(odd) in (0, len(options.targets)), f"lora.targets: no layer here is called {', '.join(odd)}")
    return _peft().LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank if options.alpha is None else options.alpha,
        target_modules="all-linear" if every else list(options.targets),
        use_rslora=options.rslora,
        fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in model.modules()),  # GPT-2's are transposed
        task_type="SEQ_2_SEQ_LM" if with_defaults(model.config, PlainConfig).is_encoder_decoder else "CAUSAL_LM",
    )


def _read(folder: Path) -> tuple["LoraConfig", dict[str, torch.Tensor]]:
    """peft's config and the tensors of a LoRA adapter."""
    if not (folder / adapters.CONFIG).is_file():
        raise OperantError(f"lora.adapter={folder}: without {adapters.CONFIG} the folder is no adapter of peft's")
    stored, weights = adapters.read(folder, "adapter")
    if (kind := stored.get("peft_type")) != KIND:
        raise OperantError(f"{folder} holds a {kind} adapter: LORA can be trained, and PROMPT_TUNING as the policy")
    try:
        config = _peft().PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # peft may raise anything on an untrusted file
        raise OperantError(f"{folder} is damaged: {' '.join(str(error).split())[:160]}; save it again") from error
    _check(config, str(folder))
    config.init_lora_weights = True  # the file's numbers replace them; other initialisations would read the base
    return config, weights


def _check(config: "LoraConfig", what: str) -> None:
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


def _inject(config: "LoraConfig", model: LanguageModel) -> None:
    linear = {n.split(".")[-1] for n, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv1D")}
    try:
        _peft().inject_adapter_in_model(config, model)
    except (ValueError, TypeError, KeyError) as error:
        raise OperantError(
            f"the adapter does not fit this {type(model).__name__} ({str(error).splitlines()[0][:120]}): "
            f"its linear layers are {', '.join(sorted(linear))}; name some in lora.targets"
        ) from error


def _fill(model: LanguageModel, weights: Mapping[str, torch.Tensor], what: object) -> None:
    wanted = {name.removeprefix(PREFIX) for name in tensors(model)}
    if odd := wanted ^ {name.removeprefix(PREFIX) for name in weights}:
        raise OperantError(
            f"{what} does not fit this {type(model).__name__} ({', '.join(sorted(odd)[:3])}): is it another model's?"
        )
    try:
        _peft().set_peft_model_state_dict(model, dict(weights), adapter_name=next(iter(model.peft_config)))
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1].strip()[:160]
        raise OperantError(f"{what} does not fit this {type(model).__name__}: {reason}") from error
