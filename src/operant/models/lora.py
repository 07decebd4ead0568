"""LoRA: small matrices beside the linear layers of a frozen model. Needs the extra `lora` (peft).

    adapt(model, LoraOptions(rank=8), seed=0)       # new: the model computes what it did, to the bit
    adapt(model, LoraOptions(adapter="folder"))     # one that is there goes on, in peft's own format
    merged(model).save_pretrained("out")            # a plain copy; the model itself is never written into
    save(model, "out/adapter")

Nothing is merged in place and nothing is subtracted back: that drifts in bfloat16 and changes bits in float32.
"""

import json
from collections.abc import Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from operant.models.safe_loading import load_tensors
from operant.storage import atomic_io, hub
from operant.types import OperantError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What peft writes before the name of every tensor."""
BASE = "base"
"""A folder inside an adapter's, with the model that it belongs to: where there is one, it is asked before any name."""
PLAIN = {"bias": "none", "modules_to_save": None, "trainable_token_indices": None, "layer_replication": None}
"""What an adapter may ask for beyond matrices beside linear layers, and its value where it does not."""
REWRITES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Starting values of adapters that change the base weights, which must stay as they are."""


@dataclass(frozen=True)
class LoraOptions:
    """Train an adapter (LoRA) beside frozen weights: the reference, checkpoints and gradients then cost only that."""

    rank: int = 0
    """Width of the matrices; 0: no adapter, the weights themselves are trained."""
    alpha: float | None = None
    """The adapter counts alpha / rank times; none: twice the rank."""
    targets: tuple[str, ...] = ("all-linear",)
    """Layers that are adapted, by the last part of their name (q_proj,v_proj); all-linear: all but the output head."""
    adapter: str | None = None
    """A folder in peft's format, to go on from; the reference is then that adapter as it was."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead."""
    quantise: str = "none"
    """none | 8bit | 4bit: the frozen weights, on a GPU, with the extra `quantise` (bitsandbytes)."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise OperantError(f"lora.rank={self.rank}: it must be at least 1, or 0 for no adapter")
        if self.alpha is not None and self.alpha <= 0:
            raise OperantError(f"lora.alpha={self.alpha}: it must be above 0, or none for twice the rank")
        if not self.targets:
            raise OperantError("lora.targets is empty: name layers, or use all-linear")
        if self.quantise not in ("none", "8bit", "4bit"):
            raise OperantError(f"lora.quantise={self.quantise!r}: it must be none, 8bit or 4bit")
        if self.adapter is not None and (self.rank, self.alpha, self.targets, self.rslora) != _NOTHING:
            raise OperantError(
                f"lora.adapter={self.adapter!r} has rank, alpha, targets and scaling of its own: leave lora.rank, "
                "lora.alpha, lora.targets and lora.rslora out, or start a new adapter without lora.adapter"
            )

    @property
    def on(self) -> bool:
        return self.rank > 0 or self.adapter is not None


_NOTHING = (0, None, ("all-linear",), False)
"""What a new adapter would be told, where nothing is said."""


def adapt(model: Any, options: LoraOptions, *, base: str | None = None, seed: int = 0) -> Any:
    """Freeze the model and put an adapter beside its layers; returns the model.

    A new adapter starts at exactly 0, with random numbers of `seed`. `base` is what its config calls the model.
    Raises: OperantError where peft is missing, or the adapter or its targets do not fit the model.
    """
    weights = None
    if options.adapter is not None:
        config, weights = _read(Path(options.adapter))
    else:
        config = _new(model, options)
        config.base_model_name_or_path, config.revision = hub.split(base) if base else (None, None)
    with _seeded(seed, model):
        _inject(config, model)
    if weights is not None:
        _fill(model, weights, options.adapter)
    return train_adapter(model)


def _straighten(model: Any) -> None:
    """Put a shorter way to the same sum in place of peft's, where a layer is plain: two products and one addition."""
    for layer in model.modules():
        if type(layer).__name__ != "Linear" or not hasattr(layer, "lora_A") or not hasattr(layer, "base_layer"):
            continue
        names = list(layer.lora_A)
        plain = len(names) == 1 and not layer.lora_variant and not any(layer.lora_bias.values())
        if plain and layer.get_base_layer().weight.is_floating_point():
            layer.forward = MethodType(_forward, layer)


