"""The levels of isolation, of untrusted programs and of supervised processes, and the limits of both."""

import ctypes
import os
import shutil
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import ClassVar, NamedTuple

from operant.sandbox import seccomp
from operant.types import OperantError, require, shown

SCRATCH = 16 << 20
"""Bytes of the scratch folder, where it is limited."""
NAMES = 4096
"""Files, folders and links in it: each takes memory that its bytes do not count."""
NOBODY = 65534
COMPARISONS = ("auto", "strict", "apps")
LEAST_MEMORY = 64 << 20
"""Bytes of address space that an interpreter with a few modules needs."""


@dataclass(frozen=True)
class Cell:
    """How the harness of an untrusted program is started."""

    argv: list[str]
    settings: dict[str, object] = field(default_factory=dict)
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
    prefixes = dict.fromkeys([sys.base_prefix, os.path.dirname(os.path.dirname(interpreter()))])
    home = os.path.realpath(os.path.expanduser("~"))
    for prefix in map(os.path.realpath, prefixes):
        held = prefix != "/usr" and os.path.commonpath([home, prefix]) == prefix
        require(not held, f"programs would read the home folder {home} in Python's {prefix}: use a Python in another")
    own = [f"{prefix}/{part}" for prefix in prefixes for part in ("bin", "lib", "lib64")]
    return [path for path in (*own, "/usr", "/lib", "/lib32", "/lib64") if os.path.exists(path)]


@cache
def packages(*folders: str) -> frozenset[str]:
    """The folders in these of packages that were installed beside the standard library."""
    kinds = [f"{place}py*/*-packages" for place in ("", "lib*/", "local/lib*/")]
    found = [path for folder in folders for kind in kinds for path in Path(folder).glob(kind)]
    return frozenset(str(path) for path in found if not path.parent.is_symlink())


@cache
def readable(path: str, hidden: frozenset[str]) -> list[tuple[str, int]]:
    """What Landlock is to let a program read in a folder, and list, for all but the hidden folders in it."""
    if not any(f"{one}/".startswith(f"{path}/") for one in hidden):
        return [(path, 4 | 8 if os.path.isdir(path) else 4)]
    inner = [] if path in hidden else [one.path for one in os.scandir(path) if not one.is_symlink()]
    return [(path, 8), *(rule for one in inner for rule in readable(one, hidden))]


def filtered() -> dict[str, object]:
    code = seccomp.program()
    return {"filter": code.hex() if code else "", "self": seccomp.SELF.to_bytes(4, sys.byteorder).hex()}


def namespaces(options: "JailOptions") -> Cell:
    found = shutil.which("bwrap")
    require(found, "bubblewrap is not installed: install the system's package bubblewrap")
    walls = "--unshare-all --unshare-user --disable-userns --die-with-parent --new-session --cap-drop ALL --clearenv"
    argv = [found, *walls.split(), "--uid", str(NOBODY), "--gid", str(NOBODY)]
    for folder in system_folders():
        link = os.path.islink(folder)
        argv += ["--symlink", os.readlink(folder), folder] if link else ["--ro-bind", folder, folder]
    for folder in packages(*(path for path in system_folders() if not os.path.islink(path))):
        argv += ["--tmpfs", folder, "--remount-ro", folder]
    argv += ["--dev-bind", "/dev/null", "/dev/null", "--size", str(SCRATCH), "--tmpfs", "/tmp"]
    argv += ["--remount-ro", "/", "--chdir", "/tmp", interpreter()]
    return Cell(argv, {**filtered(), "folder": "/tmp"})


