"""Decoding against the memory bandwidth: each step must read every weight and the cache once."""

from typing import Any

from benchmarks.gpu.machine import copy_rate
from benchmarks.gpu.place import Place, queries

BATCH = 32
BARS = {"gpt2": 0.15, "llama-1b": 0.5}


def main(place: Place, report: Any) -> None:
    rate = copy_rate(place) * 1e9
    report(copy_gb_per_s=rate / 1e9)
    good = True
    for name, bar in BARS.items():
        found = measured(place, name, rate)
        report(**{f"{name}/{k}": v for k, v in found.items()})
        good &= place.tiny or found["share"] >= bar
    report(good=good)


def measured(place: Place, name: str, rate: float) -> dict[str, float]:
    """Seconds per step after the prefill, and the share of the bandwidth that it reaches."""
    prompt, short, long = place.sized((64, 32, 160), (4, 3, 8))
    learner = place.learner(name, reference=None, **{"kl.coef": 0.0})
    prompts = queries(BATCH, prompt)

    def generate(tokens: int) -> float:
        options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "eos_token_id": None}
        return place.seconds(lambda: learner.generate(prompts, **options))

    replies = learner.generate(prompts, max_new_tokens=short, min_new_tokens=short, eos_token_id=None)
    assert all(len(reply.ids) == short for reply in replies)
    for tokens in (short, long):  # warm-up: captures and compiles everything
        generate(tokens)
    a, b = (min(generate(tokens) for _ in range(place.sized(4, 1))) for tokens in (short, long))
    step = (b - a) / (long - short)
    moved = weight_bytes(learner.policy) + cache_bytes(learner.policy, BATCH, prompt + (short + long) / 2)
    return {
        "step_ms": 1e3 * step,
        "tokens_per_s": BATCH / step,
        "whole_tokens_per_s": BATCH * long / b,
        "gb_a_step": moved / 1e9,
        "share": moved / rate / step,
    }


def weight_bytes(policy: Any) -> float:
    """Bytes of the weights that a step reads, without an untied input embedding: it reads one row of that per token."""
    model = policy.model
    tables = {id(model.get_input_embeddings().weight)} - {id(policy.head.weight)}
    return sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in tables)


def cache_bytes(policy: Any, batch: int, length: float) -> float:
    """Bytes of the keys and values of a batch."""
    config = policy.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * size * policy.head.weight.element_size() * batch * length
