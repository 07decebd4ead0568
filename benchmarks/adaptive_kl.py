"""The demo from a price of KL that is too low, with a controller that raises it: `python -m benchmarks.adaptive_kl`.

Trains the sentiment recipe with `kl.control=adaptive` from a fifth of its price, one thread, into `runs/adaptive-kl`
(a finished run is not repeated; four minutes on one idle core). The run at the recipe's fixed price is that of
`python -m benchmarks.sentiment_seeds` with the same seed. Writes `benchmarks/results/adaptive-kl.json` and the figure
`docs/figures/adaptive-kl.svg`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys

from benchmarks.kept import drawn, places
from benchmarks.sentiment_seeds import QUICK, ROOT

OUT, RESULT = places("adaptive-kl", "adaptive-kl")
SEED, START, OWN = 1, 0.02, 0.1
ADAPTIVE = ["--kl.control", "adaptive", "--kl.target", "6", "--kl.coef", str(START)]
KINDS = {"adaptive": ("#2563ab", f"adaptive, from {START}"), "fixed": ("#c2410c", f"fixed at {OWN}")}


def train(quick: bool) -> dict:
    """Train the run unless it is finished already, and return its numbers."""
    if not (OUT / "evaluation.json").exists():
        shutil.rmtree(OUT, ignore_errors=True)  # of a run that was stopped
        words = [sys.executable, "-m", "operant", "train", "sentiment", "--seed", str(SEED), "--out", str(OUT)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        words += [*ADAPTIVE, *(QUICK if quick else [])]
        subprocess.run(words, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    evaluation = json.loads((OUT / "evaluation.json").read_text(encoding="utf-8"))
    metrics = [json.loads(line) for line in (OUT / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "run": "adaptive",
        "before": evaluation["before"]["mean"],
        "after": evaluation["after"]["mean"],
        "kl_after": evaluation["after"]["kl"],
        "kl": [row["kl/per_reply"] for row in metrics],
        "coef": [row["kl/coef"] for row in metrics],
    }


def fixed() -> dict:
    """The same seed at the recipe's own price, from the committed results."""
    seeds = json.loads((ROOT / "benchmarks/results/sentiment-seeds.json").read_text(encoding="utf-8"))
    row = next(row for row in seeds["runs"] if row["run"] == f"seed-{SEED}")
    numbers = {"before": row["before"], "after": row["after"], "kl_after": row["kl_per_reply"], "kl": row["kl"]}
    return {"run": "fixed"} | numbers | {"coef": [OWN] * len(row["kl"])}


def figure(rows: list[dict]) -> str:
    """The figure as SVG: KL a reply, and its price, over the steps."""
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 290" font-family="sans-serif" font-size="12">']
    parts.append('<rect width="720" height="290" fill="white"/>')
    for i, (title, key) in enumerate((("KL per reply, nats", "kl"), ("its price, kl/coef", "coef"))):
        left, top = 45 + 360 * i, max(1e-9, *(max(row[key]) for row in rows))
        parts.append(f'<text x="{left}" y="18">{title}</text>')
        for tick in range(5):
            y = 230 - 50 * tick
            parts.append(f'<line x1="{left}" x2="{left + 290}" y1="{y}" y2="{y}" stroke="#ddd"/>')
            parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end" fill="#555">{top * tick / 4:.2g}</text>')
        parts.append(f'<text x="{left + 290}" y="248" text-anchor="end" fill="#555">step</text>')
        for row in rows:
            last = max(len(row[key]) - 1, 1)
            points = (f"{left + 290 * t / last:.1f},{230 - 200 * max(v, 0) / top:.1f}" for t, v in enumerate(row[key]))
            line = f'fill="none" stroke="{KINDS[row["run"]][0]}" stroke-width="1.6"'
            parts.append(f'<polyline points="{" ".join(points)}" {line}/>')
    for i, (colour, title) in enumerate(KINDS.values()):
        parts.append(f'<text x="{45 + 360 * i}" y="275" fill="{colour}">{title}</text>')
    return "\n".join([*parts, "</svg>"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only check that it runs: a tiny run, no measurement")
    rows = [train(parser.parse_args().quick), fixed()]
    result = {"command": "python -m benchmarks.adaptive_kl", "seed": SEED, "start": START, "runs": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    drawn("adaptive-kl.svg").write_text(figure(rows) + "\n", encoding="utf-8")
    for row in rows:
        print(f"{row['run']:10} reward {row['after']:.3f}  KL {row['kl_after']:.1f}  price {row['coef'][-1]:.3f}")


if __name__ == "__main__":
    main()
