"""Few-shot classification by a prompt of five tokens: `python -m benchmarks.few_shot --task-model FOLDER`.

Protocol, fixed before anything was measured. The task model is the masked language model of
`recipes/train_masked_lm.py`; its template is `{sentence} {prompt} {mask} .`, the words terrible and great. The training
texts are the published splits of RLPrompt: 16 of each label of SST-2, MR and CR, seeds 13, 21, 42, 87 and 100; their
dev texts are left out. The held-out texts are the first `--held-out` of the set's test file in a fixed random order.

- `none`, and `manual`: the best on the training texts of six prompts written by hand.
- `random`, and `halving` (successive halving): the tokens of the task model, at as many calls (prompts times texts) as
  training.
- `soft_q`: `--steps` steps of 16 prompts on the 32 texts, by the recipe `prompt`: the MLP behind `builtin:reviews-lm`.
  The prompt of the table is the best on the training texts of the 20 best in training.
- Behind a name, `+mean` is the calibration: each class's mean log-prob over the training texts is subtracted.
- `head`: logistic regression on the model's states at the mask.

A finished row is kept in `runs/bench-few-shot`, and not repeated; `--keep` takes over those of the committed results.
Writes `benchmarks/results/few-shot.json`; `make docs` writes its table.
"""

import argparse
import csv
import gzip
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.kept import restore
from benchmarks.prompts import searched, trained
from operant.machine import about

ROOT = Path(__file__).parents[1]
RUNS, RESULTS = ROOT / "runs/bench-few-shot", ROOT / "benchmarks/results/few-shot.json"
NAMES = (
    *("none", "none+mean", "manual", "manual+mean", "soft_q+mean", "halving+mean", "soft_q", "halving"),
    *("random+mean", "random", "head"),
)
SETS, SEEDS = ("sst-2", "mr", "cr"), ("13", "21", "42", "87", "100")


def write_split(data: Path, name: str, seed: str, held_out: int) -> Path:
    """train.tsv of a published split, and above it test.tsv with a part of the set's test file."""
    folder = RUNS / name / f"16-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(data / name / f"16-{seed}" / "train.tsv", folder / "train.tsv")
    with gzip.open(data / name / "test.tsv.gz", "rt", encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file, delimiter="\t")
    with (folder.parent / "test.tsv").open("w", encoding="utf-8", newline="") as file:
        chosen = random.Random(0).sample(rows, min(held_out, len(rows)))
        csv.writer(file, delimiter="\t").writerows([head, *chosen])
    return folder


def one(name: str, seed: str, given: argparse.Namespace) -> dict[str, Any]:
    """One row, in this process."""
    of, _, way = name.partition(" ")
    folder, model = write_split(given.data, of, seed, given.held_out), str(given.task_model)
    base, _, calibrate = way.partition("+")
    if base == "soft_q":
        options = {"task_model": model, "lr": 3e-4, "reward.calibrate": calibrate or "none"}
        found = trained(folder, steps=given.steps, seed=int(seed), out=RUNS / f"{of}-{way}-{seed}", **options)
    else:
        found = searched(way, folder, given.steps * 16 * 32, "--task-model", model)
    return {"set": of, "name": way, "seed": seed, "steps": given.steps, "held_out": given.held_out, **found}


def place(row: dict[str, Any]) -> Path:
    return RUNS / f"{row['set']}-{row['name']}-{row['seed']}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROOT / "../shared/data/rlprompt/fewshot16")
    parser.add_argument("--task-model", type=Path, default=ROOT / "runs/masked-lm/masked-lm")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--held-out", type=int, default=500)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--seeds", default=",".join(SEEDS))
    parser.add_argument("--only", default=",".join(NAMES), help="rows, separated by commas")
    parser.add_argument("--keep", action="store_true", help="keep the rows of the committed results")
    parser.add_argument("--one", nargs=2, metavar=("SET NAME", "SEED"), help="one row, in this process")
    given = parser.parse_args()
    RUNS.mkdir(parents=True, exist_ok=True)
    if given.one:
        row = one(*given.one, given)
        place(row).write_text(json.dumps(row), encoding="utf-8")
        print({name: value for name, value in row.items() if name != "curve"}, flush=True)
        return
    if given.keep:
        restore(RESULTS, place)
    beside = given.task_model.parent / f"{given.task_model.name}.json"
    model = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
    for seed in given.seeds.split(","):
        for of in given.sets.split(","):
            for name in given.only.split(","):
                if not place({"set": of, "name": name, "seed": seed}).is_file():
                    words = [sys.executable, "-m", "benchmarks.few_shot", "--one", f"{of} {name}", seed]
                    words += ["--data", str(given.data), "--task-model", str(given.task_model)]
                    words += ["--steps", str(given.steps), "--held-out", str(given.held_out)]
                    subprocess.run(words, cwd=ROOT, check=True)
                rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RUNS.glob("*.json"))]
                result = {"command": "python -m benchmarks.few_shot", "machine": about(), "model": model, "rows": rows}
                RESULTS.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
