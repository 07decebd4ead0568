"""A name to a policy: a folder, `builtin:NAME`, or a Hub name; and a policy to a plain transformers folder.

The critic is an artefact of its own beside the language model: `critic/` holds the value head (and the separate
network, if there is one). Weights that are missing there are an error, never a fresh head in silence.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from operant.models import lora as adapters
from operant.models import quantised
from operant.models.lora import LoraOptions
from operant.models.options import ModelOptions
from operant.models.policy import Policy
from operant.models.reference import PolicyCopy, shared
from operant.models.safe_loading import check_finite, check_model, load_model, load_tensors, load_tokenizer
from operant.models.value_head import ValueOptions
from operant.storage import atomic_io
from operant.storage.hub import find_model, quietly
from operant.types import OperantError


def load_policy(
    name: Any,
    *,
    value: ValueOptions | None = None,
    tokenizer: Any = None,
    options: ModelOptions = ModelOptions(),
    lora: LoraOptions = LoraOptions(),
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Policy:
    """The policy of a name, or around a model that is already loaded; remote code off. A Policy stays as it is.

    The folder of an adapter is a name, too: it goes on, on the model that it names. With `value`, a critic saved beside
    the model is loaded; where there is none, one is made. `seed` is that of a new adapter, `device` where quantised
    weights are put.
    Raises: OperantError for a name that cannot be had, a folder that holds no language model or an adapter that does
    not fit it, or a damaged critic.
    """
    device = torch.device(device)
    adapters.check(lora)
    quantised.check(lora.quantise, device)
    if isinstance(name, Policy):
        if lora.on:
            raise OperantError("lora.* with a Policy that is made already: load_policy(name, lora=LoraOptions(rank=8))")
        return name
    if isinstance(name, torch.nn.Module):
        check_model(name)
        model = adapters.unwrapped(name)
        return _with_critic(_adapted(model, lora, None, seed), tokenizer, value, None, options)
    folder = Path(find_model(name))
    base, whose = folder, _stored_name(name, folder)
    if adapters.is_adapter(folder):
        if lora.on:
            raise OperantError(f"{folder} is an adapter itself and goes on: leave lora.rank and lora.adapter out")
        lora = LoraOptions(adapter=str(folder), quantise=lora.quantise)
        base = Path(_found_base(folder))
    elif lora.adapter is not None:
        lora = replace(lora, adapter=find_model(lora.adapter))
    if lora.quantise != "none" and not lora.on:
        raise OperantError(
            f"lora.quantise={lora.quantise}: quantised weights cannot be trained themselves; set lora.rank"
        )
    model = _adapted(
        load_model(base, options.dtype, quantised.loading(lora.quantise, options.dtype, device)), lora, whose, seed
    )
    tokenizer = tokenizer or (load_tokenizer(folder) if base != folder else None) or load_tokenizer(base)
    return _with_critic(model, tokenizer, value, folder, options)


def _adapted(model: Any, lora: LoraOptions, name: str | None, seed: int) -> Any:
    if not lora.on:
        return model
    if adapters.adapted(model):
        raise OperantError("the model has an adapter already, which goes on: leave lora.rank and lora.adapter out")
    return adapters.adapt(model, lora, base=name or getattr(model, "name_or_path", None), seed=seed)


def _stored_name(name: Any, folder: Path) -> str:
    """What an adapter's config calls its model: a folder as a whole path, any other name as it is."""
    return str(folder.resolve()) if Path(name).expanduser().exists() else str(name)


def _found_base(folder: Path) -> str:
    base = adapters.base_of(folder)
    try:
        return find_model(base)
    except OperantError as error:
        raise OperantError(
            f"{folder} is an adapter of {base!r} ({error}): give the model, and lora.adapter={folder}"
        ) from error


def load_reference(given: Any, policy: Policy) -> PolicyCopy | None:
    """What KL is measured against: `copy` of the policy as it is now, None, a name, a Policy or a PolicyCopy.

    Raises: OperantError where its vocabulary is not the policy's.
    """
    if given is None or isinstance(given, PolicyCopy):
        return given
    if isinstance(given, str) and given == "copy":
        return PolicyCopy(policy)
    held = load_policy(given, options=ModelOptions(precision=policy.options.precision)).to(policy.device)
    if held.vocabulary != policy.vocabulary:
        raise OperantError(
            f"the reference has a vocabulary of {held.vocabulary}, the policy one of {policy.vocabulary}: "
            "they score the same ids, so the two must be the same"
        )
    return PolicyCopy(held, copy=False)


