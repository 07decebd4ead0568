"""Reward against KL for every way of pricing KL: `python -m benchmarks.kl_frontier`.

Trains the demo, 72 steps of 128 replies on one thread, at five prices or targets of each of six ways: a fixed price of
the sampled difference in the reward; the adaptive controller, from 0.1, at five targets; a price in the loss; and the
exact divergences, reverse and forward in the reward, reverse in the loss. Held-out reward and KL are those of the run's
own last evaluation. Three seeds, all ways of a seed before the next; a run takes about three minutes of processor time.
A finished row is not repeated, and `--keep` takes the committed ones. Writes `benchmarks/results/kl-frontier.json` and
`docs/figures/kl-frontier.svg`.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.kept import drawn, places, restore
from benchmarks.sentiment_seeds import QUICK, ROOT

RUNS, RESULTS = places("bench-kl-frontier", "kl-frontier")
FIGURE = drawn("kl-frontier.svg")
PRICES, IN_LOSS = (0.02, 0.05, 0.1, 0.2, 0.5), ("--kl.coef", "0", "--kl.loss_coef")
WAYS: dict[str, tuple[str, tuple[str, ...], tuple[float, ...]]] = {
    "fixed": ("#2563ab", ("--kl.coef",), PRICES),
    "adaptive": ("#d97706", ("--kl.control", "adaptive", "--kl.target"), (1, 2, 4, 8, 16)),
    "loss": ("#15803d", IN_LOSS, PRICES),
    "reverse": ("#7c3aed", ("--kl.kind", "reverse", "--kl.coef"), PRICES),
    "forward": ("#be185d", ("--kl.kind", "forward", "--kl.coef"), PRICES),
    "loss, reverse": ("#475569", ("--kl.loss_kind", "reverse", *IN_LOSS), PRICES),
}
"""Each way: its colour, its options, and the values of the last of them."""


def place(row: dict[str, Any]) -> Path:
    return RUNS / f"{row['way'].replace(', ', '_')}-{row['value']:g}-{row['seed']}" / "row.json"


def train(row: dict[str, Any], quick: bool) -> None:
    """One run, in a process of its own; writes its row."""
    out, options = place(row).parent / "run", WAYS[row["way"]][1]
    shutil.rmtree(out, ignore_errors=True)  # of a row that was stopped
    words = [sys.executable, "-m", "operant", "train", "sentiment", "--seed", str(row["seed"]), "--out", str(out)]
    words += [*options, f"{row['value']:g}", *(QUICK if quick else [])]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    before = os.times()
    subprocess.run(words, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    then = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))["after"]
    row = row | {"seconds": seconds, "reward": then["mean"], "kl": then["kl"]}
    place(row).write_text(json.dumps(row), encoding="utf-8")
    print(row, flush=True)


def write() -> list[dict[str, Any]]:
    """Write the results of all rows, and return them."""
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RUNS.glob("*/row.json"))]
    result = {"command": "python -m benchmarks.kl_frontier", "rows": rows}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return rows


def figure(rows: list[dict[str, Any]]) -> str:
    """The figure as SVG: held-out reward over KL, a point for each run, a line through each way's means."""
    high, low = 5 * math.ceil(max(row["kl"] for row in rows) / 5), min(row["reward"] for row in rows)
    low, left, bottom = 0.1 * (low // 0.1), 50, 330

    def at(kl: float, reward: float) -> tuple[float, float]:
        return left + 480 * kl / high, bottom - 300 * (reward - low) / max(1 - low, 1e-9)

    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 370" font-family="sans-serif" font-size="12">']
    parts.append('<rect width="720" height="370" fill="white"/>')
    parts.append(f'<text x="{left}" y="18">Held-out reward over KL per reply (nats)</text>')
    for tick in range(6):
        reward, kl = low + (1 - low) * tick / 5, high * tick / 5
        x, y = at(kl, reward)
        parts.append(f'<line x1="{left}" x2="{left + 480}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{reward:.2f}</text>')
        parts.append(f'<text x="{x:.1f}" y="350" text-anchor="middle" fill="#555">{kl:.0f}</text>')
    measured = {way: how for way, how in WAYS.items() if any(row["way"] == way for row in rows)}
    for i, (way, (colour, _, values)) in enumerate(measured.items()):
        means = []
        for value in values:
            points = [(row["kl"], row["reward"]) for row in rows if (row["way"], row["value"]) == (way, value)]
            drawn = (at(*point) for point in points)
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}" opacity=".6"/>' for x, y in drawn]
            means += [at(*map(statistics.mean, zip(*points)))] if points else []
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in sorted(means))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="560" y="{60 + 20 * i}" fill="{colour}">{way}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--only", default=";".join(WAYS), help="ways, separated by semicolons")
    parser.add_argument("--keep", action="store_true", help="keep the rows of the committed results")
    parser.add_argument("--quick", action="store_true", help="only check that it runs: a tiny run a way")
    parser.add_argument("--draw", action="store_true", help="only draw the figure of the committed results")
    given = parser.parse_args()
    if given.draw:
        FIGURE.write_text(figure(json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]), encoding="utf-8")
        return
    if given.keep:
        restore(RESULTS, place)
    ways = given.only.split(";")
    for seed in (int(seed) for seed in given.seeds.split(",")):
        for way, (_, _, values) in WAYS.items():
            for value in values[: 1 if given.quick else None] if way in ways else ():
                row = {"way": way, "value": value, "seed": seed}
                if not place(row).is_file():
                    train(row, given.quick)
                rows = write()
    FIGURE.write_text(figure(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
