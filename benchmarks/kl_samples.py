"""The same seed with and without a KL penalty, side by side: `python -m benchmarks.kl_samples`.

Trains the sentiment recipe twice, with its own KL coefficient and with 0, into `runs/kl-samples` (finished runs are
not repeated; six minutes on two idle cores), and writes `benchmarks/results/kl-samples.json` and the figure
`docs/figures/with-and-without-kl.svg`: reward and KL over steps, and the replies of both to the same probe prompts.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.kept import drawn, places
from benchmarks.sentiment_seeds import QUICK

ROOT = Path(__file__).parents[1]
RUNS, RESULTS = places("kl-samples", "kl-samples")
KINDS = {"with": ("with the KL penalty", "#2563ab", []), "without": ("without", "#c2410c", ["--kl.coef", "0"])}
SHOWN = 6


def train(name: str, seed: int, quick: bool) -> None:
    """Train one run, unless it is finished already."""
    out = RUNS / name
    if (out / "evaluation.json").exists():
        return
    shutil.rmtree(out, ignore_errors=True)  # of a run that was stopped
    words = [sys.executable, "-m", "operant", "train", "sentiment", "--seed", str(seed), "--out", str(out)]
    subprocess.run(
        [*words, *KINDS[name][2], *(QUICK if quick else [])],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        check=True,
        stdout=sys.stderr,
    )


def summary(name: str) -> dict:
    """Curves, evaluation-out evaluation, findings, and the last replies to the first probe prompts."""
    import pyarrow.parquet as pq

    from operant.tools.report.diagnosis import diagnose, read_history

    evaluation = json.loads((RUNS / name / "evaluation.json").read_text(encoding="utf-8"))
    metrics = [json.loads(line) for line in (RUNS / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    last = sorted((RUNS / name / "probes").glob("step-*.parquet"))[-1]
    rows = pq.read_table(last, columns=["query", "reply", "reward"]).slice(0, SHOWN).to_pylist()
    return {
        "run": name,
        "before": evaluation["before"]["mean"],
        "after": evaluation["after"]["mean"],
        "kl_per_reply": evaluation["after"]["kl"],
        "reward": [m["reward/mean"] for m in metrics],
        "kl": [m["kl/per_reply"] for m in metrics],
        "findings": [f.message for f in diagnose(read_history(RUNS / name))],
        "replies": rows,
    }


def figure(runs: list[dict]) -> str:
    """The figure as SVG: two small charts, then the replies in two columns."""
    width, top = 900, 250
    wrapped = [
        [textwrap.wrap(f"{row['query']}|{row['reply']}".replace("\n", " "), 58) for row in run["replies"]]
        for run in runs
    ]
    heights = [max(len(run[i]) for run in wrapped) for i in range(SHOWN)]
    height = top + 30 + sum(h * 15 + 16 for h in heights)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i, (key, title) in enumerate((("reward", "mean positive probability"), ("kl", "KL per reply, nats"))):
        parts += _chart(runs, key, title, 40 + 450 * i)
    y = top + 20
    for j, run in enumerate(runs):
        label, colour, _ = KINDS[run["run"]]
        text = f"{label}: reward {run['after']:.2f}, KL {run['kl_per_reply']:.0f} nats"
        parts.append(f'<text x="{40 + 450 * j}" y="{y}" font-size="13" font-weight="600" fill="{colour}">{text}</text>')
    y += 24
    for i, tall in enumerate(heights):
        for j, replies in enumerate(wrapped):
            for k, line in enumerate(replies[i]):
                query, bar, reply = line.partition("|")
                shown = f'<tspan fill="#777">{escape(query)}</tspan>{escape(reply)}' if bar else escape(line)
                parts.append(f'<text x="{40 + 450 * j}" y="{y + 15 * k}" font-size="12">{shown}</text>')
        y += tall * 15 + 16
    return "\n".join([*parts, "</svg>"]) + "\n"


def _chart(runs: list[dict], key: str, title: str, left: int) -> list[str]:
    values = [v for run in runs for v in run[key]]
    low, high = min(0.0, *values), max(values)
    parts = [f'<text x="{left}" y="24" font-size="13">{title}</text>']
    for tick in range(5):
        value, y = low + (high - low) * tick / 4, 225 - 180 * tick / 4
        parts.append(f'<line x1="{left}" x2="{left + 390}" y1="{y}" y2="{y}" stroke="#e2e2e2"/>')
        parts.append(
            f'<text x="{left - 6}" y="{y + 4}" font-size="11" text-anchor="end" fill="#666">{value:.3g}</text>'
        )
    for run in runs:
        points = " ".join(
            f"{left + 390 * t / max(len(run[key]) - 1, 1):.1f},{225 - 180 * (v - low) / (high - low):.1f}"
            for t, v in enumerate(run[key])
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{KINDS[run["run"]][1]}" stroke-width="1.8"/>')
    return [*parts, f'<text x="{left + 390}" y="241" font-size="11" text-anchor="end" fill="#666">step</text>']


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="only check that it runs: tiny runs, no measurement")
    args = parser.parse_args()
    seed = args.seed
    for name in KINDS:
        train(name, seed, args.quick)
    runs = [summary(name) for name in KINDS]
    result = {"command": "python -m benchmarks.kl_samples", "seed": seed, "runs": runs}
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    RESULTS.write_text(text, encoding="utf-8")
    drawn("with-and-without-kl.svg").write_text(figure(runs), encoding="utf-8")
    for run in runs:
        print(
            f"{run['run']:8} {run['before']:.3f} -> {run['after']:.3f}  KL {run['kl_per_reply']:.1f}  {run['findings']}"
        )


if __name__ == "__main__":
    main()
