"""The GPU against the CPU: sampling and scoring agree, updates agree, and the same replies are sampled."""

from copy import deepcopy
from typing import Any

import torch
import transformers as t

from benchmarks.gpu.place import Place, queries

SMALL = {"vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = SMALL | {"intermediate_size": 128, "num_key_value_heads": 2, "initializer_range": 0.2}
ENDS = {"bos_token_id": 0, "eos_token_id": 0}
QUIET = {"kl.coef": 0.1, "max_tokens": 12, "watch_every": 0}


def models() -> dict[str, Any]:
    """Tiny random models of four architectures, far from uniform."""
    torch.manual_seed(0)
    neox = t.GPTNeoXConfig(intermediate_size=128, initializer_range=0.2, **SMALL, **ENDS)
    shape = {"vocab_size": 200, "n_embd": 64, "n_layer": 2, "n_head": 4}
    made = {
        "gpt2": t.GPT2LMHeadModel(t.GPT2Config(initializer_range=0.2, **shape, **ENDS)),
        "gpt_neox": t.GPTNeoXForCausalLM(neox),
        "llama": t.LlamaForCausalLM(t.LlamaConfig(**GATED, **ENDS)),
        "qwen2": t.Qwen2ForCausalLM(t.Qwen2Config(**GATED, **ENDS)),
    }
    return {name: model.eval() for name, model in made.items()}


def main(place: Place, report: Any) -> None:
    good = True
    for name, model in models().items():
        found = {f"{name}/gap_float32": gap(place, model, "float32"), f"{name}/gap_bf16": gap(place, model, "bfloat16")}
        found |= {f"{name}/update_gap": update_gap(place, model), f"{name}/replies_equal": equal(place, model)}
        good &= found[f"{name}/gap_float32"] < 1e-3 and found[f"{name}/update_gap"] < 1e-3
        good &= (
            found[f"{name}/replies_equal"] > 0.95
        )  # a logit that differs in its last bit occasionally changes a token
        report(**found)
    rewards = canary(place, models()["gpt2"])
    report(canary=[rewards[0], rewards[-1]], good=good and (place.tiny or rewards[-1] > rewards[0] + 0.3))


def gap(place: Place, model: Any, precision: str) -> float:
    """The largest difference between log-probs of decoding and of scoring, over ragged prompts."""
    learner = place.learner(deepcopy(model), precision=precision, **{"optimizer.lr": 0.0, **QUIET})
    replies = learner.generate([q[: 1 + i % 8] for i, q in enumerate(queries(32, 8))])
    return learner.step(replies, [float(i % 3) for i in range(32)])["rollout/logprob_gap"]


def update_gap(place: Place, model: Any) -> float:
    """The difference of one update between the devices: its norm over the norm of the update."""
    # With so large an eps, Adam's first step is the gradient, and no rounding of a gradient of 0 becomes a full step.
    options = {"optimizer.lr": 1.0, "optimizer.eps": 1.0, "optimizer.max_grad_norm": None, "epochs": 1, **QUIET}
    moved = []
    for device in ("cpu", place.device):
        learner = place.learner(deepcopy(model).to(device), precision="float32", **options, device=device)
        before = [p.detach().cpu().clone() for p in learner.policy.trainable()]
        replies = [[5 + (3 * i + j) % 90 for j in range(1 + i % 9)] for i in range(16)]
        learner.step(queries(16, 6), replies, [float(i % 4) for i in range(16)])
        after = [p.detach().cpu() for p in learner.policy.trainable()]
        moved.append(torch.cat([(a - b).flatten().double() for a, b in zip(after, before, strict=True)]))
    return float((moved[0] - moved[1]).norm() / moved[0].norm())


def equal(place: Place, model: Any) -> float:
    """The share of replies that are equal in every id on both devices."""
    replies = []
    for device in ("cpu", place.device):
        learner = place.learner(deepcopy(model).to(device), precision="float32", **QUIET, device=device)
        replies.append([r.ids for r in learner.generate(queries(64, 5))])
    return sum(a == b for a, b in zip(*replies, strict=True)) / 64


def canary(place: Place, model: Any) -> list[float]:
    """Mean rewards of steps with a reward for one token."""
    learner = place.learner(
        model, precision="float32", **{"max_tokens": 6, "optimizer.lr": 1e-2, "kl.coef": 0.0, "minibatch": 16}
    )
    rewards = []
    for _ in range(place.sized(20, 2)):
        replies = learner.generate(queries(64, 4))
        rewards.append(learner.step(replies, [sum(x == 7 for x in r.ids) / len(r.ids) for r in replies])["reward/mean"])
    return rewards
