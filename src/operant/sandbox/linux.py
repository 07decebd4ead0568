"""System calls of the supervisor: namespaces, cgroups, processes. Imports only the standard library and psutil."""

import ctypes
import glob
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cache

import psutil

# Constants of <sched.h>, <sys/mount.h> and <sys/prctl.h>.
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LINUX = sys.platform == "linux"
PATIENCE = 2.0
"""Seconds that the processes of a cgroup may take to go."""


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> bool:
    return _library().prctl(option, ctypes.c_ulong(value), 0, 0, 0) == 0


def new_pid_namespace() -> bool:
    """Put the next child into a new PID namespace: as root, or with a new user namespace. Returns whether it worked."""
    user, group = os.getuid(), os.getgid()
    if _library().unshare(CLONE_NEWPID) == 0:
        return True
    if _library().unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0:
        return False
    write_value("/proc/self/setgroups", "deny")
    write_value("/proc/self/uid_map", f"{user} {user} 1")
    write_value("/proc/self/gid_map", f"{group} {group} 1")
    return True


def mount_own_proc() -> None:
    """Mount a /proc that shows the pids of this namespace, if that is allowed."""
    library = _library()
    mounts = MS_REC | MS_PRIVATE  # changes here are not seen outside
    if library.unshare(CLONE_NEWNS) == 0 and library.mount(b"none", b"/", None, mounts, None) == 0:
        library.mount(b"proc", b"/proc", b"proc", 0, None)


def new_cgroup(max_processes: int, name: str = "") -> str | None:
    """Path of a new cgroup with at most `max_processes` processes and threads; None if none may be created."""
    with suppress(OSError):
        for parent in _cgroups_with_pids():
            path = f"{parent}/{name or f'operant-{os.getpid()}'}"
            with suppress(OSError):
                os.mkdir(path)
                if os.path.exists(f"{path}/pids.max") and write_value(f"{path}/pids.max", max_processes):
                    return path
                os.rmdir(path)
    return None


def inside(cgroup: str, argv: list[str]) -> list[str]:
    """The command, which enters the cgroup first."""
    return ["/bin/sh", "-c", 'echo 0 > "$0/cgroup.procs"; exec "$@"', cgroup, *argv]


@cache
def cgroups_work() -> bool:
    """Whether a process may enter a cgroup made here. Empty ones that killed runs have left behind are removed."""
    if not LINUX:
        return False
    with suppress(OSError):
        for parent in _cgroups_with_pids():
            for path in glob.glob(f"{glob.escape(parent)}/operant-[0-9]*"):
                pid = path.rpartition("/")[2].split("-")[1]
                if pid.isdecimal() and not psutil.pid_exists(int(pid)):
                    remove_cgroups([path])
    if not (cgroup := new_cgroup(8, f"operant-{os.getpid()}-trial")):
        return False
    asked = inside(cgroup, ["/bin/sh", "-c", 'read pid < "$0/cgroup.procs"; test "$pid" = $$', cgroup])
    try:
        return subprocess.run(asked, capture_output=True, timeout=PATIENCE).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
    finally:
        remove_cgroups([cgroup], PATIENCE)


def remove_cgroups(cgroups: list[str], patience: float = 0.0) -> None:
    """Remove those whose processes are gone from the machine and from the list, and wait for the others."""
    end = time.monotonic() + patience
    while True:
        for path in list(cgroups):
            with suppress(OSError):
                os.rmdir(path)
            if not os.path.isdir(path):
                with suppress(ValueError):  # another thread was sooner
                    cgroups.remove(path)
        if not cgroups or time.monotonic() >= end:
            return
        time.sleep(0.01)


def _cgroups_with_pids() -> list[str]:
    """Cgroups of this process, and their roots, in the hierarchies that may limit the number of processes."""
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        entries = [line.strip().split(":", 2) for line in file]
    with open("/proc/self/mounts", encoding="utf-8") as file:
        mounts = [line.split() for line in file]
    found = []
    for _, controllers, path in entries:
        for _, point, kind, options, *_ in mounts:
            version_1 = kind == "cgroup" and "pids" in options.split(",") and "pids" in controllers.split(",")
            if version_1 or (kind == "cgroup2" and not controllers):
                found += [point + path.rstrip("/"), point]
    return list(dict.fromkeys(found))


def write_value(path: str, value: object) -> bool:
    """Write `value` to a file of the system; returns whether that was allowed."""
    with suppress(OSError), open(path, "w", encoding="ascii") as file:
        file.write(str(value))
        return True
    return False


def children(pid: int, *, recursive: bool = False) -> set[int]:
    """Pids of the living children of a process, or of all its living descendants."""
    found = set()
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive):
            with suppress(psutil.Error):
                if child.status() != psutil.STATUS_ZOMBIE:
                    found.add(child.pid)
    return found


def kill(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def reap() -> tuple[int, int] | None:
    """Wait for one child that has died, and return its pid and exit code; None if none has."""
    with suppress(ChildProcessError):
        pid, status = os.waitpid(-1, os.WNOHANG)
        return (pid, exit_code(status)) if pid else None
    return None


def exit_code(status: int) -> int:
    """The exit code as a shell reports it: 128 plus the signal's number if a signal killed the process."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
