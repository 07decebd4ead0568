"""Generated configurations, counted: `python -m benchmarks.configs`, 2,000 of them in ten minutes on two idle cores.

Each is accepted and trains, or is refused in one sentence; what is neither is printed, and the exit code is 1.
tests/test_configs.py makes them and says what counts; `benchmarks/results/configs.json` holds the numbers.

    python -m benchmarks.configs --examples 200      fewer; nothing is written
    python -m benchmarks.configs --jobs 4            processes at a time, each with a share and a seed of its own
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
    asked = parser.parse_args()
    if asked.seed is not None:
        print(json.dumps(count(asked.examples, asked.seed)))
        return 0
    told = together(asked.examples, asked.jobs)
    print(json.dumps(told, indent=1))
    print(f"{told['accepted']} ran, {told['refused']} were refused in a sentence, {told['failed']} did neither")
    if asked.examples == WHOLE:
        RESULT.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return int(told["failed"] > 0)


def together(examples: int, jobs: int) -> dict:
    """So many configurations from so many processes."""
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
    told = {"command": "python -m benchmarks.configs", "examples": sum(tally[name] for name in OUTCOMES)}
    told |= {name: tally[name] for name in (*OUTCOMES, *sorted(set(tally) - set(OUTCOMES)))}
    told |= {
        "options": parts[0]["known"],
        "options tried": len(tried),
        "failures": [odd for part in parts for odd in part["odd"]],
    }
    return told | {"jobs": jobs, "seconds": round(time.perf_counter() - begun)} | parts[0]["machine"]


def count(examples: int, number: int) -> dict:
    """Try configurations, the same ones for a seed every time; none stops the others."""
    sys.path.insert(0, str(ROOT / "tests"))
    import test_configs as configs
    from hypothesis import Phase, given, seed, settings

    from operant import machine

    tally: Counter[str] = Counter()
    options: set[str] = set()
    odd: list[str] = []

    @seed(number)
    @given(configs.cases())
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
    told = {"tally": tally, "tried": sorted(known & options), "known": len(known), "odd": odd}
    return told | {"machine": machine.about()}


if __name__ == "__main__":
    sys.exit(main())
