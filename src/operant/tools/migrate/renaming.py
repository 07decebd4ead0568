"""Options of TRL's and trlX's configurations as operant's: names from `other_names.txt`, values as code.

A value stays the code that the script has, as `args.epochs`; only where its meaning differs is it computed here.
"""

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from operant import options
from operant.options import TRLX, names, note, ours
from operant.runs.config import config_schema
from operant.types import OperantError

ALGORITHMS = {"GRPO": "grpo", "RLOO": "rloo", "DPO": "dpo", "SFT": "sft", "Reward": "reward-model", "PPO": "ppo"}
"""The method of each trainer of TRL, by what its name begins with."""
DEFAULTS: Mapping[str, Mapping[str, str]] = {
    "grpo": {
        "learning_rate": "1e-6",
        "lr_scheduler_type": '"linear"',
        "num_generations": "8",
        "max_completion_length": "512",
        "beta": "0.0",
        "loss_type": '"dapo"',
        "scale_rewards": '"group"',
    },
    "rloo": {
        "learning_rate": "1e-6",
        "lr_scheduler_type": '"linear"',
        "num_generations": "2",
        "max_completion_length": "512",
        "beta": "0.05",
    },
    "dpo": {"learning_rate": "1e-6", "lr_scheduler_type": '"linear"', "beta": "0.1", "max_length": "1024"},
    "sft": {"learning_rate": "2e-5", "lr_scheduler_type": '"linear"', "max_length": "1024"},
    "reward-model": {"learning_rate": "1e-4", "lr_scheduler_type": '"linear"', "max_length": "1024"},
    "ppo": {},
}
"""Values that TRL 1.16 takes where a script names none, which are written out, as operant's differ."""
IDLE = (("trl", "reward_weights"), ("trlx", "name"))
"""The first stand with the rewards."""
TRUE_THERE = {
    "average_tokens_across_devices",
    "disable_dropout",
    "shuffle_dataset",
    "vllm_importance_sampling_correction",
}
"""Options without an equal that TRL 1.16 sets by default, so that False asks for something."""
SAME_HERE: Mapping[str, object] = {
    "disable_dropout": True,
    "importance_sampling_level": "token",
    "multi_objective_aggregation": "sum_then_normalize",
    "shuffle_dataset": True,
    "top_entropy_quantile": 1.0,
    "repetition_penalty": 1.0,
}
"""Values of TRL's options that say what is done here anyway."""
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
LOSSES: Mapping[str, Mapping[str, tuple[str, str] | None]] = {
    "grpo": {
        "grpo": None,
        "dapo": ("update.per", '"token"'),
        "bnpo": ("update.per", '"token"'),
        "dr_grpo": ("update.per", '"constant"'),
    },
    "dpo": {"sigmoid": None, "ipo": ("loss.kind", '"ipo-mean"')},
    "sft": {"nll": None},
}
"""What each `loss_type` is; None: the default here, too."""
UNKNOWN = object()


@dataclass
class Renamed:
    """The options of a configuration under operant's names."""

    algorithm: str
    values: dict[str, str] = field(default_factory=dict)
    """Our options, each with the code of its value."""
    comments: list[str] = field(default_factory=list)
    """What has no equal, or another meaning."""
    lost: dict[str, str] = field(default_factory=dict)
    """The comments on options that nothing here stands for, by TRL's name."""
    epochs: str = ""
    """Code of the passes over the tasks, which `steps` replaces; empty: the steps are known."""

    def put(self, name: str, code: str) -> None:
        self.values.setdefault(name, code)

    def say(self, name: str, code: str, why: str = "") -> None:
        """Comment on an option that is left out, or has another meaning."""
        shown = f"{name}={code}" if len(code) < 50 and "\n" not in code else name
        self.comments.append(f"{shown}: {why or note(name) or 'there is no such option here; see docs/options.md'}")


def literal(code: str) -> Any:
    """The value of code that is a literal; UNKNOWN otherwise."""
    try:
        return ast.literal_eval(code)
    except (ValueError, SyntaxError):
        return UNKNOWN


