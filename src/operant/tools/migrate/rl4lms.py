"""The recipe for a YAML configuration of RL4LMs. Its numbers become replies and options as those of the presets did."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from operant.algorithms.rl4lms import Row
from operant.options import names, parse
from operant.runs.config import config_schema
from operant.tools.migrate.renaming import literal, renamed
from operant.types import OperantError, of_user, shown

RECIPES = {"imdb": "imdb", "imdb_seq2seq": "imdb", "commongen": "commongen", "cnn_daily_mail": "summarize"}
RECIPES |= {"totto": "totto", "narrative_qa": "narrativeqa", "daily_dialog": "dialog", "crd3": "dialog"}
RECIPES |= dict.fromkeys("wmt16 wmt14_processed_en_de wmt16newsonly iwslt2017en_de".split(), "translate")
"""The form of the rows of each data pool."""
SAME = "increasing_numbers meteor bleu chrf ter cider rouge parent dates diversity".split()
REWARDS = dict(zip(SAME, SAME)) | {"sentences_with_dates": "dates", "sacre_bleu": "bleu", "bert_score": "bertscore"}
REWARDS |= {"rouge_combined": "rouge", "rouge_l_max": "rouge:rougeL", "intent_accuracy": "intent"}
REWARDS["common_gen_repeat_penalty"] = "repeat_penalty"
"""Rewards and metrics by their names there (docs/other-names.md)."""
READ = {
    "alg.args": "n_steps batch_size verbose learning_rate n_epochs ent_coef vf_coef gamma gae_lambda clip_range "
    "clip_range_vf max_grad_norm target_kl cg_max_steps cg_damping n_critic_updates sub_sampling_factor",
    "alg.policy.args": "model_name apply_model_parallel prompt_truncation_side generation_kwargs min_tokens_to_keep "
    "top_mask mask_type target_update_iterations",
    "alg.policy.args.generation_kwargs": "do_sample min_length max_new_tokens top_k top_p temperature",
    "env.args": "max_prompt_length prompt_truncation_side max_episode_length",
}
"""What is read of each mapping; the rest is named in a comment."""
RATES = {"a2c": (7e-4, 5), "trpo": (1e-3, 2048)}
"""Learning rate and steps there, where the file names none."""
Part = Callable[..., Any]


def recipe(text: str, path: Path) -> str:
    """The recipe as YAML with comments. Raises: OperantError for a file that is no configuration of RL4LMs."""
    given = parse(text, str(path))
    if not isinstance(given, Mapping) or not all(isinstance(given.get(part), Mapping) for part in ("alg", "datapool")):
        raise OperantError(f"{path} is no configuration of RL4LMs: it has no alg and datapool; nothing to move")

    def part(*names: str, default: object = None) -> Any:
        """What stands in nested mappings, by the names on the way."""
        found: Any = given
        for name in names:
            found = found.get(name) if isinstance(found, Mapping) else None
        return default if found is None else found

    method = str(part("alg", "id", default="ppo"))
    if method not in ("ppo", "nlpo", "a2c", "trpo", "supervised"):
        raise OperantError(f"{path}: alg.id={shown(method)}; RL4LMs has ppo, nlpo, a2c, trpo and supervised")
    with of_user(f"{path} has a value of another kind than RL4LMs reads: "):
        return _recipe(part, method, path.name)


def _recipe(part: Part, method: str, name: str) -> str:
    comments: list[str] = []
    model = part("alg", "policy", "args", "model_name") or part("alg", "model_name") or "MODEL"
    options: dict[str, Any] = {"policy": model}
    pool = str(part("datapool", "id"))
    if pool in RECIPES:
        options |= {"form": RECIPES[pool], "tasks": "FILE"}
        comments.append(f"tasks: the rows of {pool}, as docs/tasks.md names them; evaluate: its held-out rows")
    else:
        options["tasks"] = "FILE"
        comments.append(f"datapool {pool}: name a file of tasks; docs/tasks.md")
    if part("datapool", "args"):
        comments.append(f"datapool.args {part('datapool', 'args')}: the options form.* and data.* of docs/tasks.md")
    if method == "supervised":
        numbers = {str(k): repr(v) for k, v in (part("alg", "training_args") or {}).items()}
        found = renamed(numbers, "sft", "transformers")
        options |= {"algorithm": "sft"} | {k: literal(v) for k, v in found.values.items()}
        comments += found.comments
        comments += [f"steps: {found.epochs} passes are {found.epochs} * tasks / batch"] if found.epochs else []
    else:
        options |= _reward(part, comments) | _numbers(part, method)
        for where, read in READ.items():
            if left := [name for name in part(*where.split("."), default={}) if name not in read.split()]:
                comments.append(f"{where} {', '.join(left)}: not converted; docs/other-names.md")
        if part("alg", "policy", "args", "generation_kwargs", "do_sample") is False:
            comments.append("do_sample=false, the likeliest reply alone: here replies are drawn")
        comments.append("its rewards and KL target are per token; batch counts replies (docs/other-names.md)")
    options |= _evaluation(part, comments)
    if length := part("env", "args", "max_prompt_length"):
        options["data.prompt_tokens"] = length
        cut = part("env", "args", "prompt_truncation_side", default="left")  # which overrules the tokenizer's
        options["data.prompt_keeps"] = "end" if cut == "left" else "start"
    head = f"# From {name} of RL4LMs; `operant train FILE` runs it once the tasks are named.\n"
    head += "".join(f"# operant: {comment}\n" for comment in comments)
    return head + yaml.safe_dump(options, sort_keys=False, allow_unicode=True)


def _reward(part: Part, comments: list[str]) -> dict[str, str]:
    name, arguments = str(part("reward_fn", "id")), part("reward_fn", "args", default={})
    if name.startswith("learned") and isinstance(arguments, Mapping) and "model_name" in arguments:
        if "label_ix" in arguments:
            comments.append(f"reward: label_ix={arguments['label_ix']} is --reward.label of the classifier")
        return {"reward": f"classifier:{arguments['model_name']}"}
    if name == "rouge" and isinstance(arguments, Mapping) and "rouge_type" in arguments:
        return {"reward": f"rouge:{arguments['rouge_type']}"}
    if arguments:
        comments.append(f"reward_fn.args {arguments}: see docs/other-names.md, Rewards and metrics")
    if name not in REWARDS:
        comments.append(f"reward_fn {name} has no equal: name a reward (docs/rewards.md)")
    return {"reward": REWARDS.get(name, "REWARD")}


def _numbers(part: Part, method: str) -> dict[str, object]:
    """The numbers of the method, by the rules of the presets."""
    own = part("alg", "args", default={})
    generation = part("alg", "policy", "args", "generation_kwargs", default={})
    length = int(generation.get("max_new_tokens") or part("env", "args", "max_episode_length", default=48))
    rate, count = RATES.get(method, (3e-4, 2048))
    tokens = int(own.get("n_steps", count)) * int(part("env", "n_envs", default=1))
    mask = None
    if method == "nlpo":
        policy = part("alg", "policy", "args", default={})
        mask = (float(policy.get("top_mask", 0.9)), int(policy.get("target_update_iterations", 20)))
    rate = float(own.get("learning_rate", rate))
    price = float(part("alg", "kl_div", "coeff", default=0.0))
    target = float(part("alg", "kl_div", "target_kl", default=1.0))
    steps = int(part("train_evaluation", "n_iters", default=100))
    shortest, top_k = (int(generation.get(name, 0)) for name in ("min_length", "top_k"))
    options = Row(tokens, length, rate, price, target, steps, shortest, top_k, mask).options(method)
    if part("alg", "kl_div", "target_kl") is None:  # the price is fixed
        options = {name: value for name, value in options.items() if name not in ("kl.control", "kl.target")}
    options |= {"score.normalise": True} if part("alg", "kl_div", "norm_reward") else {}
    least = part("alg", "policy", "args", "min_tokens_to_keep", default=100)
    if by_k := method == "nlpo" and policy.get("mask_type") == "learned_top_k":
        options["sampling.top_k"] = int(options.pop("sampling.top_p"))
    if "update.epochs" in options:
        options["update.epochs"] = own.get("n_epochs", 10)
    if "sub_sampling_factor" in own and method == "trpo":
        options["update.fisher_share"] = 1 / own["sub_sampling_factor"]
    options |= {"sampling.top_p_least": least} if method == "nlpo" and not by_k else {}
    if "batch_size" in own and "update.minibatch" in options:
        options["update.minibatch"] = max(1, round(own["batch_size"] / length))
    known = names(config_schema(method))
    for given, theirs, ours, factor in (
        (own, "gamma", "advantage.gamma", 1),
        (own, "gae_lambda", "advantage.lam", 1),
        (own, "ent_coef", "loss.entropy_coef", 1),
        (own, "clip_range", "loss.clip", 1),
        (own, "clip_range_vf", "loss.value_clip", 1),
        (own, "max_grad_norm", "optimizer.max_grad_norm", 1),
        (own, "target_kl", "update.target_kl", 1.5),  # it stops at 1.5 times that
        (own, "cg_max_steps", "update.solver_steps", 1),
        (own, "cg_damping", "update.damping", 1),
        (own, "n_critic_updates", "update.critic_epochs", 1),
        (generation, "temperature", "sampling.temperature", 1),
        (generation, "top_p", "sampling.top_p", 1),
    ):
        mask = method == "nlpo" and ours == "sampling.top_p"  # which top_mask has given
        if isinstance(given.get(theirs), (int, float)) and ours in known and not mask:
            options[ours] = given[theirs] * factor
    if "vf_coef" in own and "loss.value_coef" in options:
        options["loss.value_coef"] = 2 * own["vf_coef"]  # their squared error is not halved
    return options


def _evaluation(part: Part, comments: list[str]) -> dict[str, object]:
    """Evaluation during training, and its metrics."""
    options: dict[str, object] = {}
    for theirs, ours in (("eval_every", "evaluate_every"), ("save_every", "checkpoint_every")):
        if isinstance(number := part("train_evaluation", theirs), int):
            options[ours] = number
    drawn = part("train_evaluation", "generation_kwargs", default={})
    sampling = {name: drawn[name] for name in ("temperature", "top_k", "top_p") if name in drawn}
    trained = part("alg", "policy", "args", "generation_kwargs", default={}).get("max_new_tokens")
    sampling |= {"top_k": 1} if drawn.get("do_sample") is False and drawn.get("num_beams", 1) == 1 else {}
    sampling |= {"max_tokens": n} if (n := drawn.get("max_new_tokens", trained)) != trained else {}
    options |= {"evaluation.sampling": sampling} if sampling else {}
    options |= {"evaluation.beams": beams} if (beams := drawn.get("num_beams", 1)) > 1 else {}
    read = ("do_sample", "temperature", "top_k", "top_p", "num_beams", "max_new_tokens")
    if left := [name for name in drawn if name not in read]:
        comments.append(f"train_evaluation.generation_kwargs {', '.join(left)}: evaluation.sampling, docs/options.md")
    listed = [str(m.get("id")) for m in part("train_evaluation", "metrics", default=[]) if isinstance(m, Mapping)]
    if known := [REWARDS[name] for name in listed if name in REWARDS]:
        options["evaluation.metrics"] = ",".join(known)
    if others := [name for name in listed if name not in REWARDS and not name.startswith("learned")]:
        comments.append(f"metrics {', '.join(others)}: see docs/other-names.md, Rewards and metrics")
    return options
