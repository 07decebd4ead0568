"""How the cost of a run grows: `python -m benchmarks.growth`, half an hour on a machine that does nothing else.

- rows, tokens, parameters: seconds of a PPO step of a GPT-2 (4 layers of 256, vocabulary 8,192; 64 replies of 8 + 32
  tokens), where one of the three changes.
- turns: seconds of 32 episodes of so many turns with 8 new tokens each, whose history grows (`benchmarks.turns`).
- steps: seconds of a run of so many steps of 8 replies by a Llama of 0.2M parameters, its log and checkpoints included.
- page: seconds of `operant report` of such a run. lines: of one of 100 steps whose log has so many replies.

Medians of rounds. The slope is that of the last doubling in logarithms, of medians and of each round: 1 is as the size
grows, 0 not at all. Writes
`benchmarks/results/growth.json` and `docs/figures/growth.svg`; `make docs` writes the table of docs/fast.md.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.kept import drawn
from benchmarks.report import machine
from benchmarks.turns import MODELS, Sides
from operant import Learner

ROOT = Path(__file__).parents[1]
RESULTS, FIGURE = ROOT / "benchmarks/results/growth.json", drawn("growth.svg")


class Step:
    """A PPO step on fixed queries, of which each call makes one."""

    def __init__(self, rows: int = 64, tokens: int = 32, width: int = 256):
        torch.manual_seed(0)
        shape = {"n_embd": width, "n_layer": 4, "n_head": max(2, width // 64), "n_positions": 1024, "vocab_size": 8192}
        model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0, pad_token_id=0))
        self.size = sum(p.numel() for p in model.parameters())
        options = {"max_tokens": tokens, "fixed_length": True, "update.epochs": 1, "minibatch": 64, "watch_every": 0}
        self.learner = Learner(model, **options)
        self.queries = [[3 + (7 * i + j) % 90 for j in range(8)] for i in range(rows)]

    def __call__(self) -> None:
        replies = self.learner.generate(self.queries)
        self.learner.step(replies, [float(r.ids[0] % 7) for r in replies])


def turns(count: int) -> Callable[[], Any]:
    return Sides(MODELS["built-in shape"], 32, count).ways["ours"]


def run(folder: Path, steps: int, batch: int) -> list[str]:
    """The command of a run of sums, which is small, and writes what every run writes."""
    words = f"train arithmetic --steps {steps} --batch {batch} --update.minibatch 8 --samples 8 --probes 0".split()
    words += "--data.limit 64 --evaluate none".split()
    return [sys.executable, "-m", "operant", *words, "--out", str(folder)]


def called(command: list[str], place: Path) -> Callable[[], Any]:
    return lambda: subprocess.run(command, cwd=place, check=True, capture_output=True)


def seconds(work: Callable[[], Any], rounds: int, warm: bool) -> list[float]:
    if warm:
        work()
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return found


def growth(name: str, points: list[tuple[float, list[float]]]) -> dict[str, Any]:
    """A row of the results: sizes, medians, and the slope of the last doubling with its range over rounds."""
    (x, before), (x2, after) = points[-2:]

    def slope(y: float, y2: float) -> float:
        return math.log(y2 / y) / math.log(x2 / x)

    rounds = [slope(y, y2) for y, y2 in zip(before, after, strict=True)]
    rows = [{"size": size, "seconds": statistics.median(all_), "all": all_} for size, all_ in points]
    print(f"{name}: " + ", ".join(f"{row['size']:,.0f} {row['seconds']:.2f} s" for row in rows), flush=True)
    last = slope(statistics.median(before), statistics.median(after))
    return {"what": name, "points": rows, "slope": last, "slopes": [min(rounds), max(rounds)]}


def figure(rows: list[dict[str, Any]]) -> str:
    """Seconds over sizes, both as logarithms, a panel each; the dashed line grows as the size does."""
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 920 410" font-family="sans-serif" font-size="12">']
    parts.append('<rect width="920" height="410" fill="white"/>')
    for i, row in enumerate(rows):
        left, top = 45 + 225 * (i % 4), 45 + 195 * (i // 4)
        points = [(math.log2(p["size"]), math.log2(p["seconds"])) for p in row["points"]]
        (low, least), (high, most) = points[0], (points[-1][0], max(y for _, y in points))
        least = min(least, most - (high - low))

        def at(x: float, y: float) -> str:
            return f"{left + 165 * (x - low) / (high - low):.1f},{top + 130 - 120 * (y - least) / (most - least):.1f}"  # noqa: B023

        end = points[-1][1]
        dashed = f'points="{at(low, end - high + low)} {at(high, end)}" stroke-dasharray="4 3"'
        line = f'<polyline fill="none" stroke="#aaa" {dashed}/>'
        parts += [f'<rect x="{left}" y="{top}" width="165" height="135" fill="none" stroke="#ddd"/>', line]
        parts.append(
            f'<polyline fill="none" stroke="#0072b2" stroke-width="2" points="{" ".join(at(*p) for p in points)}"/>'
        )
        parts.append(f'<text x="{left}" y="{top - 10}">{row["what"]}, slope {row["slope"]:.2f}</text>')
        first, last = row["points"][0], row["points"][-1]
        begin, ended = (f"{p['size'] / 1e6:.1f}M" if p["size"] > 1e5 else f"{p['size']:,}" for p in (first, last))
        parts.append(f'<text x="{left}" y="{top + 152}" fill="#555">{begin}: {first["seconds"]:.2g} s</text>')
        ends = f"{ended}: {last['seconds']:.3g} s"
        parts.append(f'<text x="{left + 165}" y="{top + 152}" text-anchor="end" fill="#555">{ends}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="only check that it runs: two small sizes, no results")
    given = parser.parse_args()
    rounds, cut = (1, 2) if given.quick else (given.rounds, None)
    found = []
    for name, sizes, make in (
        ("rows", (16, 32, 64, 128, 256), lambda n: Step(rows=n)),
        ("tokens", (8, 16, 32, 64, 128, 256), lambda n: Step(tokens=n)),
        ("parameters", (64, 128, 256, 512), lambda n: Step(width=n)),
        ("turns", (3, 6, 12, 24), turns),
    ):
        points = []
        for size in sizes[:cut]:
            work = make(size)
            points.append((work.size if name == "parameters" else size, seconds(work, rounds, True)))
        found.append(growth(name, points))
    with tempfile.TemporaryDirectory() as folder:
        place, steps, pages, lines = Path(folder), [], [], []
        for size in (1, 2) if given.quick else (25, 50, 100, 200, 400, 800):
            folders = [place / f"{size}-{i}" for i in range(rounds)]
            steps.append((size, [seconds(called(run(f, size, 8), place), 1, False)[0] for f in folders]))
            report = [sys.executable, "-m", "operant", "report", str(folders[0])]
            pages.append((size, seconds(called(report, place), rounds, False)))
        for size in (800, 1600, 3200, 6400, 12800)[:cut]:
            called(run(place / "again", 100 if not given.quick else 2, size // 100), place)()
            report = [sys.executable, "-m", "operant", "report", str(place / "again")]
            lines.append((size, seconds(called(report, place), rounds, False)))
            subprocess.run(["rm", "-r", str(place / "again")], check=True)
    found += [growth(name, points) for name, points in (("steps", steps), ("page", pages), ("lines", lines))]
    if not given.quick:
        result = {"command": "python -m benchmarks.growth", "machine": machine(), "rounds": rounds, "rows": found}
        RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        FIGURE.write_text(figure(found), encoding="utf-8")


if __name__ == "__main__":
    main()
