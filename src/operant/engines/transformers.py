"""Generation with the weights in training by code that is not ours: transformers, or a policy of the user's."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import getattr_static
from typing import Literal

import torch
from torch import Tensor

from operant.engines.native.capabilities import try_decoding
from operant.engines.native.decoding import Record
from operant.engines.native.engine import NativeEngine
from operant.machine import beat
from operant.models import layout
from operant.models.base import PolicyBase
from operant.models.policy import Policy
from operant.models.safe_loading import LanguageModel
from operant.sampling import Sampling, check_expressed, check_prompts, counter, end_of, uniforms
from operant.types import Completion, OperantError, require

UNKNOWN = ("only_text", "banned", "min_tokens", "min_p", "top_p_least", "keep_stops", "guidance", "truncation")
"""What continuous batching drops or does not have."""
PAGE = 16
"""Tokens of a page of its cache."""


class TransformersEngine:
    """An engine in the training process: `policy` is the model in training, so `sync` only stores the version.

    mode: `generate`: `model.generate`. A logits processor draws the tokens from the counters of `sampling.uniforms`, so
    replies are those of the native engine for the same keys. `continuous`: `model.generate_batch`, which draws by
    itself, so a reply depends on the other prompts of the call; the same call gives the same replies.
    batch: number of rows that are decoded at a time. Completions have no values: the learner computes them.
    """

    def __init__(self, policy: Policy, *, mode: Literal["generate", "continuous"] = "generate", batch: int = 256):
        require(batch >= 1, f"engine.batch={batch}: it must be at least 1")
        if not isinstance(policy, Policy) or not hasattr(policy.model, "generate"):
            name = type(getattr(policy, "model", policy)).__name__
            raise OperantError(f"engine transformers: {name} is no transformers model with `generate`; leave it out")
        if mode == "continuous" and (policy.encoder_decoder or policy.virtual):
            what = "an encoder-decoder" if policy.encoder_decoder else "a soft prompt"
            raise OperantError(f"engine.mode=continuous: transformers cannot batch {what} so; use engine.mode=generate")
        self.mode, self.batch = mode, batch
        self.sync(policy, policy.version)

    def sync(self, policy: Policy, version: int) -> None:
        self.policy, self.version = policy, version

    def choose(
        self, prompts: Sequence[list[int]], options: Sequence[list[list[int]]], sampling: Sampling, keys: Sequence[int]
    ) -> list[tuple[int, Completion]]:
        """Draw one option for each prompt, by the native engine: transformers generates no choice."""
        chooser = NativeEngine(self.policy, kept_gb=0)  # of this engine's weights: copies of it have others
        chooser.version = self.version
        return chooser.choose(prompts, options, sampling, keys)

    @torch.no_grad()
    def generate(self, prompts: Sequence[list[int]], sampling: Sampling, keys: Sequence[int]) -> list[Completion]:
        check_prompts(self.policy, prompts, sampling)
        if self.mode == "continuous":
            call, unknown, name = self.batched, UNKNOWN, "transformers with engine.mode=continuous"
        else:
            call, unknown, name = self.generated, ("guidance",), "transformers"
        check_expressed(sampling, unknown, name)
        made = dict[int, Completion]()
        with neutral(self.policy.model):
            for rows in self.calls(prompts):
                made |= zip(rows, call([prompts[i] for i in rows], sampling, [keys[i] for i in rows]), strict=True)
                beat()
        return [made[i] for i in range(len(prompts))]

    def calls(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """The prompts of each call; of equal length where the model does not read padding exactly."""
        rows = list(range(len(prompts)))
        if self.mode == "generate" and not (self.policy.encoder_decoder or try_decoding(self.policy).left):
            lengths = sorted({len(prompt) for prompt in prompts})
            groups = [[i for i in rows if len(prompts[i]) == length] for length in lengths]
        else:
            groups = [rows]
        return [group[i : i + self.batch] for group in groups for i in range(0, len(group), self.batch)]

    def generated(self, prompts: list[list[int]], sampling: Sampling, keys: list[int]) -> list[Completion]:
        from transformers import GenerationConfig

        policy = self.policy
        record = Record(policy, prompts, sampling, self.version)
        record.values = None
        side = "right" if policy.encoder_decoder else "left"
        ids, mask = layout.pad([[*policy.virtual, *prompt] for prompt in prompts], side, policy.device)
        start = {"decoder_start_token_id": policy.start_token} if policy.encoder_decoder else {}
        rows, begin = torch.arange(len(keys), device=policy.device), 1 if policy.encoder_decoder else ids.shape[1]
        config = GenerationConfig(
            max_new_tokens=sampling.max_tokens,
            do_sample=False,
            pad_token_id=0,
            use_cache=bool(try_decoding(policy).cached),
            **start,
        )

        def draw(before: Tensor, scores: Tensor) -> Tensor:
            """As a logits processor: draw a token for every row, record it, and leave `generate` no other choice."""
            place = before.shape[1] - begin
            places = torch.full_like(rows, place)
            adjusted = sampling.adjust(scores, places)
            allowed = sampling.kept(adjusted)
            if allowed is not None:
                adjusted = adjusted.masked_fill(~allowed, -torch.inf)
            drawn, logprobs = sampling.draw(adjusted, uniforms(keys, place).to(scores.device))
            record.write(rows, places, drawn, logprobs.to(record.logprobs), None, allowed)
            return torch.full_like(scores, -torch.inf).scatter(1, drawn[:, None], 0.0)

        def ended(before: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
            """As a stopping criterion: [B] whether each reply has ended."""
            beat()
            return record.ended

        given = {"input_ids": ids, "attention_mask": mask.long(), "generation_config": config}
        policy.model.generate(**given, logits_processor=[draw], stopping_criteria=[ended])
        return record.completions()

    def batched(self, prompts: list[list[int]], sampling: Sampling, keys: list[int]) -> list[Completion]:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        pages = sum(-(-(len(prompt) + sampling.max_tokens + 1) // PAGE) for prompt in prompts)
        config = GenerationConfig(
            max_new_tokens=sampling.max_tokens,
            do_sample=True,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            eos_token_id=sorted(sampling.stops) or -1,
            pad_token_id=0,
        )
        batching = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=pages + 1,
            max_batch_tokens=max(256, *map(len, prompts)),
            return_logprobs=True,
            seed=counter(*keys) >> 32,
        )
        with torch.random.fork_rng([policy.device] if (policy := self.policy).device.type == "cuda" else []):
            found = self.policy.model.generate_batch(prompts, config, batching)
        replies = list(found.values())
        failed = next((reply.error for reply in replies if reply.error), None)
        if failed or len(replies) != len(prompts):
            raise OperantError(
                f"transformers' continuous batching returned {len(replies)} replies for {len(prompts)} prompts"
                f"{f' ({failed})' if failed else ''}: use engine.mode=generate"
            )
        made = []
        for reply in replies:
            ended = end_of(reply.generated_tokens, sampling, self.policy.tokenizer)
            ids, logprobs = reply.generated_tokens[:ended], reply.logprobs[:ended]
            made.append(Completion(ids, logprobs, None, "length" if ended is None else "stop", self.version))
        return made


@contextmanager
def neutral(model: LanguageModel, config: object = None) -> Iterator[None]:
    """Inside this context the model is in evaluation mode, and its own generation config, such as a repetition penalty,
    changes no logits. config: what stands in its place; None: nothing."""
    from transformers import GenerationConfig

    own, model.eval().generation_config = model.generation_config, config or GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


class OwnEngine:
    """Calls `policy.generate`. `policy` is the policy in training, so `sync` copies no weights."""

    def __init__(self, policy: PolicyBase):
        if not hasattr(policy, "generate") or getattr_static(type(policy), "generate", None) is PolicyBase.generate:
            raise OperantError(f"policy {type(policy).__name__} lacks a method `generate`: write it, or name an engine")
        self.sync(policy, policy.version)

    def sync(self, policy: PolicyBase, version: int) -> None:
        self.policy, self.version = policy, version

    def generate(self, prompts: Sequence[list[int]], sampling: Sampling, keys: Sequence[int]) -> list[Completion]:
        made = self.policy.generate(prompts, sampling, keys)
        counts = f"{len(made)} completions for {len(prompts)} prompts: return one each, in their order"
        require(len(made) == len(prompts), f"{type(self.policy).__name__}.generate returned {counts}")
        return [replace(completion, version=self.version) for completion in made]

    def choose(
        self, prompts: Sequence[list[int]], options: Sequence[list[list[int]]], sampling: Sampling, keys: Sequence[int]
    ) -> list[tuple[int, Completion]]:
        choose: Callable[..., list[tuple[int, Completion]]] | None = getattr(self.policy, "choose", None)
        if choose is None:
            raise OperantError(f"{type(self.policy).__name__} has no method choose, which the world's choices need")
        made = choose(prompts, options, sampling, keys)
        return [(index, replace(completion, version=self.version)) for index, completion in made]
