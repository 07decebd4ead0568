"""The names that options have in TRL, transformers and OpenRLHF, for errors and for docs/from-trl.md, made from here.

answer("learning_rate")    # "that is its name in TRL and transformers; here it is optimizer.lr"
"""

from typing import NamedTuple


class Theirs(NamedTuple):
    """An option of another system."""

    ours: str = ""
    """Our options, separated by commas; empty: there is none."""
    note: str = ""
    """What differs, or what to do instead."""
    default: str = ""
    """Its default there, for the page."""


PPO_CONFIG = {
    "steps": Theirs(
        "steps", "TRL counts samples, operant PPO steps: 20000 samples in batches of 128 are 157 steps", "20000"
    ),
    "batch_size": Theirs("batch", "replies of a step, over all ranks; `Learner.step` takes any number", "128"),
    "mini_batch_size": Theirs(
        "update.minibatch, update.micro_tokens",
        "the first is the optimizer's minibatch; the second limits memory, in tokens, and changes no result",
        "128",
    ),
    "forward_batch_size": Theirs("update.micro_tokens", "in tokens; it changes no result", "none"),
    "gradient_accumulation_steps": Theirs(
        "update.minibatch",
        "an optimizer step there takes `mini_batch_size * gradient_accumulation_steps` replies: use that product",
        "1",
    ),
    "backward_batch_size": Theirs("update.minibatch", "", "computed"),
    "global_backward_batch_size": Theirs("update.minibatch", "always over all ranks", "computed"),
    "global_batch_size": Theirs("batch", "", "computed"),
    "world_size": Theirs("", "comes from `torchrun`", "computed"),
    "ppo_epochs": Theirs("update.epochs", "", "4"),
    "learning_rate": Theirs("optimizer.lr", "", "1.41e-5"),
    "max_grad_norm": Theirs("optimizer.max_grad_norm", "none under the preset, 1 by default", "none"),
    "adap_kl_ctrl": Theirs("kl.control", "`adaptive` for true, `fixed` for false", "True"),
    "init_kl_coef": Theirs("kl.coef", "", "0.2"),
    "target": Theirs("kl.target", "", "6"),
    "horizon": Theirs("kl.horizon", "", "10000"),
    "kl_penalty": Theirs("kl.kind", "`kl` is `k1`, `abs` is `absolute`, `mse` is `k2`, `full` is `reverse`", '"kl"'),
    "gamma": Theirs("advantage.gamma", "", "1"),
    "lam": Theirs("advantage.lam", "", "0.95"),
    "cliprange": Theirs("loss.clip", "", "0.2"),
    "cliprange_value": Theirs("loss.value_clip", "none: not clipped", "0.2"),
    "vf_coef": Theirs("loss.value_coef", "", "0.1"),
    "early_stopping": Theirs("update.target_kl", "none: off", "False"),
    "target_kl": Theirs("update.target_kl", "TRL stops at 1.5 times this value: use 1.5 for 1", "1"),
    "ratio_threshold": Theirs("update.ratio_threshold", "", "10"),
    "use_score_scaling": Theirs("score.scale", "", "False"),
    "use_score_norm": Theirs("score.normalise", "", "False"),
    "score_clip": Theirs("score.clip", "", "none"),
    "whiten_rewards": Theirs("advantage.whiten_rewards", "", "False"),
    "seed": Theirs("learner.seed", "", "0"),
    "model_name": Theirs("policy", "", '"gpt2"'),
    "query_dataset": Theirs("tasks", "in TRL only a note for the tracker", '"stanfordnlp/imdb"'),
    "reward_model": Theirs("reward", "in TRL only a note for the tracker", '"sentiment-analysis:..."'),
    "is_encoder_decoder": Theirs("", "is read from the model's config", "none"),
    "is_peft_model": Theirs("lora.rank, lora.adapter", "", "none"),
    "gradient_checkpointing": Theirs(
        "model.gradient_checkpointing", "the logits do not need it, as they are computed in chunks", "False"
    ),
    "optimize_device_cache": Theirs("", "not needed", "False"),
    "optimize_cuda_cache": Theirs("", "not needed", "none"),
    "remove_unused_columns": Theirs("", "not needed: queries need no columns", "True"),
    "dataset_num_proc": Theirs("", "not needed", "none"),
    "exp_name": Theirs("out", "the run folder", "script's name"),
    "task_name": Theirs("out", "the run folder", "none"),
    "log_with": Theirs("trackers", "`metrics.jsonl` and the report are always written", "none"),
    "tracker_kwargs": Theirs("trackers", "a mapping from each tracker to its options", "{}"),
    "tracker_project_name": Theirs("trackers", "{wandb: {project: NAME}}", '"trl"'),
    "accelerator_kwargs": Theirs("", "not needed", "{}"),
    "project_kwargs": Theirs("", "not needed", "{}"),
    "push_to_hub_if_best_kwargs": Theirs(
        "best", "exports the best model to best/; push that folder with huggingface_hub", "{}"
    ),
    "compare_steps": Theirs("", "not needed", "1"),
}
"""Every field of `PPOConfig` in TRL 0.11.4."""

