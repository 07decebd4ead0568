"""`PPOTrainer` and its configuration as TRL 0.11.4 has them, on operant's losses, advantages and KL.

    trainer = PPOTrainer(PPOConfig(batch_size=16), model, None, tokenizer, dataset=queries, data_collator=collator)
    for batch in trainer.dataloader:
        responses = trainer.generate(batch["input_ids"], return_prompt=False, max_new_tokens=24)
        stats = trainer.step(batch["input_ids"], responses, rewards)

Tensors about tokens are [B, T - 1]: place t speaks of token t + 1, and `masks` is 1 where that token belongs to a
response. The methods can be overridden, as in TRL. What differs from TRL, and why, is in docs/from-trl.md.
"""

import inspect
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BatchEncoding, PreTrainedTokenizerBase

from operant.compat.trl.core import (
    convert_to_scalar,
    entropy_from_logits,
    flatten_dict,
    lacking,
    logprobs_from_logits,
    masked_mean,
    masked_var,
    masked_whiten,
    set_seed,
    stack_dicts,
    stats_to_np,
)
from operant.compat.trl.models import SUPPORTED_ARCHITECTURES, PreTrainedModelWrapper, create_reference_model
from operant.objectives import kl, losses
from operant.objectives.advantages import gae
from operant.rewards import shaping
from operant.rewards.shaping import RunningMoments
from operant.types import Batch, OperantError, Outputs, Tokenizer, require

__getattr__ = lacking(__name__)
KINDS = {"kl": "k1", "abs": "absolute", "mse": "k2"}
"""Names of the KL penalties that are estimated from the sampled token, and ours."""


@dataclass
class PPOConfig:
    """The options of `PPOTrainer`, by TRL's names and with its defaults; docs/other-names.md explains each.

    Raises: OperantError for sizes that do not divide each other, an unknown KL penalty, or a tracker that is missing.
    """

    exp_name: str = Path(sys.argv[0]).stem
    seed: int = 0
    log_with: Literal["wandb", "tensorboard"] | None = None
    task_name: str | None = None
    model_name: str = "gpt2"
    query_dataset: str = "stanfordnlp/imdb"
    reward_model: str = "sentiment-analysis:lvwerra/distilbert-imdb"
    remove_unused_columns: bool = True
    tracker_kwargs: dict = field(default_factory=dict)
    accelerator_kwargs: dict = field(default_factory=dict)
    project_kwargs: dict = field(default_factory=dict)
    tracker_project_name: str = "trl"
    push_to_hub_if_best_kwargs: dict = field(default_factory=dict)
    steps: int = 20000
    learning_rate: float = 1.41e-5
    adap_kl_ctrl: bool = True
    init_kl_coef: float = 0.2
    kl_penalty: Literal["kl", "abs", "mse", "full"] = "kl"
    target: float = 6.0
    horizon: float = 10000.0
    gamma: float = 1.0
    lam: float = 0.95
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    batch_size: int = 128
    forward_batch_size: int | None = None
    mini_batch_size: int = 128
    gradient_accumulation_steps: int = 1
    world_size: int | None = None
    ppo_epochs: int = 4
    max_grad_norm: float | None = None
    optimize_cuda_cache: bool | None = None
    optimize_device_cache: bool = False
    early_stopping: bool = False
    target_kl: float = 1.0
    compare_steps: int = 1
    ratio_threshold: float = 10.0
    use_score_scaling: bool = False
    use_score_norm: bool = False
    score_clip: float | None = None
    whiten_rewards: bool = False
    gradient_checkpointing: bool = False
    is_encoder_decoder: bool | None = None
    is_peft_model: bool | None = None
    backward_batch_size: int | None = None
    global_backward_batch_size: int | None = None
    global_batch_size: int | None = None
    dataset_num_proc: int | None = None

    def __post_init__(self) -> None:
        if self.forward_batch_size is not None:
            warnings.warn("forward_batch_size is an old name of mini_batch_size, which it overrules", stacklevel=3)
            self.mini_batch_size = self.forward_batch_size
        self.optimize_device_cache = self.optimize_device_cache or bool(self.optimize_cuda_cache)
        self.backward_batch_size = self.mini_batch_size * self.gradient_accumulation_steps
        require(
            self.batch_size % self.backward_batch_size == 0,
            f"batch_size={self.batch_size} is no multiple of mini_batch_size * gradient_accumulation_steps = "
            f"{self.backward_batch_size}: change one of them",
        )
        kinds = (*KINDS, "full")
        require(self.kl_penalty in kinds, f"kl_penalty={self.kl_penalty!r}: it must be one of {', '.join(kinds)}")
        if self.log_with == "wandb":
            from transformers.integrations import is_wandb_available

            require(is_wandb_available(), "log_with='wandb' needs wandb: pip install wandb, or leave log_with out")
        self.total_ppo_epochs = math.ceil(self.steps / self.batch_size)

    def to_dict(self) -> dict[str, object]:
        """All options, those of the mappings as `mapping/name`."""
        return flatten_dict(vars(self))


