"""The levels of isolation, of untrusted programs and of supervised processes, and the limits of both."""

import ctypes
import os
import shutil
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from operant.sandbox import seccomp
from operant.types import OperantError, shown

SCRATCH = 16 << 20
"""Bytes of the scratch folder, where it is limited."""
NAMES = 4096
"""Files, folders and links in it: each takes memory that its bytes do not count."""
NOBODY = 65534


@dataclass(frozen=True)
class Cell:
    """How the harness of an untrusted program is started."""

    argv: list[str]
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings of the harness: `uid`, `drop` (capabilities), `landlock`, `filter`, `folder` (watched for names)."""
    scratch: bool = False
    """Whether it needs a folder of its own, which is its working directory."""
    parent: bool = False
    """Whether the harness is a child of the run itself, and is to die with it."""
    same: bool = True
    """Whether the interpreter inside is this one, and reads its compiled code."""
    name: str = ""
    """Of the container, which does not end with the process that asked for it."""


def interpreter() -> str:
    """The interpreter itself, without an environment's links and packages."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def system_folders() -> list[str]:
    """What an interpreter reads: its own files, and the libraries of the system."""
    folders = dict.fromkeys([sys.base_prefix, os.path.dirname(os.path.dirname(interpreter())), "/usr"])
    return [*folders, *(path for path in ("/lib", "/lib32", "/lib64") if os.path.exists(path))]


def filtered() -> dict[str, Any]:
    code = seccomp.program()
    return {"filter": code.hex() if code else "", "self": seccomp.SELF.to_bytes(4, sys.byteorder).hex()}


def namespaces(options: Any) -> Cell:
    found = shutil.which("bwrap")
    if not found:
        raise OperantError("bubblewrap is not installed: install the system's package bubblewrap")
    walls = "--unshare-all --unshare-user --disable-userns --die-with-parent --new-session --cap-drop ALL --clearenv"
    argv = [found, *walls.split(), "--uid", str(NOBODY), "--gid", str(NOBODY)]
    for folder in system_folders():
        link = os.path.islink(folder)
        argv += ["--symlink", os.readlink(folder), folder] if link else ["--ro-bind", folder, folder]
    argv += ["--dev-bind", "/dev/null", "/dev/null", "--size", str(SCRATCH), "--tmpfs", "/tmp"]
    argv += ["--remount-ro", "/", "--chdir", "/tmp", interpreter()]
    return Cell(argv, {**filtered(), "folder": "/tmp"})


def landlock(options: Any) -> Cell:
    abi = 0  # the version of Landlock in this kernel; 0 if it has none
    if sys.platform == "linux":
        abi = max(0, ctypes.CDLL(None, use_errno=True).syscall(444, None, ctypes.c_size_t(0), 1))
    if abi < 3 or not filtered()["filter"]:
        raise OperantError(f"Landlock of version 3 (Linux 6.2) is needed, this kernel has {abi or 'none'}")
    read, write = 4 | 8, 2 | 4  # files and folders; a file
    paths = [[folder, read] for folder in system_folders()] + [["/dev/null", write]]
    rights = {"abi": abi, "paths": paths, "files": (1 << (16 if abi > 4 else 15)) - 1}
    rights |= {"net": 3 if abi > 3 else 0, "scoped": 3 if abi > 5 else 0}
    return Cell([interpreter()], {**filtered(), **_rights(), "landlock": rights}, parent=True)


def process(options: Any) -> Cell:
    return Cell([interpreter()], {**filtered(), **_rights()}, scratch=True, parent=True)


def _rights() -> dict[str, Any]:
    """Of root: another user, if that one can read the interpreter, else no capabilities."""
    root = sys.platform == "linux" and os.getuid() == 0
    readable = not root or all(path.stat().st_mode & 1 for path in Path(interpreter()).parents)
    return {"uid": NOBODY if root and readable else None, "drop": root and not readable}


def container(options: Any) -> Cell:
    engines = [options.engine] if options.engine else ["docker", "podman"]
    found = next((path for engine in engines if (path := shutil.which(engine))), None)
    if not found:
        raise OperantError(f"{' and '.join(engines)}: not found; install one, or name it with engine")
    name = f"operant-{uuid.uuid4().hex}"
    walls = f"run --rm --interactive --network none --read-only --cap-drop ALL --user {NOBODY}:{NOBODY} --init"
    walls += f" --security-opt no-new-privileges --pids-limit {options.processes} --memory {options.memory + (1 << 30)}"
    walls += f" --name {name} --tmpfs /tmp:size={SCRATCH} --workdir /tmp"
    runtime = ["--runtime", options.runtime] if options.runtime else []
    return Cell([found, *walls.split(), *runtime, options.image, "python3"], filtered(), same=False, name=name)


class Level(NamedTuple):
    """How far a program is isolated from the run that started it."""

    about: str
    boundary: bool = False
    """Whether it is a security boundary: without one, the program reads and writes what the run may."""
    cell: Callable[[Any], Cell] | None = None
    """Of untrusted programs: what the limits come to. Raises: OperantError where the machine cannot have the level."""

    @property
    def security(self) -> str:
        """For a log."""
        return "a security boundary" if self.boundary else "no security boundary"


LEVELS = {
    "container": Level("a container", True, container),
    "namespaces": Level("namespaces of its own by bubblewrap, a filter of system calls, limits", True, namespaces),
    "landlock": Level("Landlock, a filter of system calls, limits; it sees names of files", True, landlock),
    "process": Level("limits, and a filter of system calls where Linux has it; it reads files", False, process),
    "pid namespace": Level("ended by the kernel, with every process that it has started"),
    "sub-reaper": Level("all its descendants are found and killed"),
    "process group": Level("its process group is killed; processes that have left the group may survive"),
}
"""The levels by name, from strong to weak: those of untrusted programs, then those of supervised processes."""
UNTRUSTED = tuple(name for name, level in LEVELS.items() if level.cell)
"""`auto` tries all but the first, which has to be asked for."""
SUPERVISED = tuple(name for name in LEVELS if name not in UNTRUSTED)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a supervised process, and the level of its isolation. Raises: OperantError for an unknown level."""

    level: str = "auto"
    """The strongest level to try; auto: the strongest that works."""
    memory: int | None = None
    """Bytes of address space of each of its processes."""
    processes: int | None = 512
    """Processes and threads, all together. If the system cannot limit them, `describe` says so."""
    names: ClassVar[tuple[str, ...]] = SUPERVISED
    """The levels that may be asked for."""

    def __post_init__(self) -> None:
        if self.level not in ("auto", *self.names):
            raise OperantError(f"isolation level {shown(self.level)} is unknown: use auto, {', '.join(self.names)}")
