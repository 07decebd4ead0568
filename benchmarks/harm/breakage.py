"""Harm to a run other than kills: a power cut, and a disk that fills or refuses to write.

power(ground, ...)        kill the run at a disk operation and tear everything that was not synced
refused(ground, ...)      the disk has no space left from one operation on (through `atomic_io.seam`) until the run ends
full_disk(ground, ...)    a real disk of 20 MB in a mount namespace; None if that is not allowed
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

from benchmarks.harm.ground import KILLED, DiskOperation, Ground, Outcome, Seam, die, finish, watched
from benchmarks.harm.trials import SENTENCE, fork, playing, wait

NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000
"""Flags of clone(2)."""
WRITES = ("write", "append", "mkdir", "link")
"""Operations that need space."""
DISK = 20_000_000
"""Bytes of the full disk."""


# --- power ------------------------------------------------------------------------------------------------------------


class Unsynced:
    """Tracks the bytes of each file that no fsync has written to the disk yet, and tears them."""

    def __init__(self, seed: str):
        self.draw = random.Random(seed)
        self.safe: dict[Path, int] = {}
        """Files with writes since their last fsync, and the number of their bytes that are on the disk."""

    def __call__(self, when: str, operation: str, path: Path) -> None:
        if operation in ("append", "write"):  # both times: the files of a written folder exist only afterwards
            for file in _files(path) or [path]:
                whole = operation == "append" and when == "before" and file.exists()
                self.safe.setdefault(file, file.stat().st_size if whole else 0)
        elif operation == "fsync" and when == "after":
            self.safe.pop(path, None)
        elif (
            operation == "rename" and when == "after"
        ):  # only the new name is passed: the old one is the one that is gone
            for old in [old for old in self.safe if old.is_relative_to(path.parent) and not old.exists()]:
                below = old.relative_to(path.parent).parts[1:]
                self.safe[path.joinpath(*below)] = self.safe.pop(old)

    def tear(self) -> None:
        """Truncate every such file to its synced bytes and a random part of the others."""
        for file, safe in self.safe.items():
            if file.is_file():
                size = file.stat().st_size
                os.truncate(file, self.draw.choice([min(safe, size), self.draw.randint(min(safe, size), size)]))


def _files(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else []


def power(ground: Ground, start: Path | None, number: int, operation: DiskOperation) -> Outcome:
    """Cut the power at one operation: kill the run, and lose a part of the bytes that were not synced."""
    out = ground.place("power", start)
    unsynced = Unsynced(" ".join(operation))

    class Both(Seam):
        def __call__(self, when: str, operation: str, path: Path) -> None:
            unsynced(when, operation, path)
            super().__call__(when, operation, path)

    def off(operation: str, path: Path) -> None:
        unsynced.tear()
        die(operation, path)

    outcome = Outcome("power that goes at an operation", " ".join(operation), kills=1)
    status = wait(fork(partial(watched, ground.job, out, Both(off, number)), ground.log(out)))
    if status != KILLED:
        outcome.wrong.append(f"the operation was not reached: the run ended with {status}")
    return finish(ground, out, outcome)


# --- disks ------------------------------------------------------------------------------------------------------------


def refused(ground: Ground, start: Path | None, number: int, operation: DiskOperation) -> Outcome:
    """Refuse every write from one operation on; then free the space and resume the run."""
    out = ground.place("refused", start)

    class Full(Seam):
        def __call__(self, when: str, operation: str, path: Path) -> None:
            super().__call__(when, operation, path)
            if when == "before" and operation in WRITES and len(self.seen) > number:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    outcome = Outcome("no space from an operation on (seam)", " ".join(operation))
    status = wait(fork(partial(watched, ground.job, out, Full()), ground.log(out)))
    return check_full_disk(ground, out, outcome, status)


def check_full_disk(ground: Ground, out: Path, outcome: Outcome, status: int) -> Outcome:
    """Check that the run reported the full disk and ended with a sentence or normally; resume it, now with space."""
    log = ground.log(out).read_text(encoding="utf-8")
    if status not in (0, SENTENCE) or "Traceback" in log:
        outcome.wrong.append(f"it ended with {status}: {log.strip()[-300:]}")
    if "no space left" not in log.lower():
        outcome.wrong.append(f"the full disk was not reported: {log.strip()[-300:]}")
    finish(ground, out, outcome)
    lost = [text for text in outcome.wrong if text.endswith("is missing") and text.startswith(("rollouts", "probes"))]
    outcome.wrong = [
        text for text in outcome.wrong if text not in lost
    ]  # not written while the disk was full, as the log reports
    return outcome


def full_disk(ground: Ground, number: int, seed: int) -> Outcome | None:
    """A run on a disk of 20 MB that is filled up to a few bytes after some step, and freed when the run has ended."""
    draw = random.Random(f"{seed}/disk/{number}")
    step, free = draw.randint(1, 3), draw.randrange(0, 300_000)
    disk, result = ground.own / "disk", ground.own / "disk.json"
    disk.mkdir(exist_ok=True)
    result.unlink(missing_ok=True)

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
        check_full_disk(ground, out, outcome, status)
        result.write_text(json.dumps([outcome.what, outcome.resumed, outcome.wrong]), encoding="utf-8")

    wait(fork(inside, ground.own / "printed.txt"))
    if not result.exists():
        return None
    what, resumed, wrong = json.loads(result.read_text(encoding="utf-8"))
    return Outcome("a disk of 20 MB that fills (tmpfs)", what, 0, resumed, wrong)


def _filling(ground: Ground, out: Path, ballast: Path, step: int, free: int) -> None:
    for run in playing(ground.job, out):
        if len(run.metrics) == step and not ballast.exists():
            available = shutil.disk_usage(ballast.parent).free
            with open(ballast, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(1, available - free))


def mount(folder: Path) -> None:
    """Mount a disk of 20 MB at `folder` for this process and its children. Raises: OSError if that is forbidden."""
    user, group, libc = os.getuid(), os.getgid(), ctypes.CDLL(None, use_errno=True)
    _call(libc.unshare, NEW_USER | NEW_MOUNTS)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path(f"/proc/self/{name}").write_text(text, encoding="ascii")
    _call(libc.mount, b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={DISK}".encode())


def _call(function: Callable[..., int], *arguments: object) -> None:
    if function(*arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