TRL = {
    "num_ppo_epochs": Theirs("update.epochs"),
    "num_mini_batches": Theirs("update.minibatch", "the size of a minibatch: `batch` divided by the number of them"),
    "total_episodes": Theirs("steps", "`total_episodes / batch`"),
    "local_rollout_forward_batch_size": Theirs("update.micro_tokens", "in tokens; it changes no result"),
    "response_length": Theirs("sampling.max_tokens"),
    "stop_token": Theirs("sampling.stop_tokens, sampling.stop_strings", "the model's own end token always stops"),
    "missing_eos_penalty": Theirs(
        "score.missing_stop", "with `on_length=penalty`, `score.missing_stop_mode=add` and the penalty below 0"
    ),
    "non_eos_penalty": Theirs("score.missing_stop", "with `on_length=penalty`"),
    "kl_coef": Theirs("kl.coef"),
    "kl_estimator": Theirs("kl.kind", "in the reward; `kl.loss_kind` in the loss"),
    "beta": Theirs(
        "kl.loss_coef, kl.coef, loss.beta",
        "the first, in the loss, for grpo; the second, in the reward, for rloo and ppo; the third for dpo and kto",
    ),
    "num_generations": Theirs("samples"),
    "num_generations_eval": Theirs("evaluation.samples"),
    "generation_batch_size": Theirs("batch"),
    "steps_per_generation": Theirs("update.minibatch", "`batch` divided by it"),
    "num_iterations": Theirs("update.epochs"),
    "max_completion_length": Theirs("sampling.max_tokens"),
    "max_prompt_length": Theirs(
        "data.prompt_tokens",
        "of a longer prompt, `data.prompt_keeps` says which side stays; of a chat, its last message",
    ),
    "epsilon": Theirs("loss.clip"),
    "epsilon_high": Theirs("loss.clip_high"),
    "delta": Theirs("loss.dual_clip", "of ppo; grpo has none"),
    "scale_rewards": Theirs(
        "advantage.deviation, advantage.scale",
        '"group" is `advantage.deviation=sample`, "none" is `advantage.scale=false`',
    ),
    "loss_type": Theirs(
        "",
        '"grpo" is the default of `grpo`; "dapo" and "bnpo" are `per="token"` in a method of your own, "dr_grpo" '
        '`per="horizon"` (docs/algorithms.md); of dpo it is `loss.kind`, and "ipo" is `ipo-mean`',
    ),
    "desirable_weight": Theirs("loss.good_weight", "of kto"),
    "undesirable_weight": Theirs("loss.bad_weight", "of kto"),
    "importance_sampling_level": Theirs("", "the ratio is that of each token here"),
    "use_bias_correction_kl": Theirs("kl.loss_kind", "true is `k3`, false is `plain_k3`"),
    "reward_clip_range": Theirs("score.clip", "one number c, for -c to c"),
    "normalize_advantages": Theirs("advantage.whiten_scope"),
    "mask_truncated_completions": Theirs("learner.on_length", "`drop`"),
    "entropy_coef": Theirs("loss.entropy_coef"),
    "reward_weights": Theirs("reward", "a mapping from each reward to its weight"),
    "reward_funcs": Theirs("reward", "one function or name, or a mapping from each to its weight"),
    "reward_model_path": Theirs("reward", "`classifier:FOLDER`"),
    "sft_model_path": Theirs("policy"),
    "model_name_or_path": Theirs("policy"),
    "model": Theirs("policy", "the options `model.*` say how it is trained"),
    "ref_model": Theirs("reference"),
    "train_dataset": Theirs("tasks"),
    "dataset": Theirs("tasks"),
    "dataset_name": Theirs("tasks"),
    "eval_dataset": Theirs("evaluate"),
    "processing_class": Theirs("tokenizer", "from Python; a policy that is named has its own"),
    "peft_config": Theirs("lora.rank", "and the other options `lora.*`"),
    "shuffle_dataset": Theirs(
        "data.shuffle", "the order of the tasks is random anyway; this shuffles before `data.limit` cuts"
    ),
    "use_vllm": Theirs(
        "engine", "`native` generates in this process; `vllm` starts a server of its own (docs/engines.md)"
    ),
    "disable_dropout": Theirs("", "dropout is always off"),
    "log_completions": Theirs("", "every reply is written to rollouts/"),
}
"""Names of later versions of TRL: PPOConfig (0.12 on), GRPOConfig, RLOOConfig (1.16), and arguments of the trainers."""

