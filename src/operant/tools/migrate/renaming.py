"""Options of TRL's and trlX's configurations as operant's: names from `other_names.txt`, values as code.

A value stays the code that the script has, as `args.epochs`; only where its meaning differs is it computed here.
"""

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from operant import options
from operant.options import TRLX, names, note, ours
from operant.runs.config import config_schema
from operant.types import OperantError

ALGORITHMS = {kind: kind.lower() for kind in ("GRPO", "RLOO", "DPO", "KTO", "SFT", "PPO")} | {"Reward": "reward-model"}
"""The method of each trainer of TRL, by what its name begins with."""


def _linear(rate: str, **others: str) -> dict[str, str]:
    """TRL's defaults of a method: the schedule is the same in all."""
    return {"learning_rate": rate, "lr_scheduler_type": '"linear"', **others}


DEFAULTS: Mapping[str, Mapping[str, str]] = {
    "grpo": _linear("1e-6", num_generations="8", max_completion_length="512", beta="0.0", loss_type='"dapo"')
    | {"scale_rewards": '"group"'},
    "rloo": _linear("1e-6", num_generations="2", max_completion_length="512", beta="0.05"),
    **dict.fromkeys(("dpo", "kto"), _linear("1e-6", beta="0.1", max_length="1024")),
    "sft": _linear("2e-5", max_length="1024"),
    "reward-model": _linear("1e-4", max_length="1024"),
    "ppo": _linear("3e-6", response_length="53", temperature="0.7", kl_coef="0.05"),
}
"""Values that TRL 1.16 (of PPO 1.10) takes where a script names none, which are written out, as operant's differ."""
IDLE = (("trl", "reward_weights"), ("trlx", "name"))
"""The first stand with the rewards."""
TRUE_THERE = "average_tokens_across_devices disable_dropout shuffle_dataset vllm_importance_sampling_correction".split()
"""Options without an equal that TRL 1.16 sets by default, so that False asks for something."""
SAME_HERE: Mapping[str, object] = {
    "dataset_text_field": "text",
    "disable_dropout": True,
    "do_sample": True,
    "num_layers_unfrozen": -1,
    "importance_sampling_level": "token",
    "multi_objective_aggregation": "sum_then_normalize",
    "shuffle_dataset": True,
    "top_entropy_quantile": 1.0,
    "repetition_penalty": 1.0,
}
"""Values of TRL's options that say what is done here anyway."""
BETA = dict.fromkeys(("grpo", "gspo", "cispo", "sapo"), "kl.loss_coef") | {"dpo": "loss.beta", "kto": "loss.beta"}
BETA["ilql"] = "loss.awac_beta"
"""What `beta` is; of other methods kl.coef."""
SCHEDULES = {"linear": "linear", "cosine": "cosine", "cosine_annealing": "cosine", "constant": "constant"}
SCHEDULES["constant_with_warmup"] = "constant"
GRPO_LOSSES: dict[str, tuple[str, str] | None] = {"grpo": None, "dr_grpo": ("update.per", '"constant"')}
GRPO_LOSSES |= dict.fromkeys(("dapo", "bnpo"), ("update.per", '"token"'))
LOSSES: Mapping[str, Mapping[str, tuple[str, str] | None]] = {
    "grpo": GRPO_LOSSES,
    "gspo": GRPO_LOSSES,  # with a mean over tokens both add a reply's ratio once a token
    "cispo": {"cispo": None},
    "sapo": {"sapo": None},
    "dpo": {
        "sigmoid": None,
        "hinge": ("loss.kind", '"hinge"'),
        "robust": ("loss.kind", '"robust"'),
        "ipo": ("loss.kind", '"ipo-mean"'),
    },
    "kto": {"kto": None},
    "sft": {"nll": None},
}
"""What each `loss_type` is; None: the default here, too."""
COUNTED = frozenset(
    "per_device_train_batch_size gradient_accumulation_steps steps_per_generation generation_batch_size max_steps "
    "num_train_epochs num_iterations warmup_steps warmup_ratio total_episodes bf16 fp16 num_mini_batches adam_beta1 "
    "adam_beta2 reward_weights eval_steps save_steps gen_kwargs total_steps eval_interval checkpoint_interval".split()
)
"""Options whose meaning depends on others, so that one of them cannot be set afterwards."""
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


def literal(code: str) -> object:
    """The value of code that is a literal; UNKNOWN otherwise."""
    try:
        return ast.literal_eval(code)
    except (ValueError, SyntaxError):
        return UNKNOWN


