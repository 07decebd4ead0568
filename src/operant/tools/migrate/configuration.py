"""A configuration object of TRL 1.16, a `GRPOConfig` or its like, as operant's options.

    with_configuration(GRPOConfig("run", beta=0.1), {"policy": "gpt2", "tasks": rows, "reward": [accuracy, brevity]})

It is read by its class's name and its fields; TRL is not imported.
"""

import dataclasses
import enum
import math
import re
import warnings
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path

from operant import options as named
from operant.algorithms import find
from operant.data.sources import read
from operant.runs.config import config_schema
from operant.storage import hub
from operant.tools.migrate.renaming import ALGORITHMS, DEFAULTS, literal, renamed
from operant.types import OperantError, shown

NO_EFFECT = re.compile(
    "(use_vllm|logging|log_|hub|ddp|fsdp|dataloader|vllm|trackio|save|eval|torch_compile|ds3|skip_memory|include|liger|deepspeed|"
    "use_liger|use_transformers|transformers_continuous|accelerator|parallelism|tf32|num_completions|prediction|batch_eval"
    "|bf16_full|fp16_full|activation|gradient_checkpointing|average_tokens|per_device_eval|push_to|project|run_name|report|"
    "disable_tqdm|remove_unused|length_column|use_cache|cache_impl|pad_to_multiple|torch_empty|optimize_cuda|debug|local_rank|"
    "do_train|do_eval|do_predict|full_determinism|enable_jit|load_best|metric_for|greater_is)"
)
"""Options that say how something is computed, logged or kept, and not what is learned."""


def with_configuration(config: object, given: Mapping[str, object]) -> dict[str, object]:
    """The arguments `given` of `operant.train` with the options of a configuration below them.

    All values that differ from operant's defaults are among them. What says only how something is computed, and has
    no equal here, is named in a warning.
    Raises: OperantError for an object of another class, and for an option without an equal that changes what is
    learned, by its name.
    """
    kind, fields = _kind(config), _fields(config)
    algorithm, usual = ALGORITHMS[kind], _usual(config)
    changed = {name for name in fields if name in usual and fields[name] != usual[name]}
    devices = int(getattr(config, "world_size", 1) or 1)
    usual_there = DEFAULTS[ALGORITHMS[kind]]  # None is then no default
    written = {name: repr(x) for name, x in fields.items() if x is not None or name in usual_there}
    written["per_device_train_batch_size"] = str(fields.get("per_device_train_batch_size", 8) * devices)
    written |= {"bf16": repr(bool(fields.get("bf16"))), "fp16": repr(bool(fields.get("fp16")))}
    found = renamed(written, algorithm)
    light = [sentence for name, sentence in found.lost.items() if name in changed]
    if heavy := [text for name, text in found.lost.items() if name in changed and not NO_EFFECT.match(name)]:
        more = f" (and {len(heavy) - 1} more: {'; '.join(heavy[1:])})" if heavy[1:] else ""
        raise OperantError(f"{kind}Config: {heavy[0]}{more}; leave it out of the configuration")
    if light:
        warnings.warn(f"{kind}Config: these options do nothing here: {'; '.join(light)}", stacklevel=4)
    algorithm, columns = found.algorithm, _columns(given.get("tasks"))
    if algorithm == "sft" and "messages" in columns and not fields.get("assistant_only_loss"):
        found.values["data.loss_on"] = '"all"'  # TRL learns all messages of such rows
    if algorithm == "reward-model" and "margin" in columns:
        found.values["loss.margin"] = "1.0"  # times the difference of the labels, which is the row's margin
    values = {name: literal(code) for name, code in found.values.items()}
    step = fields["per_device_train_batch_size"] * fields.get("gradient_accumulation_steps", 1) * devices
    each = values["batch"] / step * fields.get("num_iterations", 1)  # optimizer steps of a batch
    if (steps := fields["max_steps"] / each) <= 0:
        tasks, epochs = given.get("tasks"), fields["num_train_epochs"]
        if not isinstance(tasks, Sized) or isinstance(tasks, str):
            unknown = f"num_train_epochs={epochs} of tasks whose number is not known ({shown(tasks)})"
            raise OperantError(f"{kind}Config: {unknown}: give max_steps, or the tasks as a list")
        steps = epochs * len(tasks) * values.get("samples", 1) / values["batch"]
    values["steps"] = max(1, math.ceil(steps))
    if (warmup := fields.get("warmup_steps") or 0) >= 1 and fields.get("lr_scheduler_type") != "constant":
        values["optimizer.warmup"] = min(1.0, warmup / (steps * each))
    values = _other_than_ours(values, algorithm)
    grouped = {f"{group}.{name}" for group, own in given.items() if isinstance(own, Mapping) for name in own}
    ours = {n: x for n, x in values.items() if n.rpartition(".")[2] not in given and n not in grouped}
    arguments = {"algorithm": algorithm} | ours | dict(given)
    if fields.get("reward_weights") is not None:
        arguments["reward"] = _weighted(kind, fields["reward_weights"], given.get("reward"))
    if algorithm == "reward-model" and given.get("policy") not in (None, "reward_model"):
        if not isinstance(given["policy"], str):
            how = "give the name or folder of a causal model, which gets its new head here"
            raise OperantError(f"RewardConfig: policy={type(given['policy']).__name__}: {how}")
        arguments |= {"policy": "reward_model", "policy.trunk": given["policy"]}
    return arguments


