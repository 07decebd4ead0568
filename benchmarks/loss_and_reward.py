"""PPO's loss beside its reward, of the demo and of its control: `python -m benchmarks.loss_and_reward`.

Trains the sentiment recipe with seed 1, and with shuffled rewards, into `runs/bench-sentiment` (finished runs of
`benchmarks.sentiment_seeds` are not repeated; eight minutes on two idle cores). Writes the curves to
`benchmarks/results/loss-and-reward.json` and the figure `docs/figures/loss-and-reward.svg`.
"""

import argparse
import json
import statistics

from benchmarks.kept import drawn
from benchmarks.sentiment_seeds import ROOT, RUNS, train

RUN_NAMES = {"seed-1": ("the demo", "#2563ab"), "control-1": ("its control, with shuffled rewards", "#c2410c")}
CURVES = {"reward/mean": "mean reward", "loss/total": "total loss", "policy/loss": "policy loss"}
"""The panels: metric and title."""
RANGES = {"reward/mean": (0.4, 1.0), "loss/total": (0.0, 0.2), "policy/loss": (-0.1, 0.1)}


def summary(name: str) -> dict:
    """The curves of a run."""
    lines = (RUNS / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    curves = {key: [m[key] for m in metrics] for key in [*CURVES, "value/loss"]}
    return {"run": name, "curves": curves}


def ends(values: list[float]) -> tuple[float, float]:
    """The means over the first and over the last tenth of the steps."""
    tenth = max(len(values) // 10, 1)
    return statistics.mean(values[:tenth]), statistics.mean(values[-tenth:])


def figure(runs: list[dict]) -> str:
    """The figure as SVG: three panels, one line a run."""
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 250" font-family="sans-serif" font-size="12">']
    parts.append('<rect width="900" height="250" fill="white"/>')
    for i, (key, title) in enumerate(CURVES.items()):
        left, (low, high) = 50 + 295 * i, RANGES[key]
        parts.append(f'<text x="{left}" y="20" font-size="13">{title}</text>')
        for tick in range(5):
            value, y = low + (high - low) * tick / 4, 210 - 170 * tick / 4
            parts.append(f'<line x1="{left}" x2="{left + 240}" y1="{y}" y2="{y}" stroke="#e2e2e2"/>')
            parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end" fill="#666">{value:.3g}</text>')
        for run in runs:
            values = [min(max(v, low), high) for v in run["curves"][key]]
            points = " ".join(
                f"{left + 240 * t / max(len(values) - 1, 1):.1f},{210 - 170 * (v - low) / (high - low):.1f}"
                for t, v in enumerate(values)
            )
            colour = RUN_NAMES[run["run"]][1]
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        steps = len(runs[0]["curves"][key])
        parts.append(f'<text x="{left + 240}" y="226" text-anchor="end" fill="#666">{steps} steps</text>')
    for i, (label, colour) in enumerate(RUN_NAMES.values()):
        parts.append(f'<text x="{50 + 120 * i}" y="244" fill="{colour}">{label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only check that it runs: tiny runs, no results written")
    args = parser.parse_args()
    for name in RUN_NAMES:
        train(name, 1, name.startswith("control"), args.quick)
    runs = [summary(name) for name in RUN_NAMES]
    for run in runs:
        shown = ["{} {:.3f} -> {:.3f}".format(key, *ends(values)) for key, values in run["curves"].items()]
        print(f"{run['run']:10} {'  '.join(shown)}")
    if args.quick:
        return
    result = {"command": "python -m benchmarks.loss_and_reward", "runs": runs}
    (ROOT / "benchmarks/results/loss-and-reward.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    drawn("loss-and-reward.svg").write_text(figure(runs), encoding="utf-8")


if __name__ == "__main__":
    main()
