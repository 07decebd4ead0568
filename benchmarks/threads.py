"""Seconds of a PPO step with the number of threads that the library chooses, with one thread and with all, in turn.

    python -m benchmarks.threads

Measured on an idle machine, and with one other busy process per core. Writes
`benchmarks/results/threads.json`; docs/fast.md shows it. Ten minutes on two cores.
"""

import argparse
import json
import os
import sys
from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks.driver import ROOT, SIDES, Side, others

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
    parser.add_argument("--busy-rounds", type=int, default=4)
    parser.add_argument("--only", help="part of the names of the cases; no results are written")
    args = parser.parse_args()
    rows = []
    for name, case in CASES.items():
        if args.only and args.only not in name:
            continue
        found = {"idle": measured(case, args.rounds, False), "busy": measured(case, args.busy_rounds, True)}
        rows.append(row(name, found))
        for kind in ("idle", "busy"):
            timings = ", ".join(f"{v} {found[kind][v]['seconds']:.3f}" for v in found[kind])
            print(f"{name}, {kind}: {timings} s", flush=True)
    if not args.only:
        result = {"command": "python -m benchmarks.threads", "cores": os.cpu_count(), "rows": rows}
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
