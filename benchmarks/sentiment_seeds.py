"""The sentiment task over seeds, and a control that must not learn: `python -m benchmarks.sentiment_seeds`.

Runs `operant train sentiment` for seeds 1 to 5, and the shuffled control for some of them, each with one thread and
two at a time, into `runs/bench-sentiment`. Writes the numbers to `benchmarks/results/sentiment-seeds.json` and the
figure to `docs/figures/sentiment-seeds.svg`. Finished runs are not repeated. Half an hour on two cores.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.kept import drawn, places
from operant.tools.report.diagnosis import diagnose, read_history, verdict

ROOT = Path(__file__).parents[1]
RUNS, RESULTS = places("bench-sentiment", "sentiment-seeds")
CONTROL = "benchmarks/shuffled.py:shuffled"
QUICK = "--steps 2 --batch 8 --update.minibatch 4 --data.limit 8 --max-tokens 6 --min-tokens 2".split()
QUICK += ["--probes", "6", "--probe-every", "1"]
"""Options of a tiny run that only checks that everything works."""


def train(name: str, seed: int, control: bool, quick: bool = False) -> None:
    """Train one run, unless it is finished already."""
    out = RUNS / name
    if (out / "evaluation.json").exists():
        return
    shutil.rmtree(out, ignore_errors=True)  # of a run that was stopped
    words = [sys.executable, "-m", "operant", "train", "sentiment", "--seed", str(seed), "--out", str(out)]
    words += (["--reward", CONTROL] if control else []) + (QUICK if quick else [])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(words, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)


def summary(name: str) -> dict:
    """The results of a run."""
    evaluation = json.loads((RUNS / name / "evaluation.json").read_text(encoding="utf-8"))
    lines = (RUNS / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    history = read_history(RUNS / name)
    found = diagnose(history)
    return {
        "run": name,
        "before": evaluation["before"]["mean"],
        "after": evaluation["after"]["mean"],
        "kl_per_reply": evaluation["after"]["kl"],
        "verdict": verdict(history, found),
        "findings": [f.name for f in found],
        "logprob_gap_max": max(m["rollout/logprob_gap"] for m in metrics),
        "reward": [m["reward/mean"] for m in metrics],
        "kl": [m["kl/per_reply"] for m in metrics],
        "seconds_one_thread": sum(m["time/step"] for m in metrics),
    }


def figure(rows: list[dict]) -> str:
    """The figure as SVG: reward and KL over steps, one line per run, controls dashed."""
    panels = [("mean positive probability", "reward", 0.4, 1.0), ("KL per reply, nats", "kl", -1.0, 11.0)]
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 260" font-family="sans-serif" font-size="12">']
    parts.append('<rect width="720" height="260" fill="white"/>')
    for i, (title, key, low, high) in enumerate(panels):
        left = 45 + 360 * i
        parts.append(f'<text x="{left}" y="18">{title}</text>')
        for tick in range(5):
            value = low + (high - low) * tick / 4
            y = 230 - 200 * tick / 4
            parts.append(f'<line x1="{left}" x2="{left + 290}" y1="{y}" y2="{y}" stroke="#ddd"/>')
            parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end" fill="#555">{value:.2g}</text>')
        parts.append(f'<text x="{left + 290}" y="250" text-anchor="end" fill="#555">step</text>')
        for row in rows:
            values = row[key]
            points = " ".join(
                f"{left + 290 * t / max(len(values) - 1, 1):.1f},{230 - 200 * (v - low) / (high - low):.1f}"
                for t, v in enumerate(values)
            )
            control = row["run"].startswith("control")
            style = 'stroke="#c33" stroke-dasharray="4 3"' if control else 'stroke="#2563ab"'
            parts.append(f'<polyline points="{points}" fill="none" stroke-width="1.4" {style}/>')
    parts.append('<text x="45" y="250" fill="#2563ab">PPO, one line a seed</text>')
    parts.append('<text x="405" y="250" fill="#c33">control: shuffled rewards</text></svg>')
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--controls", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="only check that it runs: tiny runs, no measurement")
    args = parser.parse_args()
    jobs = [(f"seed-{s}", s, False) for s in range(1, args.seeds + 1)]
    jobs += [(f"control-{s}", s, True) for s in range(1, args.controls + 1)]
    RUNS.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(lambda job: train(*job, args.quick), jobs))
    rows = [summary(name) for name, _, _ in jobs]
    learned = [r["after"] for r in rows if r["run"].startswith("seed")]
    result = {
        "command": "python -m benchmarks.sentiment_seeds",
        "after_mean": statistics.mean(learned),
        "after_min": min(learned),
        "kl_max": max(r["kl_per_reply"] for r in rows),
        "control_largest_change": max(
            (abs(r["after"] - r["before"]) for r in rows if r["run"].startswith("control")), default=None
        ),
        "runs": rows,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    drawn("sentiment-seeds.svg").write_text(figure(rows) + "\n", encoding="utf-8")
    for row in rows:
        print(f"{row['run']:10} KL {row['kl_per_reply']:5.2f}  {row['verdict']}")


if __name__ == "__main__":
    main()
