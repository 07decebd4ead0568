"""Count the torch operations of a small run: generation, scoring and update of each method. No timing, so no noise.

    python -m benchmarks.operations                   # of this checkout
    python -m benchmarks.operations --json FILE       # and write them

Run it in two checkouts, with `PYTHONPATH=CHECKOUT/src`, to see that a change of layout changed no computation.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

CASES: dict[str, dict[str, Any]] = {
    "ppo": {"minibatch": 4, "epochs": 2},
    "ppo, LoRA": {"minibatch": 4, "epochs": 2, "lora.rank": 2},
    "ppo, trunk": {"minibatch": 4, "epochs": 2, "model.train_layers": 1},
    "grpo": {"algorithm": "grpo"},
    "rloo": {"algorithm": "rloo"},
    "ppo, t5": {"minibatch": 4, "epochs": 2},
}
QUERIES = [[3, 4, 5], [6, 7], [3, 4, 5], [6, 7], [8, 9, 10, 11], [8, 9, 10, 11], [12], [12]]


class Counted(TorchDispatchMode):
    """Counts every operation that reaches a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "t5":
        config = T5Config(vocab_size=60, d_model=32, d_ff=64, d_kv=16, num_layers=2, num_heads=2, dropout_rate=0.0)
        config.decoder_start_token_id = 0
        return T5ForConditionalGeneration(config)
    return GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=2, n_positions=64))


def count(name: str) -> dict[str, int]:
    """Operations of two steps of a case: of all, and of the matrix products among them."""
    from operant import Learner

    learner = Learner(model("t5" if "t5" in name else "gpt2"), **{"max_tokens": 8, "seed": 1, **CASES[name]})
    learner.step(replies := learner.generate(QUERIES), scores(replies))  # what is tried out once is not counted
    with Counted() as counted:
        for _ in range(2):
            learner.step(replies := learner.generate(QUERIES), scores(replies))
    products = sum(n for op, n in counted.counts.items() if op.split(".")[1] in ("mm", "addmm", "bmm"))
    return {"operations": sum(counted.counts.values()), "matrix products": products}


def scores(replies: Sequence[Any]) -> list[float]:
    """Known numbers that differ within every group."""
    return [(7 * i % 5) / 5 for i in range(len(replies))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the counts there as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: count(name) for name in CASES}
    for name, counts in found.items():
        print(f"{name:<12} {counts['operations']:>8,} operations, {counts['matrix products']:>6,} matrix products")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
