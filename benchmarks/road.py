"""The road from taste to a trained model: `python -m benchmarks.road`, twenty minutes of processor time a row.

Walks `recipes/rlhf.py` once for each seed with the stand-in's labels, and once with labels that mean nothing: 1,000
labels, PPO, 1,000 labels of the trained policy's replies, PPO. A finished row is not repeated. Writes
`benchmarks/results/road.json`; `make docs` writes the table.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.kept import restore

ROOT = Path(__file__).parents[1]
RUNS, RESULTS = ROOT / "runs/bench-road", ROOT / "benchmarks/results/road.json"


def row_file(seed: int, shuffled: bool) -> Path:
    """Where a row is stored, beside the runs that made it."""
    return RUNS / f"{'shuffled' if shuffled else 'labels'}-{seed}" / "row.json"


def walked(seed: int, shuffled: bool, quick: bool) -> dict[str, Any]:
    """Walk the road, and return what was measured at its end."""
    done = row_file(seed, shuffled)
    work = done.parent
    if not done.is_file():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        words = [sys.executable, "recipes/rlhf.py", "--work", str(work), "--seed", str(seed)]
        words += ["--labels", "20", "--steps", "1"] * quick
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run(words + ["--shuffled"] * shuffled, cwd=ROOT, env=environment, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        models = [json.loads((work / f"rm-{n}/evaluation.json").read_text())["after"]["metrics"] for n in (1, 2)]
        compared = json.loads((work / "eval.json").read_text())
        compared = {name: value for name, value in compared.items() if name not in ("replies", "tasks")}
        row = {"seed": seed, "shuffled": shuffled, "minutes": seconds / 60, "reward_models": models, "eval": compared}
        done.write_text(json.dumps(row))
    return json.loads(done.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--quick", action="store_true", help="to try the program: 20 labels, one step of PPO")
    parser.add_argument("--keep", action="store_true", help="keep the rows of the committed results")
    given = parser.parse_args()
    if given.keep:
        restore(RESULTS, lambda row: row_file(row["seed"], row["shuffled"]))
    seeds, rows = [int(seed) for seed in given.seeds.split(",")], list[dict[str, Any]]()
    for seed, shuffled in [(seed, False) for seed in seeds] + [(seed, True) for seed in seeds]:
        rows.append(walked(seed, shuffled, given.quick))
        result = {"command": "python -m benchmarks.road", "rows": rows}
        RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
