"""The run folders below a folder, newest first, and how each of them stands.

run_folders("runs")            # [Path("runs/sentiment"), Path("runs/letters-sweep/seed-1"), ...]
standing("runs/sentiment")     # Standing(state="finished", done=72, steps=72)
"""

from pathlib import Path
from typing import Literal, NamedTuple

from operant.options import read_mapping
from operant.runs import lock
from operant.runs.folder import FAILED, is_export
from operant.storage import atomic_io

State = Literal["running", "finished", "failed", "interrupted"]


class Standing(NamedTuple):
    """How a run stands."""

    state: State
    done: int
    """Steps that are done."""
    steps: int
    """Steps that were asked for."""


def run_folders(*places: str | Path) -> list[Path]:
    """The run folders among `places` and up to two levels below them, as those of a sweep, newest first."""
    found = {
        path.parent
        for place in map(Path, places)
        for pattern in ("config.yaml", "*/config.yaml", "*/*/config.yaml")
        for path in place.glob(pattern)
    }
    return sorted(found, key=changed, reverse=True)


def changed(folder: Path) -> float:
    """When a run folder last got a step, in seconds since 1970; before the first step, when it was made."""
    metrics, config = folder / "metrics.jsonl", folder / "config.yaml"
    return (metrics if metrics.exists() else config).stat().st_mtime


def standing(folder: str | Path) -> Standing:
    """How the run in `folder` stands.

    It failed if an error ended it, and was interrupted if a signal did, or if its process is gone without a trace.
    Raises: OperantError for a configuration or a record that cannot be read.
    """
    folder = Path(folder)
    steps = int(read_mapping(folder / "config.yaml").get("steps") or 0)
    records = atomic_io.records(folder / "metrics.jsonl")
    done = int(records[-1]["step"]) if records else 0
    if lock.held(folder / "lock"):
        return Standing("running", done, steps)
    if done >= steps and is_export(folder / "export"):
        return Standing("finished", done, steps)
    log = folder / "log.txt"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return Standing("failed" if lines and FAILED in lines[-1] else "interrupted", done, steps)