def renamed(given: Mapping[str, str], algorithm: str, system: str = "trl") -> Renamed:
    """The options `given`, by the other system's names, under ours. system: trl, trlx, or transformers, of which no
    defaults are written out.
    """
    found, left = Renamed(algorithm), dict(given)
    if system == "transformers":
        _batch(found, left)
        _length(found, left)
    elif system == "trl":
        written = [name for name in DEFAULTS[algorithm] if name not in left]
        left |= {name: DEFAULTS[algorithm][name] for name in written}
        if written:
            found.comments.append(f"where the script named none, these are TRL's defaults: {', '.join(written)}")
        _batch(found, left)
        _length(found, left)
    betas = {name: left.pop(name) for name in ("adam_beta1", "adam_beta2") if name in left}
    if betas:
        found.put("optimizer.betas", f"({betas.get('adam_beta1', '0.9')}, {betas.get('adam_beta2', '0.999')})")
    origin = dict[str, str]()
    for name, code in left.items():
        values, comments = len(found.values), len(found.comments)
        _one(found, name, code, system)
        origin |= dict.fromkeys([*found.values][values:], name)
        if len(found.values) == values and len(found.comments) > comments:
            found.lost[name] = found.comments[-1]
    known = {*names(config_schema(algorithm)), "out", "resume"}
    for name in [name for name in found.values if name not in known]:
        theirs = origin.get(name, name)
        found.say(theirs, found.values.pop(name), f"{algorithm} has no such option")
        found.lost[theirs] = found.comments[-1]
    return found


def _batch(found: Renamed, left: dict[str, str]) -> None:
    """TRL's batch of a device, its accumulation and its reuse, as replies (or rows) of a step."""
    device = left.pop("per_device_train_batch_size", "8")
    accumulation = left.pop("gradient_accumulation_steps", "1")
    several = left.pop("steps_per_generation", "")
    optimizer_step = _times(device, accumulation)
    batch = left.pop("generation_batch_size", "") or (_times(device, several) if several else optimizer_step)
    found.put("batch", batch)
    if batch != optimizer_step:
        found.put("update.minibatch", optimizer_step)
    found.comments.append("batch: of one process; with N processes of torchrun, N times as many, as in TRL")


def _times(a: str, b: str) -> str:
    """Code of a product."""
    x, y = literal(a), literal(b)
    if isinstance(x, int) and isinstance(y, int):
        return str(x * y)
    return a if y == 1 else b if x == 1 else f"{bracketed(a)} * {bracketed(b)}"


def bracketed(code: str) -> str:
    """Code in brackets, unless it is a name or a number."""
    return code if code.replace(".", "").replace("_", "").isalnum() else f"({code})"


def _length(found: Renamed, left: dict[str, str]) -> None:
    """TRL's epochs, steps and warm-up."""
    steps, epochs = left.pop("max_steps", "-1"), left.pop("num_train_epochs", "3")
    warmup = left.pop("warmup_steps", "")
    if literal(steps) == -1:
        found.epochs = epochs
    else:
        minibatch = found.values.get("update.minibatch")
        batch = bracketed(found.values["batch"])
        found.put("steps", f"max(1, {bracketed(steps)} * {bracketed(minibatch)} // {batch})" if minibatch else steps)
        if "num_iterations" in left:
            found.say("max_steps", steps, "optimizer steps there: divide steps by num_iterations, too")
    if warmup and warmup != "0":
        share = literal(warmup)
        if isinstance(share, float) and share < 1:
            found.put("optimizer.warmup", warmup)
        elif not found.epochs:
            found.put("optimizer.warmup", f"{warmup} / {steps}")
        else:
            found.say("warmup_steps", warmup)


