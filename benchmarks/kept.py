"""Where benchmarks keep their rows: `--keep` takes those of an earlier machine from the committed results."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def places(runs: str, results: str) -> tuple[Path, Path]:
    """The folder of a benchmark's rows, and the file of its results. With `--quick`, which measures nothing, both are
    elsewhere, so that the real command takes nothing of it for finished."""
    if "--quick" in sys.argv:
        return ROOT / f"runs/{runs}-quick", ROOT / f"runs/{results}-quick.json"
    return ROOT / f"runs/{runs}", ROOT / f"benchmarks/results/{results}.json"


def drawn(name: str) -> Path:
    """The file of a figure; with `--quick`, it is elsewhere."""
    path = ROOT / ("runs" if "--quick" in sys.argv else "docs/figures") / name
    path.parent.mkdir(exist_ok=True)
    return path


def needed(path: Path, command: str) -> None:
    """Raises: SystemExit that names the command which makes `path`, if that is missing."""
    if not path.exists():
        raise SystemExit(f"{path} is missing: run {command} first")


def restore(results: Path, place: Callable[[dict[str, Any]], Path]) -> None:
    """Write each row of a file of results to its place, where nothing is; the row then counts as measured."""
    for row in json.loads(results.read_text(encoding="utf-8"))["rows"] if results.is_file() else ():
        if not place(row).is_file():
            place(row).parent.mkdir(parents=True, exist_ok=True)
            place(row).write_text(json.dumps(row), encoding="utf-8")


def whole(run: Any) -> Any:
    """The run, which no signal has stopped. Raises: SystemExit otherwise, because it would be a row of fewer steps."""
    if run.interrupted:
        raise SystemExit("stopped: no row; run it again")
    return run
