"""The sentiment task with every method that generates replies, with controls: `python -m benchmarks.sentiment_methods`.

Runs `operant train sentiment --algorithm ...` as it is, GRPO also with its published KL coefficient, and both group
methods with shuffled rewards, each with one thread, into `runs/bench-methods`. Finished runs are not repeated. Writes
`benchmarks/results/sentiment-methods.json`; docs/algorithms.md shows it. Twenty minutes on two cores.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from benchmarks.kept import places
from benchmarks.sentiment_seeds import CONTROL, QUICK, ROOT
from operant.tools.report.diagnosis import diagnose, read_history, verdict

RUNS, RESULT = places("bench-methods", "sentiment-methods")
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
    """Train one run, unless it is finished already."""
    out = place(name)
    if (out / "evaluation.json").exists():
        return
    shutil.rmtree(out, ignore_errors=True)  # of a run that was stopped
    words = [sys.executable, "-m", "operant", "train", "sentiment", "--seed", str(seed), "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    words += KINDS[name] + (QUICK if quick else [])
    subprocess.run(words, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)


def summary(name: str) -> dict:
    """The results of a run."""
    evaluation = json.loads((place(name) / "evaluation.json").read_text(encoding="utf-8"))
    history = read_history(place(name))
    found = diagnose(history)
    return {
        "run": name,
        "before": evaluation["before"]["mean"],
        "after": evaluation["after"]["mean"],
        "kl": evaluation["after"]["kl"],
        "verdict": verdict(history, found),
        "findings": [f.message for f in found if f.level != "note"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="only check that it runs: half of them, tiny")
    args = parser.parse_args()
    RUNS.mkdir(parents=True, exist_ok=True)
    names = [*KINDS][:: 2 if args.quick else 1]
    with ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(lambda name: train(name, args.seed, args.quick), names))
    rows = [summary(name) for name in names]
    result = {"command": "python -m benchmarks.sentiment_methods", "seed": args.seed, "runs": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(f"{row['run']:24} {row['before']:.3f} -> {row['after']:.3f}  KL {row['kl']:5.1f}  {row['verdict']}")


if __name__ == "__main__":
    main()
