"""PPO, NLPO, A2C, TRPO and REINFORCE on the continuation of film reviews: `python -m benchmarks.policy_gradients`.

Protocol, fixed before anything was measured. Every run starts from `builtin:reviews-lm` and has 24 steps of 128 replies
of 10 to 20 tokens to openings of reviews; the reward is the probability that `builtin:sentiment` calls the text
positive, with a KL penalty of 0.1 a nat (of normalised scores), as in the recipe `sentiment`. Each method has three
rates, a factor of three apart, and five seeds; TRPO has no learning rate, so its bound is varied. At the middle rate
there are also runs without KL, and controls whose rewards are shuffled within a step. Afterwards 256 held-out openings
are continued once, with the method's own mask:

- `reward`: the mean probability, and its standard error over the openings;
- `perplexity`: of these replies under the starting model, which says how natural they are;
- `distinct`: different two-word sequences over all of them;
- a run has **collapsed** if its reward is below the start's by two standard errors, its perplexity is above three times
  the start's, its distinct-2 is below half of the start's, or it did not finish.

A finished row is not repeated, and `--keep` takes the committed ones. Writes
`benchmarks/results/policy-gradients.json` and `docs/figures/policy-gradients.svg`; `make docs` writes the tables of
docs/algorithms.md. A run takes one to eight minutes of processor time. `--only start` after a first time only draws.
"""

import argparse
import json
import math
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
from operant import Learner, train
from operant.data import load_tasks
from operant.metrics.evaluation import Distinct
from operant.rewards import judge, resolve
from operant.rollouts.collate import collate
from operant.training.scoring import forward_batch

ROOT = Path(__file__).parents[1]
RUNS, RESULTS = places("bench-policy-gradients", "policy-gradients")
FIGURE = drawn("policy-gradients.svg")
START, SHUFFLED = "builtin:reviews-lm", str(ROOT / "benchmarks/shuffled.py:shuffled")
RATES: dict[str, tuple[str, tuple[float, float, float]]] = {
    "ppo": ("optimizer.lr", (1e-4, 3e-4, 1e-3)),
    "nlpo": ("optimizer.lr", (1e-4, 3e-4, 1e-3)),
    "a2c": ("optimizer.lr", (3e-5, 1e-4, 3e-4)),
    "reinforce": ("optimizer.lr", (1e-4, 3e-4, 1e-3)),
    "trpo": ("update.target_kl", (0.003, 0.01, 0.03)),
}
"""The option that is varied for each method, and its values."""
KINDS = ("kl", "no kl", "shuffled")


def place(row: dict[str, Any]) -> Path:
    return RUNS / "-".join(str(row[name]) for name in ("method", "kind", "rate", "seed")).replace(" ", "_") / "row.json"


def measured(learner: Learner) -> dict[str, float]:
    """What a policy reaches on the held-out openings."""
    tasks = load_tasks("builtin:openings/held-out")
    rollouts = learner.play(tasks, stream="evaluate")
    scores = [float(score) for score in judge(resolve("builtin:sentiment"), rollouts).scores]
    batch = collate(rollouts, scores).with_(allowed=None)
    assert learner.reference is not None
    known = forward_batch(batch, learner.reference.policy, learner.sampling, 8192).raw_logprobs
    own = forward_batch(batch, learner.policy, learner.sampling, 8192).raw_logprobs
    at = batch.actions
    return {
        "reward": statistics.mean(scores),
        "error": statistics.stdev(scores) / math.sqrt(len(scores)),
        "perplexity": float(torch.exp(-known[at].detach().double().mean())),
        "distinct": Distinct(n=2)(rollouts) or 0.0,
        "kl": float((own - known)[at].detach().double().sum()) / len(rollouts),
    }


def one(method: str, kind: str, rate: int, seed: int, quick: bool) -> None:
    """One row, in this process."""
    row: dict[str, Any] = {"method": method, "kind": kind, "rate": rate, "seed": seed}
    sampling: dict[str, Any] = {"max_tokens": 20, "min_tokens": 10}
    if method == "start":
        row |= measured(Learner(START, algorithm="rloo", seed=seed, threads="1", **sampling))
    else:
        option, values = RATES[method]
        options: dict[str, Any] = {
            "recipe": "sentiment",
            "algorithm": method,
            "steps": 24,
            "seed": seed,
            "threads": "1",
        }
        options |= {option: values[rate], "probes": 0, "evaluate": None, "quiet": True}
        options |= {"kl.coef": 0.0} if kind == "no kl" else {}
        options |= {"reward": SHUFFLED} if kind == "shuffled" else {}
        options |= {"steps": 1, "batch": 8} if quick else {}
        shutil.rmtree(place(row).parent, ignore_errors=True)  # a run that goes on has the curve of its second half only
        begin = time.process_time()
        run = train(out=place(row).parent / "run", **options)
        whole(run)
        row |= {"seconds": time.process_time() - begin, "value": values[rate]}
        names = ("reward/mean", "kl/per_reply", "policy/entropy", "trust/kl", "trust/accepted", "policy/allowed_tokens")
        row["curve"] = {name: [m.get(name) for m in run.metrics] for name in names if name in run.metrics[-1]}
        row |= measured(run.learner)
    place(row).parent.mkdir(parents=True, exist_ok=True)
    place(row).write_text(json.dumps(row), encoding="utf-8")
    print({name: value for name, value in row.items() if name != "curve"}, flush=True)


