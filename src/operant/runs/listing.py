"""The run folders below a folder, newest first, and how each of them stands.

run_folders("runs")            # [Path("runs/sentiment"), Path("runs/letters-sweep/seed-1"), ...]
state(Path("runs/sentiment"), done=72, steps=72)     # "finished"
"""

from pathlib import Path
from typing import Literal

from operant.runs import lock
from operant.runs.folder import FAILED, is_export

State = Literal["running", "finished", "failed", "interrupted"]


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


def state(folder: Path, done: int, steps: int) -> State:
    """How the run in `folder` stands, with `done` of `steps` steps.

    It failed if an error ended it, and was interrupted if a signal did, or if its process is gone without a trace.
    """
    if lock.held(folder / "lock"):
        return "running"
    if done >= steps and is_export(folder / "export"):
        return "finished"
    log = folder / "log.txt"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return "failed" if lines and FAILED in lines[-1] else "interrupted"