def _forward(layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """x W + s x A' B', the last product and the sum in one. Dropout is off here as everywhere."""
    out = layer.base_layer(x, *args, **kwargs)
    name = next(iter(layer.lora_A))
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    narrow = nn.functional.linear(x.to(a.dtype), a) * layer.scaling[name]
    rows, narrow = out.flatten(0, -2), narrow.flatten(0, -2).to(out.dtype)
    # In place where nothing is differentiated; where something is, autograd would copy the gradient for it.
    add = rows.addmm if torch.is_grad_enabled() else rows.addmm_
    return add(narrow, b.T.to(out.dtype)).view_as(out)


def train_adapter(model: Any) -> Any:
    """Everything frozen but the adapter. Raises: OperantError for one on the head or the embedding."""
    for name, p in model.named_parameters():
        p.requires_grad_(".lora_" in name)
    _straighten(model)
    for what, part in (("output head", model.get_output_embeddings()), ("embedding", model.get_input_embeddings())):
        if hasattr(part, "base_layer"):
            raise OperantError(f"the adapter changes the {what}: adapt the layers of the blocks (lora.targets) alone")
    return model


def adapted(model: Any) -> bool:
    """Whether a model has an adapter beside its layers."""
    return bool(getattr(model, "peft_config", None))


def unwrapped(model: Any) -> Any:
    """The model inside peft's wrapper, its adapter beside its layers and in training; any other as it is.

    Raises: OperantError for an adapter of another kind than LoRA, or several.
    """
    if not (adapted(model) and hasattr(model, "get_base_model")):
        return model
    if len(model.peft_config) != 1:
        raise OperantError(f"the model has adapters {', '.join(model.peft_config)}: keep one, with delete_adapter")
    config = next(iter(model.peft_config.values()))
    if not hasattr(config, "init_lora_weights"):
        raise OperantError(
            f"the model has an adapter of kind {config.peft_type.value}: LORA is what can be trained here"
        )
    _check(config, "the model")
    return train_adapter(model.get_base_model())


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter alone."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").exists()


def base_of(folder: Path) -> str:
    """The name or folder of the model that an adapter was trained on. Raises: OperantError where it does not say."""
    if (folder / BASE / "config.json").is_file():
        return str(folder / BASE)
    told = _told(folder)
    base, revision = told.get("base_model_name_or_path"), told.get("revision")
    if not base:
        raise OperantError(
            f"{folder} does not say which model it belongs to: give the model, and lora.adapter={folder}"
        )
    return f"{base}@{revision}" if revision and hub.split(f"{base}@{revision}")[1] else base


def critics_of(folder: Path) -> list[Path]:
    """Where a critic lies beside a model; of an adapter that was exported with one, beside that."""
    there = [folder / "critic"] + ([folder.parent / "critic"] if is_adapter(folder) else [])
    return [path for path in there if path.is_dir()][:1]


def check(options: LoraOptions) -> None:
    """Raises: OperantError where an adapter is asked for and peft is missing."""
    if options.on:
        _peft()


