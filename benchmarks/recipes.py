"""What the recipes `keyword` and `chat` learn, and controls that must not: `python -m benchmarks.recipes`.

Trains each recipe with seeds 1 to 3, and with shuffled rewards (benchmarks/shuffled.py), one thread a run and two
runs at a time, into `runs/bench-recipes`. Finished runs are not repeated. The replies to held-out tasks are judged
again, by the word or mood of the task that they answer, and of another one: that shows whether the prompt was read.
Writes `benchmarks/results/recipes.json` and the figure `docs/figures/recipes.svg`; `make docs` writes the tables of
docs/tasks.md. Half an hour on two idle cores.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.kept import drawn, places
from operant.data import DataOptions, load_tasks
from operant.rewards import resolve
from operant.tools.report.diagnosis import diagnose, read_history, verdict
from operant.types import Rollout, Task

ROOT = Path(__file__).parents[1]
RUNS, RESULTS = places("bench-recipes", "recipes")
RECIPES = ("keyword", "chat")
QUICK = "--steps 2 --batch 16 --update.minibatch 8 --data.limit 8 --probes 2".split()
TITLES = {"keyword": "keyword: the reply holds the word", "chat": "chat: mood as asked + 0.3 ended"}
TARGETS = {"keyword": ("builtin:keywords", "text", "target"), "chat": ("builtin:chat", "messages", "mood")}


def train(recipe: str, seed: int, control: bool, quick: bool) -> None:
    """Train one run, unless it is finished already."""
    out = RUNS / name_of(recipe, seed, control)
    if (out / "evaluation.json").exists():
        return
    shutil.rmtree(out, ignore_errors=True)  # of a run that was stopped
    words = [sys.executable, "-m", "operant", "train", recipe, "--seed", str(seed), "--out", str(out)]
    words += (["--reward", f"benchmarks/shuffled.py:{recipe}"] if control else []) + (QUICK if quick else [])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(words, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)


def name_of(recipe: str, seed: int, control: bool) -> str:
    return f"{recipe}-{'control' if control else 'seed'}-{seed}"


def judged(recipe: str, replies: Iterable[dict]) -> dict[str, float]:
    """Means over the replies to held-out tasks, by the recipe's own measures."""
    source, text, target = TARGETS[recipe]
    tasks = {task.id: task for task in load_tasks(source, options=DataOptions(text_field=text, target_field=target))}
    known = {task.target for task in load_tasks(f"{source}/train", options=DataOptions(text, target_field=target))}
    pairs = [(tasks[reply["task"]], reply) for reply in replies]
    own = [task.target for task, _ in pairs]
    if recipe == "chat":
        positive = resolve("builtin:sentiment", {"text": "reply"})(_rollouts(own, pairs))
        moods = [p if mood == "positive" else 1 - p for p, mood in zip(positive, own)]
        # The recipe's score is the probability of the mood, and 0.3 more for a reply that ended.
        ended = [(reply["score"] - mood) / 0.3 for (_, reply), mood in zip(pairs, moods)]
        return {
            "positive where it is asked": _mean(p for p, mood in zip(positive, own) if mood == "positive"),
            "positive where negative is asked": _mean(p for p, mood in zip(positive, own) if mood == "negative"),
            "ended": _mean(ended),
        }
    held = resolve("keyword")(_rollouts(own, pairs))
    another = resolve("keyword")(_rollouts([own[(i + 5) % len(own)] for i in range(len(own))], pairs))
    return {
        "words of training": _mean(score for score, word in zip(held, own) if word in known),
        "new words": _mean(score for score, word in zip(held, own) if word not in known),
        "another task's word": _mean(another),
    }


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return statistics.mean(known) if known else float("nan")


def _rollouts(targets: list[str], pairs: list[tuple[Task, dict]]) -> list[Rollout]:
    return [Rollout(Task(t.id, [0], target), 0, [], [r["reply"]]) for target, (t, r) in zip(targets, pairs)]


def summary(recipe: str, seed: int, control: bool) -> dict:
    """The results of a run."""
    folder = RUNS / name_of(recipe, seed, control)
    found = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    history = read_history(folder)
    return {
        "recipe": recipe,
        "seed": seed,
        "control": control,
        "before": found["before"]["mean"],
        "after": found["after"]["mean"],
        "kl": found["after"]["kl"],
        "measures": {when: judged(recipe, found[when]["replies"]) for when in ("before", "after")},
        "replies": [
            {"query": reply["query"], "before": old["reply"], "after": reply["reply"]}
            for old, reply in list(zip(found["before"]["replies"], found["after"]["replies"]))[:256:43]
        ],
        "verdict": verdict(history, diagnose(history)),
        "logprob_gap_max": max(m["rollout/logprob_gap"] for m in metrics),
        "reward": [m["reward/mean"] for m in metrics],
        "loss": [m["loss/total"] for m in metrics],
        "seconds_one_thread": sum(m["time/step"] for m in metrics),
    }


def figure(rows: list[dict]) -> str:
    """The figure as SVG: the mean reward of each step, one line a run, controls dashed; means of five steps."""
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 260" font-family="sans-serif" font-size="12">']
    parts.append('<rect width="720" height="260" fill="white"/>')
    for i, recipe in enumerate(RECIPES):
        left, high = 45 + 360 * i, {"keyword": 1.0, "chat": 1.4}[recipe]
        parts.append(f'<text x="{left}" y="18">{TITLES[recipe]}</text>')
        for tick in range(5):
            y = 230 - 50 * tick
            parts.append(f'<line x1="{left}" x2="{left + 290}" y1="{y}" y2="{y}" stroke="#ddd"/>')
            parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end" fill="#555">{high * tick / 4:.3g}</text>')
        own = [row for row in rows if row["recipe"] == recipe]
        parts.append(
            f'<text x="{left + 290}" y="248" text-anchor="end" fill="#555">{len(own[0]["reward"])} steps</text>'
        )
        for row in own:
            values = row["reward"]
            smooth = [statistics.mean(values[max(0, t - 4) : t + 1]) for t in range(len(values))]
            points = " ".join(
                f"{left + 290 * t / max(len(smooth) - 1, 1):.1f},{230 - 200 * value / high:.1f}"
                for t, value in enumerate(smooth)
            )
            style = 'stroke="#c33" stroke-dasharray="4 3"' if row["control"] else 'stroke="#2563ab"'
            parts.append(f'<polyline points="{points}" fill="none" stroke-width="1.4" {style}/>')
    parts.append('<text x="45" y="248" fill="#2563ab">GRPO, one line a seed</text>')
    parts.append('<text x="405" y="248" fill="#c33">control: shuffled rewards</text></svg>')
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--controls", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="only check that it runs: tiny runs, no results written")
    args = parser.parse_args()
    jobs = [(recipe, s, False) for recipe in RECIPES for s in range(1, args.seeds + 1)]
    jobs += [(recipe, s, True) for recipe in RECIPES for s in range(1, args.controls + 1)]
    RUNS.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(lambda job: train(*job, args.quick), jobs))
    rows = [summary(*job) for job in jobs]
    for row in rows:
        print(f"{name_of(row['recipe'], row['seed'], row['control']):18} KL {row['kl']:5.2f}  {row['verdict']}")
    if args.quick:
        return
    result = {"command": "python -m benchmarks.recipes", "runs": rows}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    drawn("recipes.svg").write_text(figure(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
