"""`operant doctor --plan` against measured peaks: `python -m benchmarks.plan`; writes results/plan.json.

Each case is planned, then run for three steps in a process of its own. Its peak memory is measured without that of the
imports.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GPT2 = {"batch": 32, "max_tokens": 24, "minibatch": 8, "sampling.fixed_length": True}
CASES: dict[str, dict[str, Any]] = {
    "reviews-lm, one reply": {"batch": 1, "max_tokens": 2, "minibatch": 1, "watch_every": 0},
    "reviews-lm, full": {"batch": 128, "max_tokens": 24, "minibatch": 64},
    "reviews-lm, long replies": {"batch": 64, "max_tokens": 200, "minibatch": 64, "sampling.fixed_length": True},
    "124M, full": GPT2,
    "124M, full, one minibatch": GPT2 | {"minibatch": 32},
    "124M, trunk": GPT2 | {"preset": "trunk"},
    "124M, bfloat16": GPT2 | {"model.precision": "bfloat16"},
    "124M, LoRA": GPT2 | {"lora.rank": 16},
    "124M, close looks off": GPT2 | {"watch_every": 0},
}
COMMON = {"steps": 3, "probes": 0, "epochs": 1, "checkpoint_minutes": 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", help="run only this case, in this process, and print its peak")
    parser.add_argument("--only", help="part of the names of the cases; no results written")
    parser.add_argument("--model", default="", help="the folder of the model of GPT-2's shape")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measured(args.case, args.model)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        save(folder)
        for name in [n for n in CASES if args.only is None or args.only in n]:
            command = [sys.executable, "-m", "benchmarks.plan", "--case", name, "--model", folder]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{name}: {done.stderr.strip().splitlines()[-1]}")
                continue
            rows.append({"case": name, **json.loads(done.stdout.splitlines()[-1])})
            print(done.stderr[-1200:], rows[-1], flush=True)
    worst = max((abs(row["ratio"] - 1) for row in rows), default=0.0)
    print(f"worst: {100 * worst:.0f} %")
    if args.only is None:
        result = {"command": "python -m benchmarks.plan", "machine": _machine(), "worst": worst, "rows": rows}
        (ROOT / "benchmarks/results/plan.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def save(folder: str) -> None:
    """Save a model of GPT-2's shape with random weights in a folder."""
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config()).save_pretrained(folder)


def measured(name: str, folder: str) -> dict[str, Any]:
    """The planned peak and the measured peak of three steps, in GB."""
    from benchmarks import peak
    from operant.api import steps
    from operant.memory_plan import lines, plan
    from operant.runs.config import configure

    own = not name.startswith("reviews-lm")
    vocabulary = 50_000 if own else 3_000
    options = {"tasks": [[3 + (7 * i + j) % vocabulary for j in range(8)] for i in range(64)], "reward": odd}
    options |= {"policy": folder if own else "builtin:reviews-lm", **CASES[name], **COMMON}
    made = plan(configure(options))
    warm_up()
    before = peak.reset()
    with tempfile.TemporaryDirectory() as out:
        for _ in steps(out=Path(out) / "run", **options):
            most = peak.most() - before
    for line in lines(made):
        print(line, file=sys.stderr)
    return {"planned_gb": made.peak / 1e9, "measured_gb": most, "ratio": made.peak / 1e9 / most, "device": made.device}


def warm_up() -> None:
    """Import everything before memory is measured."""
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401

    import operant.api  # noqa: F401


def odd(rollouts: list[Any]) -> list[float]:
    return [float(sum(i % 2 for i in r.ids)) for r in rollouts]


def _machine() -> str:
    from operant.machine import about

    info = about()
    return f"{info['machine']}, {info['gpu']}, torch {info['torch']}, {info['threads']} threads"


if __name__ == "__main__":
    main()
