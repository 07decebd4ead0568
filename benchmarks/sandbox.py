"""What a program in the jail costs. `python -m benchmarks.sandbox`.

Per level: the seconds of one program with three tests, alone (median and 99th percentile of `--rounds`), and programs a
second with as many at once as there are cores, beside a plain subprocess that starts the same interpreter for the same
program and its tests. Then `--many` programs of which a tenth never end, against what the deadline makes necessary: the
seconds of the others alone, and of as many endless plain processes that the kernel ends after the same processor time.
Writes `benchmarks/results/sandbox.json`.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from operant.machine import about
from operant.sandbox.jail import Code, Jail, JailOptions, Program, cores
from operant.sandbox.levels import UNTRUSTED, interpreter
from operant.types import OperantError

RESULTS = Path(__file__).parent / "results/sandbox.json"
SOURCE = "def f(x):\n    return sorted(x)[-1]"
TESTS = ["assert f([1, 3, 2]) == 3", "assert f([5]) == 5", "assert f([0, -1]) == 0"]
HONEST = Program(SOURCE, [Code(test) for test in TESTS])
ENDLESS = Program("while True:\n    pass", [Code("assert f([1]) == 1")])


def plain(count: int) -> None:
    """The same by a plain subprocess for each program: nothing is limited, and a program can forge its verdict."""
    argv = [interpreter(), "-I", "-S", "-c", "\n".join([SOURCE, *TESTS])]
    with ThreadPoolExecutor(cores()) as pool:
        for done in pool.map(lambda _: subprocess.run(argv, env={}, stdin=subprocess.DEVNULL), range(count)):
            assert done.returncode == 0


def seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def row(name: str, run: Callable[[int], object], rounds: int) -> dict[str, float | str]:
    """The cost of a program, alone and among others."""
    alone = sorted(seconds(lambda: run(1)) for _ in range(rounds))
    return {
        "level": name,
        "median": statistics.median(alone),
        "p99": alone[min(rounds - 1, round(0.99 * rounds))],
        "per_second": rounds / seconds(lambda: run(rounds)),
    }


def endless(jail: Jail, many: int) -> dict[str, float | str]:
    """Many programs, a tenth of which never end, against the least time that their deadline allows."""
    programs = [ENDLESS if i % 10 == 0 else HONEST for i in range(many)]
    others = seconds(lambda: jail.run([HONEST] * (many - many // 10)))
    verdicts = []
    taken = seconds(lambda: verdicts.extend(jail.run(programs)))
    assert [verdict.outcome == "passed" for verdict in verdicts] == [i % 10 != 0 for i in range(many)]
    limit = f"resource.setrlimit(resource.RLIMIT_CPU, ({math.ceil(jail.options.seconds)},) * 2)"
    argv = [interpreter(), "-I", "-S", "-c", f"import resource\n{limit}\n{ENDLESS.source}"]
    with ThreadPoolExecutor(jail.at_once) as pool:
        ended = seconds(lambda: list(pool.map(lambda _: subprocess.run(argv, env={}), range(many // 10))))
    late = max(verdict.seconds - jail.options.seconds for verdict in verdicts[::10])
    return {"level": jail.level, "many": many, "seconds": taken, "necessary": others + ended, "late": late}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sandbox", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--many", type=int, default=1000)
    parser.add_argument(
        "--deadline", type=float, default=1.0, help="seconds of processor time, for those that never end"
    )
    args = parser.parse_args(argv)
    load = os.getloadavg()[0]  # before it begins: that of other work
    rows, slow = [row("plain subprocess", plain, args.rounds)], []
    print(rows[-1], flush=True)
    for level in UNTRUSTED:
        try:
            jail = Jail(JailOptions(level=level, seconds=args.deadline))
        except OperantError as error:
            print(f"{level}: not measured: {error}")
            continue
        rows.append(row(level, lambda count, jail=jail: jail.run([HONEST] * count), args.rounds))
        print(rows[-1], flush=True)
        if not slow:  # the strongest alone: it is the slowest
            slow.append(endless(jail, args.many))
            print(slow[-1], flush=True)
    results = {"command": " ".join(["python -m benchmarks.sandbox", *(sys.argv[1:] if argv is None else argv)])}
    results |= {
        "machine": about(),
        "cores": cores(),
        "load": load,
        "deadline": args.deadline,
        "rows": rows,
        "endless": slow,
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
