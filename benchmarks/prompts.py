"""Prompts for a frozen model, learnt and searched at equal calls: `python -m benchmarks.prompts`, hours on two cores.

Protocol, fixed before anything was measured. Task: SST-2, with `builtin:reviews-lm` as the frozen task model, the
template `{sentence}{prompt}` and the words terrible and great. 256 training texts are drawn of the set's own for each
seed, half of each label, and 800 held-out texts, the same for all seeds. A prompt has five tokens. It is scored with
the mean calibration (each class's mean log-prob over the scored texts is subtracted), as without it most of a gain is
the threshold.

- `soft_q`, `grpo`, `ppo` and `reinforce` train the MLP of the recipe `prompt` behind the same model: `--steps` steps of
  16 prompts on 64 texts each. The prompt of the table is the best on all training texts of the 20 best in training.
- Searches get as many calls (prompts times texts): `random`, `halving` (successive halving) and `greedy` (coordinates).
- `manual`: six prompts written by hand, the best on training texts; `none`: no prompt; `in-context`; `head`: logistic
  regression on the model's features of the training texts.
- Control: `shuffled`, `soft_q` and `halving` on shuffled labels; on held-out texts neither may beat chance.

A finished row is not repeated. Writes `benchmarks/results/prompts.json`; `make docs` writes its table.
"""

import argparse
import csv
import gzip
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.kept import restore, whole
from benchmarks.timed import spent
from operant import train
from operant.machine import about
from operant.sampling import counter
from operant.tools.cli import main as command

ROOT = Path(__file__).parents[1]
RUNS, RESULTS = ROOT / "runs/bench-prompts", ROOT / "benchmarks/results/prompts.json"
LEARNT = ("soft_q", "grpo", "reinforce", "ppo")
SEARCHED = ("none+mean", "manual+mean", "random+mean", "halving+mean", "greedy+mean", "in-context+mean", "head")
RATES = {"soft_q": 2e-4, "grpo": 2e-3, "reinforce": 1e-3, "ppo": 1e-3}
OWN: dict[str, dict[str, Any]] = {
    "soft_q": {},
    "grpo": {"kl.loss_coef": 0.0},
    "reinforce": {"kl.coef": 0.0, "score.normalise": True},
    "ppo": {"kl.coef": 0.0, "score.normalise": True},
}


