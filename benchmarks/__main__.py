"""`python -m benchmarks [W1 W3 ...] [--rounds N] [--quick] [--list]`: measure, and write benchmarks/results/bench.*"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks import driver, learning, report, scale
from benchmarks.work import WORKS, WorkDiffers

ROUNDS, SEEDS = 5, 5


def everything(rounds: int, quick: bool, seeds: int) -> dict[str, tuple[str, Callable[[], list[dict[str, Any]]]]]:
    """Workloads by name: the description of each, and the function that measures it."""
    works = [work.quick() if quick else work for work in WORKS.values()]
    table = {work.name: (work.about, partial(driver.run, work, rounds)) for work in works}
    base = replace(scale.BASE, shape="tiny", queries=2, new=4, query=4, minibatch=2) if quick else scale.BASE
    table["W6"] = ("cost as batch, length and layers grow 1x to 16x", partial(scale.run, rounds, base))
    learn = partial(learning.run, 1, steps=4) if quick else partial(learning.run, seeds)
    table["W7"] = ("the demo task: seconds to mean reward 0.9", learn)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split(":", 1)[1])
    parser.add_argument("works", nargs="*", help="names of workloads; by default all")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds that are measured, after one warm-up round")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of seeds of W7")
    parser.add_argument(
        "--quick", action="store_true", help="only check that every side runs: tiny models, no results written"
    )
    parser.add_argument("--list", action="store_true", help="list the workloads")
    args = parser.parse_args()
    table = everything(2 if args.quick else args.rounds, args.quick, args.seeds)
    if args.list:
        print("\n".join(f"{name:9} {about}" for name, (about, _) in table.items()))
        return 0
    unknown = [name for name in args.works if name not in table]
    if unknown:
        parser.error(f"there is no workload {unknown[0]}; choose from {', '.join(table)}")
    failed = [name for name in args.works or table if not measure(name, *table[name], save=not args.quick)]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def measure(name: str, about: str, run: Callable[[], list[dict[str, Any]]], *, save: bool) -> bool:
    """Measure one workload, print its rows and add them to the results; returns False if it could not be measured."""
    print(f"{name}: {about}", flush=True)
    start = time.perf_counter()
    try:
        rows = run()
    except (driver.SideFailed, WorkDiffers) as error:
        print(f"  {type(error).__name__}: {error}", flush=True)
        return False
    print(f"{report.lines(rows)}\n  ({time.perf_counter() - start:.0f} s)", flush=True)
    if save:
        report.merge(rows)
    return True


if __name__ == "__main__":
    sys.exit(main())
