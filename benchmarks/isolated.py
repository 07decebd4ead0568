"""Rewards that misbehave, one after the other: what each costs a batch of 64. `python -m benchmarks.isolated`.

Each reward of `tests/hostile.py` judges 64 samples, one of which breaks it, in an isolated worker with a deadline.
Told are what came of that sample, how many of the other scores were right, the seconds until the batch was judged, the
largest memory that its processes held together, and how many processes are left when the reward is closed: found by a
mark in the environment, among all processes of the machine. Everything is done at both levels: in a PID namespace, and
by a sub-reaper where none is allowed.

Writes `benchmarks/results/isolated.json`; the exit status is 0 where every reward was held: the outcome that it should
have, 63 scores, within the deadline + 2 s, nobody left.
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
from operant.rewards import isolated
from operant.types import Rollout, Task, Turn

ROOT = Path(__file__).parents[1]
HOSTILE = ROOT / "tests/hostile.py"
RESULTS = ROOT / "benchmarks/results/isolated.json"
MARK = "OPERANT_GUEST_MARK"
LEVELS = ("pid namespace", "sub-reaper")
BATCH, GRACE = 64, 2.0


@dataclass(frozen=True)
class Row:
    """What one reward has cost."""

    reward: str
    about: str
    level: str
    wanted: str
    outcome: str
    kept: int
    """Of the other samples' scores."""
    deadline: float
    seconds: float
    memory_mb: int
    """The largest resident memory of all its processes together, looked at 20 times a second."""
    left: int
    """Processes, once the reward is closed."""

    @property
    def held(self) -> bool:
        """Whether all was as promised."""
        in_time = self.seconds < self.deadline + GRACE
        return self.outcome == self.wanted and self.kept == BATCH - 1 and in_time and self.left == 0


def marked(mark: str) -> dict[int, int]:
    """Processes with the mark in their environment, which no child can shed, and their resident memory in bytes."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if int(name) != os.getpid() and mark.encode() in Path(f"/proc/{name}/environ").read_bytes():
                pages = int(Path(f"/proc/{name}/statm").read_text(encoding="ascii").split()[1])
                found[int(name)] = pages * os.sysconf("SC_PAGE_SIZE")
    return found


def left(mark: str, patience: float = 0.0) -> list[int]:
    """Who has the mark; with `patience`, as soon as nobody has."""
    end = time.monotonic() + patience
    while (found := marked(mark)) and time.monotonic() < end:
        time.sleep(0.02)
    return list(found)


@contextlib.contextmanager
def watched(mark: str) -> Iterator[Callable[[], int]]:
    """While this lasts, the largest memory of all that have the mark."""
    most, over = 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not over.wait(0.05):
            most = max(most, sum(marked(mark).values()))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield lambda: most
    finally:
        over.set()
        thread.join()


def samples() -> list[Rollout]:
    return [Rollout(Task(f"t/{i}", "x"), i, [Turn([1], [2, 3])], [f"reply {i}"]) for i in range(BATCH)]


def measured(hostile: Any, name: str, wanted: str, level: str, deadline: float) -> Row:
    """One reward at one level."""
    os.environ[MARK] = mark = f"guest-{uuid.uuid4()}"
    guest = isolated(f"{HOSTILE}:{name}", timeout=deadline, memory=1, processes=64, level=level)
    guest.check()
    in_force, begun = guest.level.partition(":")[0], time.perf_counter()
    with watched(mark) as most:
        judged = guest.judged(samples())
        seconds = time.perf_counter() - begun
    guest.close()
    bad = int(hostile.BAD.removeprefix("t/"))
    kept = sum(score == float(i) for i, score in enumerate(judged.scores) if i != bad)
    said = (getattr(hostile, name).__doc__ or "").partition("\n")[0]
    numbers = (kept, deadline, round(seconds, 1), round(most() / 1e6), len(left(mark, 1.0)))
    return Row(name, said, in_force, wanted, judged.outcomes[bad], *numbers)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.isolated", description=__doc__)
    parser.add_argument("rewards", nargs="*", help="which; all without any, and only then the results are written")
    parser.add_argument("--deadline", type=float, default=10.0, help="seconds for a batch")
    args = parser.parse_args(argv)
    sys.path.insert(0, str(HOSTILE.parent))
    import hostile

    cases = [(reward.__name__, outcome) for outcome, rewards in hostile.CASES.items() for reward in rewards]
    rows = []
    for name, wanted in [case for case in cases if not args.rewards or case[0] in args.rewards]:
        for level in LEVELS:
            row = measured(hostile, name, wanted, level, args.deadline)
            rows.append(row)
            print(
                f"{'held' if row.held else 'NOT HELD':8} {name:28} {row.level:14} {row.outcome:8} kept {row.kept} "
                f"in {row.seconds:.1f} s, {row.memory_mb} MB, {row.left} left",
                flush=True,
            )
    if not args.rewards:
        told = {"command": "python -m benchmarks.isolated", "machine": about(), "rows": [asdict(row) for row in rows]}
        RESULTS.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(f"{sum(row.held for row in rows)} of {len(rows)}")
    return 0 if all(row.held for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
