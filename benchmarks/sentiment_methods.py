"""The main job by every method that plays, with controls: `python -m benchmarks.sentiment_methods`.

Runs `operant train sentiment --algorithm ...` as it is, GRPO also at the price of KL that it was published with, and
both group methods with shuffled rewards, each with one thread, into `runs/bench-methods`. What is there is not made
again. Writes `benchmarks/results/sentiment-methods.json`; docs/algorithms.md shows it. Twenty minutes on two cores.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from benchmarks.sentiment_seeds import CONTROL, QUICK, ROOT
from operant.diagnosis import diagnose, read_history, verdict

RUNS, RESULT = ROOT / "runs/bench-methods", ROOT / "benchmarks/results/sentiment-methods.json"
SHUFFLED = ["--reward", CONTROL]
KINDS = {
    "ppo": [],
    "grpo": ["--algorithm", "grpo"],
    "grpo, kl.loss_coef 0.04": ["--algorithm", "grpo", "--kl.loss-coef", "0.04"],
    "rloo": ["--algorithm", "rloo"],
    "grpo, shuffled rewards": ["--algorithm", "grpo", *SHUFFLED],
    "rloo, shuffled rewards": ["--algorithm", "rloo", *SHUFFLED],
}


def place(name: str):
    return RUNS / name.replace(", ", "-").replace(" ", "-")


def train(name: str, seed: int, quick: bool) -> None:
    """One run, unless it is there."""
    out = place(name)
    if (out / "evaluation.json").exists():
        return
    words = [sys.executable, "-m", "operant", "train", "sentiment", "--seed", str(seed), "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words += KINDS[name] + (QUICK if quick else [])
    subprocess.run(words, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)


def summary(name: str) -> dict:
    """What a run came to."""
    held = json.loads((place(name) / "evaluation.json").read_text(encoding="utf-8"))
    history = read_history(place(name))
    found = diagnose(history)
    said = {"verdict": verdict(history, found), "findings": [f.message for f in found if f.level != "note"]}
    return {
        "run": name,
        "before": held["before"]["mean"],
        "after": held["after"]["mean"],
        "kl": held["after"]["kl"],
        **said,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="tiny runs, nothing measured: does it run?")
    args = parser.parse_args()
    RUNS.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(lambda name: train(name, args.seed, args.quick), KINDS))
    rows = [summary(name) for name in KINDS]
    told = {"command": "python -m benchmarks.sentiment_methods", "seed": args.seed, "runs": rows}
    RESULT.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(f"{row['run']:24} {row['before']:.3f} -> {row['after']:.3f}  KL {row['kl']:5.1f}  {row['verdict']}")


if __name__ == "__main__":
    main()
