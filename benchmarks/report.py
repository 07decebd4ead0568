"""Rows of measurements: benchmarks/results/bench.json, and the tables in bench.md."""

import json
import os
import platform
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> str:
    """What it was measured on, in a line."""
    import torch

    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores, {model}, torch {torch.__version__}"


def lines(rows: list[dict[str, Any]]) -> str:
    """A line a row, for the console."""
    said = []
    for row in rows:
        low, high = row["spread"]
        ours, theirs = row["seconds"]["operant"], row["seconds"]["peer"]
        if row["peer"] == "limit":
            share, square = 100 * row["speed_ratio"], 100 * row["of_square_rate"]
            said.append(
                f"  limit: update {ours:.3g} s, its products alone {theirs:.3g} s: {share:.0f} % "
                f"({100 * low:.0f}-{100 * high:.0f}), {square:.0f} % of the 1024^2 rate"
            )
            continue
        name = f"{row['peer']} {row['variant']}".strip()
        peaks = row["peak_mb"]
        said.append(
            f"  {name}: {ours:.3g} s against {theirs:.3g} s: {row['speed_ratio']:.2f}x ({low:.2f}-{high:.2f}), "
            f"memory {peaks['operant']:.0f} against {peaks['peer']:.0f} MB: {row['memory_ratio']:.2f}x"
        )
        said += [f"    {difference}" for difference in row["differences"]]
    return "\n".join(said)


def merge(rows: list[dict[str, Any]]) -> None:
    """Put rows in the place of those of the same work, and write both files."""
    path = RESULTS / "bench.json"
    held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    works = {row["work"] for row in rows}
    here = machine()
    kept = [row for row in held if row["work"] not in works] + [row | {"machine": here} for row in rows]
    kept.sort(key=lambda row: row["work"])
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    pass
