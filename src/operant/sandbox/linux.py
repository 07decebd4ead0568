"""What the keeper asks of the system: namespaces, cgroups, who there is and whose child. The standard library alone."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

NEW_MOUNTS, NEW_USER, NEW_PIDS = 0x00020000, 0x10000000, 0x20000000
ALL_PRIVATE = 0x4000 | 0x40000
DEATH_SIGNAL, SUB_REAPER = 1, 36
LINUX = sys.platform == "linux"


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> bool:
    return _library().prctl(option, ctypes.c_ulong(value), 0, 0, 0) == 0


def new_namespace() -> bool:
    """Whether the next child may be the first of a namespace: as root, or in a user namespace of its own."""
    user, group = os.getuid(), os.getgid()
    if _library().unshare(NEW_PIDS) == 0:
        return True
    if _library().unshare(NEW_USER | NEW_PIDS) != 0:
        return False
    written("/proc/self/setgroups", "deny")
    written("/proc/self/uid_map", f"{user} {user} 1")
    written("/proc/self/gid_map", f"{group} {group} 1")
    return True


def own_proc() -> None:
    """A /proc that shows the namespace's numbers, where that is allowed."""
    library = _library()
    if library.unshare(NEW_MOUNTS) == 0 and library.mount(b"none", b"/", None, ALL_PRIVATE, None) == 0:
        library.mount(b"proc", b"/proc", b"proc", 0, None)


def new_cgroup(most: int) -> str | None:
    """A cgroup below ours that holds at most `most` processes and threads; None where none may be made."""
    with suppress(OSError):
        for place in _cgroups():
            path = f"{place}/operant-{os.getpid()}"
            with suppress(OSError):
                os.mkdir(path)
                if os.path.exists(f"{path}/pids.max") and written(f"{path}/pids.max", most):
                    return path
                os.rmdir(path)
    return None


def _cgroups() -> list[str]:
    """Where this process stands in the hierarchies that may count processes, and their roots."""
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        entries = [line.strip().split(":", 2) for line in file]
    with open("/proc/self/mounts", encoding="utf-8") as file:
        mounts = [line.split() for line in file]
    found = []
    for _, controllers, path in entries:
        for _, point, kind, options, *_ in mounts:
            ours = "pids" in options.split(",") and "pids" in controllers.split(",")
            if (kind == "cgroup" and ours) or (kind == "cgroup2" and not controllers):
                found += [point + path.rstrip("/"), point]
    return list(dict.fromkeys(found))


def written(path: str, value: object) -> bool:
    try:
        with open(path, "w", encoding="ascii") as file:
            file.write(str(value))
        return True
    except OSError:
        return False


class Process(NamedTuple):
    """One row of the table of processes."""

    parent: int
    state: str
    threads: int


def processes() -> dict[int, Process]:
    """All there are, by number."""
    if not LINUX:
        with subprocess.Popen(["ps", "-axo", "pid=,ppid=,stat="], stdout=subprocess.PIPE, text=True) as ps:
            rows = [line.split() for line in ps.communicate()[0].splitlines()]
        return {int(pid): Process(int(up), state[:1], 1) for pid, up, state in rows if int(pid) != ps.pid}
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
            state, parent, *rest = file.read().rpartition(")")[2].split()
            found[int(name)] = Process(int(parent), state, int(rest[15]))
    return found


def descendants(root: int) -> set[int]:
    """Of those that live."""
    known = processes()
    found, new = set(), {root}
    while new:
        new = {pid for pid, process in known.items() if process.parent in new} - found
        found |= new
    return {pid for pid in found if known[pid].state != "Z"}


def of_this_user() -> int:
    """How many processes and threads this user has, which is what its limit counts."""
    total = 0
    for pid, process in processes().items():
        with suppress(OSError):
            total += process.threads if os.stat(f"/proc/{pid}").st_uid == os.getuid() else 0
    return total


def kill(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def buried() -> tuple[int, int] | None:
    """One child that has died, if there is one: its number and its `code_of`."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, code_of(status)) if pid else None


def code_of(status: int) -> int:
    """As a shell has it: 128 and the signal's number, where one has killed."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def why_of(code: int) -> str:
    """In words."""
    with suppress(ValueError):
        if code > 128:
            return f"was killed by {signal.Signals(code - 128).name}"
    return f"ended with exit status {code}"
