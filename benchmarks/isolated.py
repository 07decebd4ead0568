"""Rewards that misbehave, one after the other: what each costs a batch of 64. `python -m benchmarks.isolated`.

Each reward of `tests/hostile.py` judges 64 samples, one of which breaks it, in an isolated worker with a deadline. The
table has the outcome of that sample, the number of correct scores of the others, the seconds until the batch was
judged, the peak memory of all its processes together, and the number of processes left when the reward is closed, found
among all processes of the machine by a mark in their environment. Each is measured at two levels of isolation: PID
namespace and sub-reaper.

Writes `benchmarks/results/isolated.json`. The exit status is 0 if every reward was contained: the expected outcome, 63
correct scores, within the deadline + 2 s, and no process left.
"""

import argparse
import contextlib
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from operant.machine import about
from operant.rewards.isolated import isolated
from operant.types import Rollout, Task, Turn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from isolation import MARK, marked_processes, memory_by_process  # noqa: E402

HOSTILE = ROOT / "tests/hostile.py"
RESULTS = ROOT / "benchmarks/results/isolated.json"
LEVELS = ("pid namespace", "sub-reaper")
BATCH, GRACE = 64, 2.0


@dataclass(frozen=True)
class Row:
    """The measurements of one reward at one level."""

    reward: str
    about: str
    level: str
    wanted: str
    outcome: str
    kept: int
    """Number of correct scores of the other samples."""
    deadline: float
    seconds: float
    memory_mb: int
    """Peak resident memory of all its processes together, measured 20 times a second."""
    left: int
    """Processes left when the reward is closed."""

    @property
    def contained(self) -> bool:
        """Whether everything is as promised."""
        in_time = self.seconds < self.deadline + GRACE
        return self.outcome == self.wanted and self.kept == BATCH - 1 and in_time and self.left == 0


@contextlib.contextmanager
def peak_memory(mark: str) -> Iterator[Callable[[], int]]:
    """Inside the block, measure the memory of all marked processes; yields a function that returns the peak."""
    peak, over = 0, threading.Event()

    def measure() -> None:
        nonlocal peak
        while not over.wait(0.05):
            peak = max(peak, sum(memory_by_process(mark).values()))

    thread = threading.Thread(target=measure)
    thread.start()
    try:
        yield lambda: peak
    finally:
        over.set()
        thread.join()


def samples() -> list[Rollout]:
    return [Rollout(Task(f"t/{i}", "x"), i, [Turn([1], [2, 3])], [f"reply {i}"]) for i in range(BATCH)]


def measured(hostile: Any, name: str, wanted: str, level: str, deadline: float) -> Row:
    """Measure one reward at one level."""
    os.environ[MARK] = mark = f"reward-{uuid.uuid4()}"
    reward = isolated(f"{HOSTILE}:{name}", timeout=deadline, memory=1, processes=64, level=level)
    reward.check()
    in_force, begun = reward.level.partition(":")[0], time.perf_counter()
    with peak_memory(mark) as peak:
        judged = reward.judged(samples())
        seconds = time.perf_counter() - begun
    reward.close()
    bad = int(hostile.BAD.removeprefix("t/"))
    correct = sum(score == float(i) for i, score in enumerate(judged.scores) if i != bad)
    description = (getattr(hostile, name).__doc__ or "").partition("\n")[0]
    numbers = (correct, deadline, round(seconds, 1), round(peak() / 1e6), len(marked_processes(mark, 1.0)))
    return Row(name, description, in_force, wanted, judged.outcomes[bad], *numbers)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.isolated", description=__doc__)
    parser.add_argument(
        "rewards", nargs="*", help="names of rewards; by default all, and only then the results are written"
    )
    parser.add_argument("--deadline", type=float, default=10.0, help="seconds for a batch")
    args = parser.parse_args(argv)
    import hostile

    cases = [(reward.__name__, outcome) for outcome, rewards in hostile.CASES.items() for reward in rewards]
    rows = []
    for name, wanted in [case for case in cases if not args.rewards or case[0] in args.rewards]:
        for level in LEVELS:
            row = measured(hostile, name, wanted, level, args.deadline)
            rows.append(row)
            print(
                f"{'contained' if row.contained else 'ESCAPED':9} {name:28} {row.level:14} {row.outcome:8} "
                f"{row.kept} of {BATCH - 1} scores in {row.seconds:.1f} s, {row.memory_mb} MB, {row.left} left",
                flush=True,
            )
    if not args.rewards:
        results = {
            "command": "python -m benchmarks.isolated",
            "machine": about(),
            "rows": [asdict(row) for row in rows],
        }
        RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"{sum(row.contained for row in rows)} of {len(rows)} contained")
    return 0 if all(row.contained for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
