"""A lock file that says who holds it.

    left = take(path / "lock")     # None, or what a dead process left there; OperantError where a live one holds it
    release(path / "lock")

The file names process, machine and time, because a person has to decide whether to wait or to delete it.
"""

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from operant import files
from operant.types import OperantError


def take(lock: Path) -> dict[str, Any] | None:
    """Hold `lock`; returns the mapping that a dead process left in it, if one did.

    Raises `OperantError` where a live process holds it, or one of another machine, which cannot be asked.
    """
    left = None
    while not take_free(lock):
        left = _owner(lock)
        if left and _alive(left):
            who = f"process {left['pid']} on {left['host']}, since {left.get('since')}"
            raise OperantError(f"{lock.parent} is in use by {who}; wait for it, or if it is gone, delete {lock}")
        lock.unlink(missing_ok=True)
    return left


def take_free(lock: Path) -> bool:
    """True when nobody held the lock and it is ours now."""
    me = {"pid": os.getpid(), "host": socket.gethostname(), "born": _born(os.getpid())}
    with files.explained(lock):
        try:
            descriptor = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(json.dumps(me | {"since": time.strftime("%Y-%m-%d %H:%M:%S")}))
    return True


def release(lock: Path) -> None:
    """Let go."""
    lock.unlink(missing_ok=True)


def _owner(lock: Path) -> dict[str, Any] | None:
    """Who holds the lock; None where it vanished. A lock without content was torn by a crash: nobody's."""
    for wait in (0.2, 0.0):  # another process may be between making the file and filling it
        try:
            return json.loads(lock.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError:
            time.sleep(wait)
    return {"pid": None, "host": socket.gethostname()}


def _alive(owner: Mapping[str, Any]) -> bool:
    if owner["host"] != socket.gethostname() or os.name == "nt":  # on Windows os.kill(pid, 0) is no question
        return True
    if owner["pid"] is None:
        return False
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, and alive
    return owner.get("born") == _born(owner["pid"])  # the numbers of processes are used again


def _born(pid: int) -> str | None:
    """When a process started, in ticks of the kernel; None where the system does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]
