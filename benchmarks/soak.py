"""Check that a long run is steady: `python -m benchmarks.soak`, 2,000 steps of a tiny model.

A real run in a process of its own, with checkpoints, evaluations, probes and reports. After every step its resident
memory, open file handles, threads and the seconds of the step are recorded. Steady: after the first quarter, memory
grows by less than `GROWTH` a step (least squares), handles and threads are never more than before, and the median step
of the last quarter takes at most `SLOWER` times that of the second. Writes `benchmarks/results/soak.json`.
"""

import argparse
import json
import mmap
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harm.trials import job_of, playing, prepare

RESULTS = Path(__file__).parents[1] / "benchmarks/results/soak.json"
GROWTH = 16.0
"""KB per step. 5 of them are the metrics of the step, which a run stores for its diagnosis."""
SLOWER = 1.3
PAGE = os.sysconf("SC_PAGE_SIZE") / 1000
SPARE = {"handles": 0, "threads": 2}
"""The allowed increase in the second half: the pool of a library starts a thread when its others are busy for the first
time, which may be late on a loaded machine. A leak adds one per step or per checkpoint."""
LESS_OFTEN = {"checkpoint_every": 10, "evaluate_every": 50, "probe_every": 25, "checkpoint": "both"}


@dataclass(frozen=True)
class Sample:
    """The resources of this process after a step."""

    memory: float
    """Resident memory in KB."""
    handles: int
    threads: int
    """As the system counts them, including those of libraries."""
    seconds: float
    """Seconds of the step and of everything that follows it."""


def sample(seconds: float) -> Sample:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    handles, threads = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
    return Sample(pages * PAGE, handles, threads, seconds)


def soak(folder: Path, steps: int, harm: Callable[[int], object] = lambda step: None) -> Iterator[Sample]:
    """Play the run and yield a sample per step; `harm` is called with the number of each step before it is sampled."""
    prepare(folder / "inputs")
    before, done = time.perf_counter(), 0
    for run in playing(job_of(folder / "inputs", steps, **LESS_OFTEN), folder / "run"):
        now = time.perf_counter()
        if len(run.metrics) > done:
            done = len(run.metrics)
            harm(done)
            yield sample(now - before)
        before = time.perf_counter()


def verdict(samples: Sequence[Sample]) -> list[str]:
    """What was not steady, one sentence each; empty if everything was."""
    quarter = len(samples) // 4
    later = samples[quarter:]
    problems = []
    if (growth := slope([s.memory for s in later])) > GROWTH:
        problems.append(f"memory grows by {growth:.1f} KB a step")
    for what, spare in SPARE.items():
        first, last = (max(getattr(s, what) for s in part) for part in (later[:quarter], later[quarter:]))
        if last > first + spare:
            problems.append(f"{what}: {first} in the second quarter, {last} after it")
    if (slower := ratio(samples)) > SLOWER:
        problems.append(f"a step of the last quarter takes {slower:.2f} times one of the second")
    return problems


def ratio(samples: Sequence[Sample]) -> float:
    """Median seconds of a step in the last quarter over those in the second."""
    quarter = len(samples) // 4
    second, last = samples[quarter : 2 * quarter], samples[-quarter:]
    return statistics.median(s.seconds for s in last) / statistics.median(s.seconds for s in second)


def slope(values: Sequence[float]) -> float:
    """Growth from one value to the next, by least squares."""
    return statistics.linear_regression(range(len(values)), values).slope


def summary(samples: Sequence[Sample], steps: int) -> dict[str, object]:
    """The content of the results file."""
    quarter = len(samples) // 4
    after = samples[quarter:]
    return {
        "command": f"python -m benchmarks.soak --steps {steps}",
        "steps": len(samples),
        "seconds": round(sum(s.seconds for s in samples)),
        "memory_mb": [round(s.memory / 1000, 1) for s in (samples[0], after[0], samples[-1])],
        "growth_kb": round(slope([s.memory for s in after]), 2),
        "handles": [min(s.handles for s in after), max(s.handles for s in after)],
        "threads": [min(s.threads for s in after), max(s.threads for s in after)],
        "step_ratio": round(ratio(samples), 3),
        "criteria": {"growth_kb": GROWTH, "step_ratio": SLOWER},
        "curve": [
            [i + 1, round(samples[i].memory / 1000, 1)] for i in range(0, len(samples), max(1, len(samples) // 50))
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--leak", nargs="+", choices=sorted(LEAKS), default=[], help="plant these leaks, to check that they are found"
    )
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        samples = list(soak(Path(folder), args.steps, lambda step: [LEAKS[name](step) for name in args.leak]))
    wrong = verdict(samples)
    result = summary(samples, args.steps) | {"wrong": wrong}
    if not args.leak:
        args.results.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(*(f"{name}: {value}" for name, value in result.items() if name != "curve"), sep="\n")
    print("\n".join(wrong) or "steady")
    return int(bool(wrong))


_leaked: list[Any] = []
LEAKS: dict[str, Callable[[int], object]] = {
    # Pages of its own: what a process has freed would hold a planted block without growing.
    "memory": lambda step: _leaked.append(mmap.mmap(-1, 500_000)) or _leaked[-1].write(b"x" * 500_000),
    "handles": lambda step: step % 50 or _leaked.append(open(os.devnull, encoding="utf-8")),  # noqa: SIM115
    "threads": lambda step: step % 50 or threading.Thread(target=threading.Event().wait, daemon=True).start(),
    "time": lambda step: time.sleep(step * 5e-4),
}
"""Leaks to plant: name -> a function that is called after each step."""


if __name__ == "__main__":
    sys.exit(main())
