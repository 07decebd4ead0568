"""The order in which a checkpoint reaches the disk, from the system calls of a process, traced by strace.

    disorder(traced(folder))              one sentence per violation; empty if the order is right

A file that is renamed before its bytes are on the disk may be empty after a power cut. A name may be lost unless an
fsync of its folder follows, and if the old checkpoint is deleted before that, everything is lost.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

CALLS = "write,pwrite64,fsync,fdatasync,rename,renameat,renameat2"
FILES = ("tensors.safetensors", "state.json", "manifest.json")
Call = tuple[str, str]
"""A system call and its path; for a rename, the old and the new path with ` -> ` between."""

SAVE = """
import sys
import torch
from operant.storage import atomic_io
from operant.storage.checkpoint import RunState
exec(sys.argv[2])
state = RunState()
state.register("model", torch.nn.Linear(8, 8))
state.save(sys.argv[1], 12)
"""
"""Runs the code of the second argument, then saves one checkpoint in the folder of the first."""


def available() -> bool:
    """Whether this machine has strace and permits tracing."""
    strace = shutil.which("strace")
    return (
        strace is not None and subprocess.run([strace, "-o", "/dev/null", "true"], capture_output=True).returncode == 0
    )


def traced(folder: Path, before: str = "") -> list[Call]:
    """The calls of a process that saves one checkpoint in `folder`, in order; `before`: Python code to run first."""
    log = folder / "trace"
    strace = ["strace", "-f", "-y", "-s", "1", "-e", f"trace={CALLS}", "-o", str(log)]
    subprocess.run([*strace, sys.executable, "-c", SAVE, str(folder / "checkpoints"), before], check=True)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return [call for line in lines if (call := _call(line)) and str(folder) in call[1]]


def _call(line: str) -> Call | None:
    """The call in a line such as `712 fsync(3</tmp/x>) = 0`; None if it failed or the line has no call."""
    found = re.match(r"\d+ +(\w+)\((.*)\) += (\d+)", line)
    if found is None:
        return None
    name, arguments = found[1], found[2]
    if name.startswith("rename"):
        return "rename", " -> ".join(re.findall(r'"([^"]*)"', arguments))
    name = {"pwrite64": "write", "fdatasync": "fsync"}.get(name, name)
    path = re.match(r"\d+<([^>]*)>", arguments)
    return (name, path[1]) if path else None


def disorder(calls: list[Call]) -> list[str]:
    """Violations of this order: write and fsync of each file; rename of their folder; fsync of the folder above."""
    renames = [i for i, (name, path) in enumerate(calls) if name == "rename" and path.endswith("step-00012")]
    if len(renames) != 1:
        return [f"the checkpoint was renamed {len(renames)} times"]
    (rename,) = renames
    temporary, final = (Path(path) for path in calls[rename][1].split(" -> "))
    problems = [text for name in FILES for text in _unsafe(calls[:rename], temporary / name)]
    if ("fsync", str(temporary)) not in calls[:rename]:
        problems.append("the names in the folder were not synced before its rename")
    if ("fsync", str(final.parent)) not in calls[rename:]:
        problems.append("the folder above was not synced after the rename")
    return problems


def _unsafe(calls: list[Call], path: Path) -> list[str]:
    """Violations of the order for one file, before the rename of its folder."""
    names = {str(path)} | {
        where.split(" -> ")[0] for name, where in calls if name == "rename" and where.endswith(f"> {path}")
    }
    about = [name for name, where in calls if where in names]
    if "write" not in about:
        return [f"{path.name} was not written before the rename"]
    last = len(about) - 1 - about[::-1].index("write")
    return [] if "fsync" in about[last:] else [f"{path.name} was not synced between its last write and the rename"]