def texts(path: Path) -> list[tuple[str, int]]:
    """The texts and labels of a file of SST-2."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [(row["text"], int(row["label"])) for row in map(json.loads, file)]


def write_split(data: Path, seed: int, held_out: int, labels: str = "") -> Path:
    """train.tsv and test.tsv of a seed; with labels="shuffled", those of training are in another order."""
    folder = RUNS / f"sst-2-{seed}{labels}"
    folder.mkdir(parents=True, exist_ok=True)
    known, others = texts(data / "sst2_train.jsonl.gz"), texts(data / "sst2_test.jsonl.gz")
    chance = random.Random(counter(seed, "prompts"))
    chosen = [row for label in (0, 1) for row in chance.sample([row for row in known if row[1] == label], 128)]
    if labels:
        order = chance.sample([label for _, label in chosen], len(chosen))
        chosen = [(text, label) for (text, _), label in zip(chosen, order, strict=True)]
    others = random.Random(0).sample(others, held_out)
    for name, rows in (("train", chosen), ("test", others)):
        with (folder / f"{name}.tsv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, delimiter="\t").writerows([("sentence", "label"), *rows])
    return folder


def learnt(method: str, folder: Path, seed: int, steps: int) -> dict[str, Any]:
    """The best prompt of a run, and its curve."""
    options = {"algorithm": method, "lr": RATES[method], "reward.calibrate": "mean", **OWN[method]}
    options |= {
        "reward.template": "{sentence}{prompt}",
        "reward.words": ("terrible", "great"),
        "out": RUNS / f"{method}-{folder.name}",
    }
    return trained(folder, steps=steps, seed=seed, **options)


def trained(folder: Path, **options: Any) -> dict[str, Any]:
    """The best prompt of a run of the recipe `prompt` with these options, and its curve."""
    begin = spent()
    known = {"reward.compare": ("none",), "threads": "1", "quiet": True, "probes": 0}
    run = train(tasks=str(folder), recipe="prompt", **known, **options)
    whole(run)
    found = json.loads((run.path / "prompts.json").read_text(encoding="utf-8"))
    best, scores = found["prompts"][0], [m.get("reward/mean") for m in run.metrics]
    greedy = next(one for one in found["prompts"] if one["source"] == "greedy")
    of = {name: best[name] for name in ("train", "test", "score")} | {"prompt": best["text"], "calls": found["calls"]}
    curve = [scores[0], *(scores[i] for i in range(len(scores) // 10, len(scores), max(1, len(scores) // 10)))]
    return {**of, "greedy": greedy["test"], "curve": curve, "seconds": spent() - begin}


def searched(name: str, folder: Path, calls: int, *words: str) -> dict[str, Any]:
    """A baseline by `operant prompt search`; `words` name the task model, and how it is asked."""
    begin, out = spent(), folder / "rows.json"
    out.unlink(missing_ok=True)
    asked = ["prompt", "search", "--tasks", str(folder), "--baselines", name, "--calls", str(calls), *words]
    if command([*asked, "--out", str(out)]):
        raise SystemExit(f"{name} failed")
    [row] = json.loads(out.read_text(encoding="utf-8"))
    of = {key: row[key] for key in ("train", "test", "score", "prompt", "calls")}
    return {**of, "seconds": spent() - begin}


def one(name: str, seed: int, data: Path, steps: int, held_out: int) -> dict[str, Any]:
    """One row, in this process."""
    base = name.removesuffix(", shuffled")
    folder = write_split(data, seed, held_out, "shuffled" if base != name else "")
    if base in LEARNT:
        found = learnt(base, folder, seed, steps)
    else:
        words = ["--task-model", "builtin:reviews-lm", "--template", "{sentence}{prompt}", "--words", "terrible,great"]
        found = searched(base, folder, steps * 16 * 64, *words)
    return {"name": name, "seed": seed, "steps": steps, **found}


def place(row: dict[str, Any]) -> Path:
    return RUNS / f"{row['name'].replace(', ', '-')}-{row['seed']}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROOT / "../shared/data/sst")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--held-out", type=int, default=800)
    parser.add_argument("--seeds", default="1,2,3,4,5")
    names = [*LEARNT, *SEARCHED, "soft_q, shuffled", "halving+mean, shuffled"]
    parser.add_argument("--only", default=";".join(names), help="rows, separated by semicolons")
    parser.add_argument("--keep", action="store_true", help="keep the rows of the committed results")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "SEED"), help="one row, in this process")
    given = parser.parse_args()
    RUNS.mkdir(parents=True, exist_ok=True)
    if given.one:
        row = one(given.one[0], int(given.one[1]), given.data, given.steps, given.held_out)
        place(row).write_text(json.dumps(row), encoding="utf-8")
        print({name: value for name, value in row.items() if name != "curve"}, flush=True)
        return
    if given.keep:
        restore(RESULTS, place)
    for seed in given.seeds.split(","):
        for name in given.only.split(";"):
            if not place({"name": name, "seed": seed}).is_file():
                words = [sys.executable, "-m", "benchmarks.prompts", "--data", str(given.data), "--one", name, seed]
                words += ["--steps", str(given.steps), "--held-out", str(given.held_out)]
                subprocess.run(words, cwd=ROOT, check=True)
            rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RUNS.glob("*-?.json"))]
            result = {"command": "python -m benchmarks.prompts", "machine": about(), "rows": rows}
            RESULTS.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
