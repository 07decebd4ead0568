"""Every check that needs a GPU, in a process each, within a budget each: `benchmarks/gpu.sh`.

    python -m benchmarks.gpu --only decode,head     # some of the parts
    python -m benchmarks.gpu --tiny                 # every path, on a CPU, in under a minute; measures nothing

A part that fails or runs out of time is recorded with its error and with what it had found; the others go on. Results
are in `--out` (benchmarks/results/gpu.json) after every part.
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
    asked = arguments()
    chosen = [name for name in PARTS if asked.only is None or name in asked.only.split(",")]
    if not asked.tiny and not _gpu():
        print("no GPU that torch can use: nothing to measure (--tiny tries every path on a CPU)")
        return 0
    told: dict[str, Any] = {"command": " ".join(["python -m benchmarks.gpu", *sys.argv[1:]]), "tiny": asked.tiny}
    end = time.monotonic() + asked.minutes * 60
    for name in chosen:
        budget = min(PARTS[name].seconds, end - time.monotonic())
        told[name] = run(name, asked.tiny, budget) if budget > 5 else {"error": "left out: no time was left"}
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {json.dumps(told[name])}", flush=True)
    failed = [name for name in chosen if "error" in told[name] or told[name].get("good") is False]
    print(
        f"{asked.out}: {len(chosen) - len(failed)} of {len(chosen)} parts are well; not: {', '.join(failed) or 'none'}"
    )
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on whatever device there is")
    parser.add_argument("--only", help=f"parts, with commas: {','.join(PARTS)}")
    parser.add_argument("--minutes", type=float, default=9.5, help="for everything together")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def _gpu() -> bool:
    """Whether there is a GPU, asked in a process of its own: this one shall fork, and must never touch CUDA."""
    return run("machine", False, 60.0).get("cuda", False)


if __name__ == "__main__":
    sys.exit(main())
