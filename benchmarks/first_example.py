"""The README's first example with three seeds: `python -m benchmarks.first_example`, a minute and a half on one core.

Runs the snippet as it stands, with `seed` added to its options, and writes the share of replies with an `I` in the
first and the last step to `benchmarks/results/first-example.json`, which `make docs` puts into the README.
"""

import argparse
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from operant.machine import about

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/first-example.json"


def row(seed: int) -> dict[str, Any]:
    """Run the snippet in the current folder, and return what its sentence in the README names."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    snippet = next(part for part in re.findall(r"```python\n(.*?)```", text, re.S) if "def personal" in part)
    names: dict[str, Any] = {}
    exec(snippet.replace('options = {"out"', f'options = {{"seed": {seed}, "quiet": True, "out"'), names)
    first, last = names["run"].metrics[0], names["run"].metrics[-1]
    half = max(1.96 * m["reward/std"] / m["rollout/count"] ** 0.5 for m in (first, last))
    return {
        "seed": seed,
        "steps": len(names["run"].metrics),
        "first": first["reward/mean"],
        "last": last["reward/mean"],
        "half": half,
        "kl": last["kl/per_reply"],
        "seconds": sum(m["time/step"] for m in names["run"].metrics),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2")
    options = parser.parse_args()
    rows = []
    for seed in map(int, options.seeds.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            rows.append(row(seed))
            os.chdir(ROOT)
        print(rows[-1])
    found = {"command": "python -m benchmarks.first_example", "machine": about(), "rows": rows}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
