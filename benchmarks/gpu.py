"""Every check that needs a GPU, in a few minutes: `python -m benchmarks.gpu`. Writes benchmarks/results/gpu.json.

1. Sampling and scoring agree on the GPU (log-prob gap below 1e-3 in float32), for four architectures.
2. A rewarded token becomes likelier.
3. Seconds of a PPO step at the GPT-2 124M shape, 64 replies of 24 tokens, one epoch.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

from operant.learner import Learner

SMALL = {"vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = SMALL | {"intermediate_size": 128, "num_key_value_heads": 2}


def models() -> dict[str, torch.nn.Module]:
    """Tiny random models of four architectures, far from uniform."""
    t = transformers
    torch.manual_seed(0)
    return {
        "gpt2": t.GPT2LMHeadModel(t.GPT2Config(vocab_size=200, n_embd=64, n_layer=2, n_head=4, initializer_range=0.2)),
        "gpt_neox": t.GPTNeoXForCausalLM(t.GPTNeoXConfig(intermediate_size=128, initializer_range=0.2, **SMALL)),
        "llama": t.LlamaForCausalLM(t.LlamaConfig(initializer_range=0.2, **GATED)),
        "qwen2": t.Qwen2ForCausalLM(t.Qwen2Config(initializer_range=0.2, **GATED)),
    }


def step(learner: Learner, queries: int, width: int, wanted: int) -> dict[str, float]:
    """One step in which `wanted` is what pays."""
    replies = learner.generate([[3 + (i + j) % 90 for j in range(1 + i % width)] for i in range(queries)])
    return learner.step(replies, [sum(t == wanted for t in r.ids) / len(r.ids) for r in replies])


def main() -> int:
    if not torch.cuda.is_available():
        print("no GPU that torch can use: nothing to check")
        return 0
    told: dict = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name, model in models().items():
        learner = Learner(model, **{"max_tokens": 12, "optimizer.lr": 0.0, "device": "cuda"})
        told[f"gap/{name}"] = step(learner, 32, 8, 7)["rollout/logprob_gap"]
    learner = Learner(models()["gpt2"], **{"max_tokens": 6, "optimizer.lr": 1e-2, "kl.coef": 0.0, "minibatch": 16})
    rewards = [step(learner, 64, 4, 7)["reward/mean"] for _ in range(20)]
    told["canary"] = [rewards[0], rewards[-1]]
    big = transformers.GPT2LMHeadModel(transformers.GPT2Config())
    learner = Learner(big, **{"max_tokens": 24, "sampling.fixed_length": True, "epochs": 1, "minibatch": 64})
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize()
        metrics = step(learner, 64, 8, 7)
        seconds.append({k: metrics[f"time/{k}"] for k in ("generate", "observe", "update")})
    told["gpt2_124m_step"] = seconds[-1]
    told["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    (folder / "gpu.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(told, indent=1))
    good = all(v < 1e-3 for k, v in told.items() if k.startswith("gap/")) and rewards[-1] > rewards[0] + 0.3
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
