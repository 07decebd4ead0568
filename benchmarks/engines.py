"""Tokens a second of the engines, in turn, with the built-in policy on one thread.

    python -m benchmarks.engines [--python ~/vllm/bin/python]

In each round every engine generates 64 replies of exactly 24 tokens to the built-in openings, in turn. Processor
time counts this process alone, on which other processes of the machine have little influence; a server has its own.
Writes `benchmarks/results/engines.json`; docs/engines.md shows it.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from benchmarks.driver import ROOT
from operant import machine
from operant.data import load_tasks
from operant.engines import ENGINES
from operant.models.loading import load_policy
from operant.sampling import Sampling, encode_prompt, task_key
from operant.types import Batch

RESULT = ROOT / "benchmarks/results/engines.json"
REPLIES, LENGTH = 64, 24
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "native": ("native", {}),
    "transformers": ("transformers", {}),
    "transformers, continuous": ("transformers", {"mode": "continuous"}),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", help="that of an environment with vLLM, which is then a side, too")
    parser.add_argument("--args", default="--dtype float32", help="further arguments of vllm serve")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--replies", type=int, default=REPLIES)
    parser.add_argument("--result", type=Path, default=RESULT)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    policy = load_policy("builtin:reviews-lm")
    tasks = load_tasks("builtin:openings/train", policy.tokenizer)[: asked.replies]
    prompts = [encode_prompt(policy.tokenizer, task.prompt) for task in tasks]
    sampling = Sampling(max_tokens=LENGTH, fixed_length=True)
    vllm = {"vllm": ("vllm", {"python": Path(asked.python), "args": asked.args})} if asked.python else {}
    engines = {side: ENGINES.find(name)(policy, **options) for side, (name, options) in (SIDES | vllm).items()}
    rows: dict[str, list[dict[str, float]]] = {side: [] for side in engines}
    for round in range(asked.rounds + 1):
        keys = [task_key(round, "train", 0, task.id) for task in tasks]
        for side, engine in engines.items():
            wall, processor = time.perf_counter(), time.process_time()
            completions = engine.generate(prompts, sampling, keys)
            row = {"seconds": time.perf_counter() - wall, "processor": time.process_time() - processor}
            batch = Batch.given(prompts, [c.action for c in completions])
            with torch.no_grad():
                own = policy.forward(batch, sampling).logprobs[batch.actions]
            theirs = torch.tensor([x for c in completions for x in c.logprobs])
            if round:  # the first is not counted
                rows[side].append(row | {"gap": float((own - theirs).abs().mean())})
    for engine in engines.values():
        getattr(engine, "close", lambda: None)()
    tokens = asked.replies * LENGTH
    result: dict[str, Any] = {"replies": asked.replies, "tokens": LENGTH, "rounds": asked.rounds}
    result["machine"] = machine.about()
    result["sides"] = {
        side: {
            "tokens_per_second": tokens / median(row["seconds"] for row in found),
            "tokens_per_processor_second": tokens / median(row["processor"] for row in found),
            "gap": mean(row["gap"] for row in found),
        }
        for side, found in rows.items()
    }
    asked.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["sides"], indent=1))


if __name__ == "__main__":
    main()
