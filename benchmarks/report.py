"""Formats rows of measurements: lines for the console, benchmarks/results/bench.json, and the tables of bench.md."""

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]


def machine() -> str:
    """The machine of the measurement, in one line."""
    import torch

    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    threads = os.environ.get("BENCH_THREADS") or os.cpu_count()
    return f"{os.cpu_count()} cores ({threads} threads), {model}, torch {torch.__version__}"


def lines(rows: list[Row]) -> str:
    """Lines for the console: one per row, and one per difference between its sides."""
    out = []
    for row in rows:
        out.append(f"  {row['work']} {_sentence(row)}")
        out += [f"    {difference}" for difference in row["differences"]]
    return "\n".join(out)


def _sentence(row: Row) -> str:
    low, high = row["spread"]
    if "slope" in row:
        return f"16x the {row['work'].split()[1]}: {_slopes(row)}"
    ours, theirs = row["seconds"]["operant"], row["seconds"]["peer"]
    if row["peer"] == "limit":
        return (
            f"limit: update {ours:.3g} s, its products alone {theirs:.3g} s: {_percent(row['speed_ratio'])} "
            f"({_percent(low)}-{_percent(high)}), {_percent(row['of_square_rate'])} of the 1024^2 rate"
        )
    peaks = row["peak_mb"]
    return (
        f"{_who(row)}: {ours:.3g} s against {theirs:.3g} s: {row['speed_ratio']:.2f}x ({low:.2f}-{high:.2f}), "
        f"memory {peaks['operant']:.0f} against {peaks['peer']:.0f} MB: {row['memory_ratio']:.2f}x"
    )


def _who(row: Row) -> str:
    return f"{row['peer']} {row['variant']}".strip()


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _slopes(row: Row) -> str:
    return f"seconds ~ size^{row['slope']:.2f}, {row['slope_at_the_end']:.2f} from 8x to 16x"


def merge(rows: list[Row], folder: Path = RESULTS) -> None:
    """Replace the rows of the same works by `rows`, and write both files."""
    path = folder / "bench.json"
    existing = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    works, here = {row["work"] for row in rows}, {"machine": machine(), "date": time.strftime("%Y-%m-%d")}
    merged = [row for row in existing if row["work"] not in works] + [row | here for row in rows]
    merged.sort(key=lambda row: row["work"])  # stable: the rows of one work stay in order
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
    (folder / "bench.md").write_text(page(merged), encoding="utf-8")


def page(rows: list[Row]) -> str:
    """The tables of bench.md."""
    machines = sorted({row["machine"] for row in rows})
    parts = [
        "# Measured: `make bench`\n",
        "Made by `python -m benchmarks`; benchmarks/README.md says what is measured, and how. Seconds are medians of a "
        "step, ratios those of medians, brackets the lowest and highest ratio of a single round. Memory is the peak "
        "above what imports cost.\n",
        f"Machine: {'; '.join(machines)}.\n",
    ]
    against = [row for row in rows if row["peer"] not in ("limit", "operant")]
    limits = [row for row in rows if row["peer"] == "limit"]
    scales = [row for row in rows if "slope" in row]
    parts += _table("Against TRL", ("work", "peer", "ours, s", "theirs, s", "faster", "memory, MB", "memory"), against)
    parts += _works(against)
    head = ("work", "update, s", "products alone, s", "share of that", "share of the 1024^2 rate", "GFLOP")
    parts += _table("The update beside its own matrix products", head, limits)
    parts += _table("Growth", ("what", "1x 2x 4x 8x 16x: tokens/s", "peak MB", "slope"), scales)
    return "\n".join(parts)


def _table(title: str, head: tuple[str, ...], rows: list[Row]) -> list[str]:
    if not rows:
        return []
    body = [f"| {' | '.join(_cells(row))} |" for row in rows]
    return [f"## {title}\n", f"| {' | '.join(head)} |", "|---" * len(head) + "|", *body, ""]


def _cells(row: Row) -> list[str]:
    low, high = row["spread"]
    if "slope" in row:
        rates = " ".join(f"{rate:,.0f}" for rate in row["tokens_per_second"])
        return [row["about"], rates, " ".join(f"{mb:.0f}" for mb in row["peak_mb"]), _slopes(row)]
    ours, theirs = (f"{row['seconds'][side]:.3g}" for side in ("operant", "peer"))
    if row["peer"] == "limit":
        share = f"{_percent(row['speed_ratio'])} ({_percent(low)}-{_percent(high)})"
        return [row["work"], ours, theirs, share, _percent(row["of_square_rate"]), f"{row['update_gflop']:,.0f}"]
    peaks, faster = row["peak_mb"], f"**{row['speed_ratio']:.2f}x** ({low:.2f}-{high:.2f})"
    memory = [f"{peaks['operant']:,.0f} / {peaks['peer']:,.0f}", f"{row['memory_ratio']:.2f}x"]
    return [row["work"], _who(row), ours, theirs, faster, *memory]


def _works(rows: list[Row]) -> list[str]:
    """The description of each work and the differences between its sides."""
    out = []
    for work in dict.fromkeys(row["work"] for row in rows):
        mine = [row for row in rows if row["work"] == work]
        out.append(f"- **{work}**: {mine[0]['about']}.")
        out += [f"  - {_who(row)}: {'; '.join(row['differences'])}." for row in mine if row["differences"]]
    return [*out, ""]
