"""The effect of the KL coefficient on the recipe `letters`: `python -m benchmarks.letters_frontier`.

Takes twenty minutes on two cores. Sweeps six coefficients over three seeds into `runs/letters-sweep` (finished
runs are not repeated), and writes `benchmarks/results/letters-frontier.json`; docs/how-to-train.md shows it.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.kept import places
from benchmarks.sentiment_seeds import QUICK
from operant.tools.report.compare import comparison

ROOT = Path(__file__).parents[1]
RUNS, RESULT = places("letters-sweep", "letters-frontier")
COEFFICIENTS, SEEDS = "0,0.02,0.1,0.2,0.5,2", "1,2,3"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="only check that it runs: two tiny runs, no measurement")
    quick = parser.parse_args().quick
    axes = ["--kl.coef", "0,0.2" if quick else COEFFICIENTS, "--seed", "1" if quick else SEEDS]
    sweep = ["sweep", "letters", *axes, "--out", str(RUNS), *(QUICK if quick else [])]
    code = subprocess.run([sys.executable, "-m", "operant", *sweep], check=False).returncode
    if not code:
        write()
    return code


def write() -> None:
    """Write the results of the runs."""
    rows = []
    for group in comparison([RUNS])["groups"]:
        held_out = group["held_out"]
        final = {"before": held_out["reward"]["before"]}
        final |= {name: held_out[name]["after"] for name in ("reward", "kl", "empty")}
        findings = [{"name": f["name"], "level": f["level"], "runs": f["runs"]} for f in group["findings"]]
        value = float(group["values"]["kl.coef"])
        rows.append({"kl.coef": value, "runs": group["n"], "final": final, "findings": findings})
    result = {"command": "python -m benchmarks.letters_frontier", "groups": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