def jobs(seeds: list[int]) -> list[dict[str, Any]]:
    """All rows, those first that say most."""
    found = [{"method": "start", "kind": "kl", "rate": 1, "seed": 1}]
    for kind, rates, some in (("kl", (1,), seeds[:3]), ("shuffled", (1,), seeds[:1]), ("no kl", (1,), seeds[:1])):
        found += [{"method": m, "kind": kind, "rate": r, "seed": s} for s in some for r in rates for m in RATES]
    found += [{"method": m, "kind": "kl", "rate": r, "seed": s} for s in seeds for r in (2, 0, 1) for m in RATES]
    for kind in ("shuffled", "no kl"):
        found += [{"method": m, "kind": kind, "rate": 1, "seed": s} for s in seeds[:3] for m in RATES]
    return [row for i, row in enumerate(found) if row not in found[:i]]


def summary() -> dict[str, Any]:
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RUNS.glob("*/row.json"))]
    return {"command": "python -m benchmarks.policy_gradients", "rows": rows}


COLOURS = {"ppo": "#4477aa", "nlpo": "#228833", "a2c": "#ccaa00", "reinforce": "#ee6677", "trpo": "#aa3377"}


def figure(rows: list[dict[str, Any]]) -> str:
    """As SVG: the reward of each step, mean over seeds at the middle rate; and each run's reward against perplexity."""
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 330" font-family="sans-serif" font-size="12">']
    parts.append('<rect width="900" height="330" fill="white"/>')
    far = max(row["perplexity"] for row in rows)
    least = min(row["perplexity"] for row in rows)

    def height(reward: float) -> float:
        return 270 - 230 * (reward - 0.4) / 0.6

    def across(perplexity: float) -> float:
        return 500 + 380 * math.log(perplexity / (0.9 * least)) / math.log(far / (0.8 * least))

    for left, title in ((45, "reward of each step (band: all seeds)"), (500, "held-out reward of each run")):
        parts.append(f'<text x="{left}" y="20" font-weight="bold">{title}</text>')
        for tenth in range(4, 11, 2):
            y = height(tenth / 10)
            parts.append(f'<line x1="{left}" x2="{left + 380}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{tenth / 10}</text>')
    for i, (method, colour) in enumerate(COLOURS.items()):
        own = [row for row in rows if row["method"] == method]
        curves = [row["curve"]["reward/mean"] for row in own if (row["kind"], row["rate"]) == ("kl", 1)]
        steps = list(zip(*curves, strict=True))
        at = [45 + 380 * step / (len(steps) - 1) for step in range(len(steps))]
        lines = [
            [f"{x:.1f},{height(number(values)):.1f}" for x, values in zip(at, steps, strict=True)]
            for number in (statistics.mean, max, min)
        ]
        band = " ".join([*lines[1], *reversed(lines[2])])
        parts.append(f'<polygon points="{band}" fill="{colour}" fill-opacity="0.12"/>')
        parts.append(f'<polyline points="{" ".join(lines[0])}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        for row in (row for row in own if row["kind"] != "shuffled"):
            place = f'cx="{across(row["perplexity"]):.1f}" cy="{height(row["reward"]):.1f}" r="4"'
            filled = colour if row["kind"] == "kl" else "white"
            parts.append(f'<circle {place} fill="{filled}" fill-opacity="0.75" stroke="{colour}"/>')
        parts.append(f'<text x="{45 + 75 * i}" y="318" fill="{colour}">{method}</text>')
    start = next(row for row in rows if row["method"] == "start")
    x, y = across(start["perplexity"]), height(start["reward"])
    parts.append(f'<path d="M{x - 5:.1f} {y:.1f}h10m-5 -5v10" stroke="black" stroke-width="1.6"/>')
    for value in (value for value in (30, 100, 300, 1000, 3000) if least <= value <= far):
        parts.append(f'<text x="{across(value):.1f}" y="290" text-anchor="middle" fill="#555">{value:,}</text>')
    parts.append('<text x="45" y="290" fill="#555">step 1</text>')
    parts.append('<text x="425" y="290" text-anchor="end" fill="#555">24</text>')
    parts.append('<text x="500" y="318" fill="#555">perplexity under the start (+); hollow: without KL</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--only", help="methods, separated by commas")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="keep the rows of the committed results")
    parser.add_argument("--quick", action="store_true", help="only check that it runs: tiny runs, no measurement")
    parser.add_argument("--one", nargs=4, metavar=("METHOD", "KIND", "RATE", "SEED"), help="one row, in this process")
    given = parser.parse_args()
    if given.one:
        method, kind, rate, seed = given.one
        one(method, kind, int(rate), int(seed), given.quick)
        return
    if given.keep:
        restore(RESULTS, place)

    def run(row: dict[str, Any]) -> None:
        if place(row).is_file() or (given.only and row["method"] not in given.only.split(",")):
            return
        words = [sys.executable, "-m", "benchmarks.policy_gradients", *(["--quick"] if given.quick else []), "--one"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run([*words, *map(str, row.values())], cwd=ROOT, env=environment, check=True)
        RESULTS.write_text(json.dumps(summary(), indent=1) + "\n", encoding="utf-8")

    RUNS.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(given.at_once) as pool:
        list(pool.map(run, jobs([int(seed) for seed in given.seeds.split(",")])))
    found = summary()
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    FIGURE.write_text(figure(found["rows"]), encoding="utf-8")


if __name__ == "__main__":
    main()
