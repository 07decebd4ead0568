"""The optimizers on the demo, three rates each: `python -m benchmarks.optimizers`, a quarter of an hour on two cores.

Every run is 24 steps of 128 replies of the recipe `sentiment`, on one thread. Each optimizer has three rates with seed
1; the rate whose held-out reward is the highest has seeds 2 and 3 too, and a control whose rewards are shuffled.
`bytes` are those of the optimizer's state for a trained weight, `ms` the median of nine steps of the optimizer alone.

A finished row is not repeated, and `--keep` takes the committed ones. Writes `benchmarks/results/optimizers.json` and
`docs/figures/optimizers.svg`; `make docs` writes the table of docs/how-to-train.md.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.kept import drawn, places, restore, whole
from benchmarks.policy_gradients import SHUFFLED, measured
from benchmarks.report import machine
from operant import train

ROOT = Path(__file__).parents[1]
RUNS, RESULTS = places("bench-optimizers", "optimizers")
FIGURE = drawn("optimizers.svg")
KINDS: dict[str, tuple[dict[str, Any], tuple[float, float, float], str]] = {
    "adamw": ({}, (1e-4, 3e-4, 1e-3), "#0072b2"),
    "adamw, 8-bit states": ({"optimizer.states": "8bit"}, (1e-4, 3e-4, 1e-3), "#56b4e9"),
    "muon": ({"optimizer.kind": "muon"}, (1e-4, 3e-4, 1e-3), "#d55e00"),
    "rmsprop": ({"optimizer.kind": "rmsprop"}, (3e-5, 1e-4, 3e-4), "#009e73"),
    "sgd, momentum 0.9": ({"optimizer.kind": "sgd", "optimizer.momentum": 0.9}, (0.03, 0.1, 0.3), "#888888"),
}
"""The options of each optimizer, its rates, and its colour."""


def place(row: dict[str, Any]) -> Path:
    words = (row["optimizer"], row["kind"], row["rate"], row["seed"])
    return RUNS / "-".join(map(str, words)).replace(" ", "_").replace(",", "") / "row.json"


def one(optimizer: str, kind: str, rate: float, seed: int, quick: bool) -> None:
    """One row, in this process."""
    row: dict[str, Any] = {"optimizer": optimizer, "kind": kind, "rate": rate, "seed": seed}
    options = {"recipe": "sentiment", "steps": 24, "seed": seed, "threads": "1", "probes": 0, "evaluate": None}
    options |= {"optimizer.lr": rate, "quiet": True, "keep_gradients": True} | KINDS[optimizer][0]
    options |= {"reward": SHUFFLED} if kind == "shuffled" else {}
    options |= {"steps": 1, "batch": 8} if quick else {}
    shutil.rmtree(place(row).parent, ignore_errors=True)
    begin = time.process_time()
    run = train(out=place(row).parent / "run", **options)
    whole(run)
    row |= {"seconds": time.process_time() - begin, "curve": [m["reward/mean"] for m in run.metrics]}
    row |= measured(run.learner) | cost(run.learner.optimizer, sum(p.numel() for p in run.learner.policy.trainable()))
    place(row).parent.mkdir(parents=True, exist_ok=True)
    place(row).write_text(json.dumps(row), encoding="utf-8")
    print({name: value for name, value in row.items() if name != "curve"}, flush=True)


def cost(optimizer: torch.optim.Optimizer, trained: int) -> dict[str, float]:
    """Bytes of state for each weight, and the time of a step on one thread, with the gradients of the last one."""
    torch.set_num_threads(1)
    held = sum(x.nbytes for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor))
    seconds = []
    for _ in range(9):
        begin = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    return {"bytes": held / trained, "ms": 1e3 * statistics.median(seconds)}


def summary() -> dict[str, Any]:
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RUNS.glob("*/row.json"))]
    rows.sort(key=lambda row: ([*KINDS].index(row["optimizer"]), row["kind"], row["rate"], row["seed"]))
    return {"command": "python -m benchmarks.optimizers", "machine": machine(), "rows": rows}


def best(rows: list[dict[str, Any]], optimizer: str) -> float:
    """The rate of an optimizer whose held-out reward is the highest with seed 1."""
    own = [r for r in rows if (r["optimizer"], r["kind"], r["seed"]) == (optimizer, "own", 1)]
    return max(own, key=lambda row: row["reward"])["rate"]


def figure(rows: list[dict[str, Any]]) -> str:
    """Reward over the steps at the best rate of each: the mean of the seeds, and a band over all of them."""
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 330" font-family="sans-serif" font-size="12">']
    parts.append('<rect width="720" height="330" fill="white"/>')

    def at(step: int, reward: float) -> str:
        return f"{50 + 440 * step / 23:.1f},{280 - 240 * (reward - 0.4) / 0.6:.1f}"

    parts.append('<text x="50" y="22" font-weight="bold">mean reward of each step (band: all seeds)</text>')
    for tenth in range(4, 11, 2):
        y = at(0, tenth / 10).split(",")[1]
        parts.append(f'<line x1="50" x2="490" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="44" y="{float(y) + 4}" text-anchor="end" fill="#555">{tenth / 10}</text>')
    parts.append('<text x="50" y="300" fill="#555">step 1</text><text x="490" y="300" text-anchor="end">24</text>')
    for i, (name, (_, _, colour)) in enumerate(KINDS.items()):
        rate = best(rows, name)
        curves = [r["curve"] for r in rows if (r["optimizer"], r["kind"], r["rate"]) == (name, "own", rate)]
        steps = list(zip(*curves, strict=True))
        mean, high, low = (
            [at(step, number(values)) for step, values in enumerate(steps)] for number in (statistics.mean, max, min)
        )
        parts.append(f'<polygon points="{" ".join([*high, *reversed(low)])}" fill="{colour}" fill-opacity="0.12"/>')
        parts.append(f'<polyline points="{" ".join(mean)}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        parts.append(f'<text x="505" y="{60 + 22 * i}" fill="{colour}">{name}, {rate:g}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--only", help="part of the name of an optimizer")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="keep the rows of the committed results")
    parser.add_argument("--quick", action="store_true", help="only check that it runs: tiny runs, no results written")
    parser.add_argument(
        "--one", nargs=4, metavar=("OPTIMIZER", "KIND", "RATE", "SEED"), help="one row, in this process"
    )
    given = parser.parse_args()
    if given.one:
        name, kind, rate, seed = given.one
        one(name, kind, float(rate), int(seed), given.quick)
        return
    if given.keep:
        restore(RESULTS, place)

    def run(row: dict[str, Any]) -> None:
        if place(row).is_file():
            return
        words = [sys.executable, "-m", "benchmarks.optimizers", *(["--quick"] if given.quick else []), "--one"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run([*words, *map(str, row.values())], cwd=ROOT, env=environment, check=True)

    names = [name for name in KINDS if (given.only or "") in name]
    seeds = [int(seed) for seed in given.seeds.split(",")]
    with ThreadPoolExecutor(given.at_once) as pool:
        tried = {n: KINDS[n][1][1:2] if given.quick else KINDS[n][1] for n in names}
        first = [{"optimizer": n, "kind": "own", "rate": rate, "seed": 1} for n in names for rate in tried[n]]
        list(pool.map(run, first))
        rates = {name: best(summary()["rows"], name) for name in names}
        further = [("own", seed) for seed in seeds if seed != 1] + [("shuffled", 1)]
        list(
            pool.map(run, [{"optimizer": n, "kind": k, "rate": rates[n], "seed": s} for k, s in further for n in names])
        )
    if not given.quick:
        found = summary()
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        FIGURE.write_text(figure(found["rows"]), encoding="utf-8")


if __name__ == "__main__":
    main()
