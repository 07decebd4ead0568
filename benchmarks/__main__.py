"""`python -m benchmarks [W1 W3 ...] [--rounds N] [--quick] [--list]`: measure, and write benchmarks/results/bench.*"""

import argparse
import sys
import time

from benchmarks import report
from benchmarks.driver import SideFailed, run
from benchmarks.work import WORKS, WorkDiffers


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split(":", 1)[1])
    parser.add_argument("works", nargs="*", help="which; all without any")
    parser.add_argument("--rounds", type=int, default=5, help="that count, after one that does not")
    parser.add_argument("--quick", action="store_true", help="tiny models, nothing written: does every side run?")
    parser.add_argument("--list", action="store_true", help="what there is")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{work.name:9} {work.about}" for work in WORKS.values()))
        return 0
    failed = 0
    for name in args.works or WORKS:
        if name not in WORKS:
            parser.error(f"{name} is none of {', '.join(WORKS)}")
        work = WORKS[name].quick() if args.quick else WORKS[name]
        print(f"{work.name}: {work.about}", flush=True)
        start = time.perf_counter()
        try:
            rows = run(work, 2 if args.quick else args.rounds)
        except (SideFailed, WorkDiffers) as error:
            failed += 1
            print(f"  {type(error).__name__}: {error}", flush=True)
            continue
        print(report.lines(rows), flush=True)
        print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)
        if not args.quick:
            report.merge(rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
