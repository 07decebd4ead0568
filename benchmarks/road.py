"""From labels to a trained model: `python -m benchmarks.road`, twenty minutes of processor time a row.

Walks `recipes/rlhf.py` three times for each seed: with the stand-in's labels, and with labels that mean nothing
(`shuffled`): 1,000 labels, 60 steps of PPO, 1,000 labels of the trained policy's replies, PPO from the start again. And
once where the reward model keeps learning beside the policy (`beside`): four times 250 labels of the newest policy's
replies, and 15 steps. Its counterpart is the first PPO of `labels`, with as many labels and steps, and a reward model
that does not change. A finished row is not repeated. Writes `benchmarks/results/road.json`; `make docs` writes the
tables.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.kept import places, restore

ROOT = Path(__file__).parents[1]
RUNS, RESULTS = places("bench-road", "road")


KINDS = {"labels": [], "shuffled": ["--shuffled"], "beside": "--beside --rounds 4 --labels 250 --steps 15".split()}
"""Of rows: the options of the recipe."""


def row_file(kind: str, seed: int) -> Path:
    """Where a row is stored, beside the runs that made it."""
    return RUNS / f"{kind}-{seed}" / "row.json"


def walked(kind: str, seed: int, quick: bool) -> dict[str, Any]:
    """Walk the road, and return what was measured at its end."""
    done = row_file(kind, seed)
    work = done.parent
    if not done.is_file():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        words = [sys.executable, "recipes/rlhf.py", "--work", str(work), "--seed", str(seed)]
        words += KINDS[kind] + "--labels 20 --steps 1 --rounds 1 --limit 16".split() * quick
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run(words, cwd=ROOT, env=environment, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        models = [json.loads((work / f"rm-{n}/evaluation.json").read_text())["after"]["metrics"] for n in range(1, 5)
                  if (work / f"rm-{n}").is_dir()]  # fmt: skip
        compared = json.loads((work / "eval.json").read_text())
        compared = {name: value for name, value in compared.items() if name not in ("replies", "tasks")}
        row = {"seed": seed, "kind": kind, "minutes": seconds / 60, "reward_models": models, "eval": compared}
        done.write_text(json.dumps(row))
    return json.loads(done.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--quick", action="store_true", help="to try it: one round of 20 labels, one step of PPO")
    parser.add_argument("--keep", action="store_true", help="keep the rows of the committed results")
    given = parser.parse_args()
    if given.keep:
        restore(RESULTS, lambda row: row_file(row["kind"], row["seed"]))
    seeds = [int(seed) for seed in given.seeds.split(",")]
    for kind, seed in [(kind, seed) for kind in given.kinds.split(",") for seed in seeds]:
        walked(kind, seed, given.quick)
        rows = [json.loads(path.read_text()) for path in sorted(RUNS.glob("*/row.json"))]
        result = {"command": "python -m benchmarks.road", "rows": rows}
        RESULTS.write_text(json.dumps(result, indent=1).replace(f"{ROOT}/", "") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
