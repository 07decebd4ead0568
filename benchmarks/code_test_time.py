"""Programs at test time, at an equal number of programs: `python -m benchmarks.code_test_time`, about half an hour.

After `python -m benchmarks.programs`, whose start, critic, samples and held-out problems it uses. Protocol, fixed
before anything was measured: 16 programs for each of 200 held-out problems, of which one is chosen by the example tests
of the statement, and among those that pass by the critic.

- `sampled`: all 16 are sampled at once.
- `refined`: 8 are sampled. Of those that pass the examples, the beginning is kept and the rest written anew, 8 times:
  cut by the critic, at a random line, or anywhere.
- `repaired`: 8 are sampled. If none passes the examples, the best failure is rewritten 8 times, by the policy itself or
  by a model that has learnt to: three minutes of cross-entropy on failures of the start, with the most similar right
  program as the reply.
- `both`: refined by the critic and repaired by that model.

Where there is nothing to refine or repair, a problem uses fewer programs, and the table says how many. A finished row
is not repeated. Writes `benchmarks/results/code-test-time.json`; `make docs` writes docs/code.md's table.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.kept import needed, restore
from benchmarks.programs import CRITIC, ROOT, RUNS, START
from benchmarks.timed import spent, train_for
from operant.machine import about
from operant.models.loading import export
from operant.tools.cli import main as command

RESULTS, REPAIRER = ROOT / "benchmarks/results/code-test-time.json", RUNS / "repairer"
REFINE, REPAIR = ["--samples", "8", "--budget", "16"], ["--repair", str(REPAIRER)]
WAYS = {
    "sampled": ["--samples", "16"],
    "refined, critic": [*REFINE, "--refine", "--cut", "critic"],
    "refined, line": [*REFINE, "--refine", "--cut", "line"],
    "refined, random": [*REFINE, "--refine", "--cut", "random"],
    "repaired, itself": [*REFINE, "--repair", "policy"],
    "repaired, trained": [*REFINE, *REPAIR],
    "both": [*REFINE, "--refine", "--cut", "critic", *REPAIR],
}


def train_repairer() -> None:
    """The start, after three minutes of cross-entropy on repairs of its own failures."""
    options = {"policy": str(START), "algorithm": "sft", "form": "repair", "lr": 3e-4, "batch": 64, "steps": 100_000}
    tasks, out = str(RUNS / "critic-train.jsonl"), RUNS / "repairer-run"
    _, policy = train_for(3.0, out, tasks=tasks, **options, quiet=True, threads="1", probes=0)
    export(policy, REPAIRER)


def one(way: str, seed: int) -> dict[str, Any]:
    """One row, in this process."""
    if str(REPAIRER) in WAYS[way] and not REPAIRER.is_dir():
        train_repairer()
    begin, out, few = spent(), RUNS / "test-time.jsonl", RUNS / "held-out-200.jsonl"
    rows = (RUNS / "held-out.jsonl").read_text(encoding="utf-8").splitlines()[:200]
    few.write_text("\n".join(rows) + "\n", encoding="utf-8")
    out.unlink(missing_ok=True)  # that of another row
    words = ["generate", str(START), "--tasks", str(few), "--form", "code", "--tests", "--all", "--max-tokens", "100"]
    words += ["--critic", f"{CRITIC}/export", "--seed", str(seed), *WAYS[way], "--out", str(out)]
    if command(words):
        raise SystemExit(f"{way} failed")
    found = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    best = {row["task"]: row for row in found if row.get("rank") == 0}
    ways = {how: sum(row["how"] == how for row in best.values()) for how in ("sampled", "refined", "repaired")}
    right = [int(row["outcome"] == "passed") for row in best.values()]
    known = {"programs": len(found) / len(best), "right": right, "chosen": ways}
    known["any"] = len({row["task"] for row in found if row["outcome"] == "passed"}) / len(best)
    return {"way": way, "seed": seed, "seconds": spent() - begin, **known}


def place(row: dict[str, Any]) -> Path:
    return RUNS / "test-time" / f"{row['way'].replace(', ', '-')}-{row['seed']}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=";".join(WAYS), help="ways, separated by semicolons")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--keep", action="store_true", help="keep the rows of the committed results")
    parser.add_argument("--one", nargs=2, metavar=("WAY", "SEED"), help="one row, in this process")
    given = parser.parse_args()
    needed(RUNS / "held-out.jsonl", "python -m benchmarks.programs")
    if given.one:
        row = one(given.one[0], int(given.one[1]))
        place(row).parent.mkdir(exist_ok=True)
        place(row).write_text(json.dumps(row), encoding="utf-8")
        print({name: value for name, value in row.items() if name != "right"}, flush=True)
        return
    if given.keep:
        restore(RESULTS, place)
    for seed in given.seeds.split(","):
        for way in given.only.split(";"):
            if not place({"way": way, "seed": seed}).is_file():
                words = [sys.executable, "-m", "benchmarks.code_test_time", "--one", way, seed]
                subprocess.run(words, cwd=ROOT, check=True)
            rows = [
                json.loads(path.read_text(encoding="utf-8")) for path in sorted((RUNS / "test-time").glob("*-?.json"))
            ]
            result = {"command": "python -m benchmarks.code_test_time", "machine": about(), "rows": rows}
            RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
