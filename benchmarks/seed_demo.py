"""The demo at its published size, 100 steps of 256 queries: `python -m benchmarks.seed_demo`, an hour of one core.

The queries are the first 2 to 8 tokens of real reviews (IMDB's training set, `--data` names the folder); the model, the
reward and all other options are those of the recipe `sentiment`. The held-out openings are the recipe's. Three seeds,
and of each the control, whose replies get each other's scores. A finished row is not repeated, and `--keep` takes the
committed ones. Writes `benchmarks/results/seed-demo.json`, `docs/figures/seed-demo.svg` with reward and KL over steps,
and `docs/figures/seed-demo-rewards.svg` with the distribution of the rewards at each step.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.kept import ROOT, drawn, places, restore
from benchmarks.sentiment_seeds import CONTROL, figure
from operant.machine import about
from operant.tally import Histogram

RUNS, RESULTS = places("bench-seed-demo", "seed-demo")
BINS = 16
"""Of a reward from 0 to 1: a power of two, because the bins of a run's own histograms are."""


def place(row: dict[str, Any]) -> Path:
    return RUNS / f"{row['method']}-{row['seed']}" / "row.json"


def train(row: dict[str, Any], data: Path, quick: bool) -> None:
    """One run, in a process of its own; writes its row."""
    out = place(row).parent / "run"
    shutil.rmtree(out, ignore_errors=True)  # of a row that was stopped
    steps, batch = ("1", "4") if quick else ("100", "256")
    words = [sys.executable, "-m", "operant", "train", "sentiment", "--tasks", str(data / "imdb_train.jsonl.gz")]
    words += ["--data.query-tokens", "2-8", "--steps", steps, "--batch", batch, "--seed", str(row["seed"])]
    words += ["--threads", "1", "--out", str(out), *(["--minibatch", "4"] if quick else [])]
    words += ["--reward", CONTROL] if row["method"] == "shuffled" else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    before = os.times()
    subprocess.run(words, cwd=ROOT, check=True, env=environment, stdout=subprocess.DEVNULL)
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    judged = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))
    logged, spread = (
        [json.loads(line) for line in (out / name).read_text(encoding="utf-8").splitlines()]
        for name in ("metrics.jsonl", "distributions.jsonl")
    )
    row |= {"before": judged["before"]["mean"], "after": judged["after"]["mean"], "kl_after": judged["after"]["kl"]}
    row |= {"openings": len(judged["after"]["replies"]), "replies": sum(step["rollout/count"] for step in logged)}
    row |= {"seconds": seconds, "steps": len(logged)}  # of the processor, from the command to its end
    row |= {"reward": [step["reward/mean"] for step in logged], "kl": [step["kl/per_reply"] for step in logged]}
    row["distribution"] = [shares(Histogram.from_plain(step["histograms"]["reward"])) for step in spread]
    place(row).write_text(json.dumps(row), encoding="utf-8")
    print({name: value for name, value in row.items() if not isinstance(value, list)}, flush=True)


def shares(histogram: Histogram) -> list[float]:
    """The share of a step's replies in each of `BINS` equal parts of 0 to 1."""
    found = [0.0] * BINS
    for i, count in enumerate(histogram.counts):
        found[min(int((histogram.start + i) * histogram.width * BINS), BINS - 1)] += count / sum(histogram.counts)
    return [round(share, 4) for share in found]


def heatmap(rows: list[dict[str, Any]]) -> str:
    """An SVG: for each step, how many replies have which reward; the first seed of each method, side by side."""
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 260" font-family="sans-serif" font-size="12">']
    parts.append('<rect width="720" height="260" fill="white"/>')
    for left, method, title in ((45, "ppo", "PPO"), (405, "shuffled", "control: shuffled rewards")):
        [row, *_] = [row for row in rows if row["method"] == method] or [{"distribution": [], "seed": "none"}]
        wide, high = 290 / max(len(row["distribution"]), 1), 200 / BINS
        parts.append(f'<text x="{left}" y="18">{title}, seed {row["seed"]}: rewards of each step</text>')
        parts.append('<g fill="#2563ab">')
        for i, step in enumerate(row["distribution"]):
            for j, share in enumerate(step):
                x, y, shade = left + wide * i, 230 - high * (j + 1), min(1.0, share / 0.5) ** 0.5
                box = f'<path d="M{x:.1f} {y:g}h{wide:.2f}v{high:g}h-{wide:.2f}" opacity="{shade:.2g}"/>'
                parts += [box] if share else []
        parts.append("</g>")
        for tick in (0, 0.5, 1):
            y = 234 - 200 * tick
            parts.append(f'<text x="{left - 6}" y="{y:.0f}" text-anchor="end" fill="#555">{tick:g}</text>')
        parts.append(f'<text x="{left + 290}" y="250" text-anchor="end" fill="#555">step</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def write() -> None:
    """Write the results of all rows, and both figures."""
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RUNS.glob("*/row.json"))]
    result = {"command": "python -m benchmarks.seed_demo", "machine": about(), "rows": rows}
    RESULTS.write_text(json.dumps(result) + "\n", encoding="utf-8")  # thousands of numbers, of which none needs a line
    names = {"ppo": "seed", "shuffled": "control"}
    curves = [row | {"run": f"{names[row['method']]}-{row['seed']}"} for row in rows]
    drawn("seed-demo.svg").write_text(figure(curves) + "\n", encoding="utf-8")
    drawn("seed-demo-rewards.svg").write_text(heatmap(rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROOT / "../shared/data/imdb")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--keep", action="store_true", help="keep the rows of the committed results")
    parser.add_argument("--quick", action="store_true", help="only check that it runs: one step of 4 replies")
    given = parser.parse_args()
    if given.keep:
        restore(RESULTS, place)
    for seed in (int(seed) for seed in given.seeds.split(",")):
        for method in ("ppo", "shuffled"):
            row = {"method": method, "seed": seed}
            if not place(row).is_file():
                train(row, given.data, given.quick)
    write()


if __name__ == "__main__":
    main()
