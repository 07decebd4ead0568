"""A program under a supervisor: limited, and ended with all its descendants, even those that try to hide.

process = SupervisedProcess(["python", "program.py"], Limits(memory=4 << 30), fds=[3])
process.level       # "pid namespace", "sub-reaper" or "process group"
process.ended       # None while it runs, then why it does not
process.end()       # the program and all its descendants are killed
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from operant.sandbox.levels import LEVELS, Limits
from operant.types import require

BOOT = "import sys; sys.path += sys.argv[2:]; from operant.sandbox.supervisor import main; main(sys.argv[1])"

PACKAGES = [str(Path(file).parents[depth]) for file, depth in ((__file__, 2), (psutil.__file__, 1))]
"""The folders of the packages that a supervisor imports, which has no `site`."""
FORCED = "OPERANT_ISOLATION"
"""The environment variable that asks for a weaker level than the machine allows."""


class SupervisedProcess:
    """A running program and its supervisor."""

    def __init__(
        self, argv: Sequence[str], limits: Limits, *, fds: Sequence[int] = (), output: int = subprocess.DEVNULL,
        environment: Mapping[str, str] = {},
    ):  # fmt: skip
        """Start the program. It inherits `fds` under the same numbers; its output goes to the descriptor `output`.
        environment: further variables, which may be secret: other users read arguments, but not these."""
        require(os.name == "posix", "isolated rewards need Linux or macOS: use the reward without isolation here")
        if limits.level == "auto":
            limits = replace(limits, level=os.environ.get(FORCED, "auto"))
        self.limits = limits
        self.level = ""
        """The level in force; empty until the program has started."""
        self.limited_by: str | None = None
        """How the number of its processes is limited: cgroup, rlimit, or not at all."""
        self.ended: str | None = None
        """Why the program has ended; None while it runs."""
        self.orphans_killed: int | None = None
        """Result of the last `kill_orphans`; None until it has arrived."""
        self._cgroup: str | None = None
        self._unread = b""
        self._run = os.getpid()
        self.control, theirs = socket.socketpair()
        self.control.setblocking(False)
        setup = {"argv": list(argv), "control": theirs.fileno(), "fds": list(fds), "run": self._run}
        setup |= {"level": limits.level, "memory": limits.memory, "processes": limits.processes}
        with theirs:
            # In a session of its own, so that Ctrl-C reaches the run alone.
            self.supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", BOOT, json.dumps(setup), *PACKAGES], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[theirs.fileno(), *fds],
                env={**os.environ, **environment},
            )  # fmt: skip

    def describe(self) -> str:
        """The level in force and the limits, for a log."""
        count = f"at most {self.limits.processes} processes" if self.limited_by else "no limit on its processes"
        memory = f", {self.limits.memory / (1 << 30):g} GB each" if self.limits.memory else ""
        return f"{self.level}: {LEVELS[self.level].about}; {count}{memory}; no security boundary"

    def receive(self) -> None:
        """Read the supervisor's messages; to be called when `control` can be read."""
        try:
            data = self.control.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.ended = self.ended or "has ended with its supervisor"
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "started" in message:
                self.level, self.limited_by, self._cgroup = message["level"], message["limited_by"], message["cgroup"]
            self.ended = message.get("ended", self.ended)
            self.orphans_killed = message.get("orphans_killed", self.orphans_killed)

    def kill_orphans(self) -> None:
        """Ask the supervisor to kill the program's orphans. `orphans_killed` is their number, some time later."""
        self.orphans_killed = None
        self._send(b"o")

    def request_end(self) -> None:
        """Ask the supervisor to kill the program and all its descendants, without waiting for it."""
        self._send(b"k")

    def end(self, patience: float = 1.0) -> None:
        """Kill the program and all its descendants. Takes milliseconds, at most `patience` seconds."""
        if os.getpid() == self._run:
            self.request_end()
            with suppress(subprocess.TimeoutExpired):  # then the supervisor goes on killing by itself
                self.supervisor.wait(patience)
            end = time.monotonic() + 0.5
            while self._cgroup and os.path.isdir(self._cgroup) and time.monotonic() < end:
                # Its processes are left if the supervisor itself was killed.
                with suppress(OSError), open(f"{self._cgroup}/cgroup.procs", encoding="ascii") as file:
                    for pid in file.read().split():
                        os.kill(int(pid), signal.SIGKILL)
                with suppress(OSError):
                    os.rmdir(self._cgroup)
                time.sleep(0.002)
        self.control.close()
        self.ended = self.ended or "was ended"

    def _send(self, command: bytes) -> None:
        if os.getpid() == self._run:  # a forked copy of the run must not end its workers
            with suppress(OSError):
                self.control.send(command)