def landlock(options: "JailOptions") -> Cell:
    abi = 0  # the version of Landlock in this kernel; 0 if it has none
    if sys.platform == "linux":
        abi = max(0, ctypes.CDLL(None, use_errno=True).syscall(444, None, ctypes.c_size_t(0), 1))
    if abi < 3 or not filtered()["filter"]:
        raise OperantError(f"Landlock of version 3 (Linux 6.2) is needed, this kernel has {abi or 'none'}")
    folders = dict.fromkeys(map(os.path.realpath, system_folders()))
    rules = [rule for folder in folders for rule in readable(folder, packages(*folders))]
    paths = [*dict.fromkeys(rules), ("/dev/null", 2 | 4)]
    rights = {"abi": abi, "paths": paths, "files": (1 << (16 if abi > 4 else 15)) - 1}
    rights |= {"net": 3 if abi > 3 else 0, "scoped": 3 if abi > 5 else 0}
    return Cell([interpreter()], {**filtered(), **_rights(), "landlock": rights}, parent=True)


def process(options: "JailOptions") -> Cell:
    return Cell([interpreter()], {**filtered(), **_rights()}, scratch=True, parent=True)


def _rights() -> dict[str, object]:
    """Of root: another user, if that one can read the interpreter, else no capabilities."""
    root = sys.platform == "linux" and os.getuid() == 0
    readable = not root or all(path.stat().st_mode & 1 for path in Path(interpreter()).parents)
    return {"uid": NOBODY if root and readable else None, "drop": root and not readable}


def container(options: "JailOptions") -> Cell:
    engines = [options.engine] if options.engine else ["docker", "podman"]
    found = next((path for engine in engines if (path := shutil.which(engine))), None)
    require(found, f"{' and '.join(engines)}: not found; install one, or name it with engine")
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
    cell: Callable[["JailOptions"], Cell] | None = None
    """Of untrusted programs: what the limits come to. Raises: OperantError where the machine cannot have the level."""


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
    """The limits of a supervised process, and the level of its isolation."""

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


@dataclass(frozen=True, kw_only=True)
class JailOptions(Limits):
    """Limits of a program, and the level of isolation. Raises: OperantError for a value out of range."""

    level: str = "auto"
    """auto: the strongest of namespaces, landlock and process that works; container has to be asked for."""
    seconds: float = 4.0
    """Processor time of a program over all its tests; of an APPS program, for each test."""
    memory: int = 512 << 20
    """Bytes of address space."""
    processes: int = field(default=64, init=False)
    """Processes and threads, in a container and, of root, where a cgroup may be made."""
    at_once: int | None = None
    """Programs at the same time; None: as many as there are cores."""
    compare: str = "auto"
    """How printed output is compared: strict (equal but for white space at the ends of lines and of the text), apps
    (as APPS' judge does: also equal numbers, or lines of the same words); auto: apps of APPS, else strict."""
    patience: float = 4.0
    """Seconds that a program may sleep. To wait for a processor is not to sleep; where the system does not tell the two
    apart, ten times as much wall clock may pass."""
    image: str = "python:3.12-slim"
    """Of the level container: an image with python3."""
    engine: str = ""
    """Of the level container: docker or podman, or a path; empty: the one that is installed."""
    runtime: str = ""
    """Of the level container: its runtime, such as runsc (gVisor); empty: the engine's own."""
    names: ClassVar[tuple[str, ...]] = UNTRUSTED

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compare not in COMPARISONS:
            raise OperantError(f"comparison {shown(self.compare)} is unknown: use {', '.join(COMPARISONS)}")
        for name, value in (("seconds", self.seconds), ("patience", self.patience)):
            require(0 < value < float("inf"), f"{name} is {value}: no program ends in that; use 4.0, for instance")
        little = f"memory is {self.memory:,} bytes, and an interpreter alone needs {LEAST_MEMORY:,}: use {512 << 20}"
        require(self.memory >= LEAST_MEMORY, little)
        if self.at_once is not None and self.at_once < 1:
            raise OperantError(f"at_once is {self.at_once}: use 1 or more, or None for as many as there are cores")

    def of(self, tests: int, judge: str) -> "JailOptions":
        """Those of a program with so many tests: its seconds over all of them, and how what it prints is compared."""
        compare = (judge or "strict") if self.compare == "auto" else self.compare
        return replace(self, compare=compare, seconds=self.seconds * max(1, tests if judge else 1))
