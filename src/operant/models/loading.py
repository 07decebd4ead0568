"""Loads a policy by name (a folder, `builtin:NAME` or a Hub name), and exports one to a plain transformers folder.

The critic is saved beside the language model: the folder `critic/` has the value head, and the separate network if
there is one. If weights are missing there, that is an error: no new head is made silently.
"""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from operant.import_by_name import Lazy, nearest
from operant.models import adapters
from operant.models.adapters import LoraOptions, OutputMlpOptions, SoftPromptOptions
from operant.models.base import POLICIES, PolicyBase
from operant.models.options import ModelOptions
from operant.models.policy import Policy
from operant.models.reference import PolicyCopy, shared, trained_weights
from operant.models.safe_loading import (
    LanguageModel,
    check_finite,
    check_model,
    load_model,
    load_tensors,
    load_tokenizer,
    unlike,
)
from operant.models.value_head import ValueOptions
from operant.storage import atomic_io, hub, manifest
from operant.storage.hub import OWN, find_model, quietly
from operant.types import OperantError, Tokenizer, require, with_defaults

WEIGHTS = "policy.safetensors"
"""The trained weights of an exported policy that is no transformers model."""
Trained = Policy | PolicyBase


def load_policy(
    name: object,
    *,
    value: ValueOptions | None = None,
    tokenizer: Tokenizer | None = None,
    options: ModelOptions = ModelOptions(),
    lora: LoraOptions = LoraOptions(),
    soft: SoftPromptOptions = SoftPromptOptions(),
    mlp: OutputMlpOptions = OutputMlpOptions(),
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Trained:
    """Load a policy by name, or make one around a loaded model. A `Policy` or `PolicyBase` is returned unchanged.

    `name` can also be the folder of an adapter, soft prompt or output MLP, whose training then continues on the model
    that its config names. With `value`, the critic that was saved beside the model is loaded; if there is none, a new
    one is made. `seed`: for the random numbers of a new adapter, soft prompt or MLP. `device`: for quantised weights.
    Code from the folder or the Hub is never run.
    Raises: OperantError for an unknown name, a folder without a language model, an adapter that does not fit it, or a
    damaged critic.
    """
    device = torch.device(device)
    if lora.on or lora.quantise != "none":
        BESIDE["lora"].check(lora, device)
    adapters.check_alone(lora, soft, mlp, options)
    parts = (lora, soft, mlp)
    require(lora.quantise == "none" or isinstance(name, (str, Path)), "lora.quantise: give the model's name or folder")
    if isinstance(name, (Policy, PolicyBase)):
        if part := next((part for part in parts if part.on), None):
            how = ("lora", "soft", "mlp")[parts.index(part)]
            raise OperantError(f"{how} with an existing Policy: use load_policy(name, {how}={part!r})")
        if isinstance(name, PolicyBase):
            name.check()
        return name
    if isinstance(name, torch.nn.Module):
        check_model(name)
        model = BESIDE["lora"].unwrapped(name) if adapters.adapted(name) else name
        tokenizer = tokenizer or with_defaults(name, LanguageModel).tokenizer
        return _with_critic(_adapted(model, parts, tokenizer, None, seed), tokenizer, value, None, options)
    if not isinstance(name, (str, Path)):
        raise OperantError(
            f"policy={name!r:.100} is no policy: give a name, a transformers model, a Policy, or one of your own, "
            "whose class is derived from operant.PolicyBase (docs/extending.md)"
        )
    try:
        folder = Path(find_model(name))
    except OperantError as error:
        if hint := nearest(str(name)[:100], POLICIES.names()):
            raise OperantError(f"{error}{hint}") from error
        raise
    if (folder / OWN).is_file():
        plain = lora.quantise == "none" and not any(part.on for part in parts)
        require(plain, f"{folder}: its own class takes no lora, soft_prompt or output_mlp")
        return _load_own(folder, tokenizer, value, options)
    base, kind = folder, None
    # The adapter's config names its model by a full path if it is a folder, and otherwise by its name.
    stored_name = str(folder.resolve()) if Path(name).expanduser().exists() else str(name)
    if adapters.is_adapter(folder):
        if any(part.on for part in parts):
            raise OperantError(
                f"{folder} is itself an adapter, which is trained further: leave lora.rank, lora.adapter, "
                "soft_prompt.tokens and output_mlp.width out"
            )
        base = _find_base(folder)
        peft_type = adapters.read_config(folder).get("peft_type")
        kind = BESIDE[str(peft_type)] if peft_type in ALONE else None
        if kind is None:
            lora = LoraOptions(adapter=str(folder), quantise=lora.quantise)
    elif lora.adapter is not None:
        lora = replace(lora, adapter=find_model(lora.adapter))
    if lora.quantise != "none" and not lora.on:
        raise OperantError(f"lora.quantise={lora.quantise}: quantised weights are not trained; set lora.rank")
    how = {} if lora.quantise == "none" else BESIDE["lora"].quantisation(lora.quantise, options.dtype, device)
    model = load_model(base, options.dtype, **how)
    require(not adapters.adapted(model), f"{base} holds a model and an adapter of it: move {adapters.CONFIG} away")
    tokenizer = tokenizer or (load_tokenizer(folder) if base != folder else None) or load_tokenizer(base)
    if kind is not None:
        kind.attach_saved(model, folder)
    model = _adapted(model, (lora, soft, mlp), tokenizer, stored_name, seed)
    return _with_critic(model, tokenizer, value, folder, options)


Parts = tuple[LoraOptions, SoftPromptOptions, OutputMlpOptions]
BESIDE = Lazy(
    {
        "lora": "operant.models.lora",
        "PROMPT_TUNING": "operant.models.soft_prompt",
        "OUTPUT_MLP": "operant.models.output_mlp",
    }
)
"""The modules of what is trained beside a model, imported for such models."""
ALONE = ("PROMPT_TUNING", "OUTPUT_MLP")
"""The `peft_type` of those that are trained alone, and cannot be merged. All other folders of adapters are LoRA's."""


def _adapted(
    model: LanguageModel, parts: Parts, tokenizer: Tokenizer | None, name: str | None, seed: int
) -> LanguageModel:
    """The model with what the options put on it. `name`: the model's, if files hold it."""
    lora, soft, mlp = parts
    if not any(part.on for part in parts):
        return model
    if adapters.adapted(model) or adapters.find(model, adapters.TrainedPart) is not None:
        raise OperantError(
            "the model already has an adapter, soft prompt or MLP, which is trained further: leave lora.rank, "
            "lora.adapter, soft_prompt.tokens and output_mlp.width out"
        )
    if mlp.on:
        kind = BESIDE["OUTPUT_MLP"]
        return kind.attach(model, kind.first_layers(model, mlp, seed), name)
    if soft.on:
        kind = BESIDE["PROMPT_TUNING"]
        return kind.attach(model, kind.first_vectors(model, soft, tokenizer, seed), name)
    return BESIDE["lora"].adapt(model, lora, base=name or with_defaults(model, LanguageModel).name_or_path, seed=seed)


def _find_base(folder: Path) -> Path:
    base = adapters.base_of(folder)
    try:
        return Path(find_model(base))
    except OperantError as error:
        raise OperantError(
            f"{folder} is an adapter of {base!r} ({error}): write the model's name into its {adapters.CONFIG} "
            f"(base_model_name_or_path), or for LoRA give the model, and lora.adapter={folder}"
        ) from error


def load_reference(name: object, policy: Policy, rule: str | tuple[str, float] = "frozen") -> PolicyCopy | None:
    """The model that KL is measured against: "copy" (of the policy), None, a model's name, a Policy or a PolicyCopy.

    An object is copied unless its weights are frozen: somebody may train it. `rule`: how a copy follows the policy.
    """
    if name is None or isinstance(name, PolicyCopy):
        return name
    if (isinstance(name, str) and name == "copy") or (name.model if isinstance(name, Policy) else name) is policy.model:
        return PolicyCopy(policy, rule)
    alike = replace(policy.options, train_layers=None, train_head=None, chat_template=None)
    reference = load_policy(name, options=alike).to(policy.device)
    sizes = f"the reference has a vocabulary of {reference.vocabulary}, the policy one of {policy.vocabulary}"
    why = "they score the same ids, so both vocabularies must have the same size"
    require(reference.vocabulary == policy.vocabulary, f"{sizes}: {why}")
    if not isinstance(name, str) and any(p.requires_grad for p in reference.parameters()):
        reference = PolicyCopy(reference).policy
    return PolicyCopy(reference, copy=False)


def _with_critic(
    model: LanguageModel,
    tokenizer: Tokenizer | None,
    value: ValueOptions | None,
    folder: Path | None,
    options: ModelOptions,
) -> Policy:
    """The policy around a model, with the critic that `value` asks for: the saved one in `folder`, or a new one."""
    tokenizer = options.templated(tokenizer)
    saved = _critic_of(folder) if folder is not None else None
    if value is None:
        return Policy(model, tokenizer, options=options)
    if saved is not None:
        value = _saved_options(saved, value)
    critic = None if value.critic is None else _critic_network(model, value, saved, options)
    policy = Policy(model, tokenizer, value=value, critic=critic, options=options)
    if saved is None:
        return policy
    owner, path = policy.critic or policy, saved / "head.safetensors"
    require(path.exists(), f"{path} is missing: the critic was saved there; delete {saved} to start with a new one")
    weights, wanted = load_tensors(path), owner.value_head.state_dict()
    if not owner.value_options.actions:  # the Q values of a critic that has some are not asked for
        weights = {name: x for name, x in weights.items() if not name.startswith(("one.", "two."))}
    if odd := ", ".join(unlike(weights, wanted)):
        raise OperantError(f"{path} does not hold the critic's weights ({odd}): delete {saved} for a new one")
    owner.value_head.load_state_dict(weights)
    return policy


def _critic_of(folder: Path) -> Path | None:
    """The folder of the critic beside a model or an exported adapter, if there is one."""
    exported = adapters.is_adapter(folder) and (folder.parent / "config.json").is_file()
    beside = folder.parent if exported else folder
    return next((path for path in (folder / "critic", beside / "critic") if path.is_dir()), None)


def _critic_network(model: LanguageModel, value: ValueOptions, saved: Path | None, options: ModelOptions) -> Policy:
    """The separate network of a critic: the saved one, a copy of the model, or another model."""
    if saved is not None:
        network: Any = load_policy(saved / "network").model  # which may have a soft prompt
    elif value.critic == "copy":
        require(hasattr(model, "save_pretrained"), f"value.critic: no {type(model).__name__} can be saved; drop it")
        network = deepcopy(model, shared(model))
    else:
        network = load_model(Path(find_model(value.critic)))
    if network.config.vocab_size != model.config.vocab_size:
        raise OperantError(
            f"value.critic={value.critic!r} has a vocabulary of {network.config.vocab_size}, the policy one of "
            f"{model.config.vocab_size}: a critic reads the policy's ids, so the two must be the same"
        )
    return Policy(network, value=value, options=replace(options, train_layers=None, train_head=None))


def export(
    policy: Trained, folder: str | Path, *, made_by: Mapping[str, object] | None = None, served: bool = False
) -> Path:
    """Write a transformers folder that `from_pretrained` loads without operant, and the critic in `critic/`.

    An adapter is merged into a copy of the model, and also saved in `adapter/`, in peft's format. With a soft prompt,
    the folder is one of peft's (`soft_prompt.save`), with an MLP it has that alone (`output_mlp.save`). Of a model
    without `save_pretrained`, only the trained weights are written, and what made it: `made_by`, its `name` and
    `options`. served: for a server that loads it again and again: without the critic, and with an output layer of its
    own where that is tied to the embeddings, as vLLM may keep a tied one as it was.
    Raises: OperantError if a weight is NaN or infinite; then nothing is written.
    """
    folder = Path(folder)
    check_finite(dict(policy.named_parameters()), folder)
    if hasattr(policy.model, "save_pretrained"):
        beside = adapters.find(policy.model, adapters.TrainedPart) is None and adapters.is_adapter(folder)
        require(not beside, f"{folder} holds an adapter: choose another folder for the model")
        _save_plain(policy.model, folder, untied=served)
        with atomic_io.explained(folder):
            for name in (OWN, WEIGHTS):  # of an earlier export
                atomic_io.remove(folder / name)
    else:
        atomic_io.mkdir(folder)
        _write_tensors(folder / WEIGHTS, trained_weights(policy.model))
        made = {"name": None, "options": {}, **(made_by or {})}
        atomic_io.write(folder / OWN, json.dumps(made, indent=1, default=str))
    if isinstance(policy, PolicyBase):
        policy.export(folder)
    if adapters.adapted(policy.model):
        BESIDE["lora"].save(policy.model, folder / "adapter")
    if policy.tokenizer is not None:
        with atomic_io.operation("write", folder):
            policy.tokenizer.save_pretrained(folder)
    if ((beside := folder / "critic") / "critic.json").is_file():  # of an earlier export
        atomic_io.remove_tree(beside)
    if policy.has_values and not (served or isinstance(policy, PolicyBase)):
        owner = policy.critic or policy
        atomic_io.mkdir(beside)
        _write_tensors(beside / "head.safetensors", owner.value_head.state_dict())
        atomic_io.write(beside / "critic.json", json.dumps(asdict(owner.value_options), indent=1))
        if policy.critic is not None:
            _save_plain(policy.critic.model, beside / "network")
    return folder


def replace_export(policy: Policy, folder: Path) -> None:
    """Export the language model of a policy for a server, in place of the folder: whole, or not at all."""
    new = folder.with_name(f".{folder.name}.tmp")
    with atomic_io.explained(folder):
        atomic_io.remove_tree(new)
        with atomic_io.operation("write", new):
            export(policy, new, served=True)
        atomic_io.replace_folder(new, folder)


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    from safetensors.torch import save_file

    with atomic_io.operation("write", path):
        save_file({name: x.detach().contiguous() for name, x in tensors.items()}, path)


def _load_own(folder: Path, tokenizer: Tokenizer | None, value: ValueOptions | None, options: ModelOptions) -> Trained:
    """The policy of an export that is no transformers model, made again by what made it.

    Only a name that is built in or installed is used: a folder from elsewhere must not name code to run.
    """
    from operant.options import Factory, arguments

    try:
        made_by = json.loads((folder / OWN).read_text(encoding="utf-8"))
        name, own = made_by["name"], dict(made_by["options"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise OperantError(f"{folder / OWN} is damaged ({error}): export the policy again") from error
    if name not in POLICIES:
        raise OperantError(
            f"{folder} has a policy that {name or 'Python code'} made, which is not installed under that name: make "
            f"it yourself, and load its weights with operant.models.loading.load_own_weights(policy, {str(folder)!r})"
        )
    make = POLICIES.find(name)
    made = make(**arguments(Factory(make), own, f"policy {name}"))
    policy = load_policy(made, tokenizer=tokenizer or load_tokenizer(folder))
    if policy is not made:  # a module
        policy = _with_critic(made, policy.tokenizer, value, folder, options)
    load_own_weights(policy, folder)
    return policy


@torch.no_grad()
def load_own_weights(policy: Policy, folder: str | Path) -> None:
    """Load the trained weights of an export of the same policy, in place."""
    path = Path(folder) / WEIGHTS
    require(path.is_file(), f"{path} is missing: {folder} is no export of a policy that is not transformers' own")
    weights, own = load_tensors(path), trained_weights(policy.model)
    if odd := ", ".join(unlike(weights, own)[:3]):
        raise OperantError(f"{path} has other weights than this policy ({odd}): make it with the same options")
    for name, weight in own.items():
        weight.copy_(weights[name])


def _save_plain(model: LanguageModel, folder: Path, *, untied: bool = False) -> None:
    """Save a model with transformers. An adapter is merged into a copy, and a quantised base is loaded unquantised.

    A soft prompt or an MLP cannot be merged: it is saved alone, the soft prompt in peft's format. untied: an output
    layer that is tied to the embeddings is written, too.
    """
    if (part := adapters.find(model, adapters.TrainedPart)) is not None:
        BESIDE[part.kind].save(model, folder)
        return
    if adapters.adapted(model):
        if with_defaults(model, LanguageModel).is_quantized:
            model = BESIDE["lora"].transplant(model, load_model(Path(find_model(model.name_or_path)), model.dtype))
        model = BESIDE["lora"].merged(model)
    head, state = model.get_output_embeddings(), None
    if untied and head.weight is model.get_input_embeddings().weight:
        name = next(name for name, module in model.named_modules() if module is head)
        state = model.state_dict() | {f"{name}.weight": head.weight.detach().clone()}
    with quietly(), atomic_io.operation("write", folder):
        model.save_pretrained(folder, state_dict=state)
    if state is not None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        atomic_io.write(folder / "config.json", json.dumps(config | {"tie_word_embeddings": False}, indent=1))


def _saved_options(folder: Path, asked: ValueOptions) -> ValueOptions:
    """The options of a saved critic. Only `detach` is taken from the options of the new run."""
    try:
        saved = json.loads((folder / "critic.json").read_text(encoding="utf-8"))
        known = {name: saved[name] for name in ("layers", "init", "critic")}
        found = ValueOptions(**known, detach=asked.detach, actions=asked.actions)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise OperantError(
            f"{folder} is damaged: critic.json cannot be read ({error}); delete {folder} to start with a new one"
        ) from error
    layers, critic = asked.layers not in (ValueOptions.layers, found.layers), asked.critic and not found.critic
    if layers or critic:  # a preset may have set it, so it is no error
        option = f"value.layers={asked.layers}" if layers else f"value.critic={asked.critic}"
        warnings.warn(f"{option} has no effect: {folder} holds a critic; delete it to train a new one", stacklevel=2)
    return found


def saved_action_values(folder: Path) -> ValueOptions | None:
    """The options of the critic in an export, if it has Q values, which can guide what the policy says; else None."""
    path = folder / "critic" / "critic.json"
    if not path.is_file():
        return None
    options = _saved_options(path.parent, ValueOptions())  # a critic of its own, say, which has no Q values
    return replace(options, actions=True) if json.loads(path.read_text(encoding="utf-8")).get("actions") else None


START = "start"
MODELS = {"policy": "policy", "reference": "reference", "lora.adapter": "adapter", "value.critic": "critic"}
"""Options that name a model, and the folder of its copy."""


def copy_models(named: Mapping[str, object], folder: Path, called: Mapping[str, object] | None = None) -> None:
    """Copy the models in plain folders, by option, into `folder/start/`; existing copies stay.

    called: the names under which `copies` is to find them; None: those in `named`.
    The files are copied and not hard-linked, because a program that overwrites the original would change a link too.
    """
    sources = {option: source for option, name in named.items() if (source := hub.found(name)) is not None}
    if not sources or (folder / START).exists():
        return
    temporary = folder / f".{START}.tmp"
    with atomic_io.explained(folder / START, "copy the model that the run starts from to"):
        atomic_io.remove_tree(temporary)
        for option, source in sources.items():
            _copy_model(source, temporary / MODELS[option], alone=option == "lora.adapter")
        names = sorted(str(p.relative_to(temporary).as_posix()) for p in temporary.rglob("*") if p.is_file())
        recorded = {option: str((called or named)[option]) for option in sources}
        manifest.write(temporary, {"schema": 2, "kind": START, "models": recorded}, names)
        for inner in (temporary, *(p for p in temporary.rglob("*") if p.is_dir())):
            atomic_io.sync_folder(inner)
        atomic_io.replace_folder(temporary, folder / START)


def copies(named: Mapping[str, object], folder: Path, warn: Callable[[str], None]) -> dict[str, str]:
    """The copies in `folder/start/` of the models that options name. warn: called for a folder without a copy."""
    start = folder / START
    if not start.is_dir():
        for name in (name for name in named.values() if hub.found(name) is not None):
            warn(f"{folder} has no copy of the initial model in {START}/: {name} is loaded as it is now")
        return {}
    if wrong := manifest.problem(start):
        raise OperantError(
            f"{start}, the copy of the initial model, is damaged: {wrong}; restore it, or delete it to load the "
            "original folder, if that has not changed"
        )
    called = manifest.read(start).get("models")
    called = called if isinstance(called, Mapping) else {}
    return {option: str(start / MODELS[option]) for option, name in named.items() if called.get(option) == str(name)}


def _copy_model(folder: Path, target: Path, *, alone: bool = False) -> None:
    """Copy the files of a model. The base model of an adapter is copied too if it is a folder; a Hub name is pinned.

    alone: leave out the adapter's base model, because it is the policy, which has a copy of its own.
    """
    folder = hub.exported(folder)
    _copy_files(folder.glob, folder, target)
    if (critic := _critic_of(folder)) is not None:
        _copy_files(critic.rglob, critic, target / "critic")
    if adapters.is_adapter(folder) and not alone:
        base = adapters.base_of(folder)
        if (found := hub.found(base)) is not None:
            _copy_model(found, target / adapters.BASE)
        else:
            path, (name, revision) = target / adapters.CONFIG, hub.split(hub.pinned(base))
            content = json.loads(path.read_text(encoding="utf-8"))
            content |= {"base_model_name_or_path": name, "revision": revision}
            atomic_io.write_and_sync(path, json.dumps(content, indent=2))


def _copy_files(listed: Callable[[str], Iterator[Path]], folder: Path, target: Path) -> None:
    atomic_io.mkdir(target)
    for source in (path for pattern in hub.WANTED for path in listed(pattern) if path.is_file()):
        copy = target / source.relative_to(folder)
        atomic_io.mkdir(copy.parent)
        with atomic_io.operation("write", copy):
            shutil.copyfile(source, copy)
        atomic_io.sync(copy)
