"""Two checkouts in turn, a step at a time, on the same machine: the ratio of their seconds, with an interval.

    python -m benchmarks.against OTHER_CHECKOUT --steps 30 --json benchmarks/results/against.json

Both sides stay alive, so loading is not counted; each pair of steps is taken within seconds, so the noise of a machine
falls on both. A side generates, scores and updates with the public `Learner`.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORKS = {
    "small": {"n_embd": 128, "n_layer": 4, "n_head": 4, "queries": 16, "new": 24},
    "wide": {"n_embd": 512, "n_layer": 4, "n_head": 8, "queries": 16, "new": 32},
}


def side(name: str) -> None:
    """Do one step for every line that is read, and answer with its seconds."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from operant import Learner

    work = WORKS[name]
    torch.manual_seed(0)
    shape = {key: work[key] for key in ("n_embd", "n_layer", "n_head")}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=2000, n_positions=128, bos_token_id=1, eos_token_id=1, **shape))
    learner = Learner(model, **{"max_tokens": work["new"], "fixed_length": True, "minibatch": 8, "epochs": 4})
    queries = [[5 + i, 6, 7 + i] for i in range(work["queries"])]
    for _ in sys.stdin:
        begun = time.perf_counter()
        replies = learner.generate(queries)
        learner.step(replies, [float(i % 3) for i in range(len(replies))])
        print(time.perf_counter() - begun, flush=True)


def start(checkout: Path, work: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(Path(__file__).resolve()), "--side", work]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )


def step(process: subprocess.Popen[str]) -> float:
    assert process.stdin is not None and process.stdout is not None  # both are pipes
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def interval(ratios: list[float]) -> tuple[float, float]:
    """The 95 % interval of the median, by 2,000 resamples with a fixed seed."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1949]


def compare(other: Path, work: str, steps: int) -> dict[str, float | int]:
    """The median ratio of seconds, this checkout over the other, and its interval."""
    both = [start(ROOT, work), start(other, work)]
    try:
        for process in both * 3:  # warm up
            step(process)
        ratios, seconds = [], []
        for number in range(steps):
            order = both if number % 2 == 0 else both[::-1]
            taken = {process.pid: step(process) for process in order}
            ours, theirs = (taken[process.pid] for process in both)
            ratios.append(ours / theirs)
            seconds.append(ours)
    finally:
        for process in both:
            process.kill()
    low, high = interval(ratios)
    found = {"ratio": statistics.median(ratios), "low": low, "high": high, "seconds": statistics.median(seconds)}
    return {"steps": steps, **{name: round(value, 4) for name, value in found.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("other", nargs="?", type=Path, help="the other checkout")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=WORKS, help="(for the processes that this one starts)")
    options = parser.parse_args()
    if options.side:
        side(options.side)
        return
    if options.other is None:
        parser.error("name the other checkout")
    found = {work: compare(options.other, work, options.steps) for work in WORKS}
    for work, row in found.items():
        print(f"{work:<8} {row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f}), {row['seconds']:.3f} s a step")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