def _columns(tasks: object) -> set[str]:
    """The names of the first row's fields; empty where they are not known before it is read."""
    first = next(iter(tasks), None) if isinstance(tasks, Sequence) and not isinstance(tasks, str) else None
    if isinstance(tasks, (str, Path)) and hub.found(str(tasks)):
        first = next((row for _, row in read(tasks)[1]), None)
    named = getattr(tasks, "column_names", None)  # of a Dataset
    return {*first} if isinstance(first, Mapping) else {*named} if isinstance(named, list) else set()


def _kind(config: object) -> str:
    names = [made.__name__ for made in type(config).__mro__]
    kind = next((kind for kind in ALGORITHMS for name in names if name == f"{kind}Config"), "")
    if not kind or not dataclasses.is_dataclass(config) or kind == "PPO":
        known = ", ".join(f"{kind}Config" for kind in ALGORITHMS if kind != "PPO")
        raise OperantError(f"args is a {type(config).__name__}: it must be a {known} of TRL 1.16")
    return kind


def _fields(config: object) -> dict[str, object]:
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def _plain(value: object) -> object:
    """A value without enumerations, as `SchedulerType.LINEAR` for "linear"."""
    if isinstance(value, enum.Enum):
        return value.value
    return [_plain(x) for x in value] if isinstance(value, (list, tuple)) else value


def _usual(config: object) -> dict[str, object]:
    """The fields of a configuration that says only where it runs; what its class computes is equal there."""
    same = ("output_dir", "use_cpu", "bf16", "fp16", "per_device_train_batch_size", "gradient_accumulation_steps")
    same += ("generation_batch_size", "num_generations")
    kept = {name: getattr(config, name) for name in same if hasattr(config, name)}
    try:
        return _fields(type(config)(**kept))
    except Exception:  # some other combination that the class refuses: its declared defaults then
        return {field.name: _plain(field.default) for field in dataclasses.fields(config)}


def _other_than_ours(values: Mapping[str, object], algorithm: str) -> dict[str, object]:
    """The values that are not operant's defaults anyway."""
    schema = config_schema(algorithm)
    usual = {f"{g}.{n}" if g else n: x for g, made in schema.items() for n, x in named.defaults(made).items()}
    usual |= named.resolve(schema, dict(find(algorithm).defaults))
    always = ("batch", "steps", "out")
    return {name: x for name, x in values.items() if name in always or name not in usual or usual[name] != x}


def _weighted(kind: str, weights: object, reward: object) -> object:
    """The rewards, each with its weight."""
    rewards = list(reward) if isinstance(reward, Sequence) and not isinstance(reward, str) else [reward]
    if len(rewards) != len(weights) or isinstance(reward, Mapping):
        what = f"reward_weights={shown(weights)} for {shown(reward)}"
        raise OperantError(f"{kind}Config: {what}: give a list of rewards, one a weight")
    summed = dict.fromkeys(rewards, 0.0)
    for one, weight in zip(rewards, weights):
        summed[one] += float(weight)
    return summed
