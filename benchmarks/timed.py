"""A run that ends after so many minutes of processor time, which other work on the machine does not shorten."""

import os
import shutil
from pathlib import Path
from typing import Any

from benchmarks.kept import whole
from operant.api import runs


def spent() -> float:
    """Seconds of processor time of this process and of the processes that it has started and waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def train_for(minutes: float, out: Path, **options: Any) -> tuple[dict[str, Any], Any]:
    """Train in `out`; returns seconds, steps and a curve of [second, mean reward, KL of a reply], and the policy."""
    begin, seconds, curve = None, 0.0, list[list[float | None]]()
    shutil.rmtree(out, ignore_errors=True)  # of a row that was stopped
    for run in runs(out, **options):
        begin = begin or spent()  # models and tasks are loaded
        seconds = spent() - begin
        if run.metrics:
            curve.append([seconds, *(run.metrics[-1].get(name) for name in ("reward/mean", "kl/per_reply"))])
        if seconds > 60 * minutes:
            break  # the run ends and is saved, like one that was interrupted
    whole(run)
    few = curve[:: len(curve) // 50 + 1]
    return {"seconds": seconds, "steps": len(curve), "curve": few}, run.policy
