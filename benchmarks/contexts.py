"""Peak memory and the largest batch of a training step on many-turn rows of 256 to 4,096 tokens.

    python -m benchmarks.contexts

The planned peak comes from `operant.tools.memory_plan`, whose parts are put together for episodes that grow to a
context: keys and values of the rows that decode, and what the engine keeps of them for the next turn. Short ones are
also measured: a process plays episodes in the world of `turns.py`, trains on them, and reports its largest resident
set.
Writes `benchmarks/results/contexts.json`; docs/fast.md shows it. Some minutes.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import operant
from benchmarks import report
from benchmarks.driver import ROOT
from benchmarks.turns import MODELS, NEW, Walk
from operant.models.safe_loading import load_tokenizer
from operant.runs.config import configure
from operant.tools.memory_plan import DECODED, RECORDS, MemoryPlan, plan
from operant.types import Task

RESULT = ROOT / "benchmarks/results/contexts.json"
MODEL = "8 layers x 512"
CONTEXTS = (256, 512, 1024, 2048, 4096)
BATCH, ROOM = 8, 24 * 2**30
MEASURED = 1024
"""The longest context that is measured by default."""
TURN = 43
"""Tokens of a turn in `Walk`, its reply included."""
MOST = 1 << 16
KEPT, VOCABULARY = 2.0, 8192
"""GB that the engine keeps from turn to turn at the most; ids of the tokenizer."""
OPTIONS = {"algorithm": "ppo", "epochs": 1, "sampling.min_tokens": NEW, "watch_every": 0}


def make(folder: Path) -> None:
    """A model folder with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = {
        "vocab_size": VOCABULARY,
        "n_positions": 4096 + TURN,
        "eos_token_id": 0,
        "bos_token_id": 0,
        "pad_token_id": 0,
    }
    GPT2LMHeadModel(GPT2Config(**config, **MODELS[MODEL])).save_pretrained(folder)
    load_tokenizer(Path(operant.__file__).parent / "builtin/reviews-lm").save_pretrained(folder)


def planned(folder: Path, context: int, batch: int) -> MemoryPlan:
    """The plan of a step with `batch` rows of `context` tokens, of which the replies of all turns are trained on."""
    actions = context * NEW // TURN
    tasks = [Task(str(i), [1] * (context - actions)) for i in range(batch)]
    options = {
        "reward": "letters:e",
        "policy": str(folder),
        "batch": batch,
        "sampling.max_tokens": actions,
        "tasks": tasks,
    }
    return plan(configure(OPTIONS | options))


def peak(memory: MemoryPlan, context: int, batch: int) -> float:
    """Bytes at the peak with `batch` rows, from a plan for as many or, beyond a micro-batch, for more or fewer."""
    rows, seen = min(batch, DECODED), memory.shape.batch
    reading = memory.phases["generation and scoring"]
    cache = reading["cache"] * rows / min(seen, DECODED)
    generation = cache + min(1e9 * KEPT, cache) + 24.0 * rows * VOCABULARY + reading["forward pass"]
    always = sum(memory.permanent.values()) + RECORDS * context * (batch - seen)
    return max(memory.loading, always + max(sum(memory.phases["update"].values()), generation))


def largest(memory: MemoryPlan, context: int) -> int:
    """The largest batch that fits."""
    low, high = 1, MOST
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if peak(memory, context, middle) <= ROOM else (low, middle - 1)
    return low


def measure(folder: str, context: int) -> None:
    """Play and train on `BATCH` episodes that grow to `context` tokens; print the peak and the longest row."""
    turns = -(-context // TURN)
    learner = operant.Learner(folder, env=Walk(turns), **OPTIONS | {"sampling.max_tokens": NEW})
    text = "Episode {}: find the way out of the house"
    tasks = [Task(str(i), text.format(i) + learner.env.text(i, 0)) for i in range(BATCH)]
    rollouts = learner.play(tasks)
    learner.learn(rollouts, None)
    longest = max(len(r.turns[-1].prompt) + len(r.turns[-1].action) for r in rollouts)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(json.dumps({"measured_gb": round(most / 1e9, 3), "longest": longest, "turns": turns}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--upto", type=int, default=MEASURED, help="the longest context that is measured")
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "TOKENS"), help="measure one in this process")
    args = parser.parse_args()
    if args.measure:
        measure(args.measure[0], int(args.measure[1]))
        return
    old = json.loads(RESULT.read_text(encoding="utf-8"))["rows"] if RESULT.exists() else []
    rows: dict[int, dict[str, Any]] = {row["context"]: row for row in old}
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        for context in CONTEXTS:
            most = largest(planned(Path(folder), context, DECODED), context)
            size = peak(planned(Path(folder), context, BATCH), context, BATCH)
            rows[context] = rows.get(context, {}) | {"context": context, "planned_gb": round(size / 1e9, 3)}
            rows[context]["largest_batch"] = most
            write(rows)
        for context in [n for n in CONTEXTS if n <= args.upto]:
            command = [sys.executable, "-m", "benchmarks.contexts", "--measure", folder, str(context)]
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
            rows[context] |= json.loads(done.stdout.splitlines()[-1])
            write(rows)


def write(rows: dict[int, dict[str, Any]]) -> None:
    """Print and write the rows that there are; what was measured before stays."""
    print(json.dumps(rows), flush=True)
    result = {"command": "python -m benchmarks.contexts", "machine": report.machine(), "model": MODEL}
    result |= {"batch": BATCH, "most": MOST, "room_gib": ROOM / 2**30, "kept_gb": KEPT, "rows": list(rows.values())}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
