"""The training cycle and its seconds, from a run's own metrics: `python -m benchmarks.training_cycle runs/sentiment`.

Writes `benchmarks/results/training-cycle.json` (mean seconds of each phase over the steps) and the figure
`docs/figures/training-cycle.svg`.
"""

import argparse
import json
import textwrap
from pathlib import Path
from statistics import mean
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
PHASES = {
    "generate": ("generate", "the policy finishes each query;", "with log-probs and values"),
    "reward": ("judge", "the reward scores each reply:", "any Python function or model"),
    "observe": ("observe", "the reference scores the tokens;", "KL compares the two models"),
    "advantage": ("credit", "reward minus KL, token by token;", "GAE against the critic"),
    "update": ("update", "clipped steps on policy and critic", "over minibatches of the replies"),
    "track": ("track", "metrics, replies, histograms", "into the run folder"),
}
"""Phase of `time/...` -> its name in the figure and two lines of description."""
WIDTH, BOX, GAP = 980, 148, 14
COLOURS = ["#2f6fb5", "#c9762b", "#5b8a3c", "#7a5aa8", "#b5433f", "#6b7280"]


def seconds(run: Path) -> dict[str, float]:
    """Mean seconds per step of each phase, without the first step, which warms up."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines][1:]
    return {phase: mean(step[f"time/{phase}"] for step in steps) for phase in PHASES}


def figure(phases: dict[str, float], about: str) -> str:
    """The figure as SVG: the phases as boxes, the arrow back to the first, and a bar of their shares of the time."""
    whole = sum(phases.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 290" font-family="system-ui, sans-serif">',
        f'<rect width="{WIDTH}" height="290" fill="white"/>',
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#888"/></marker></defs>',
    ]
    for i, (phase, (name, *lines)) in enumerate(PHASES.items()):
        x = 10 + i * (BOX + GAP)
        parts.append(f'<rect x="{x}" y="40" width="{BOX}" height="98" rx="8" fill="#f7f8fa" stroke="{COLOURS[i]}"/>')
        parts.append(f'<text x="{x + 12}" y="66" font-size="15" font-weight="600" fill="{COLOURS[i]}">{name}</text>')
        shown = f"{phases[phase]:.2f} s" if phases[phase] >= 0.01 else f"{1000 * phases[phase]:.1f} ms"
        parts.append(f'<text x="{x + BOX - 12}" y="66" font-size="13" text-anchor="end">{shown}</text>')
        for j, line in enumerate(lines):
            words = textwrap.wrap(line, 22)
            for k, text in enumerate(words):
                y = 88 + (2 * j + k) * 12
                parts.append(f'<text x="{x + 12}" y="{y}" font-size="10.5" fill="#444">{escape(text)}</text>')
        if i:
            parts.append(f'<line x1="{x - GAP}" x2="{x - 1}" y1="89" y2="89" stroke="#888" marker-end="url(#a)"/>')
    right, left = 10 + 5 * (BOX + GAP) + BOX / 2, 10 + BOX / 2
    parts.append(f'<path d="M{right} 138V160H{left}V139" fill="none" stroke="#888" marker-end="url(#a)"/>')
    parts.append(
        f'<text x="{WIDTH / 2}" y="177" font-size="11" fill="#666" text-anchor="middle">the next step begins with '
        "the new weights</text>"
    )
    at = 10.0
    for i, phase in enumerate(PHASES):
        width = (WIDTH - 20) * phases[phase] / whole
        parts.append(f'<rect x="{at:.1f}" y="200" width="{width:.1f}" height="26" fill="{COLOURS[i]}"/>')
        if width > 60:
            label = f"{PHASES[phase][0]} {100 * phases[phase] / whole:.0f} %"
            parts.append(f'<text x="{at + 8:.1f}" y="218" font-size="12" fill="white">{label}</text>')
        at += width
    parts.append(f'<text x="10" y="252" font-size="12" fill="#444">{whole:.2f} s a step: {escape(about)}</text></svg>')
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    run = parser.parse_args().run
    phases = seconds(run)
    machine = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    about = (
        f"{run.name}, mean over the steps of one run, torch {machine['torch']}, {machine['threads']} threads on "
        f"{machine['cores']} cores"
    )
    result = {"command": f"python -m benchmarks.training_cycle {run}", "about": about, "seconds": phases}
    path = ROOT / "benchmarks/results/training-cycle.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (ROOT / "docs/figures/training-cycle.svg").write_text(figure(phases, about), encoding="utf-8")
    print(json.dumps(phases, indent=1))


if __name__ == "__main__":
    main()