class FixedKLController:
    """A KL coefficient (`value`) that `update` does not change."""

    def __init__(self, kl_coef: float):
        self.controller = kl.controller(kl.KLOptions(coef=kl_coef))

    @property
    def value(self) -> float:
        return self.controller.coef

    @value.setter
    def value(self, coef: float) -> None:
        self.controller.coef = coef

    def update(self, current: float, n_steps: int) -> None:
        """Called with the mean KL of the last `n_steps` replies, in nats a reply."""
        self.controller.update(float(current), 0.0, n_steps)


class AdaptiveKLController(FixedKLController):
    """A KL coefficient that rises while the KL is above `target`, and falls below it (arXiv:1909.08593)."""

    def __init__(self, init_kl_coef: float, target: float, horizon: float):
        options = kl.KLOptions(coef=init_kl_coef, control="adaptive", target=target, horizon=horizon)
        self.controller = kl.controller(options)


class PPOTrainer:
    """TRL's trainer of 0.11: `generate`, `step`, `log_stats`, `save_pretrained`; `dataloader` if it has a dataset.

    ref_model: None for a copy of the model (`num_shared_layers` of which it shares), or the model without its adapter.
    optimizer: Adam by default. data_collator: of the dataloader. training_data_collator: pads queries with responses.
    Raises: OperantError for arguments of another kind, several processes, or a missing accelerate.
    """

    def __init__(
        self,
        config: PPOConfig | None = None,
        model: PreTrainedModelWrapper | None = None,
        ref_model: PreTrainedModelWrapper | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dataset: object = None,
        optimizer: torch.optim.Optimizer | None = None,
        data_collator: Callable[..., object] | None = None,
        num_shared_layers: int | None = None,
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        training_data_collator: Callable[..., object] | None = None,
    ):
        _check_arguments(config, model, ref_model, tokenizer, dataset, lr_scheduler)
        assert config is not None and model is not None
        set_seed(config.seed)
        self.config, self.model, self.tokenizer, self.dataset = config, model, tokenizer, dataset
        self.accelerator = _accelerator(config)
        self.is_encoder_decoder = model.is_encoder_decoder
        self.is_peft_model, self.is_distributed = model.is_peft_model, False
        config.world_size, config.global_batch_size = 1, config.batch_size
        config.global_backward_batch_size = config.backward_batch_size
        config.is_encoder_decoder, config.is_peft_model = self.is_encoder_decoder, self.is_peft_model
        if config.log_with is not None:
            options = config.to_dict() if config.log_with == "tensorboard" else {"trl_ppo_trainer_config": vars(config)}
            self.accelerator.init_trackers(config.tracker_project_name, options, init_kwargs=config.tracker_kwargs)
        if ref_model is not None and num_shared_layers is not None:
            warnings.warn(f"num_shared_layers={num_shared_layers} is ignored: ref_model is there already", stacklevel=2)
        if self.is_peft_model:
            ref_model = None
        elif ref_model is None:
            ref_model = create_reference_model(model, num_shared_layers)
        if dataset is None:
            warnings.warn("there is no dataset: each step must have config.batch_size replies", stacklevel=2)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        if training_data_collator is None:
            from transformers import DataCollatorForLanguageModeling

            training_data_collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
        self.model_params = [p for p in model.parameters() if p.requires_grad]
        optimizer = optimizer or torch.optim.Adam(self.model_params, lr=config.learning_rate)
        loader = None if dataset is None else self.prepare_dataloader(dataset, data_collator)
        ready = self.accelerator.prepare(model, optimizer, training_data_collator, loader, lr_scheduler)
        self.model, self.optimizer, self.data_collator, self.dataloader, self.lr_scheduler = ready
        self.ref_model = self.accelerator.prepare(ref_model)
        self.current_device = self.model.v_head.summary.weight.device
        self.kl_ctl = FixedKLController(config.init_kl_coef)
        if config.adap_kl_ctrl:
            self.kl_ctl = AdaptiveKLController(config.init_kl_coef, config.target, config.horizon)
        self.running = RunningMoments()
        self.current_step, self.compare_step, self.highest_reward = 0, 0, -math.inf
        best = config.push_to_hub_if_best_kwargs
        require(not best or "repo_id" in best, "push_to_hub_if_best_kwargs: give the repository as repo_id")

    # --- queries and replies ------------------------------------------------------------------------------------------

    def prepare_dataloader(self, dataset: Any, data_collator: Callable[..., object] | None = None) -> DataLoader:
        """Whole batches of `batch_size` in random order. Of a `datasets.Dataset` columns that the model does not read
        are removed, except `label`, `query` and `response`, unless `remove_unused_columns=False`."""
        if hasattr(dataset, "remove_columns") and self.config.remove_unused_columns:
            known = [*inspect.signature(self.model.forward).parameters, "label", "query", "response"]
            dataset = dataset.remove_columns([name for name in dataset.column_names if name not in known])
        return DataLoader(
            dataset, batch_size=self.config.batch_size, collate_fn=data_collator, shuffle=True, drop_last=True
        )

    def generate(
        self,
        query_tensor: Tensor | list[Tensor],
        length_sampler: Callable[[], int] | None = None,
        batch_size: int = 4,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        **generation_kwargs: object,
    ) -> Any:
        """Replies to one query [T], as a tensor [1, L], or to a list of queries, as a list of tensors.

        length_sampler: the number of new tokens of each batch, when called. return_prompt: with the query before the
        reply. generate_ref_response: also those of the reference, as a second return value. generation_kwargs: those of
        transformers' `generate`. A reply of a list ends with its first end token.
        Raises: OperantError for a tensor of queries.
        """
        options = {"length_sampler": length_sampler, "batch_size": batch_size, "return_prompt": return_prompt}
        queries, alone = query_tensor, False
        if isinstance(query_tensor, Tensor):
            require(query_tensor.ndim == 1, "generate takes a query [T] or a list of them; list(queries) is one")
            queries, alone, options["remove_padding"] = [query_tensor], True, False
        reference = self.accelerator.unwrap_model(self.model if self.is_peft_model else self.ref_model)
        model, found = self.accelerator.unwrap_model(self.model), []
        for who, scope in [(model, nullcontext), (reference, self._reference_scope)][: 1 + generate_ref_response]:
            with scope():
                replies = self._generate_batched(who, queries, **options, **generation_kwargs)
                found.append(torch.stack(replies) if alone else replies)
        return tuple(found) if generate_ref_response else found[0]

    def _reference_scope(self) -> AbstractContextManager[None]:
        model = self.accelerator.unwrap_model(self.model)
        return model.pretrained_model.disable_adapter() if self.is_peft_model else nullcontext()

    def _generate_batched(
        self,
        model: PreTrainedModelWrapper,
        query_tensors: Sequence[Tensor],
        length_sampler: Callable[[], int] | None = None,
        batch_size: int = 4,
        return_prompt: bool = True,
        pad_to_multiple_of: int | None = None,
        remove_padding: bool = True,
        **generation_kwargs: object,
    ) -> list[Tensor]:
        outputs: list[Tensor] = []
        for start in range(0, len(query_tensors), batch_size):
            if length_sampler is not None:
                generation_kwargs["max_new_tokens"] = length_sampler()
            batch = list(query_tensors[start : start + batch_size])
            side = self.tokenizer.padding_side if self.is_encoder_decoder else "left"
            padded = padded_queries(self.tokenizer, batch, side, pad_to_multiple_of, self.current_device)
            model.eval()  # dropout would draw from another policy than the one that is scored
            drawn = model.generate(**padded, **generation_kwargs)
            width = 0 if self.is_encoder_decoder else padded["input_ids"].shape[1]
            several = len(drawn) // len(batch)  # num_return_sequences
            for query, row in zip((query for query in batch for _ in range(several)), drawn, strict=True):
                opening, reply = row[max(width - len(query), 0) : width], row[width:]
                reply = reply[: end_of(reply, self.tokenizer, width, generation_kwargs)] if remove_padding else reply
                outputs.append(torch.cat([opening, reply]) if return_prompt else reply)
        return outputs

    # --- the step -----------------------------------------------------------------------------------------------------

    def _step_safety_checker(
        self,
        batch_size: int | None,
        queries: list[Tensor],
        responses: list[Tensor],
        scores: list[Tensor],
        masks: list[Tensor] | None = None,
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor] | None]:
        """The arguments of `step` on the model's device, each score as a tensor without axes."""
        for name, given in (("queries", queries), ("responses", responses), ("scores", scores)):
            if not isinstance(given, list) or not given or not isinstance(given[0], Tensor):
                raise OperantError(f"{name} must be a list of tensors, not {type(given).__name__}: give one a reply")
            if batch_size is not None and len(given) != batch_size:
                raise OperantError(f"{len(given)} {name} for batch_size={batch_size}: a step takes exactly so many")
        for i, (query, response) in enumerate(zip(queries, responses)):
            require(len(query) and len(response), f"reply {i} has an empty query or response: each needs a token")
        if shapes := [tuple(score.shape) for score in scores if score.dim() > 1 or score.numel() != 1]:
            raise OperantError(f"a score must be a tensor with one number, not of shape {shapes[0]}")
        fits = masks is None or [*map(len, masks)] == [*map(len, responses)]
        require(fits, "response_masks: give one for each response, with an entry for each of its tokens")
        moved = [[x.to(self.current_device) for x in given] for given in (queries, responses, scores)]
        at = None if masks is None else [mask.to(self.current_device) for mask in masks]
        return moved[0], moved[1], [score.squeeze() for score in moved[2]], at

    def step(
        self,
        queries: list[Tensor],
        responses: list[Tensor],
        scores: list[Tensor],
        response_masks: list[Tensor] | None = None,
    ) -> dict[str, Any]:
        """One step of PPO on `batch_size` queries [T], responses [T] and scores (one number each).

        response_masks: 0 at tokens of a response that the policy did not choose, such as a tool's answer.
        Returns TRL's statistics by its names. Raises: OperantError for arguments of another form.
        """
        config, begin = self.config, time.time()
        queries, responses, scores, response_masks = self._step_safety_checker(
            config.batch_size, queries, responses, scores, response_masks
        )
        used = self._shaped_scores(torch.stack(scores).float())
        best, mean = config.push_to_hub_if_best_kwargs, float(used.mean())
        if best and self.compare_step % config.compare_steps == 0 and mean > self.highest_reward:
            self.highest_reward = mean
            self.push_to_hub(**best)
        self.compare_step += 1
        inputs, full = self.prepare_model_inputs(queries, responses), config.kl_penalty == "full"
        timing, clock = {}, time.time()
        with torch.no_grad():
            passed = (queries, responses, inputs, full, response_masks)
            logprobs, logits, values, masks = self.batched_forward_pass(self.model, *passed)
            with self._reference_scope():
                reference = self.model if self.is_peft_model else self.ref_model
                ref_logprobs, ref_logits, _, _ = self.batched_forward_pass(reference, *passed)
            timing["forward_pass"], clock = time.time() - clock, time.time()
            compared = (logits.log_softmax(-1), ref_logits.log_softmax(-1)) if full else (logprobs, ref_logprobs)
            rewards, non_score_reward, kls = self.compute_rewards(used, *compared, masks)
            timing["compute_rewards"], clock = time.time() - clock, time.time()
            values, advantages, returns = self.compute_advantages(values, rewards, masks)
            timing["compute_advantages"], clock = time.time() - clock, time.time()
        known = (logprobs.float(), values.float(), masks, advantages, returns)
        train_stats = stack_dicts(self._epochs(queries, responses, inputs, known))
        timing["optimize_step"], clock = time.time() - clock, time.time()
        for name in ("policy/advantages", "policy/ratio"):  # of all tokens, not their mean over minibatches
            train_stats[name] = train_stats[name].flatten()[None]
        data = {"scores": used, "logprobs": logprobs, "ref_logprobs": ref_logprobs, "masks": masks, "kls": kls}
        data |= {"queries": queries, "responses": responses, "train_stats": train_stats}
        data["non_score_reward"] = non_score_reward
        stats = stats_to_np(self.record_step_stats(self.kl_ctl.value, **data))
        timing["calc_stats"] = time.time() - clock
        stats["ppo/learning_rate"] = self.optimizer.param_groups[0]["lr"]
        self.kl_ctl.update(float(stats["objective/kl"]), config.batch_size)
        timing["total"] = time.time() - begin
        stats |= {f"time/ppo/{name}": seconds for name, seconds in timing.items()}
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        if config.optimize_device_cache and torch.cuda.is_available():
            torch.cuda.empty_cache()
        return stats if config.log_with == "wandb" else convert_to_scalar(stats)

    def _shaped_scores(self, scores: Tensor) -> Tensor:
        """Scores [B] after running scale, norm and clip."""
        config, shaped = self.config, scores.tolist()
        if config.use_score_scaling:
            self.running.update(shaped)
            shaped = [shaping.centred(x, self.running) if config.use_score_norm else x for x in shaped]
            shaped = [shaping.scaled(x, self.running) for x in shaped]
        if config.score_clip is not None:
            shaped = [shaping.clipped(x, config.score_clip) for x in shaped]
        return torch.tensor(shaped, device=scores.device)

    def _epochs(
        self, queries: list[Tensor], responses: list[Tensor], inputs: BatchEncoding, known: tuple[Tensor, ...]
    ) -> list[dict[str, Tensor]]:
        """Train on every minibatch of every epoch; their statistics.

        known: log-probs, values, masks, advantages and returns of the batch, each [B, T - 1].
        """
        config, found = self.config, []
        for _ in range(config.ppo_epochs):
            order = np.random.permutation(config.batch_size)
            for at in range(0, config.batch_size, config.mini_batch_size):
                chosen = order[at : at + config.mini_batch_size]
                with self.accelerator.accumulate(self.model):
                    logprobs, logits, vpreds, _ = self.batched_forward_pass(
                        self.model,
                        [queries[i] for i in chosen],
                        [responses[i] for i in chosen],
                        {name: x[chosen] for name, x in inputs.items()},
                        return_logits=True,
                    )
                    old, values, masks, advantages, returns = (x[chosen] for x in known)
                    found += [self.train_minibatch(old, values, logprobs, logits, vpreds, masks, advantages, returns)]
            if self._early_stop(found[-1]["policy/policykl"]):
                break
        return found

    def _early_stop(self, policykl: Tensor) -> bool:
        """Whether the KL (old || new) of the last minibatch is above 1.5 times its target; drops gradients then."""
        if not (self.config.early_stopping and policykl > 1.5 * self.config.target_kl):
            return False
        self.optimizer.zero_grad()
        return True

    def prepare_model_inputs(self, queries: Sequence[Tensor], responses: Sequence[Tensor]) -> BatchEncoding:
        """Padded `input_ids` and `attention_mask` [B, T]; of an encoder-decoder the responses as `decoder_*`."""

        def padded(rows: Iterable[Tensor]) -> BatchEncoding:
            made = self.data_collator([{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows])
            made.pop("labels", None)
            return made.to(self.current_device)

        if not self.is_encoder_decoder:
            return padded(torch.cat([query, response]) for query, response in zip(queries, responses))
        inputs = padded(queries)
        for name, x in padded(responses).items():
            inputs[f"decoder_{name}"] = x
        return inputs

    def batched_forward_pass(
        self,
        model: PreTrainedModelWrapper,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        model_inputs: Mapping[str, Tensor],
        return_logits: bool = False,
        response_masks: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Log-probs, logits [B, T - 1, V] or None, values and masks, `mini_batch_size` rows a pass, without dropout."""
        model.eval()
        side = "decoder_" if self.is_encoder_decoder else ""
        ids, real = (model_inputs[f"{side}{name}"] for name in ("input_ids", "attention_mask"))
        masks = torch.zeros_like(ids)
        for row, (query, response) in enumerate(zip(queries, responses)):
            # A decoder's first token is given to it, and the last one of its row counts for TRL as the end.
            skip = 1 if self.is_encoder_decoder else 0
            start = (skip or len(query) - 1) + int(real[row].long().argmax())
            length = len(response) - 2 * skip
            own = 1 if response_masks is None else response_masks[row][2 * skip : 2 * skip + length].to(masks)
            masks[row, start : start + length] = own
        size, parts = self.config.mini_batch_size, list[tuple[Tensor, Tensor | None, Tensor]]()
        for at in range(0, len(queries), size):
            logits, _, values = model(**{name: x[at : at + size] for name, x in model_inputs.items()})
            chosen = logprobs_from_logits(logits[:, :-1], ids[at : at + size, 1:])
            parts.append((chosen, logits[:, :-1] if return_logits else None, values[:, :-1]))
        logprobs, tables, values = zip(*parts)
        return torch.cat(logprobs), torch.cat(tables) if return_logits else None, torch.cat(values), masks[:, :-1]

    def train_minibatch(
        self,
        old_logprobs: Tensor,
        values: Tensor,
        logprobs: Tensor,
        logits: Tensor,
        vpreds: Tensor,
        mask: Tensor,
        advantages: Tensor,
        returns: Tensor,
    ) -> dict[str, Tensor]:
        """Make one optimizer step (or, accumulating, a part of it); returns its statistics."""
        self.model.train()
        policy, value, stats = self.loss(old_logprobs, values, logits, vpreds, logprobs, mask, advantages, returns)
        self.accelerator.backward(policy + value)
        if self.config.max_grad_norm is not None and self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(self.model_params, self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return stats

    def compute_rewards(
        self, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, masks: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(rewards, the part that is not score, KL) [B, T - 1]: the price of KL at each token, the score at the last.

        With `kl_penalty="full"` the log-probs are [B, T - 1, V].
        """
        divergence = self._kl_penalty(logprobs, ref_logprobs)
        price = -self.kl_ctl.value * divergence
        places = torch.arange(masks.shape[1], device=masks.device)
        last = (masks.bool() * places).argmax(1, keepdim=True)
        return price.scatter_add(1, last, scores[:, None].to(price)), price, divergence

    def _kl_penalty(self, logprob: Tensor, ref_logprob: Tensor) -> Tensor:
        if self.config.kl_penalty in KINDS:
            return kl.estimate(KINDS[self.config.kl_penalty], logprob, ref_logprob)
        return torch.nn.functional.kl_div(ref_logprob, logprob, log_target=True, reduction="none").sum(-1)

    def compute_advantages(self, values: Tensor, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(values at the mask, whitened advantages, returns) by GAE, [B, T - 1]."""
        values, rewards = values * mask, rewards * mask
        if self.config.whiten_rewards:
            rewards = masked_whiten(rewards, mask, shift_mean=False)
        ahead = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
        gamma, lam = (torch.full_like(values, x) for x in (self.config.gamma, self.config.lam))
        advantages = gae(rewards, values, ahead, gamma, lam)
        return values, masked_whiten(advantages, mask).detach(), advantages + values

    def loss(
        self,
        old_logprobs: Tensor,
        values: Tensor,
        logits: Tensor,
        vpreds: Tensor,
        logprobs: Tensor,
        mask: Tensor,
        advantages: Tensor,
        returns: Tensor,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(policy loss, `vf_coef` times value loss, statistics): means over the tokens of the mask."""
        config = self.config
        known = {"logprobs": old_logprobs, "values": values, "advantages": advantages, "returns": returns}
        # These losses do not read the first eight fields.
        rows = Batch(*8 * (mask,), **known, weights=mask / mask.sum())
        out = Outputs(logprobs=logprobs, raw_logprobs=logprobs, values=vpreds)
        policy = losses.clipped(out, rows, low=config.cliprange, high=config.cliprange)
        value = losses.value_error(out, rows, value_clip=config.cliprange_value)
        mean = {name: losses.total(x, rows) for name, x in (policy | value).items()}
        policy_loss, value_loss = losses.total(policy["loss"], rows), losses.total(value["loss"], rows)
        if mean["policy/ratio_mean"] > config.ratio_threshold:
            ratio = f"the mean ratio is {float(mean['policy/ratio_mean']):.2f}"
            warnings.warn(f"{ratio}, above ratio_threshold={config.ratio_threshold}: no gradient here", stacklevel=2)
            policy_loss, value_loss = policy_loss * 0.0, value_loss * 0.0
        stats = {
            "loss": {"policy": policy_loss, "value": value_loss, "total": policy_loss + config.vf_coef * value_loss},
            "policy": {
                "entropy": masked_mean(entropy_from_logits(logits), mask),
                "approxkl": mean["policy/approx_kl"],
                "policykl": mean["policy/old_new_kl"],
                "clipfrac": mean["policy/clip_fraction"],
                "advantages": advantages,
                "advantages_mean": masked_mean(advantages, mask),
                "ratio": policy["policy/ratio_mean"],
            },
            "returns": {"mean": masked_mean(returns, mask), "var": masked_var(returns, mask)},
            "val": {
                "vpred": mean["value/prediction"],
                "error": mean["value/error"],
                "clipfrac": mean["value/clip_fraction"],
                "mean": masked_mean(values, mask),
                "var": masked_var(values, mask),
            },
        }
        return policy_loss, config.vf_coef * value_loss, {k: x.detach() for k, x in flatten_dict(stats).items()}

    # --- what is told -------------------------------------------------------------------------------------------------

    def record_step_stats(self, kl_coef: float, **data: Any) -> dict[str, Any]:
        """The statistics of a step by TRL's names, from what `step` knows."""
        mask, kl_of_replies = data["masks"], (data["kls"] * data["masks"]).sum(-1)
        if (measured := float(kl_of_replies.mean())) < -1.0:
            warnings.warn(
                f"the KL estimate is {measured:.2f} nats a reply, and no KL is below 0: were the replies drawn with "
                "top_k, top_p, min_length or another temperature? The policy is paid for going further",
                stacklevel=3,
            )
        scores = data["scores"]
        stats = {
            "objective/kl": kl_of_replies.mean(),
            "objective/kl_dist": kl_of_replies,
            "objective/logprobs": data["logprobs"],
            "objective/ref_logprobs": data["ref_logprobs"],
            "objective/kl_coef": kl_coef,
            "objective/entropy": (-data["logprobs"] * mask).sum(-1).mean(),
            "ppo/mean_non_score_reward": masked_mean(data["non_score_reward"], mask),
            "ppo/mean_scores": scores.mean(),
            "ppo/std_scores": _spread(scores),
        }
        for name in ("queries", "responses"):
            lengths = torch.tensor([float(len(x)) for x in data[name]])
            stats |= {f"tokens/{name}_len_mean": lengths.mean(), f"tokens/{name}_len_std": _spread(lengths)}
            stats[f"tokens/{name}_dist"] = lengths
        stats |= {f"ppo/{name}": x.mean(0) for name, x in data["train_stats"].items()}
        return stats | {"ppo/val/var_explained": 1 - stats["ppo/val/error"] / stats["ppo/returns/var"]}

    def log_stats(
        self, stats: dict[str, object], batch: Any, rewards: Any, columns_to_log: Iterable[str] = ("query", "response")
    ) -> None:
        """Send the statistics of a step to the tracker, with `env/reward_*`, and to W&B a table of the columns.

        Raises: OperantError if W&B is asked for and the batch lacks a column.
        """
        columns = list(columns_to_log)
        numbers = torch.as_tensor([float(x) for x in rewards])
        logs = dict(stats)
        if self.config.log_with == "wandb":
            import wandb

            if lacking := [name for name in columns if name not in batch]:
                raise OperantError(f"the batch has no {lacking[0]!r}: add it, or leave it out of columns_to_log")
            rows = [list(row) for row in zip(*(batch[name] for name in columns), numbers.tolist())]
            logs["game_log"] = wandb.Table(columns=[*columns, "reward"], rows=rows)
        elif not {"query", "response"} & set(batch):
            warnings.warn("the batch has neither query nor response, so no replies are logged", stacklevel=2)
        logs |= {"env/reward_mean": float(numbers.mean()), "env/reward_std": float(_spread(numbers))}
        logs["env/reward_dist"] = numbers.numpy()
        if self.config.log_with == "tensorboard":
            self.current_step += 1
        self.accelerator.log(logs, step=self.current_step if self.config.log_with == "tensorboard" else None)

    # --- what is kept -------------------------------------------------------------------------------------------------

    def save_pretrained(self, save_directory: str | Path, **kwargs: object) -> None:
        """Write the model with its value head, and the tokenizer, into a folder. kwargs: of the model's method."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        self.accelerator.unwrap_model(self.model).save_pretrained(save_directory, **kwargs)
        self.tokenizer.save_pretrained(save_directory)

    _save_pretrained = save_pretrained

    def push_to_hub(self, repo_id: str, commit_message: str = "Push model trained with PPO", **kwargs: Any) -> Any:
        """Save into a repository of the Hub, which is created if it is not there. kwargs: `token`, `private`."""
        from huggingface_hub import HfApi

        api = HfApi(token=kwargs.pop("token", None), endpoint=kwargs.pop("api_endpoint", None))
        repo_id = api.create_repo(repo_id, exist_ok=True, private=kwargs.pop("private", None)).repo_id
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=commit_message, **kwargs)


def _spread(x: Tensor) -> Tensor:
    """The unbiased standard deviation; NaN for one number, without torch's warning."""
    return x.std() if len(x) > 1 else torch.full((), math.nan)


def end_of(reply: Tensor, tokenizer: Tokenizer, width: int, generation_kwargs: Mapping[str, object]) -> int:
    """Length of a reply [T] with its first end token. `width`: tokens of its query, 0 for an encoder-decoder, whose
    replies begin with a given token, which is the end token in BART."""
    given, ends = int(not width), (generation_kwargs.get("eos_token_id"), tokenizer.eos_token_id)
    stops = [reply[:0], *(torch.as_tensor(end).flatten().to(reply) for end in ends if end is not None)]
    ended = torch.isin(reply[given:], torch.cat(stops))
    return given + int(ended.nonzero()[0, 0]) + 1 if ended.any() else len(reply)


def padded_queries(
    tokenizer: Tokenizer, queries: Sequence[Tensor], side: str, multiple: int | None, device: torch.device
) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask` [B, T] of queries [T], padded on one side, to a multiple if it is given."""
    fill = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    rows = {"input_ids": (list(queries), fill or 0), "attention_mask": ([torch.ones_like(x) for x in queries], 0)}
    padded = {
        name: torch.nn.utils.rnn.pad_sequence(x, batch_first=True, padding_value=value, padding_side=side).to(device)
        for name, (x, value) in rows.items()
    }
    more = -padded["input_ids"].shape[1] % (multiple or 1)
    wide = (more, 0) if side == "left" else (0, more)
    return {name: torch.nn.functional.pad(x, wide, value=rows[name][1]) for name, x in padded.items()}


def _check_arguments(
    config: object, model: object, ref_model: object, tokenizer: object, dataset: object, lr_scheduler: object
) -> None:
    expected = {
        "config": (config, (PPOConfig,)),
        "model": (model, SUPPORTED_ARCHITECTURES),
        "ref_model": (ref_model, (*SUPPORTED_ARCHITECTURES, type(None))),
        "tokenizer": (tokenizer, (PreTrainedTokenizerBase,)),
        "lr_scheduler": (lr_scheduler, (torch.optim.lr_scheduler.LRScheduler, type(None))),
    }
    for name, (value, kinds) in expected.items():
        if not isinstance(value, kinds):
            raise OperantError(f"{name} is a {type(value).__name__}: give a {kinds[0].__name__}")
    known = dataset is None or isinstance(dataset, torch.utils.data.Dataset) or hasattr(dataset, "column_names")
    require(known, f"dataset is a {type(dataset).__name__}: give a torch or datasets Dataset, or None")


def _accelerator(config: PPOConfig) -> Any:
    try:
        from accelerate import Accelerator
        from accelerate.utils import ProjectConfiguration
    except ImportError as error:
        raise OperantError('operant.compat.trl needs accelerate: pip install "operant[trl]"') from error
    made = Accelerator(
        log_with=config.log_with,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        project_config=ProjectConfiguration(**config.project_kwargs),
        **config.accelerator_kwargs,
    )
    how = "operant.train does this on several GPUs, under torchrun (docs/scale.md)"
    require(made.num_processes <= 1, f"{made.num_processes} processes: TRL's old loop runs in one here; {how}")
    return made
