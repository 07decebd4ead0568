"""The demo with a price of KL that is too low, and a controller that raises it: `python -m benchmarks.adaptive_kl`.

Trains the sentiment recipe from a fifth of its own price with `kl.control=adaptive`, once with the horizon that follows
the length of the run, and once with the 10,000 replies of the published runs; one thread each, into `runs/adaptive-kl`.
Finished runs are not repeated; eight minutes on one idle core. The run at the recipe's own fixed price is that of
`python -m benchmarks.sentiment_seeds` with the same seed. Writes `benchmarks/results/adaptive-kl.json` and the figure
`docs/figures/adaptive-kl.svg`.
"""

import argparse
import json
import os
import subprocess
import sys

from benchmarks.sentiment_seeds import QUICK, ROOT

RUNS, RESULT = ROOT / "runs/adaptive-kl", ROOT / "benchmarks/results/adaptive-kl.json"
SEED, START = 1, 0.02
ADAPTIVE = ["--kl.control", "adaptive", "--kl.target", "6", "--kl.coef", str(START)]
KINDS = {
    "by the run's length": ("#2563ab", ADAPTIVE),
    "of 10,000 replies": ("#c2410c", [*ADAPTIVE, "--kl.horizon", "10000"]),
}
FIXED = ("#777", "fixed at 0.1")


def train(name: str, quick: bool) -> dict:
    """Train one run unless it is finished already, and return its numbers."""
    out = RUNS / name.replace(" ", "-").replace("'", "").replace(",", "")
    if not (out / "evaluation.json").exists():
        words = [sys.executable, "-m", "operant", "train", "sentiment", "--seed", str(SEED), "--out", str(out)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        words += [*KINDS[name][1], *(QUICK if quick else [])]
        subprocess.run(words, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    evaluation = json.loads((out / "evaluation.json").read_text(encoding="utf-8"))
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "run": name,
        "before": evaluation["before"]["mean"],
        "after": evaluation["after"]["mean"],
        "kl_after": evaluation["after"]["kl"],
        "kl": [row["kl/per_reply"] for row in metrics],
        "coef": [row["kl/coef"] for row in metrics],
    }


def figure(rows: list[dict]) -> str:
    """The figure as SVG: KL a reply and its price over the steps; the fixed price has a line in both."""
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
            colour = KINDS[row["run"]][0] if row["run"] in KINDS else FIXED[0]
            line = f'fill="none" stroke="{colour}" stroke-width="1.6"'
            parts.append(f'<polyline points="{" ".join(points)}" {line}/>')
    for i, (name, (colour, _)) in enumerate(KINDS.items()):
        parts.append(f'<text x="{45 + 250 * i}" y="275" fill="{colour}">adaptive, horizon {name}</text>')
    parts.append(f'<text x="545" y="275" fill="{FIXED[0]}">{FIXED[1]}</text></svg>')
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only check that it runs: tiny runs, no measurement")
    quick = parser.parse_args().quick
    rows = [train(name, quick) for name in KINDS]
    seeds = json.loads((ROOT / "benchmarks/results/sentiment-seeds.json").read_text(encoding="utf-8"))
    demo = next(row for row in seeds["runs"] if row["run"] == f"seed-{SEED}")
    fixed = {"run": FIXED[1], "before": demo["before"], "after": demo["after"], "kl_after": demo["kl_per_reply"]}
    rows.append(fixed | {"kl": demo["kl"], "coef": [0.1] * len(demo["kl"])})
    result = {"command": "python -m benchmarks.adaptive_kl", "start": START, "seed": SEED, "runs": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (ROOT / "docs/figures/adaptive-kl.svg").write_text(figure(rows) + "\n", encoding="utf-8")
    for row in rows:
        print(f"{row['run']:20} reward {row['after']:.3f}  KL {row['kl_after']:.1f}  price {row['coef'][-1]:.3f}")


if __name__ == "__main__":
    main()
