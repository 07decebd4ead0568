"""Try 2,000 generated configurations: `python -m benchmarks.configs`, ten minutes on two idle cores.

Each must train or be refused in one sentence; any other outcome is printed, and the exit code is 1.
tests/test_configs.py generates and judges them; `benchmarks/results/configs.json` holds the counts.

    python -m benchmarks.configs --examples 200      fewer; no results are written
    python -m benchmarks.configs --jobs 4            processes at the same time, each with its share and its seed
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/configs.json"
WHOLE = 2000
OUTCOMES = ("accepted", "refused", "failed")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=WHOLE)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int)
    args = parser.parse_args()
    if args.seed is not None:
        print(json.dumps(count(args.examples, args.seed)))
        return 0
    result = together(args.examples, args.jobs)
    print(json.dumps(result, indent=1))
    print(
        f"{result['accepted']} trained, {result['refused']} were refused in a sentence, {result['failed']} did neither"
    )
    if args.examples == WHOLE:
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(result["failed"] > 0)


def together(examples: int, jobs: int) -> dict:
    """Try `examples` configurations in `jobs` processes and add up their counts."""
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    begun, command = time.perf_counter(), [sys.executable, "-m", "benchmarks.configs", "--examples"]
    running = [
        subprocess.Popen(
            [*command, str(len(range(job, examples, jobs))), "--seed", str(job)],
            cwd=ROOT,
            env={**os.environ, **offline},
            stdout=subprocess.PIPE,
            text=True,
        )
        for job in range(jobs)
    ]
    parts = [json.loads(process.communicate()[0].splitlines()[-1]) for process in running]
    tally = sum((Counter(part["tally"]) for part in parts), Counter())
    tried = sorted({name for part in parts for name in part["tried"]})
    result = {"command": "python -m benchmarks.configs", "examples": sum(tally[name] for name in OUTCOMES)}
    result |= {name: tally[name] for name in (*OUTCOMES, *sorted(set(tally) - set(OUTCOMES)))}
    result |= {
        "options": parts[0]["known"],
        "options tried": len(tried),
        "failures": [odd for part in parts for odd in part["odd"]],
    }
    return result | {"jobs": jobs, "seconds": round(time.perf_counter() - begun)} | parts[0]["machine"]


def count(examples: int, number: int) -> dict:
    """Try `examples` configurations, the same ones for the same seed; a failure does not stop the others."""
    sys.path.insert(0, str(ROOT / "tests"))
    import test_configs as configs
    from hypothesis import Phase, given, seed, settings

    from operant import machine

    tally: Counter[str] = Counter()
    options: set[str] = set()
    odd: list[str] = []

    @seed(number)
    @given(configs.configurations())
    @settings(configs.PLAIN, max_examples=examples, derandomize=False, phases=[Phase.generate])
    def each(case):
        try:
            ran = configs.trial(case)
            tally["accepted" if ran else "refused"] += 1
            tally[f"accepted as {case[0]}"] += ran
        except (Exception, configs.pytest.fail.Exception) as error:
            tally["failed"] += 1
            odd.append(f"{type(error).__name__}: {str(error)[:300]} | {str(case)[:500]}")
            print(odd[-1], file=sys.stderr, flush=True)
        options.update(map(str, case[1]))

    each()
    known = {name for algorithm in configs.ALGORITHMS for name in configs.known(algorithm)}
    result = {"tally": tally, "tried": sorted(known & options), "known": len(known), "odd": odd}
    return result | {"machine": machine.about()}


if __name__ == "__main__":
    sys.exit(main())
