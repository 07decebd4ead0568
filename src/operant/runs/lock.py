"""A lock file that names its owner, and can be taken over if the owner has crashed.

    left = take(path / "lock")     # None, or the content of a dead process's lock; OperantError if its owner lives
    release(path / "lock")

`filelock` holds the kernel's own lock on the file, which ends with its process, in whatever way that ends. The content
names process, machine and time for a person who has to decide whether to wait or to delete the file. A process on
another machine counts as alive, because not every network folder passes the kernel's lock on; one of the same job of
torchrun (`--rdzv-id`) as gone. In a folder without such locks, an owner on this machine is alive if its pid exists.
"""

import errno
import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from operant.storage import atomic_io
from operant.types import OperantError

Owner = dict[str, Any]
"""What a lock says of the process that holds it."""
_held: dict[Path, FileLock] = {}
"""The kernel's locks that this process holds."""
_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
"""Errors of file systems that know no locks."""


def take(lock: Path) -> Owner | None:
    """Take `lock`; return the content that a dead process left in it, or None."""
    free, owner = _try(lock)
    if not free:
        who = f"process {owner['pid']} on {owner['host']}, since {owner.get('since')}" if owner else "another process"
        raise OperantError(f"{lock.parent} is in use by {who}; wait for it, or if it is gone, delete {lock}")
    return owner


def take_free(lock: Path) -> bool:
    """Take `lock` if it does not exist; return whether this process has it now."""
    return not lock.exists() and _try(lock)[0]


def held(lock: Path) -> bool:
    """Whether the process that `lock` names lives; the lock is not touched. One on another machine counts as alive."""
    owner = _owner(lock)
    if owner is None or _elsewhere(owner):
        return owner is not None
    try:  # a later process may have got the same pid
        since = time.mktime(time.strptime(owner["since"], "%Y-%m-%d %H:%M:%S"))
        return psutil.Process(owner["pid"]).create_time() <= since + 1
    except (psutil.Error, KeyError, TypeError, ValueError):
        return False


def release(lock: Path) -> None:
    """Release `lock`, unless another process has taken it over."""
    with suppress(OSError, OperantError):
        if (_owner(lock) or {}).get("pid") == os.getpid():
            atomic_io.remove(lock)
    if (kernel := _held.pop(lock.absolute(), None)) is not None:
        kernel.release()


def _try(lock: Path) -> tuple[bool, Owner | None]:
    kernel = FileLock(lock, blocking=False, thread_local=False, fallback_to_soft=False)
    with atomic_io.explained(lock):
        try:
            with atomic_io.operation("write", lock):
                kernel.acquire()
            owner = _owner(lock)
            free = not owner or not _elsewhere(owner)
        except Timeout:
            return False, _owner(lock)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            owner = _owner(lock)
            free = not owner or not (_elsewhere(owner) or psutil.pid_exists(owner["pid"] or -1))
        if free:
            me = {"pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            with atomic_io.operation("write", lock):
                lock.write_text(json.dumps(me | _place()), encoding="utf-8")
            _held[lock.absolute()] = kernel
        else:
            kernel.release()
    return free, owner


def _owner(lock: Path) -> Owner | None:
    """The content of the lock; None if it is empty or missing. Half a content is the remains of a crash."""
    try:
        text = lock.read_text(encoding="utf-8")
        return json.loads(text) if text else None
    except FileNotFoundError:
        return None
    except ValueError:
        return _place() | {"pid": None}
    except OSError as error:
        raise OperantError(f"cannot read {lock}: {error.strerror}; make it readable for your user") from error


def _elsewhere(owner: Mapping[str, object]) -> bool:
    """Whether the owner is on another machine, and of another job. A container on this one has another name but the
    same boot."""
    here = _place()
    if here["job"] is not None and owner.get("job") == here["job"]:
        return False
    owner = {**here, **owner} if owner["host"] == here["host"] else owner  # an older version's lock has fewer fields
    this_boot = here["boot"] is not None and owner.get("boot") == here["boot"]
    return not this_boot and (owner["host"], owner.get("machine")) != (here["host"], here["machine"])


@cache
def _place() -> dict[str, str | None]:
    """The machine by its name and id, and its boot; and the job, if torchrun has started this process with one."""
    boot, machine = _line("/proc/sys/kernel/random/boot_id"), _line("/etc/machine-id")
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # none: without --rdzv-id
    return {"host": socket.gethostname(), "machine": machine, "boot": boot, "job": None if job == "none" else job}


def _line(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return None