TRANSFORMERS = {
    "learning_rate": Theirs("optimizer.lr"),
    "per_device_train_batch_size": Theirs(
        "batch, update.minibatch",
        "`batch` counts the replies of a step over all ranks; `update.minibatch` those of an optimizer step: there, "
        "`per_device_train_batch_size * gradient_accumulation_steps * devices`",
    ),
    "per_device_eval_batch_size": Theirs("", "not needed: `update.micro_tokens` limits memory"),
    "gradient_accumulation_steps": PPO_CONFIG["gradient_accumulation_steps"],
    "num_train_epochs": Theirs("steps", "`epochs * tasks * samples / batch`"),
    "max_steps": Theirs("steps"),
    "lr_scheduler_type": Theirs("optimizer.schedule", "constant, linear or cosine"),
    "warmup_ratio": Theirs("optimizer.warmup"),
    "warmup_steps": Theirs("optimizer.warmup", "a share of the steps: `warmup_steps / steps`"),
    "adam_beta1": Theirs("optimizer.betas", "both, as in 0.9,0.999"),
    "adam_beta2": Theirs("optimizer.betas", "both, as in 0.9,0.999"),
    "adam_epsilon": Theirs("optimizer.eps"),
    "optim": Theirs("optimizer.kind", "adamw, rmsprop or sgd; `optimizer.states=8bit` for 8-bit states"),
    "output_dir": Theirs("out"),
    "run_name": Theirs("out", "the run folder"),
    "resume_from_checkpoint": Theirs("resume", "`operant train --resume runs/x`, or `resume=True` with `out`"),
    "eval_steps": Theirs("evaluate_every"),
    "eval_strategy": Theirs("evaluate_every", "steps between evaluations"),
    "save_steps": Theirs("checkpoint_every"),
    "save_strategy": Theirs("checkpoint_every, checkpoint_minutes"),
    "save_total_limit": Theirs("keep"),
    "logging_steps": Theirs("", "every step is logged; `samples_every` sets how often replies are shown"),
    "report_to": Theirs("trackers"),
    "metric_for_best_model": Theirs("best"),
    "bf16": Theirs("model.precision", "`bfloat16`"),
    "fp16": Theirs("model.precision", "`bfloat16`; there is no float16"),
    "use_cpu": Theirs("learner.device", "`cpu`"),
    "push_to_hub": Theirs("", "push the folder export/ of the run with huggingface_hub"),
}
"""Names of `TrainingArguments`."""

GENERATION = {
    "max_new_tokens": Theirs("sampling.max_tokens"),
    "min_new_tokens": Theirs("sampling.min_tokens"),
    "eos_token_id": Theirs("sampling.stop_tokens", "`sampling.stop_strings` for text"),
    "do_sample": Theirs(
        "sampling.top_k", "top_k=1 is greedy; training needs samples, so give it as `evaluation.sampling={top_k: 1}`"
    ),
    "num_beams": Theirs("", "beams cannot be scored as samples: leave it out"),
    "repetition_penalty": Theirs("", "its samples cannot be scored: leave it out"),
    "pad_token_id": Theirs("", "not needed: masks come from lengths"),
    "num_return_sequences": Theirs("samples"),
}
"""Arguments of `generate`; `Learner.generate` takes them under these names."""

