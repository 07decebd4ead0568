"""The replies of a run as rows with outcomes, for an outcome critic: --tasks outcomes --tasks.run runs/code"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from operant.types import OperantError


def outcomes(*, run: str, first: int = 1, last: int | None = None) -> Iterator[dict[str, Any]]:
    """Rows {"prompt", "completion", "outcome"} of all replies that a run has stored, steps `first` to `last`, whose
    reward named the outcome of a program. Raises: OperantError for a folder without such replies."""
    from operant.data.sources import read

    files = sorted((Path(run).expanduser() / "rollouts").glob("step-*.parquet"))
    chosen = [file for file in files if first <= int(file.stem.partition("-")[2]) <= (last or 1 << 60)]
    if not chosen:
        raise OperantError(f"tasks.run={run!r}: {run}/rollouts has no replies of steps {first} to {last or 'the end'}")
    found = False
    for file in chosen:
        for _, row in read(file)[1]:
            if row.get("outcome"):
                found = True
                yield {"prompt": row["query"], "completion": row["reply"], "outcome": row["outcome"]}
    if not found:
        raise OperantError(f"tasks.run={run!r}: its replies have no outcomes; their reward names them, as `tests` does")
