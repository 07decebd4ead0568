"""What each method needs to a threshold, on sums and on Countdown: `python -m benchmarks.methods`.

Protocol. Every run is the recipe `arithmetic` or `countdown` from `builtin:maths-lm`: steps of 1,024 (512) replies, 8
to each prompt, eight (four) updates of 128 replies, each used once, a constant rate of 3e-4 after 3 steps of warm-up,
no KL, right or wrong as the reward. A method brings its own loss, advantage, baseline and draws; `METHODS` holds the
options that are not its defaults. Every 4 steps, one reply to each of 1,024 held-out problems is judged. A run ends
when the share of right ones is at least the upper threshold, 0.60 (0.30), or after 60 steps; a lower one, 0.50 (0.25),
is read off the same curve.

- `rollouts`: replies that were drawn for training until then, with those that dynamic sampling threw away;
- `seconds`: processor seconds of the process, one thread, without loading and without the evaluations;
- `passes`: pass@1, 4 and 16 at the end, of 16 replies to each of 256 held-out problems.

The controls: `grpo, shuffled`, whose verdicts are shuffled within a step, and `sft`: supervised training goes on, at
the same rate, in steps of 128, on the problems and answers that the start has seen, for at most 75
seconds, as long as 60 steps of `grpo` on sums and more than on Countdown.

A finished row is not repeated, and `--keep` takes the committed ones. Writes `benchmarks/results/methods.json` and
`docs/figures/methods.svg`, which `--draw` alone writes from the committed rows; `make docs` writes the table of
docs/maths.md and the lines on the pages of the methods. A run takes half a minute to two minutes of processor time.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.kept import drawn, places, restore
from benchmarks.timed import spent
from operant import Task
from operant.apps.maths.generated import arithmetic_held_out, countdown_held_out
from operant.metrics.passes import pass_at_k
from operant.rewards import judge, resolve
from operant.runs.trainer import runs
from operant.training.learner import Learner

ROOT = Path(__file__).parents[1]
RUNS, RESULTS = places("bench-methods", "methods")
FIGURE = drawn("methods.svg")
TASKS: dict[str, dict[str, Any]] = {
    "arithmetic": {"held_out": arithmetic_held_out, "thresholds": [0.5, 0.6], "batch": 1024},
    "countdown": {"held_out": countdown_held_out, "thresholds": [0.25, 0.3], "batch": 512},
}
STEPS, EVERY, SECONDS = 60, 4, 75
METHODS: dict[str, dict[str, Any]] = {
    "start": {"algorithm": "grpo"},
    "grpo": {},
    "grpo, shuffled": {"algorithm": "grpo"},
    "sft": {"batch": 128, "tasks.seed": 1, "steps": 5000},
    "ppo": {},
    "rloo": {},
    "dapo": {},
    "dr-grpo": {},
    "gspo": {},
    "cispo": {},
    "scalerl": {"algorithm": "cispo", "preset": "scalerl"},
    "sapo": {},
    "dppo": {},
    "opo": {},
    "maxrl": {},
    "pass-at-k": {},
    "vapo": {"advantage.alpha": 1.0},
    "reinforce": {},
    "reinforce++": {},
    "reinforce++-baseline": {},
}
"""The methods, controls and the start itself, each with its options besides those of the protocol."""


def place(row: dict[str, Any]) -> Path:
    return RUNS / "-".join(str(row[name]) for name in ("task", "method", "seed")).replace(", ", "_") / "row.json"


def right(learner: Learner, tasks: list[Task]) -> list[bool]:
    """Whether the reply to each task is right."""
    return [score == 1 for score in judge(resolve("maths"), learner.play(tasks, stream="evaluate")).scores]


def options_of(task: str, method: str, seed: int) -> dict[str, Any]:
    options: dict[str, Any] = {"recipe": task, "algorithm": method, "steps": STEPS, "seed": seed, "threads": "1"}
    options |= {"batch": TASKS[task]["batch"], "optimizer.lr": 3e-4, "schedule": "constant", "warmup": 3 / STEPS}
    options |= {"update.minibatch": 128, "update.epochs": 1, "probes": 0, "evaluate": None}
    if method == "sft":
        options |= {"tasks.count": {"arithmetic": 4000, "countdown": 3000}[task], "warmup": 0.0}
    else:
        options |= {"samples": 8}
    if method.endswith("shuffled"):
        options |= {"reward": f"{ROOT}/benchmarks/shuffled.py:{task}"}
    return options | METHODS[method]


def one(task: str, method: str, seed: int, quick: bool) -> None:
    """One row, in this process."""
    row: dict[str, Any] = {"task": task, "method": method, "seed": seed}
    options = options_of(task, method, seed) | ({"steps": 1, "batch": 16} if quick else {})
    problems = TASKS[task]["held_out"](count=16 if quick else 1024, seed=1)
    held_out = [Task(f"held-out/{i}", row["prompt"], target=row["target"]) for i, row in enumerate(problems)]
    every, few = (40 if method == "sft" else EVERY), held_out[: len(held_out) // 4]
    shutil.rmtree(place(row).parent, ignore_errors=True)
    begin, apart, rollouts, curve = 0.0, 0.0, 0.0, list[list[float]]()
    for run in runs(place(row).parent / "run", **options):
        begin = begin or spent()  # models and tasks are loaded
        step = len(run.metrics)
        if step:
            rollouts += options["batch"] * run.metrics[-1].get("rollout/drawn_per_used", 1.0)
        if step % every and step < options["steps"]:
            continue
        if curve and curve[-1][0] == step:
            continue  # the end of a run, after its last step
        seconds = spent() - begin - apart
        share = sum(right(run.learner, held_out)) / len(held_out)
        apart = spent() - begin - seconds
        curve.append([step, rollouts, seconds, share])
        late = method == "start" or (method == "sft" and seconds > SECONDS)
        if late or share >= TASKS[task]["thresholds"][-1]:
            break
    else:
        if step < options["steps"]:
            raise SystemExit(f"stopped at step {step} of {options['steps']}: no row; run it again")
    row["curve"] = curve
    verdicts = right(run.learner, [t for t in few for _ in range(16)])
    counts = [sum(verdicts[i : i + 16]) for i in range(0, len(verdicts), 16)]
    row["passes"] = {str(k): sum(pass_at_k(16, n, k) for n in counts) / len(counts) for k in (1, 4, 16)}
    place(row).write_text(json.dumps(row), encoding="utf-8")
    print({name: value for name, value in row.items() if name != "curve"}, curve[0], curve[-1], flush=True)


def jobs(tasks: list[str], seeds: list[int]) -> list[dict[str, Any]]:
    """All rows, a seed of every method before the next seed."""
    return [{"task": t, "method": m, "seed": s} for t in tasks for s in seeds for m in METHODS]


def summary() -> dict[str, Any]:
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RUNS.glob("*/row.json"))]
    thresholds = {task: about["thresholds"] for task, about in TASKS.items()}
    return {"command": "python -m benchmarks.methods", "thresholds": thresholds, "methods": [*METHODS], "rows": rows}


COLOURS = "#2563ab #d97706 #15803d #7c3aed #0891b2 #be185d #65a30d #475569 #92400e #0f766e #4338ca #b45309".split()


def figure(found: dict[str, Any]) -> str:
    """The figure as SVG: the share of right sums over the replies drawn, one line a method, its first seed."""
    runs = {row["method"]: row["curve"] for row in found["rows"] if row["task"] == "arithmetic" and row["seed"] == 1}
    runs = {name: runs[name] for name in found["methods"] if len(runs.get(name, ())) > 1}
    most, bottom = max(curve[-1][1] for curve in runs.values()), 330
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 370" font-family="sans-serif" font-size="12">']
    parts.append('<rect width="760" height="370" fill="white"/>')
    parts.append('<text x="45" y="18">Right of 1,024 held-out sums, over the replies drawn</text>')
    for tick in range(8):
        y = bottom - 42 * tick
        parts.append(f'<line x1="45" x2="525" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="39" y="{y + 4}" text-anchor="end" fill="#555">{tick / 10:.1f}</text>')
    parts.append(f'<text x="525" y="350" text-anchor="end" fill="#555">{most:,.0f} replies</text>')
    ends = sorted(runs, key=lambda name: -runs[name][-1][3])
    for name, colour in zip(runs, COLOURS * 2):
        style = 'stroke="#c33" stroke-dasharray="4 3"' if name.endswith("shuffled") else f'stroke="{colour}"'
        points = " ".join(f"{45 + 480 * p[1] / most:.1f},{bottom - 420 * p[3]:.1f}" for p in runs[name])
        y = 40 + 17 * ends.index(name)
        parts.append(f'<polyline points="{points}" fill="none" stroke-width="1.5" {style}/>')
        parts.append(f'<line x1="540" x2="562" y1="{y}" y2="{y}" stroke-width="2" {style}/>')
        parts.append(f'<text x="568" y="{y + 4}">{runs[name][-1][3]:.2f} {name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tasks", default="arithmetic,countdown")
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--only", help="methods, separated by semicolons")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep the rows of the committed results")
    parser.add_argument("--quick", action="store_true", help="only check that it runs: tiny runs, no measurement")
    parser.add_argument("--draw", action="store_true", help="only draw the figure of the committed results")
    parser.add_argument("--one", nargs=3, metavar=("TASK", "METHOD", "SEED"), help="one row, in this process")
    given = parser.parse_args()
    if given.one:
        task, method, seed = given.one
        one(task, method, int(seed), given.quick)
        return
    if given.draw:
        FIGURE.write_text(figure(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")
        return
    if given.keep:
        restore(RESULTS, place)

    def run(row: dict[str, Any]) -> None:
        if place(row).is_file() or (given.only and row["method"] not in given.only.split(";")):
            return
        words = [sys.executable, "-m", "benchmarks.methods", *(["--quick"] if given.quick else []), "--one"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        subprocess.run([*words, *map(str, row.values())], cwd=ROOT, env=environment, check=True)
        RESULTS.write_text(json.dumps(summary(), indent=1) + "\n", encoding="utf-8")

    RUNS.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(given.at_once) as pool:
        list(pool.map(run, jobs(given.tasks.split(","), [int(seed) for seed in given.seeds.split(",")])))
    RESULTS.write_text(json.dumps(summary(), indent=1) + "\n", encoding="utf-8")
    if not given.quick:
        FIGURE.write_text(figure(summary()), encoding="utf-8")


if __name__ == "__main__":
    main()