# --- out --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def merged(model: Any) -> Any:
    """A copy without an adapter that computes the same. It shares what no adapter touches; the model is only read."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    copy = deepcopy(model, {id(p): p for name, p in model.named_parameters() if ".lora_" not in name})
    for name, layer in list(copy.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            inner: Any = layer.get_base_layer()
            inner.weight = nn.Parameter(inner.weight.detach().clone(), requires_grad=False)  # its own from here on
            layer.merge()
            copy.set_submodule(name, inner)
    del copy.peft_config
    return copy


def save(model: Any, folder: str | Path) -> Path:
    """Write the adapter alone, as peft does: `PeftModel.from_pretrained(base, folder)` reads it."""
    from safetensors.torch import save_file

    folder = Path(folder)
    held = {PREFIX + k: v.detach().cpu().contiguous() for k, v in tensors(model).items()}
    config = replace(next(iter(model.peft_config.values())), inference_mode=True)
    with atomic_io.explained(folder, "save the adapter"):
        atomic_io.mkdir(folder)
        with atomic_io.operation("write", folder):
            save_file(held, folder / WEIGHTS, metadata={"format": "pt"})
            config.save_pretrained(str(folder))
    return folder


def tensors(model: Any) -> dict[str, torch.Tensor]:
    """The adapter's tensors, by the names that peft gives them."""
    name = next(iter(model.peft_config))
    # Left to itself, peft looks on the Hub whether the base has other embeddings: none is adapted.
    return _peft().get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)


def transplant(model: Any, onto: Any) -> Any:
    """Put a copy of the model's adapter onto another model of the same layers; returns that one."""
    config = deepcopy(next(iter(model.peft_config.values())))
    _inject(config, onto)
    _fill(onto, tensors(model), "the adapter")
    return onto


# --- in ---------------------------------------------------------------------------------------------------------------


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise OperantError(
            "an adapter (lora.rank, lora.adapter) needs a package: pip install 'operant[lora]'"
        ) from error
    return peft


def _new(model: Any, options: LoraOptions) -> Any:
    every = options.targets == ("all-linear",)
    widest = max(min(p.shape) for p in model.parameters() if p.ndim == 2)
    if options.rank > widest:
        raise OperantError(f"lora.rank={options.rank}: it must be at most {widest}, the width of the widest layer here")
    return _peft().LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank if options.alpha is None else options.alpha,
        target_modules="all-linear" if every else list(options.targets),
        use_rslora=options.rslora,
        fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in model.modules()),  # GPT-2 keeps its weights turned
        task_type="SEQ_2_SEQ_LM" if getattr(model.config, "is_encoder_decoder", False) else "CAUSAL_LM",
    )


def _read(folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Config and tensors of a folder. Raises: OperantError where it holds no whole LoRA adapter."""
    if not (folder / CONFIG).is_file():
        raise OperantError(f"lora.adapter={folder}: the folder has no {CONFIG}, so it holds no adapter of peft's")
    if not (folder / WEIGHTS).is_file():
        raise OperantError(f"{folder} has no {WEIGHTS}: save the adapter again with safetensors (peft's default)")
    kind = _told(folder).get("peft_type")
    if kind != "LORA":
        raise OperantError(f"{folder} holds an adapter of kind {kind}: LORA is what can be trained here")
    weights = load_tensors(folder / WEIGHTS)
    try:
        config = _peft().PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # somebody's file, in somebody's library
        raise OperantError(f"{folder} is damaged: {' '.join(str(error).split())[:160]}; save it again") from error
    _check(config, str(folder))
    config.init_lora_weights = True  # the numbers come from the file; other ways of starting would look at the base
    return config, weights


def _told(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise OperantError(f"{folder} is damaged: {CONFIG} cannot be read ({error}); save it again") from error


def _check(config: Any, what: str) -> None:
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
    try:
        _peft().inject_adapter_in_model(config, model)
    except (ValueError, TypeError, KeyError) as error:
        linear = {n.split(".")[-1] for n, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv1D")}
        raise OperantError(
            f"the adapter does not fit this {type(model).__name__} ({str(error).splitlines()[0][:120]}): "
            f"its linear layers are {', '.join(sorted(linear))}"
        ) from error


def _fill(model: Any, weights: Mapping[str, torch.Tensor], what: Any) -> None:
    """Put an adapter's tensors where they belong; each has its place and each place its tensor."""
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


@contextmanager
def _seeded(seed: int, model: Any):
    """Random numbers of `seed` while this lasts, whatever was drawn before; then those that would have come."""
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        yield
