"""The process between a run and its guest: it starts the guest under its limits and ends it with all its descendants.

It runs in a bare interpreter (see `box.py`), imports the standard library and `linux.py` alone, and has no thread.
SETUP is JSON: {"argv": [...], "control": fd, "keep": [fd, ...], "level": "auto", "memory": bytes, "processes": n,
"opener": pid}; a limit of null is none. On the control socket it is told one letter at a time: `s` (kill what the guest
has left behind), `k` (kill everything, and end). The end of that socket, or of the process that opened it, means `k`.
It answers with one JSON object a line: {"started": pid, "level": ..., "counted": ..., "cgroup": ...}, {"swept": n},
{"ended": "why"}.
"""

import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress

from operant.sandbox import linux

NAMESPACE, REAPER, GROUP = "pid namespace", "sub-reaper", "process group"
PATIENCE = 10.0
"""Seconds that killing may take; only a process that the kernel holds takes long."""


class Keeper:
    """Starts the guest, keeps it, ends it."""

    def __init__(self, setup: dict, control: socket.socket):
        self.setup, self.control = setup, control
        self.first: int | None = None
        self.guest: int | None = None
        """Of the namespace and of the guest, as numbers of this process's namespace."""
        self.cgroup: str | None = None
        self.why: str | None = None
        """What became of the guest."""
        self.gate, self.open_gate = os.pipe()
        self.woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    def keep(self) -> None:
        """Until the guest has ended, or somebody wants it to."""
        try:
            self._start()
            while self.why is None:
                ready, _, _ = select.select([self.control, self.woken], [], [], 1.0)
                if self.woken in ready:
                    os.read(self.woken, 4096)
                if self.control in ready and not self._obey():
                    return
                if os.getppid() != self.setup["opener"]:
                    return
                self._bury()
            self._clear()
            self._say(ended=self.why)
        finally:
            self._clear()
            self._remove_cgroup()

    # --- start --------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        level = self._level()
        counted = self._count()
        self.first = os.fork() if level == NAMESPACE else None
        if self.first == 0:
            self._be_first()
        self.guest = self._its_pid() if self.first else self._fork_guest()
        if self.cgroup and not linux.written(f"{self.cgroup}/cgroup.procs", self.guest):
            self._remove_cgroup()
            counted = None
        self._let_go()
        self._say(started=self.guest, level=level, counted=counted, cgroup=self.cgroup)
        os.write(self.open_gate, b"!")

    def _level(self) -> str:
        """The strongest that is wanted and allowed."""
        wanted = self.setup["level"]
        if linux.LINUX and wanted in ("auto", NAMESPACE) and linux.new_namespace():
            return NAMESPACE
        if linux.LINUX and wanted in ("auto", NAMESPACE, REAPER) and linux.prctl(linux.SUB_REAPER, 1):
            return REAPER
        return GROUP

    def _count(self) -> str | None:
        """What bounds the number of processes: a cgroup, the user's limit (which knows no root), or nothing."""
        most = self.setup["processes"]
        if most is None or not linux.LINUX:
            return None
        self.cgroup = linux.new_cgroup(most)
        return "cgroup" if self.cgroup else "rlimit" if os.getuid() else None

    def _be_first(self) -> None:
        """Process 1 of the namespace: it buries the dead, and takes everybody along when the guest has ended."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        linux.prctl(linux.DEATH_SIGNAL, signal.SIGKILL)
        self.control.close()
        linux.own_proc()
        guest = self._fork_guest()
        self._let_go()
        while True:
            pid, status = os.wait()
            if pid == guest:
                os._exit(linux.code_of(status))

    def _fork_guest(self) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            if linux.LINUX:
                linux.prctl(linux.DEATH_SIGNAL, signal.SIGKILL)
                linux.written("/proc/self/oom_score_adj", 800)  # where memory runs out, the guest goes before the run
            self._limit()
            os.close(self.open_gate)
            if os.read(self.gate, 1):
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)
                for number in (signal.SIGINT, signal.SIGHUP):
                    signal.signal(number, signal.SIG_DFL)
                os.execvp(self.setup["argv"][0], self.setup["argv"])
        except BaseException as error:
            os.write(2, f"the guest could not be started: {error}".encode())
        os._exit(127)

    def _let_go(self) -> None:
        """What is the guest's alone is closed when the guest closes it."""
        for fd in self.setup["keep"]:
            os.close(fd)

    def _its_pid(self) -> int:
        """The guest's number as this process sees it: the first child of the namespace's first."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for pid, process in linux.processes().items():
                if process.parent == self.first:
                    return pid
            time.sleep(0.002)
        raise SystemExit("the namespace's first process has started nothing")

    def _limit(self) -> None:
        import resource

        limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_AS: self.setup["memory"]}
        if self.setup["processes"] is not None and self.cgroup is None and linux.LINUX:
            limits[resource.RLIMIT_NPROC] = linux.of_this_user() + self.setup["processes"]
        for limit, value in limits.items():
            if value is not None:
                with suppress(ValueError, OSError):
                    hard = resource.getrlimit(limit)[1]
                    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
                    resource.setrlimit(limit, (value, value))

    # --- while it runs ------------------------------------------------------------------------------------------------

    def _obey(self) -> bool:
        """Do what is said; whether to go on after it."""
        told = b""
        with suppress(OSError):  # a socket whose other end was killed
            told = self.control.recv(1)
        if told == b"s":
            self._say(swept=self._sweep())
        return told == b"s"

    def _say(self, **what: object) -> None:
        with suppress(OSError):
            self.control.sendall(json.dumps(what).encode() + b"\n")

    def _bury(self) -> None:
        """Take the dead away, and note why the guest has ended, if it has."""
        while (dead := linux.buried()) is not None:
            pid, code = dead
            if pid in (self.first, self.guest):
                self.why = linux.why_of(code)
                self.first = self.guest = None

    def _sweep(self) -> int:
        """Kill whoever has lost its parent: it is nobody's any more, and its children come to the same heir next."""
        heir, killed = self.first or os.getpid(), set()
        end = time.monotonic() + PATIENCE
        while linux.LINUX and time.monotonic() < end:
            self._bury()
            of_heir = [pid for pid, p in linux.processes().items() if p.parent == heir and p.state != "Z"]
            left = [pid for pid in of_heir if pid != self.guest]
            if not left or self.why:
                break
            linux.kill(left, signal.SIGKILL)
            killed.update(left)
            time.sleep(0.002)
        return len(killed)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        """Kill the guest and all its descendants, until none is left."""
        if self.first:
            linux.kill([self.first], signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self.first, 0)  # returns when the whole namespace has gone
            self.first = None
            return
        if self.cgroup:
            linux.written(f"{self.cgroup}/pids.max", 0)
        if not linux.LINUX and self.guest:
            with suppress(OSError):
                os.killpg(self.guest, signal.SIGKILL)
        stopped: set[int] = set()
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            self._bury()
            alive = linux.descendants(os.getpid())
            if not alive:
                return
            # Who is stopped forks no more: when nobody new is found, all can be killed at once.
            linux.kill(alive - stopped, signal.SIGSTOP)
            if alive <= stopped:
                linux.kill(alive, signal.SIGKILL)
                time.sleep(0.002)
            stopped |= alive

    def _remove_cgroup(self) -> None:
        end = time.monotonic() + 1.0
        while self.cgroup and time.monotonic() < end:
            try:
                os.rmdir(self.cgroup)
                self.cgroup = None
            except FileNotFoundError:
                self.cgroup = None
            except OSError:
                time.sleep(0.01)


def main(told: str) -> None:
    setup = json.loads(told)
    control = socket.socket(fileno=setup["control"])
    control.set_inheritable(False)
    Keeper(setup, control).keep()
