"""Seconds of a PPO step with the number of threads that the library chooses, with one thread and with all, in turn.

    python -m benchmarks.threads

Measured on an idle machine, and with one other busy process per core: six shapes in turn, and whole runs of recipes
with the number of threads that the library chooses. Writes `benchmarks/results/threads.json`; docs/fast.md shows it.
Twenty minutes on two cores.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.driver import ROOT, SIDES, Side, others
from benchmarks.report import machine

RESULT = ROOT / "benchmarks/results/threads.json"
LLAMA = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 5, "num_attention_heads": 8}
LLAMA |= {"num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 512}


def _gpt2(width: int, layers: int, vocabulary: int) -> dict[str, Any]:
    shape = {"n_embd": width, "n_layer": layers, "n_head": max(2, width // 64), "n_positions": 256}
    return {"kind": "gpt2", "config": shape | {"vocab_size": vocabulary}}


CASES: dict[str, dict[str, Any]] = {
    "Llama 260k, 128 x 40": {"shape": {"kind": "llama", "config": LLAMA}, "replies": 128, "tokens": 40, "options": {}},
    "GPT-2 32 wide, 64 x 20": {"shape": _gpt2(32, 2, 96), "replies": 64, "tokens": 20, "options": {}},
    "GPT-2 128 wide, 64 x 20": {"shape": _gpt2(128, 4, 2048), "replies": 64, "tokens": 20, "options": {}},
    "built-in, 128 x 20": {
        "shape": _gpt2(256, 4, 8192),
        "replies": 128,
        "tokens": 20,
        "options": {"update.epochs": 1, "minibatch": 64},
    },
    "built-in, 8 x 20": {"shape": _gpt2(256, 4, 8192), "replies": 8, "tokens": 20, "options": {}},
    "GPT-2 512 wide, 32 x 20": {"shape": _gpt2(512, 6, 8192), "replies": 32, "tokens": 20, "options": {"epochs": 1}},
}

RUNS = {
    "the demo": "sentiment",
    "the demo by GRPO": "sentiment --algorithm grpo --samples 8",
    "rooms": "rooms",
    "programs": "code",
}
"""Recipes, as somebody would type them."""


def steps(words: str, count: int, busy: bool) -> list[float]:
    """Seconds of the steps of `operant train WORDS`, without the first."""
    with tempfile.TemporaryDirectory() as folder, others((os.cpu_count() or 1) if busy else 0):
        given = ["--steps", str(count), "--evaluate", "none", "--probes", "0", "--out", f"{folder}/run"]
        command = [sys.executable, "-m", "operant", "train", *words.split(), *given]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["time/step"] for line in lines[1:]]


def measured(case: dict[str, Any], rounds: int, busy: bool) -> dict[str, Any]:
    """Median seconds of a step of each variant, without the first step."""
    cores = os.cpu_count() or 1
    variants = {"rule": "auto", "one thread": 1, f"{cores} threads": cores}
    with ExitStack() as stack:
        command = [sys.executable, str(SIDES / "threads_side.py")]
        sides = {
            name: stack.enter_context(Side(name, command, case | {"threads": threads})).build()
            for name, threads in variants.items()
        }
        stack.enter_context(others(cores if busy else 0))
        for _ in range(rounds + 1):
            for side in sides.values():
                side.step()
        return {name: {"seconds": side.median("seconds"), "all": [a["seconds"] for a in side.answers[1:]],
                       "phases": {p: side.median("phases", p) for p in ("generate", "observe", "update")}}
                for name, side in sides.items()}  # fmt: skip


def row(name: str, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Ratios of single rounds: the rule to the best variant on an idle machine, and to one thread on a busy one."""
    idle, busy = found["idle"], found["busy"]
    best = min((v for v in idle if v != "rule"), key=lambda v: idle[v]["seconds"])
    against = {"idle": (idle, best), "busy": (busy, "one thread")}
    ratios = {key: [a / b for a, b in zip(runs["rule"]["all"], runs[v]["all"])] for key, (runs, v) in against.items()}
    medians = {f"{key}_ratio": median(values) for key, values in ratios.items()}
    spread = {f"{key}_spread": [min(values), max(values)] for key, values in ratios.items()}
    return {"case": name, "best": best, **medians, **spread, "idle": idle, "busy": busy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--busy-rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="of the whole runs")
    parser.add_argument("--only", help="part of the names of the cases and runs; no results are written")
    args = parser.parse_args()
    rows, runs = [], []
    for name, words in RUNS.items():
        if not args.only or args.only in name:
            runs.append({"run": name, "command": f"operant train {words}"})
            runs[-1] |= {kind: steps(words, args.steps, kind == "busy") for kind in ("idle", "busy")}
            print(f"{name}: idle {median(runs[-1]['idle']):.2f} s, busy {median(runs[-1]['busy']):.2f} s", flush=True)
    for name, case in CASES.items():
        if args.only and args.only not in name:
            continue
        found = {"idle": measured(case, args.rounds, False), "busy": measured(case, args.busy_rounds, True)}
        rows.append(row(name, found))
        for kind in ("idle", "busy"):
            timings = ", ".join(f"{v} {found[kind][v]['seconds']:.3f}" for v in found[kind])
            print(f"{name}, {kind}: {timings} s", flush=True)
    if not args.only:
        result = {"command": "python -m benchmarks.threads", "machine": machine(), "cores": os.cpu_count()}
        result |= {"rows": rows, "runs": runs}
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