def renamed(given: Mapping[str, str], algorithm: str, system: str = "trl") -> Renamed:
    """The options `given`, by the other system's names, under ours. system: trl, trlx, or transformers, of which no
    defaults are written out."""
    found, left = Renamed(algorithm), dict(given)
    if system != "trlx" and literal(left.get("lr_scheduler_type", "")) == "constant":
        for name in ("warmup_steps", "warmup_ratio"):  # this schedule has no warm-up there
            left.pop(name, None)
    usual = DEFAULTS[algorithm] if system == "trl" else {}
    if written := [name for name in usual if name not in left]:
        left |= {name: usual[name] for name in written}
        found.comments.append(f"where the script named none, these are TRL's defaults: {', '.join(written)}")
    if system == "trlx":
        _length_of_trlx(found, left)
    else:
        _batch(found, left)
        if usual and algorithm == "ppo":
            _ppo(found, left)
        _length(found, left)
        if usual and algorithm == "grpo":
            _variant(found, left)
    if betas := {name: left.pop(name) for name in ("adam_beta1", "adam_beta2") if name in left}:
        found.put("optimizer.betas", f"({betas.get('adam_beta1', '0.9')}, {betas.get('adam_beta2', '0.999')})")
    origin = dict[str, str]()
    for name, code in left.items():
        values, comments = len(found.values), len(found.comments)
        _one(found, name, code, system)
        origin |= dict.fromkeys([*found.values][values:], name)
        if len(found.values) == values and len(found.comments) > comments:
            found.lost[name] = found.comments[-1]
    smooth = system == "trl" and found.algorithm == "dpo" and found.values.get("loss.kind") != '"robust"'
    if smooth and (share := found.values.pop("loss.label_smoothing", "")):
        found.comments.append(f"label_smoothing={share}: TRL 1.16 reads it with other losses alone")
    if found.algorithm == "sft" and "data.loss_on" not in found.values:
        found.comments.append("rows with messages are learnt whole there: data.loss_on='all'")
    if found.algorithm == "reward-model" and system != "trlx":
        found.comments.append("rows with a margin of their own: loss.margin=1 asks for it")
    known = {*names(config_schema(found.algorithm)), "out", "resume"}
    for name in [name for name in found.values if name not in known]:
        theirs = origin.get(name, name)
        found.say(theirs, found.values.pop(name), f"{found.algorithm} has no such option")
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


def _variant(found: Renamed, left: dict[str, str]) -> None:
    """The method that a `GRPOConfig` asks for by its loss or by the level of its ratio."""
    loss = literal(left.get("loss_type", ""))
    loss = loss[0] if isinstance(loss, list) and len(loss) == 1 else loss
    if literal(left.get("importance_sampling_level", "")) == "sequence":
        if isinstance(loss, str) and loss in GRPO_LOSSES:
            found.algorithm = "gspo"
            left.pop("importance_sampling_level")
    elif loss in ("cispo", "sapo"):
        found.algorithm = str(loss)
    if found.algorithm != "grpo":  # whose defaults are other ones here
        epsilon, high = left.pop("epsilon", "0.2"), left.pop("epsilon_high", "None")
        high = epsilon if high == "None" else high
        bounds = {"gspo": {"loss.clip": epsilon, "loss.clip_high": high}, "cispo": {"loss.high": high}}
        found.values |= bounds.get(found.algorithm, {})
        left.setdefault("use_bias_correction_kl", "True")
    for theirs, name in (("sapo_temperature_pos", "temperature"), ("sapo_temperature_neg", "temperature_negative")):
        if found.algorithm == "sapo" and theirs in left:
            found.put(f"loss.{name}", left.pop(theirs))


def _ppo(found: Renamed, left: dict[str, str]) -> None:
    """What the later `PPOTrainer` counts in minibatches and episodes, and how its replies end."""
    batch, parts = found.values["batch"], left.pop("num_mini_batches", "1")
    episodes = left.pop("total_episodes", "None")
    if parts != "1":
        found.put("update.minibatch", f"{bracketed(batch)} // {bracketed(parts)}")
        found.say("num_mini_batches", parts, "parts of the batch; before TRL 0.19 the batch was that many times larger")
    for name in ("sft_model_path", "reward_model_path", "max_steps"):
        left.pop(name, None)  # the first two stand in the call; the trainer never reads the third
    if episodes != "None":
        left["max_steps"] = f"-(-{bracketed(episodes)} // {bracketed(batch)})"
    penalty = left.pop("missing_eos_penalty", "None")
    if penalty != "None":
        found.values |= {"learner.on_length": '"penalty"', "score.missing_stop_mode": '"add"'}
        found.put("score.missing_stop", f"-{bracketed(penalty)}")
    found.put("kl.reward_gradient", '"score"')
    token, stop = left.pop("stop_token", "None"), left.pop("stop_token_id", "None")
    if stop != "None":
        found.put("sampling.stop_tokens", f"[{stop}]")
    elif literal(token) is None:
        found.comments.append("stop_token: without one all replies have the full length there: sampling.fixed_length")


