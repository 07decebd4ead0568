"""A script of 2023 under TRL 0.11.4, and with one import line changed: `python -m benchmarks.trl_script`.

`peers/sentiment_2023.py` is a script as TRL's users wrote them. TRL 0.11.4 runs it as it is, in `.venv-trl` (`make
.venv-trl/.ready`); here its line `from trl import` becomes `from operant.compat.trl import`, and nothing else. Three
seeds, models and reward that come with the package, one thread. TRL's control is the same script with rewards shuffled
within a batch. Writes reward and KL by step to `benchmarks/results/trl-script.json` and
`docs/figures/trl-script.svg`. A finished run is not repeated. Twenty-five minutes of processor time.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from operant.storage.hub import BUILTIN

ROOT = Path(__file__).parents[1]
RUNS, RESULTS = ROOT / "runs/bench-trl-script", ROOT / "benchmarks/results/trl-script.json"
FIGURE = ROOT / "docs/figures/trl-script.svg"
SCRIPT = ROOT / "benchmarks/peers/sentiment_2023.py"
TRL, OURS = "from trl import", "from operant.compat.trl import"
BATCH = 64
OPTIONS = {"learning_rate": 3e-4, "batch_size": BATCH, "mini_batch_size": 32}


def script(side: str) -> str:
    """The text that one side runs."""
    text = SCRIPT.read_text(encoding="utf-8")
    assert text.count(TRL) == 1
    if side == "control":
        text = text.replace("for score in positive]", "for score in np.random.permutation(positive)]")
        return text.replace("import torch\n", "import numpy as np\nimport torch\n", 1)
    return text.replace(TRL, OURS) if side == "operant" else text


def train(side: str, seed: int, steps: int, python: str) -> None:
    """Run one side, unless it is finished already."""
    out = RUNS / f"{side}-{seed}.jsonl"
    if out.exists() and len(out.read_text(encoding="utf-8").splitlines()) >= steps:
        return
    path = RUNS / f"script_{side}.py"
    path.write_text(script(side), encoding="utf-8")
    given = OPTIONS | {"seed": seed, "steps": steps * BATCH, "model_name": BUILTIN / "reviews-lm"}
    given |= {"reward_model": f"sentiment-analysis:{BUILTIN / 'sentiment'}", "query_dataset": BUILTIN / "openings.txt"}
    words = [sys.executable if side == "operant" else python, str(path)]
    words += [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with out.with_suffix(".part").open("w", encoding="utf-8") as file:
        subprocess.run(words, cwd=ROOT, env=environment, check=True, stdout=file)
    out.with_suffix(".part").replace(out)


def rows_of(side: str, seed: int) -> dict[str, Any]:
    lines = (RUNS / f"{side}-{seed}.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    return {"side": side, "seed": seed} | {name: [step[name] for step in steps] for name in steps[0]}


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each seed: how far the two sides are apart, and from which step on."""
    found = []
    for ours in (row for row in rows if row["side"] == "operant"):
        theirs = next(row for row in rows if row["side"] == "trl" and row["seed"] == ours["seed"])
        gaps = {name: [abs(a - b) for a, b in zip(ours[name], theirs[name])] for name in ("reward", "kl")}
        apart = [step for step, gap in enumerate(gaps["kl"]) if gap > 1e-3]
        last = {f"last_{name}": [sum(row[name][-10:]) / 10 for row in (theirs, ours)] for name in gaps}
        found.append(
            {"seed": ours["seed"], "equal_steps": apart[0] if apart else len(gaps["kl"])}
            | {f"largest_{name}_gap": max(gap) for name, gap in gaps.items()}
            | last
        )
    return found


def figure(rows: list[dict[str, Any]]) -> str:
    """The figure as SVG: reward and KL over steps; TRL wide and pale, ours thin upon it, the control dashed."""
    styles = {
        "trl": 'stroke="#f2b27a" stroke-width="4"',
        "control": 'stroke="#888" stroke-width="1.2" stroke-dasharray="4 3"',
        "operant": 'stroke="#2563ab" stroke-width="1.3"',
    }
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 270" font-family="sans-serif" font-size="12">']
    parts.append('<rect width="720" height="270" fill="white"/>')
    panels = [("reward: the classifier's logit", "reward"), ("KL to the start, nats a reply", "kl")]
    for i, (title, key) in enumerate(panels):
        left, values = 45 + 360 * i, [x for row in rows for x in row[key]]
        low, high = min(values), max(values)
        low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)
        parts.append(f'<text x="{left}" y="18">{title}</text>')
        for tick in range(5):
            y = 230 - 50 * tick
            parts.append(f'<line x1="{left}" x2="{left + 290}" y1="{y}" y2="{y}" stroke="#ddd"/>')
            number = low + (high - low) * tick / 4
            parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end" fill="#555">{number:.2g}</text>')
        parts.append(f'<text x="{left + 290}" y="248" text-anchor="end" fill="#555">step</text>')
        for side, style in styles.items():
            for row in (row for row in rows if row["side"] == side):
                last = max(len(row[key]) - 1, 1)
                points = " ".join(
                    f"{left + 290 * t / last:.1f},{230 - 200 * (x - low) / (high - low):.1f}"
                    for t, x in enumerate(row[key])
                )
                parts.append(f'<polyline points="{points}" fill="none" {style}/>')
    parts.append('<text x="45" y="264" fill="#c9772e">TRL 0.11.4, one line a seed</text>')
    parts.append('<text x="225" y="264" fill="#2563ab">operant.compat.trl, the same seeds</text>')
    parts.append('<text x="480" y="264" fill="#666">control: TRL, shuffled rewards</text></svg>')
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--python", default=str(ROOT / ".venv-trl/bin/python"), help="the Python that has TRL 0.11.4")
    parser.add_argument("--ours", action="store_true", help="only check that ours runs: nothing is compared or written")
    args = parser.parse_args()
    sides = ["operant"] if args.ours else ["operant", "trl", "control"]
    jobs = [(side, seed) for seed in range(1, args.seeds + 1) for side in sides if side != "control" or seed == 1]
    RUNS.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(lambda job: train(*job, args.steps, args.python), jobs))
    rows = [rows_of(*job) for job in jobs]
    if args.ours:
        return
    result = {
        "command": "python -m benchmarks.trl_script",
        "options": OPTIONS,
        "compared": compared(rows),
        "runs": rows,
    }
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    FIGURE.write_text(figure(rows) + "\n", encoding="utf-8")
    for row in result["compared"]:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
