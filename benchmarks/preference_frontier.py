"""True preference against KL: `python -m benchmarks.preference_frontier`, ten minutes of processor time a row.

The stand-in labeller (`operant.tools.labels.stand_in`) picks the best of four replies of the built-in model to 200,
1,000 or 5,000 prompts (403 openings, again and again), with noise. A reward model learns from its picks. Then, from
the same start:

- `sft` imitates the picks, for up to three passes;
- `dpo` learns from the picks, for up to two passes;
- `best of n` takes the best of n replies by the reward model; its KL is the upper bound `log n - (n - 1) / n`;
- `rejection` imitates the best of four fresh replies by the reward model, `ppo` maximises it; both for 60 steps of 128
  replies, with a KL penalty of 0.1.

On the way each is measured on 128 held-out openings, two replies each: its true preference, which is that of the
stand-in without noise, the score of the reward model, and the sampled KL to the start in nats per reply. A finished row
is not repeated. Writes `benchmarks/results/preference-frontier.json` and the figure
`docs/figures/preference-frontier.svg`; `make docs` writes the table.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.kept import drawn, places, restore, whole
from operant import Learner, Task, train
from operant.api import runs
from operant.apps.rlhf.reward_model_score import RewardModelScore
from operant.data import load_tasks
from operant.tools.labels.stand_in import Labeller, preference
from operant.types import Rollout

ROOT = Path(__file__).parents[1]
RUNS, RESULTS = places("bench-preference", "preference-frontier")
START, LABELS, NOISE = "builtin:reviews-lm", (200, 1000, 5000), 0.5
METHODS = ("sft", "dpo", "best of n", "rejection", "ppo")
PLAIN: dict[str, Any] = {"quiet": True, "threads": "1", "probes": 0}
REPLY: dict[str, Any] = {"max_tokens": 20, "min_tokens": 10}
STEPS, OPENINGS, MOST = (2, 8, 2) if "--quick" in sys.argv else (60, 128, 32)


def row_file(labels: int, seed: int) -> Path:
    """Where a row is stored, beside the runs that made it."""
    return RUNS / f"{labels}-{seed}" / "row.json"


def player(policy: Any, seed: int) -> Learner:
    """A learner that plays, and whose reference is the start."""
    return Learner(policy, reference=START, algorithm="rloo", seed=seed, threads="1", **{"kl.coef": 0.1}, **REPLY)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def picks(labels: int, seed: int) -> list[dict[str, Any]]:
    """Four replies of the start to each of so many openings, and which one the stand-in picked."""
    known = [task.prompt for task in load_tasks("builtin:openings/train")]
    tasks = [Task(str(i), known[i % len(known)]) for i in range(labels)]
    learner, stand_in, rows = player(START, seed), Labeller(NOISE, seed=seed), list[dict[str, Any]]()
    for first in range(0, labels, 64):
        some = tasks[first : first + 64]
        replies = [rollout.reply for rollout in learner.play([task for task in some for _ in range(4)], stream="probe")]
        for i, task in enumerate(some):
            four = replies[4 * i : 4 * i + 4]
            rows.append({"prompt": task.prompt, "replies": four} | stand_in.answer("pick", task.id, four))
    return rows


def point(policy: Any, judge: RewardModelScore, seed: int) -> dict[str, float]:
    """What a policy reaches on held-out openings."""
    learner = player(policy, seed)
    held_out = load_tasks("builtin:openings/held-out")[:OPENINGS]
    rollouts = learner.play([task for task in held_out for _ in range(2)], stream="evaluate")
    batch, _ = learner.preview(rollouts, [0.0] * len(rollouts))
    assert batch.raw_logprobs is not None and batch.ref_logprobs is not None
    nats = float(((batch.raw_logprobs - batch.ref_logprobs) * batch.actions).sum()) / len(rollouts)
    return {"kl": nats} | scored(rollouts, judge(rollouts))


def scored(rollouts: list[Rollout], scores: list[float]) -> dict[str, float]:
    """Mean true preference with its standard error, and mean score of the reward model."""
    true = [preference(rollout.reply) for rollout in rollouts]
    error = statistics.stdev(true) / math.sqrt(len(true))
    return {"true": statistics.mean(true), "error": error, "proxy": statistics.mean(scores)}


def best_of(judge: RewardModelScore, seed: int, most: int) -> Iterator[dict[str, float]]:
    """The best of 1, 2, 4, ... `most` replies of the start by the reward model."""
    learner, held_out = player(START, seed), load_tasks("builtin:openings/held-out")[:OPENINGS]
    replies = [learner.play([task] * most, stream="evaluate") for task in held_out]
    scores = [judge(some) for some in replies]
    for n in (2**power for power in range(int(math.log2(most)) + 1)):
        # Disjoint groups of n; two of each opening at most, as for the policies.
        places = [(t, range(g * n, (g + 1) * n)) for t in range(len(replies)) for g in range(min(2, most // n))]
        best = [(t, max(group, key=lambda i: scores[t][i])) for t, group in places]
        found = scored([replies[t][i] for t, i in best], [scores[t][i] for t, i in best])
        yield {"n": n, "kl": math.log(n) - (n - 1) / n} | found


def trained(out: Path, marks: set[int], measure: Callable[[Any], dict[str, float]], **options: Any) -> Iterator[Any]:
    """Train, and measure after the steps of `marks`."""
    left = set(marks)
    for run in runs(out=out, **PLAIN, **options):  # the finished run comes once more
        if (step := len(run.metrics)) in left:
            left.remove(step)
            yield {"step": step} | measure(run.policy)
    whole(run)


def one(labels: int, seed: int) -> None:
    """One row: every method with so many labels."""
    place, begin = row_file(labels, seed), time.process_time()
    folder = place.parent
    rows = picks(labels, seed)
    held, kept = rows[::5], [row for i, row in enumerate(rows) if i % 5]
    tasks, steps = write(folder / "labels.jsonl", kept), max(len(kept) // 16, 1)
    model = {"kind": "best", "steps": steps, "lr": 1e-3, "evaluate": write(folder / "held-out.jsonl", held)}
    if not (folder / "rm/export").is_dir():
        shutil.rmtree(folder / "rm", ignore_errors=True)  # of a run that was stopped
        whole(train(recipe="reward-model", trunk=START, tasks=tasks, out=folder / "rm", seed=seed, **PLAIN, **model))
    after = json.loads((folder / "rm/evaluation.json").read_text())["after"]["metrics"]
    judge = RewardModelScore(str(folder / "rm"))
    found: dict[str, Any] = {"labels": labels, "seed": seed, "reward_model": after, "points": {}}

    def measure(policy: Any) -> dict[str, float]:
        return point(policy, judge, seed)

    imitated = [{"prompt": row["prompt"], "completion": row["replies"][row["best"]]} for row in kept]
    own = {"policy": START, "seed": seed, "schedule": "linear"}
    epochs = {round(part * 3 * steps / 3) for part in (1, 2, 3)}
    rl = {"policy": START, "recipe": "sentiment", "evaluate": None, "reward": str(folder / "rm"), "steps": STEPS}
    rl |= {"seed": seed}
    way: dict[str, Iterator[dict[str, float]]] = {
        "best of n": best_of(judge, seed, MOST),
        "sft": trained(
            folder / "sft", epochs, measure, algorithm="sft", lr=3e-4, batch=16, steps=3 * steps,
            tasks=write(folder / "picks.jsonl", imitated), **own,
        ),
        "dpo": trained(
            folder / "dpo", {max(steps // 2, 1), steps, 2 * steps}, measure, algorithm="dpo", lr=3e-4, batch=16,
            steps=2 * steps, tasks=tasks, **own,
        ),
        "rejection": trained(
            folder / "rejection", {15, 30, STEPS}, measure, algorithm="rejection", select="group:1", samples=4,
            **{"kl.loss_coef": 0.1}, **rl,
        ),
        "ppo": trained(folder / "ppo", {15, 30, STEPS}, measure, **rl),
    }  # fmt: skip
    for method, points in way.items():
        found["points"][method] = list(points)
        print(labels, seed, method, json.dumps(found["points"][method]), flush=True)
    found["minutes"] = (time.process_time() - begin) / 60
    place.write_text(json.dumps(found), encoding="utf-8")


COLOURS = {"sft": "#777", "dpo": "#b8568f", "best of n": "#0b8a6a", "rejection": "#d17a00", "ppo": "#2563ab"}


def figure(rows: list[dict[str, Any]]) -> str:
    """As SVG: for each number of labels true preference against KL, one line a method and seed, from the start on."""
    top = max(point["true"] for row in rows for points in row["points"].values() for point in points)
    low = min(point["true"] for row in rows for points in row["points"].values() for point in points)
    far = max(point["kl"] for row in rows for points in row["points"].values() for point in points)
    top, low, far = math.ceil(top), math.floor(low), 5 * math.ceil(far / 5)
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 300" font-family="sans-serif" font-size="12">']
    parts.append('<rect width="900" height="300" fill="white"/>')
    known = sorted({row["labels"] for row in rows})
    for panel, labels in enumerate(known):
        left = 40 + 295 * panel

        def place(point: dict[str, float], left: int = left) -> tuple[float, float]:
            return left + 250 * point["kl"] / far, 240 - 210 * (point["true"] - low) / (top - low)

        parts.append(f'<text x="{left}" y="18">{labels:,} labels: true preference against KL</text>')
        for tick in range(low, top + 1):
            y = place({"kl": 0, "true": tick})[1]
            parts.append(f'<line x1="{left}" x2="{left + 250}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{tick}</text>')
        parts.append(f'<text x="{left}" y="258" fill="#555">0</text>')
        parts.append(f'<text x="{left + 250}" y="258" text-anchor="end" fill="#555">{far} nats</text>')
        for row in (row for row in rows if row["labels"] == labels):
            begin = {"kl": 0.0, "true": row["points"]["best of n"][0]["true"]}
            for method, points in row["points"].items():
                # Best of one is the start itself.
                line = [place(point) for point in [begin, *points[method == "best of n" :]]]
                path = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
                colour = COLOURS[method]
                parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
                parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in line[1:]]
    for i, (method, colour) in enumerate(COLOURS.items()):
        parts.append(f'<text x="{40 + 120 * i}" y="286" fill="{colour}">{method}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--labels", default=",".join(map(str, LABELS)))
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="keep the rows of the committed results")
    parser.add_argument("--quick", action="store_true", help="to try it: two steps of each method, eight openings")
    parser.add_argument("--one", nargs=2, type=int, metavar=("LABELS", "SEED"), help="one row, in this process")
    given = parser.parse_args()
    if given.one:
        one(*given.one)
        return
    if given.keep:
        restore(RESULTS, lambda row: row_file(row["labels"], row["seed"]))
    jobs = [(int(labels), int(seed)) for seed in given.seeds.split(",") for labels in given.labels.split(",")]

    def run(job: tuple[int, int]) -> None:
        if not row_file(*job).is_file():
            words = [sys.executable, "-m", "benchmarks.preference_frontier", "--one", *map(str, job)]
            words += ["--quick"] * given.quick
            environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            subprocess.run(words, cwd=ROOT, env=environment, check=True)

    with ThreadPoolExecutor(given.at_once) as pool:
        list(pool.map(run, jobs))
    found = [json.loads(path.read_text()) for path in sorted(RUNS.glob("*/row.json"))]
    found.sort(key=lambda row: (row["labels"], row["seed"]))
    result = {"command": "python -m benchmarks.preference_frontier", "rows": found}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    drawn("preference-frontier.svg").write_text(figure(found), encoding="utf-8")


if __name__ == "__main__":
    main()
