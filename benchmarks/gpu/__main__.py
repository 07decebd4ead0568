"""Runs every check that needs a GPU, each in a process and a time budget of its own: `benchmarks/gpu.sh`.

    python -m benchmarks.gpu --only decode,head     # some of the parts
    python -m benchmarks.gpu --tiny                 # every code path on a CPU in under a minute, without measuring

A part that fails or runs out of time is recorded with its error and its results so far; the others go on. Results are
written to `--out` (benchmarks/results/gpu.json) after every part.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import PARTS, run

RESULTS = Path(__file__).parents[1] / "results" / "gpu.json"


def main() -> int:
    args = arguments()
    chosen = [name for name in PARTS if args.only is None or name in args.only.split(",")]
    if not args.tiny and not _gpu():
        print("no GPU that torch can use: nothing to measure (--tiny runs every code path on a CPU)")
        return 0
    results: dict[str, Any] = {"command": " ".join(["python -m benchmarks.gpu", *sys.argv[1:]]), "tiny": args.tiny}
    end = time.monotonic() + args.minutes * 60
    for name in chosen:
        budget = min(PARTS[name].seconds, end - time.monotonic())
        results[name] = run(name, args.tiny, budget) if budget > 5 else {"error": "left out: no time was left"}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {json.dumps(results[name])}", flush=True)
    failed = [name for name in chosen if "error" in results[name] or results[name].get("good") is False]
    print(
        f"{args.out}: {len(chosen) - len(failed)} of {len(chosen)} parts passed; failed: {', '.join(failed) or 'none'}"
    )
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, also without a GPU")
    parser.add_argument("--only", help=f"parts, separated by commas: {','.join(PARTS)}")
    parser.add_argument("--minutes", type=float, default=9.5, help="time budget of all parts together")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def _gpu() -> bool:
    """Whether there is a GPU, checked in another process: this one forks and must never initialise CUDA."""
    return run("machine", False, 60.0).get("cuda", False)


if __name__ == "__main__":
    sys.exit(main())
