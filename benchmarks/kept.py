"""Rows that an earlier machine measured, for benchmarks of hours: `--keep` takes them from the committed results."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


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