def _times(a: str, b: str) -> str:
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
    per_step = "" if found.algorithm == "ppo" else found.values.get("update.minibatch", "")
    whole = _times(found.values["batch"] if per_step else "1", left.get("num_iterations", "1"))

    def ours_of(count: str) -> str:
        """Our steps for a number of optimizer steps."""
        done = f"{bracketed(count)} * {bracketed(per_step)}" if per_step else bracketed(count)
        numbers = [literal(code) for code in (count, per_step or "1", whole)]
        if all(isinstance(number, int) for number in numbers):
            return str(max(1, numbers[0] * numbers[1] // numbers[2]))
        return count if whole == "1" else f"max(1, {done} // {bracketed(whole)})"

    if literal(steps) == -1:
        found.epochs = bracketed(epochs)
    else:
        found.put("steps", ours_of(steps))
    for name in ("eval_steps", "save_steps"):
        if isinstance(count := literal(left.get(name, "")), int) and count > 0:
            found.put(ours(name)[0], ours_of(left.pop(name)))
    if warmup and warmup != "0":
        share = literal(warmup)
        if isinstance(share, float) and share < 1:
            found.put("optimizer.warmup", warmup)
        elif not found.epochs:
            whole = isinstance(share, int) and isinstance(literal(steps), int)
            code = repr(share / literal(steps)) if whole else f"{bracketed(warmup)} / {bracketed(steps)}"
            found.put("optimizer.warmup", code)
        else:
            found.say("warmup_steps", warmup)


def _length_of_trlx(found: Renamed, left: dict[str, str]) -> None:
    """What trlX counts in optimizer steps, where the optimizer steps of a step of PPO are known."""
    last, end = (literal(left.get(name, "")) for name in ("T_max", "total_steps"))
    wide = isinstance(last, (int, float)) and last > 2 * (end if isinstance(end, int) else 1e8)
    if wide and "cosine" in left.get("lr_scheduler_type", ""):
        left |= {"lr_scheduler_type": '"constant"'}  # so wide a cosine has hardly begun when the run ends
        for name in {"T_max", "eta_min"} & left.keys():
            del left[name]
    usual = {"num_rollouts": "", "batch_size": "", "ppo_epochs": "4"}
    sizes = [literal(left.get(name, value)) for name, value in usual.items()]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return
    replies, minibatch, passes = sizes
    each = passes * -(-replies // minibatch)
    names_of_steps = ("total_steps", "eval_interval", "checkpoint_interval")
    counted = {name: value for name in names_of_steps if isinstance(value := literal(left.get(name, "")), int)}
    for name, value in counted.items():
        found.put(ours(name)[0], str(max(1, -(-value // each) if name == "total_steps" else value // each)))
        del left[name]
    if isinstance(epochs := literal(left.get("epochs", "")), int):  # each is a batch of replies, as a step is here
        found.values["steps"] = str(min(epochs, int(found.values.get("steps", epochs))))
        del left["epochs"]
    if counted:
        found.comments.append(f"{', '.join(counted)}: in optimizer steps there, {each} of which are one step here")


def _one(found: Renamed, name: str, code: str, system: str) -> None:
    value, algorithm = literal(code), found.algorithm
    match name:
        case _ if value is None or (system, name) in IDLE or (name in ("bf16", "fp16") and value is False):
            return
        case _ if system != "transformers" and name in SAME_HERE and value == SAME_HERE[name]:
            return
        case "use_bias_correction_kl" if isinstance(value, bool):
            found.put("kl.loss_kind", '"k3"' if value else '"plain_k3"')
        case "truncation_side":
            found.say(name, code, f"of prompts it is data.prompt_keeps={'end' if value == 'left' else 'start'} here")
        case "use_cpu" if value is True:
            found.put("learner.device", '"cpu"')
        case "shuffle_dataset" if value is False:
            found.say(name, code, "the order of the tasks is random here")
        case "beta":
            found.put(BETA.get(algorithm, "kl.coef"), code)
        case "loss_type":
            one = value[0] if isinstance(value, list) and len(value) == 1 else value
            kinds = LOSSES.get(algorithm, {})
            if not isinstance(one, str) or one not in kinds:
                found.say(name, code)
            elif kinds[one] is not None:
                found.put(*kinds[one])
        case "scale_rewards" if value in ("group", True):
            found.put("advantage.deviation", '"sample"')
        case "scale_rewards" if value in ("none", False):
            found.put("advantage.scale", "False")
        case "mask_truncated_completions" if value is True:
            found.put("learner.on_length", '"drop"')
        case "scale_rewards" | "use_vllm" | "mask_truncated_completions":
            if value is not False:
                found.say(name, code)
        case "bf16" | "fp16" if value is True:
            found.put("model.precision", '"bfloat16"')
        case "cast_lm_head_to_fp32" if isinstance(value, bool):
            found.put("model.head_precision", '"float32"' if value else '"same"')
        case "report_to":
            listed = [value] if isinstance(value, str) else value
            if not isinstance(listed, list | tuple) or not {*listed} <= {"none", "wandb", "tensorboard", "trackio"}:
                found.say(name, code)
            elif {*listed} - {"none"}:
                found.put("trackers", json.dumps(",".join(x for x in listed if x != "none")))
        case "lr_scheduler_type" if str(value) in SCHEDULES:
            found.values["optimizer.schedule"] = json.dumps(SCHEDULES[str(value)])
        case "optim" if kind := next(filter(str(value).startswith, ("adamw", "rmsprop", "sgd")), ""):
            found.values["optimizer.kind"] = json.dumps(kind)
            found.values |= {"optimizer.states": '"8bit"'} if "8bit" in str(value) else {}
        case "lr_scheduler_type" | "optim":  # another one has no equal
            found.say(name, code)
        case "packing" if isinstance(value, bool):
            found.values |= {"model.packing": '"on"'} if value else {}  # ours is exact, and packs by itself
        case "assistant_only_loss" if isinstance(value, bool):
            found.values |= {"data.loss_on": '"replies"'} if value else {}
        case "completion_only_loss" if isinstance(value, bool):
            found.put("data.loss_on", '"replies"' if value else '"all"')
        case "target" if system == "trlx":
            found.values |= {"kl.control": '"adaptive"', "kl.target": code}
        case "eval_steps" | "save_steps" if isinstance(value, float) and value < 1:
            found.say(name, code, "a share of the run there; give a number of steps")
        case "scale_reward" if system == "trlx" and value == "ref":
            found.say(name, code, "divides by the deviation of the start's scores; score.scale by that of all so far")
        case "scale_reward" if system == "trlx" and value is not UNKNOWN:
            found.values |= {"score.scale": "True"} if value and value != "ignored" else {}
        case "eval_strategy" | "evaluation_strategy" | "save_strategy":
            if value not in ("no", "steps"):
                found.say(name, code, "give the number of steps: evaluate_every, checkpoint_every")
        case "run_name" if "out" in found.values:
            found.say(name, code, "the run folder, out, is the name of a run")
        case "reward_clip_range" if isinstance(value, list | tuple) and len(value) == 2 and value[0] == -value[1]:
            found.put("score.clip", str(value[1]))
        case "top_k" | "top_p" | "min_p" if system == "trl" and value not in (0, 1, 1.0):
            found.put(f"sampling.{name}", code)
            found.put("sampling.truncation", '"stored"')
        case "batch_size" if system == "trlx":
            found.put("update.minibatch", code)
        case "epochs" if system == "trlx":
            found.say(name, code, "passes over the tasks there; steps says how long a run is")
        case _ if value is not False or any(ours(name)) or name in TRUE_THERE:
            _by_table(found, name, code, system)


def _by_table(found: Renamed, name: str, code: str, system: str) -> None:
    """Rename an option by the table of names; else by its own name, if one option here has it."""
    listed = TRLX[name].ours.split(", ") if system == "trlx" and name in TRLX else ours(name)
    said = TRLX[name].note.replace("`", "") if system == "trlx" and name in TRLX else note(name)
    if len(listed) == 1 and listed[0]:
        found.put(listed[0], code)
        # How "none" is written says nothing of a value, and whose option it is is known.
        if said and not said.startswith("none") and said != f"of {found.algorithm}":
            found.say(name, code, f"{listed[0]}: {said}")
    elif listed:
        every = f"here it is {' or '.join(listed)}" if listed[0] else ""
        found.say(name, code, "; ".join(filter(None, (every, said))))
    else:
        try:
            (full,) = options.resolve(config_schema(found.algorithm), {name: code})
            found.put(full, code)
        except (OperantError, ValueError):
            found.say(name, code)