def _one(found: Renamed, name: str, code: str, system: str) -> None:
    """Rename one option."""
    value, algorithm = literal(code), found.algorithm
    match name:
        case _ if value is None:
            return
        case _ if system == "trl" and name in SAME_HERE and value == SAME_HERE[name]:
            return
        case _ if (system, name) in IDLE or (name in ("bf16", "fp16") and value is False):
            return
        case "use_bias_correction_kl" if isinstance(value, bool):
            found.put("kl.loss_kind", '"k3"' if value else '"plain_k3"')
        case "use_cpu" if value is True:
            found.put("learner.device", '"cpu"')
        case "shuffle_dataset" if value is False:
            found.say(name, code, "the order of the tasks is random here")
        case "beta":
            found.put({"grpo": "kl.loss_coef", "dpo": "loss.beta", "kto": "loss.beta"}.get(algorithm, "kl.coef"), code)
        case "loss_type":
            one = value[0] if isinstance(value, list) and len(value) == 1 else value
            kinds = LOSSES.get(algorithm, {})
            if not isinstance(one, str) or one not in kinds:
                found.say(name, code)
            elif kinds[one] is not None:
                found.put(*kinds[one])
        case "scale_rewards":
            if value in ("group", True):
                found.put("advantage.deviation", '"sample"')
            elif value in ("none", False):
                found.put("advantage.scale", "False")
            else:
                found.say(name, code)
        case "bf16" | "fp16" if value is True:
            found.put("model.precision", '"bfloat16"')
        case "report_to":
            listed = [value] if isinstance(value, str) else value
            if not isinstance(listed, list | tuple) or not {*listed} <= {"none", "wandb", "tensorboard", "trackio"}:
                found.say(name, code)
            elif {*listed} - {"none"}:
                found.put("trackers", json.dumps(",".join(x for x in listed if x != "none")))
        case "lr_scheduler_type":
            if value in SCHEDULES:
                found.put("optimizer.schedule", json.dumps(SCHEDULES[str(value)]))
            else:
                found.say(name, code)
        case "optim":
            kind = next((k for k in ("adamw", "rmsprop", "sgd") if str(value).startswith(k)), "")
            if value is UNKNOWN or not kind:
                found.say(name, code)
                return
            found.put("optimizer.kind", json.dumps(kind))
            if "8bit" in str(value):
                found.put("optimizer.states", '"8bit"')
        case "packing" if isinstance(value, bool):
            found.values |= {"model.packing": '"on"'} if value else {}  # ours is exact, and packs by itself
        case "completion_only_loss" if isinstance(value, bool):
            found.put("data.loss_on", '"replies"' if value else '"all"')
        case "scale_reward" if system == "trlx" and value is not UNKNOWN:
            found.values |= {"score.scale": "True"} if value and value != "ignored" else {}
        case "use_vllm":
            if value is not False:
                found.say(name, code)
        case "eval_strategy" | "evaluation_strategy" | "save_strategy":
            if value not in ("no", "steps"):
                found.say(name, code, "give the number of steps: evaluate_every, checkpoint_every")
        case "run_name" if "out" in found.values:
            found.say(name, code, "the run folder, out, is the name of a run")
        case "mask_truncated_completions":
            if value is True:
                found.put("learner.on_length", '"drop"')
            elif value is UNKNOWN:
                found.say(name, code)
        case "reward_clip_range" if isinstance(value, list | tuple) and len(value) == 2 and value[0] == -value[1]:
            found.put("score.clip", str(value[1]))
        case "top_k" | "top_p" | "min_p" if system == "trl" and value not in (0, 1, 1.0):
            found.put(f"sampling.{name}", code)
            found.put("sampling.truncation", '"stored"')
        case "batch_size" if system == "trlx":
            found.put("update.minibatch", code)
        case "epochs" if system == "trlx":
            found.say(name, code, "passes over the tasks there; steps says how long a run is")
        case _ if value is False and not any(ours(name)) and name not in TRUE_THERE:
            return
        case _:
            _by_table(found, name, code, system)


def _by_table(found: Renamed, name: str, code: str, system: str) -> None:
    """Rename an option by the table of names; else by its own name, if one option here has it."""
    listed = TRLX[name].ours.split(", ") if system == "trlx" and name in TRLX else ours(name)
    said = TRLX[name].note.replace("`", "") if system == "trlx" and name in TRLX else note(name)
    schema = config_schema(found.algorithm)
    if len(listed) == 1 and listed[0]:
        found.put(listed[0], code)
        if said:
            found.say(name, code, f"{listed[0]}: {said}")
        return
    if listed:
        every = f"here it is {' or '.join(listed)}" if listed[0] else ""
        found.say(name, code, "; ".join(filter(None, (every, said))))
        return
    try:
        (full,) = options.resolve(schema, {name: code})
        found.put(full, code)
    except (OperantError, ValueError):
        found.say(name, code)
