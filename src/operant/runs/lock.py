"""A lock file that names its owner, and can be taken over if the owner has crashed.

    left = take(path / "lock")     # None, or the content of a dead process's lock; OperantError if its owner lives
    release(path / "lock")

The file names process, machine and time, because a person may have to decide whether to wait or to delete it. The owner
is dead if

- the machine has been restarted since (it has another boot id);
- on this boot, no process has that id, or it belongs to a process with another start time;
- on this boot but in another namespace of process ids (another container), the kernel's own lock on the file is free:
  the kernel releases it when the owner ends.

A process on another machine cannot be checked; it counts as alive. If several processes find a dead process's lock at
the same time, one of them gets it: a lock on the folder lets them act one after the other.
"""

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from operant.storage import atomic_io
from operant.types import OperantError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_descriptors: dict[Path, int] = {}
"""Open files of this process's locks, on which it has the kernel's own lock."""


def take(lock: Path) -> dict[str, Any] | None:
    """Take `lock`; return the content that a dead process left in it, or None.

    Raises: OperantError if its owner lives, or is on another machine, where that cannot be checked.
    """
    with _in_turn(lock.parent):
        left = _owner(lock)
        if left and _alive(left, lock):
            who = f"process {left['pid']} on {left['host']}, since {left.get('since')}"
            raise OperantError(f"{lock.parent} is in use by {who}; wait for it, or if it is gone, delete {lock}")
        with atomic_io.explained(lock):
            atomic_io.remove(lock)
        if not _make(lock):  # possible only where the folder cannot be locked
            raise OperantError(f"{lock.parent} was taken by another process just now; wait for it")
    return left


def take_free(lock: Path) -> bool:
    """Take `lock` if it does not exist; return whether this process has it now."""
    with _in_turn(lock.parent):
        return _make(lock)


def release(lock: Path) -> None:
    """Release `lock`, unless another process has taken it over."""
    with suppress(OSError, OperantError), _in_turn(lock.parent):
        if (_owner(lock) or {}).get("pid") == os.getpid():
            atomic_io.remove(lock)
    descriptor = _descriptors.pop(lock.absolute(), None)
    if descriptor is not None:
        os.close(descriptor)


def _make(lock: Path) -> bool:
    """Create the lock file; return False if it exists."""
    me = {"pid": os.getpid(), "born": _born(os.getpid()), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with atomic_io.explained(lock):
        try:
            with atomic_io.operation("write", lock):
                descriptor = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        _kernel_lock(descriptor)
        _descriptors[lock.absolute()] = descriptor
        os.write(descriptor, json.dumps(me | _place()).encode())
    return True


@contextmanager
def _in_turn(folder: Path) -> Iterator[None]:
    """Let one process at a time act in the folder, where the file system supports locks."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # on Windows; or the folder is missing, which the next write reports
        yield
        return
    try:
        if fcntl is not None:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _owner(lock: Path) -> dict[str, Any] | None:
    """The content of the lock; None if there is none. An empty lock is the remains of a crash and has no owner."""
    try:
        return json.loads(lock.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        return _place() | {"pid": None}
    except OSError as error:
        raise OperantError(f"cannot read {lock}: {error.strerror}; make it readable for your user") from error


def _alive(owner: Mapping[str, Any], lock: Path) -> bool:
    """Whether the owner of the lock lives, as far as this process can find out."""
    here = _place()
    if owner["pid"] is None:
        return False
    if owner["host"] == here["host"]:
        owner = {**here, **owner}  # the lock of an older version has fewer fields
    if owner.get("boot") != here["boot"]:
        return (owner["host"], owner.get("machine")) != (here["host"], here["machine"])
    if owner.get("space") != here["space"]:
        return not _kernel_lock_is_free(lock)
    if here["boot"] is None and owner["host"] != here["host"]:
        return True
    return os.name == "nt" or _runs(owner)  # on Windows os.kill(pid, 0) would end the process


def _runs(owner: Mapping[str, Any]) -> bool:
    """Whether the owner's process is running on this machine."""
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it belongs to another user, and is running
    return owner.get("born") == _born(owner["pid"])  # process ids are reused


def _kernel_lock_is_free(lock: Path) -> bool:
    """Whether the kernel's own lock on the file is free, so that its owner, in any container here, has ended."""
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        return _kernel_lock(descriptor)
    finally:
        os.close(descriptor)


def _kernel_lock(descriptor: int) -> bool:
    """Lock an open file; return whether that succeeded."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@cache
def _place() -> dict[str, str | None]:
    """The scope of process ids: the machine, its boot, and the namespace of process ids."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = None
    boot, machine = _line("/proc/sys/kernel/random/boot_id"), _line("/etc/machine-id")
    return {"host": socket.gethostname(), "machine": machine, "boot": boot, "space": space}


def _line(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return None


def _born(pid: int) -> str | None:
    """The start time of a process, in clock ticks since boot; None if the system does not provide it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]
