"""A lock file that says who holds it, and survives whoever crashes.

    left = take(path / "lock")     # None, or what a dead process left there; OperantError where a live one holds it
    release(path / "lock")

The file names process, machine and time, because a person may have to decide whether to wait or to delete it. Who holds
it is dead where

- the machine has been started anew since (the boot has another number);
- on this boot, no process has that number, or one that was born at another time;
- on this boot, but where process numbers mean something else (another container), the kernel lets go of its own lock on
  the file, which ends with whoever holds it.

Another machine cannot be asked: then the file is believed. Of several that find a dead one's lock at once, one gets it:
they take turns at the folder.
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

_held: dict[Path, int] = {}
"""Descriptors of the locks of this process: the kernel's own lock is on them."""


def take(lock: Path) -> dict[str, Any] | None:
    """Hold `lock`; returns the mapping that a dead process left in it, if one did.

    Raises `OperantError` where a live process holds it, or one of another machine, which cannot be asked.
    """
    with _in_turn(lock.parent):
        left = _owner(lock)
        if left and _alive(left, lock):
            who = f"process {left['pid']} on {left['host']}, since {left.get('since')}"
            raise OperantError(f"{lock.parent} is in use by {who}; wait for it, or if it is gone, delete {lock}")
        with atomic_io.explained(lock):
            atomic_io.remove(lock)
        if not _make(lock):  # where there are no turns
            raise OperantError(f"{lock.parent} was taken by another process just now; wait for it")
    return left


def take_free(lock: Path) -> bool:
    """True when nobody held the lock and it is ours now."""
    with _in_turn(lock.parent):
        return _make(lock)


def release(lock: Path) -> None:
    """Let go. A lock that meanwhile is somebody else's is left alone."""
    with suppress(OSError, OperantError), _in_turn(lock.parent):
        if (_owner(lock) or {}).get("pid") == os.getpid():
            atomic_io.remove(lock)
    descriptor = _held.pop(lock.absolute(), None)
    if descriptor is not None:
        os.close(descriptor)


def _make(lock: Path) -> bool:
    me = {"pid": os.getpid(), "born": _born(os.getpid()), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with atomic_io.explained(lock):
        try:
            with atomic_io.operation("write", lock):
                descriptor = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        _kernel_lock(descriptor)
        _held[lock.absolute()] = descriptor
        os.write(descriptor, json.dumps(me | _place()).encode())
    return True


@contextmanager
def _in_turn(folder: Path) -> Iterator[None]:
    """One process at a time, where the file system knows such a thing. Nothing of it outlives a process."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows; or there is no folder, which is said by whoever writes there
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
    """Who holds the lock; None where it is free. A lock without content was torn by a crash: nobody's."""
    try:
        return json.loads(lock.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        return _place() | {"pid": None}
    except OSError as error:
        raise OperantError(f"cannot read {lock}: {error.strerror}; you may not go on with this run") from error


def _alive(owner: Mapping[str, Any], lock: Path) -> bool:
    here = _place()
    if owner["pid"] is None:
        return False
    if owner["host"] == here["host"]:
        owner = {**here, **owner}  # a lock of an older version says less
    if owner.get("boot") != here["boot"]:
        return (owner["host"], owner.get("machine")) != (here["host"], here["machine"])
    if owner.get("space") != here["space"]:
        return not _let_go(lock)
    if here["boot"] is None and owner["host"] != here["host"]:
        return True
    return os.name == "nt" or _runs(owner)  # on Windows os.kill(pid, 0) is no question


def _runs(owner: Mapping[str, Any]) -> bool:
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, and alive
    return owner.get("born") == _born(owner["pid"])  # the numbers of processes are used again


def _let_go(lock: Path) -> bool:
    """Whether the kernel's own lock on the file is free: its holder, wherever on this machine, is gone."""
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        return _kernel_lock(descriptor)
    finally:
        os.close(descriptor)


def _kernel_lock(descriptor: int) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@cache
def _place() -> dict[str, str | None]:
    """Where process numbers mean something: the machine, its boot, and the name space of the numbers."""
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
    """When a process started, in ticks of the kernel; None where the system does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[19]