OPENRLHF = {
    "pretrain": Theirs("policy"),
    "reward_pretrain": Theirs("reward", "`classifier:FOLDER`"),
    "remote_rm_url": Theirs("reward", "a function of yours that asks it: my_file.py:function"),
    "critic_pretrain": Theirs("value.critic"),
    "prompt_data": Theirs("tasks"),
    "input_key": Theirs("data.text_field"),
    "label_key": Theirs("data.target_field"),
    "input_template": Theirs("data.template"),
    "apply_chat_template": Theirs("data.chat", "for rows of text; rows with messages get the template without it"),
    "actor_learning_rate": Theirs("optimizer.lr"),
    "critic_learning_rate": Theirs(
        "optimizer.lr", "policy and critic have one; `loss.value_coef` weighs the critic's loss"
    ),
    "rollout_batch_size": Theirs(
        "batch", "it counts prompts there and replies here: `rollout_batch_size * n_samples_per_prompt`"
    ),
    "n_samples_per_prompt": Theirs("samples"),
    "train_batch_size": Theirs("update.minibatch"),
    "micro_train_batch_size": Theirs("update.micro_tokens", "in tokens; it changes no result"),
    "micro_rollout_batch_size": Theirs("update.micro_tokens", "in tokens; it changes no result"),
    "train_max_tokens_per_gpu": Theirs("update.micro_tokens"),
    "max_epochs": Theirs("update.epochs"),
    "num_episodes": Theirs("steps", "`num_episodes * tasks * samples / batch`"),
    "prompt_max_len": Theirs(
        "data.prompt_tokens",
        "of a longer prompt, `data.prompt_keeps` says which side stays; of a chat, its last message",
    ),
    "generate_max_len": Theirs("sampling.max_tokens"),
    "max_samples": Theirs("data.limit"),
    "eps_clip": Theirs("loss.clip"),
    "eps_clip_low_high": Theirs("loss.clip, loss.clip_high"),
    "lambd": Theirs("advantage.lam"),
    "init_kl_coef": Theirs("kl.coef"),
    "use_kl_loss": Theirs("kl.loss_coef", "the price itself; `kl.coef` is the one in the reward"),
    "kl_target": Theirs("kl.target", "with `kl.control=adaptive`"),
    "kl_horizon": Theirs("kl.horizon"),
    "entropy_loss_coef": Theirs("loss.entropy_coef"),
    "normalize_reward": Theirs("score.normalise"),
    "advantage_estimator": Theirs("algorithm", "`gae` is ppo, `group_norm` is grpo, `rloo` is rloo"),
    "lr_warmup_ratio": Theirs("optimizer.warmup"),
    "lr_scheduler": Theirs("optimizer.schedule", "constant, linear or cosine"),
    "max_norm": Theirs("optimizer.max_grad_norm"),
    "l2": Theirs("optimizer.weight_decay"),
    "adam_betas": Theirs("optimizer.betas"),
    "save_path": Theirs("out", "the run folder; the model is in its export/"),
    "ckpt_path": Theirs("out", "the run folder; it has checkpoints/"),
    "max_ckpt_num": Theirs("keep"),
    "lora_rank": Theirs("lora.rank"),
    "lora_alpha": Theirs("lora.alpha"),
    "load_in_4bit": Theirs("lora.quantise", "`4bit`"),
    "packing_samples": Theirs("model.packing", "`on`"),
    "use_wandb": Theirs("trackers", "`wandb`"),
    "use_tensorboard": Theirs("trackers", "`tensorboard`"),
}
"""Names of OpenRLHF's `train_ppo_ray`."""

SYSTEMS = {
    "TRL": PPO_CONFIG | TRL,
    "transformers": TRANSFORMERS,
    "transformers' generate": GENERATION,
    "OpenRLHF": OPENRLHF,
}


ALIASES = {"model": "policy", "ahead": "rollouts_ahead", "carry": "partial_rollout_tokens"}
"""Second names of options, which are accepted for them."""


def _named(name: str) -> dict[str, Theirs]:
    """The options of other systems that have this name, by system."""
    return {system: table[name] for system, table in SYSTEMS.items() if name in table}


def ours(name: str) -> list[str]:
    """Our options for one that has this name in another system."""
    return next((theirs.ours.split(", ") for theirs in _named(name).values()), [])


def note(name: str) -> str:
    """What is said beside our option for one that has this name in another system."""
    return next((theirs.note.replace("`", "") for theirs in _named(name).values()), "")


def answer(name: str) -> str:
    """The rest of a sentence about an option that has this name in another system; empty if none has it."""
    if not (found := _named(name)):
        return ""
    here = f"here it is {' or '.join(ours(name))}" if ours(name)[0] else note(name)
    return f"that is its name in {' and '.join(found)}; {here}" + (
        f" ({note(name)})" if ours(name)[0] and note(name) else ""
    )