def _with_critic(
    model: Any, tokenizer: Any, value: ValueOptions | None, folder: Path | None, options: ModelOptions
) -> Policy:
    saved = next(iter(adapters.critics_of(folder)), None) if folder is not None else None
    if value is None:
        return Policy(model, tokenizer, options=options)
    if saved is not None:
        value = _saved_options(saved, value)
    critic = None
    if value.critic is not None:
        critic = _critic_network(model, value, saved, options)
    policy = Policy(model, tokenizer, value=value, critic=critic, options=options)
    if saved is not None:
        _load_head(policy, saved)
    return policy


def _critic_network(model: Any, value: ValueOptions, saved: Path | None, options: ModelOptions) -> Policy:
    from copy import deepcopy

    if saved is not None:
        network = load_model(saved / "network")
    elif value.critic == "copy":
        network = deepcopy(model, shared(model))
    else:
        network = load_model(Path(find_model(value.critic)))
    if network.config.vocab_size != model.config.vocab_size:
        raise OperantError(
            f"value.critic={value.critic!r} has a vocabulary of {network.config.vocab_size}, the policy one of "
            f"{model.config.vocab_size}: a critic reads the policy's ids, so the two must be the same"
        )
    return Policy(network, value=value, options=ModelOptions(precision=options.precision))


def export(policy: Policy, folder: str | Path) -> Path:
    """Write a plain transformers folder that bare `from_pretrained` loads, and the critic beside it.

    Of a policy with an adapter: merged into a copy, and `adapter/` beside it in peft's own format.
    Raises: OperantError where a weight is not finite; nothing is written then.
    """
    folder = Path(folder)
    check_finite(dict(policy.named_parameters()), folder)
    _save_plain(policy.model, folder)
    if adapters.adapted(policy.model):
        adapters.save(policy.model, folder / "adapter")
    if policy.tokenizer is not None:
        with atomic_io.operation("write", folder):
            policy.tokenizer.save_pretrained(folder)
    if policy.has_values:
        _save_critic(policy, folder / "critic")
    return folder


def _save_plain(model: Any, folder: Path) -> None:
    """A model as transformers keeps it: an adapter is merged into a copy, of the unquantised weights where need be."""
    if adapters.adapted(model):
        if quantised.is_quantised(model):
            model = adapters.transplant(model, load_model(Path(find_model(model.name_or_path)), model.dtype))
        model = adapters.merged(model)
    with quietly(), atomic_io.operation("write", folder):
        model.save_pretrained(folder)


def _save_critic(policy: Policy, folder: Path) -> None:
    from safetensors.torch import save_file

    atomic_io.mkdir(folder)
    owner: Any = policy.critic or policy
    with atomic_io.operation("write", folder / "head.safetensors"):
        save_file({k: v.contiguous() for k, v in owner.value_head.state_dict().items()}, folder / "head.safetensors")
    atomic_io.write(folder / "critic.json", json.dumps(asdict(owner.value_options), indent=1))
    if policy.critic is not None:
        _save_plain(policy.critic.model, folder / "network")


def _saved_options(folder: Path, asked: ValueOptions) -> ValueOptions:
    """The saved head's shape wins; whether it is detached is the new run's choice."""
    try:
        saved = json.loads((folder / "critic.json").read_text(encoding="utf-8"))
        return ValueOptions(layers=saved["layers"], init=saved["init"], detach=asked.detach, critic=saved["critic"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise OperantError(
            f"{folder} is damaged: critic.json cannot be read ({error}); delete {folder} to start with a fresh one"
        ) from error


def _load_head(policy: Policy, folder: Path) -> None:
    owner: Any = policy.critic or policy
    path = folder / "head.safetensors"
    if not path.exists():
        raise OperantError(f"{path} is missing: the critic was saved there; delete {folder} to start with a fresh one")
    weights, wanted = load_tensors(path), owner.value_head.state_dict()
    odd = {name for name in set(weights) | set(wanted) if _shape(weights, name) != _shape(wanted, name)}
    if odd:
        raise OperantError(
            f"{path} does not hold the critic's weights ({', '.join(sorted(odd))}): delete {folder} for a fresh one"
        )
    owner.value_head.load_state_dict(weights)


def _shape(held: Mapping[str, torch.Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(held[name].shape) if name in held else None
