"""The demo at its published size, 100 steps of 256 queries: `python -m benchmarks.seed_demo`, ten processor minutes.

The queries are the first 2 to 8 tokens of real reviews (IMDB's training set, `--data` names the folder); the model, the
reward and all other options are those of the recipe `sentiment`. The held-out openings are the recipe's. A finished run
is not repeated. Writes `benchmarks/results/seed-demo.json`; the page of the run is `runs/demo-100x256/report.html`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.kept import places
from operant.machine import about

ROOT = Path(__file__).parents[1]
RUN, RESULTS = places("demo-100x256", "seed-demo")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROOT / "../shared/data/imdb")
    parser.add_argument("--quick", action="store_true", help="only check that it runs: one step of 4 replies")
    given = parser.parse_args()
    steps, batch = ("1", "4") if given.quick else ("100", "256")
    size = ["--data.query-tokens", "2-8", "--steps", steps, "--batch", batch]
    size += ["--minibatch", "4"] if given.quick else []
    if not (RUN / "evaluation.json").is_file():
        shutil.rmtree(RUN, ignore_errors=True)  # of a run that was stopped
        words = ["train", "sentiment", "--tasks", str(given.data / "imdb_train.jsonl.gz"), *size, "--threads", "1"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run([sys.executable, "-m", "operant", *words, "--out", str(RUN)], check=True, env=environment)
    judged = json.loads((RUN / "evaluation.json").read_text(encoding="utf-8"))
    rows = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    row: dict[str, Any] = {when: judged[when]["mean"] for when in ("before", "after")}
    row |= {"kl": judged["after"]["kl"], "openings": len(judged["after"]["replies"])}
    row |= {"replies": sum(step["rollout/count"] for step in rows), "steps": len(rows)}
    row["curve"] = [step["reward/mean"] for step in rows]
    result = {"command": "python -m benchmarks.seed_demo", "machine": about(), "rows": [row]}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print({name: value for name, value in row.items() if name != "curve"})


if __name__ == "__main__":
    main()
