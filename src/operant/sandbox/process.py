"""A program in a box: limited, and ended with everything that it has started, however that has hidden.

box = Box(["python", "program.py"], Limits(memory=4 << 30), fds=[3])
box.level       # "pid namespace", "sub-reaper" or "process group"
box.ended       # None while it runs, then why it does not
box.end()       # nothing of it is left
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from operant.types import OperantError

BOOT = "import sys; sys.path.append(sys.argv[1]); from operant.sandbox.supervisor import main; main(sys.argv[2])"


class Level(NamedTuple):
    """How far a program is isolated from the run that started it."""

    ends: str
    """How it is ended, for a log."""
    boundary: bool = False
    """Whether it is a security boundary: without one, the program reads and writes what the run may."""


LEVELS = {
    "pid namespace": Level("ended by the kernel, with every process that it has started"),
    "sub-reaper": Level("every process that it has started is looked for and killed"),
    "process group": Level("its process group is killed; what leaves the group may be left"),
}
"""The levels of isolation by name, from strong to weak."""
FORCED = "OPERANT_ISOLATION"
"""The environment variable that asks for a weaker level than the machine allows."""


@dataclass(frozen=True)
class Limits:
    """Of every process in a box."""

    memory: int | None = None
    """Bytes of address space, each process."""
    processes: int | None = 512
    """Processes and threads, all together; where nothing can count them, the level says so."""
    level: str = "auto"
    """A key of LEVELS: the strongest that is tried; auto: the strongest that works."""

    def __post_init__(self) -> None:
        if self.level not in ("auto", *LEVELS):
            raise OperantError(f"isolation level {self.level!r} is unknown: say auto, {', '.join(LEVELS)}")


class Box:
    """A program that runs from here on."""

    def __init__(
        self,
        argv: Sequence[str],
        limits: Limits,
        *,
        fds: Sequence[int] = (),
        output: int = subprocess.DEVNULL,
        env: dict[str, str] | None = None,
        folder: str | None = None,
    ):
        """`fds` stay open in the program under the same numbers; what it prints goes to the descriptor `output`."""
        if os.name != "posix":
            raise OperantError("isolated work needs Linux or macOS: leave the isolation out here")
        if limits.level == "auto":
            limits = replace(limits, level=os.environ.get(FORCED, "auto"))
        self.limits, self.level, self.counted = limits, "", None
        self.ended: str | None = None
        """Why it runs no more."""
        self.left: int | None = None
        """How many processes the last `sweep` has killed; None while it is under way."""
        self._cgroup: str | None = None
        self._told = bytearray()
        self._opener = os.getpid()
        self.control, theirs = socket.socketpair()
        self.control.setblocking(False)
        setup = {"argv": list(argv), "control": theirs.fileno(), "keep": list(fds), "opener": os.getpid()}
        setup |= {"level": limits.level, "memory": limits.memory, "processes": limits.processes}
        boot = [sys.executable, "-I", "-S", "-c", BOOT, str(Path(__file__).parents[2]), json.dumps(setup)]
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        with theirs:
            passed = [theirs.fileno(), *fds]
            self.keeper = subprocess.Popen(
                boot, pass_fds=passed, start_new_session=True, env=env, cwd=folder, **given
            )  # a session of its own: Ctrl-C is for the run

    def describe(self) -> str:
        """The level in force and the limits, for a log."""
        most = f"at most {self.limits.processes} processes" if self.counted else "nothing counts its processes"
        memory = f", {self.limits.memory / (1 << 30):g} GB each" if self.limits.memory else ""
        level = LEVELS[self.level]
        security = "a security boundary" if level.boundary else "no security boundary"
        return f"{self.level}: {level.ends}; {most}{memory}; {security}"

    def hear(self) -> None:
        """Take in what the keeper has said; call it when `control` can be read."""
        try:
            said = self.control.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            self.ended = self.ended or "has ended with its keeper"
        *lines, self._told = (self._told + said).split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, told: dict[str, Any]) -> None:
        if "started" in told:
            self.level, self.counted, self._cgroup = told["level"], told["counted"], told["cgroup"]
        self.ended = told.get("ended", self.ended)
        self.left = told.get("swept", self.left)

    def sweep(self) -> None:
        """Ask for the death of whoever has lost its parent in there; `left` tells how many, some time later."""
        self.left = None
        self._ask(b"s")

    def ask_end(self) -> None:
        """As `end`, without waiting."""
        self._ask(b"k")

    def end(self, patience: float = 1.0) -> None:
        """Kill the program and all its descendants. Takes milliseconds, and never more than `patience` seconds."""
        if os.getpid() == self._opener:
            self.ask_end()
            with suppress(subprocess.TimeoutExpired):  # then the keeper goes on killing by itself
                self.keeper.wait(patience)
            self._empty_cgroup()
        self.control.close()
        self.ended = self.ended or "was ended"

    def _ask(self, letter: bytes) -> None:
        if os.getpid() == self._opener:  # a forked copy of the run owns nothing
            with suppress(OSError):
                self.control.send(letter)

    def _empty_cgroup(self) -> None:
        """Where somebody has killed the keeper, its cgroup still knows who is left."""
        end = time.monotonic() + 0.5
        while self._cgroup and os.path.isdir(self._cgroup) and time.monotonic() < end:
            with suppress(OSError), open(f"{self._cgroup}/cgroup.procs", encoding="ascii") as file:
                for pid in file.read().split():
                    os.kill(int(pid), signal.SIGKILL)
            with suppress(OSError):
                os.rmdir(self._cgroup)
            time.sleep(0.002)
