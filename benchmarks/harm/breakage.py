"""What else happens to a run than being killed: power that goes, a disk that fills or refuses.

power(ground, ...)        killed at an operation, and all that no fsync had brought to the disk is torn
refused(ground, ...)      from an operation on the disk has no space left (through `files.seam`), until the run ended
full_disk(ground, ...)    a real disk of 20 MB, in a name space of its own; None where that is not allowed
damages(checkpoint, ...)  ways to damage a checkpoint, each of which must be recognised
"""

import ctypes
import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.harm.ground import Ground, Outcome, Seam, die, finish, watched
from benchmarks.harm.trials import SENTENCE, fork, playing, wait

NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000
"""Of the kernel's clone(2)."""
WRITES = ("write", "append", "mkdir", "link")
"""Operations that need space."""
DISK = 20_000_000
"""Bytes of the disk that fills."""


# --- power ------------------------------------------------------------------------------------------------------------


class Unsynced:
    """Knows which bytes of which files no fsync has brought to the disk yet, and tears them."""

    def __init__(self, seed: str):
        self.draw = random.Random(seed)
        self.safe: dict[Path, int] = {}
        """Files with writes since their last fsync, and how many bytes of each are on the disk."""

    def __call__(self, when: str, operation: str, path: Path) -> None:
        if operation in ("append", "write"):  # before and after: a folder that is written is full only then
            for file in _files(path) or [path]:
                whole = operation == "append" and when == "before" and file.exists()
                self.safe.setdefault(file, file.stat().st_size if whole else 0)
        elif operation == "fsync" and when == "after":
            self.safe.pop(path, None)
        elif operation == "rename" and when == "after":  # told by the new name: the old one is what is gone
            for old in [old for old in self.safe if old.is_relative_to(path.parent) and not old.exists()]:
                below = old.relative_to(path.parent).parts[1:]
                self.safe[path.joinpath(*below)] = self.safe.pop(old)

    def tear(self) -> None:
        """Leave of every such file what was safe, and by chance some of what was not."""
        for file, safe in self.safe.items():
            if file.is_file():
                size = file.stat().st_size
                os.truncate(file, self.draw.choice([min(safe, size), self.draw.randint(min(safe, size), size)]))


def _files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else []


def power(ground: Ground, start: Path | None, number: int, told: tuple[str, str, str]) -> Outcome:
    """The machine goes out at one operation: killed, and what was not synced is lost in part."""
    out = ground.place("power", start)
    unsynced = Unsynced(" ".join(told))

    class Both(Seam):
        def __call__(self, when: str, operation: str, path: Path) -> None:
            unsynced(when, operation, path)
            super().__call__(when, operation, path)

    def off(operation: str, path: Path) -> None:
        unsynced.tear()
        die(operation, path)

    outcome = Outcome("power that goes at an operation", " ".join(told), kills=1)
    wait(fork(partial(watched, ground.job, out, Both(off, number)), ground.log(out)))
    return finish(ground, out, outcome)


# --- disks ------------------------------------------------------------------------------------------------------------


def refused(ground: Ground, start: Path | None, number: int, told: tuple[str, str, str]) -> Outcome:
    """From one operation on nothing is written any more; then there is space again, and the run goes on."""
    out = ground.place("refused", start)

    class Full(Seam):
        def __call__(self, when: str, operation: str, path: Path) -> None:
            super().__call__(when, operation, path)
            if when == "before" and operation in WRITES and len(self.seen) > number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    outcome = Outcome("no space from an operation on (seam)", " ".join(told))
    status = wait(fork(partial(watched, ground.job, out, Full()), ground.log(out)))
    return went_on(ground, out, outcome, status)


def went_on(ground: Ground, out: Path, outcome: Outcome, status: int) -> Outcome:
    """The run ended with a sentence, or went on to its end with what could not be written said; now there is space."""
    said = ground.log(out).read_text(encoding="utf-8")
    if status not in (0, SENTENCE) or "Traceback" in said:
        outcome.wrong.append(f"it ended with {status}: {said.strip()[-300:]}")
    if "no space left" not in said.lower():
        outcome.wrong.append(f"nobody said that the disk was full: {said.strip()[-300:]}")
    finish(ground, out, outcome)
    lost = [text for text in outcome.wrong if text.endswith("is missing") and text.startswith(("rollouts", "probes"))]
    outcome.wrong = [
        text for text in outcome.wrong if text not in lost
    ]  # left out while the disk was full, as was said
    return outcome


def full_disk(ground: Ground, number: int, seed: int) -> Outcome | None:
    """A run on a disk of 20 MB that is filled after some step but for some bytes, and freed once the run has ended."""
    draw = random.Random(f"{seed}/disk/{number}")
    step, free = draw.randint(1, 3), draw.randrange(0, 300_000)
    disk, told = ground.own / "disk", ground.own / "disk.json"
    disk.mkdir(exist_ok=True)
    told.unlink(missing_ok=True)

    def inside() -> None:
        from operant.storage.checkpoint import newest_whole

        try:
            mount(disk)
        except OSError:
            return
        out, ballast = disk / "one/run", disk / "ballast"
        out.parent.mkdir()
        outcome = Outcome("a disk of 20 MB that fills (tmpfs)", f"{free} bytes left after step {step}")
        status = wait(fork(partial(_filling, ground, out, ballast, step, free), ground.log(out)))
        if newest_whole(out / "checkpoints", str) is None:
            outcome.wrong.append("no checkpoint is whole")
        ballast.unlink(missing_ok=True)
        went_on(ground, out, outcome, status)
        told.write_text(json.dumps([outcome.what, outcome.resumed, outcome.wrong]), encoding="utf-8")

    wait(fork(inside, ground.own / "printed.txt"))
    if not told.exists():
        return None
    what, resumed, wrong = json.loads(told.read_text(encoding="utf-8"))
    return Outcome("a disk of 20 MB that fills (tmpfs)", what, 0, resumed, wrong)


def _filling(ground: Ground, out: Path, ballast: Path, step: int, free: int) -> None:
    for run in playing(ground.job, out):
        if len(run.metrics) == step and not ballast.exists():
            room = shutil.disk_usage(ballast.parent).free
            with open(ballast, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, room - free))


def mount(folder: Path) -> None:
    """A disk of 20 MB at `folder`, for this process and its children alone. Raises: OSError where that is forbidden."""
    user, group, libc = os.getuid(), os.getgid(), ctypes.CDLL(None, use_errno=True)
    _call(libc.unshare, NEW_USER | NEW_MOUNTS)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path(f"/proc/self/{name}").write_text(text, encoding="ascii")
    _call(libc.mount, b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={DISK}".encode())


def _call(function: Callable[..., int], *arguments: object) -> None:
    if function(*arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
