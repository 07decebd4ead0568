"""The process between a run and a program: it starts the program under its limits and ends it with all descendants.

It runs in a bare interpreter (see `process.py`), imports only the standard library, psutil and `linux.py`, and has no
threads.

Its setup is JSON: {"argv": [...], "control": fd, "fds": [fd, ...], "level": "auto", "memory": bytes, "processes": n,
"run": pid}; a limit of null means no limit. It receives one-letter commands over the control socket: `o` (kill the
orphans of the program), `k` (kill everything and exit). It also exits if that socket closes or the run dies.
It sends one JSON object per line: {"started": pid, "level": ..., "limited_by": ..., "cgroup": ...},
{"orphans_killed": n}, {"ended": "reason"}.
"""

import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress

import psutil

from operant.sandbox import linux

NAMESPACE, REAPER, GROUP = "pid namespace", "sub-reaper", "process group"
PATIENCE = 10.0
"""Seconds that killing may take. Only a process that waits inside the kernel takes long."""


class Supervisor:
    """Starts a program, watches it, and ends it."""

    def __init__(self, setup: dict, control: socket.socket):
        self.setup, self.control = setup, control
        self.init: int | None = None
        """Pid of the first process of the namespace, if there is one, as seen from here."""
        self.program: int | None = None
        """Pid of the program, as seen from here."""
        self.cgroup: str | None = None
        self.ended: str | None = None
        self.gate, self.open_gate = os.pipe()  # the program starts when it can read a byte from the gate
        self.woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    def supervise(self) -> None:
        """Run the program until it ends, or until the run asks for its end or dies."""
        try:
            self._start()
            while self.ended is None:
                ready, _, _ = select.select([self.control, self.woken], [], [], 1.0)
                if self.woken in ready:
                    os.read(self.woken, 4096)
                if self.control in ready:
                    command = b""
                    with suppress(OSError):  # the other end of the socket was killed
                        command = self.control.recv(1)
                    if command != b"o":
                        return
                    self._send(orphans_killed=self._kill_orphans())
                if os.getppid() != self.setup["run"]:
                    return
                self._reap()
            self._kill_all()
            self._send(ended=self.ended)
        finally:
            self._kill_all()
            self._remove_cgroup()

    def _start(self) -> None:
        wanted, level = self.setup["level"], GROUP  # the strongest that is wanted and allowed
        if linux.LINUX and wanted in ("auto", NAMESPACE) and linux.new_pid_namespace():
            level = NAMESPACE
        elif linux.LINUX and wanted != GROUP and linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1):
            level = REAPER
        limited_by = None
        if self.setup["processes"] is not None and linux.LINUX:
            self.cgroup = linux.new_cgroup(self.setup["processes"])
            limited_by = "cgroup" if self.cgroup else "rlimit" if os.getuid() else None  # no rlimit binds root
        if level == NAMESPACE:
            self.init = os.fork()
            if self.init == 0:
                self._run_init()
            end, first = time.monotonic() + PATIENCE, set[int]()
            while not (first := linux.children(self.init)) and time.monotonic() < end:
                time.sleep(0.002)
            if not first:
                raise SystemExit("the first process of the namespace has started no program")
            self.program = first.pop()
        else:
            self.program = self._fork_program()
        if self.cgroup and not linux.write_value(f"{self.cgroup}/cgroup.procs", self.program):
            self._remove_cgroup()
            limited_by = None
        self._close_fds_of_program()
        self._send(started=self.program, level=level, limited_by=limited_by, cgroup=self.cgroup)
        os.write(self.open_gate, b"!")

    def _run_init(self) -> None:
        """Be process 1 of the namespace: reap its dead, and exit with the program, which ends all other processes."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        self.control.close()
        linux.mount_own_proc()
        program = self._fork_program()
        self._close_fds_of_program()
        while True:
            pid, status = os.wait()
            if pid == program:
                os._exit(linux.exit_code(status))

    def _fork_program(self) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            if linux.LINUX:
                linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
                # If memory runs out, the kernel kills the program before the run.
                linux.write_value("/proc/self/oom_score_adj", 800)
            self._set_limits()
            os.close(self.open_gate)
            if os.read(self.gate, 1):
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)
                for number in (signal.SIGINT, signal.SIGHUP):
                    signal.signal(number, signal.SIG_DFL)
                os.execvp(self.setup["argv"][0], self.setup["argv"])
        except BaseException as error:
            os.write(2, f"the program could not be started: {error}".encode())
        os._exit(127)

    def _close_fds_of_program(self) -> None:
        """Close our copies of the program's pipes, so that they close when the program closes them."""
        for fd in self.setup["fds"]:
            os.close(fd)

    def _set_limits(self) -> None:
        import resource

        limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_AS: self.setup["memory"]}
        if self.setup["processes"] is not None and self.cgroup is None and linux.LINUX:
            every = [process.info for process in psutil.process_iter(["uids", "num_threads"])]
            own = [info for info in every if info["uids"] and info["uids"].real == os.getuid()]
            # The limit counts all processes and threads of this user.
            limits[resource.RLIMIT_NPROC] = sum(info["num_threads"] or 0 for info in own) + self.setup["processes"]
        for limit, value in limits.items():
            if value is not None:
                with suppress(ValueError, OSError):
                    hard = resource.getrlimit(limit)[1]
                    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
                    resource.setrlimit(limit, (value, value))

    def _send(self, **message: object) -> None:
        with suppress(OSError):
            self.control.sendall(json.dumps(message).encode() + b"\n")

    def _reap(self) -> None:
        """Reap dead children, and record why the program has ended if it is one of them."""
        while (dead := linux.reap()) is not None:
            pid, code = dead
            if pid in (self.init, self.program):
                self.ended = f"ended with exit status {code}"
                with suppress(ValueError):
                    if code > 128:
                        self.ended = f"was killed by {signal.Signals(code - 128).name}"
                self.init = self.program = None

    def _kill_orphans(self) -> int:
        """Kill every process of the program that has lost its parent; returns how many.

        The system makes orphans children of the init process, or of this one. When an orphan is killed, its own
        children become orphans too.
        """
        parent, killed = self.init or os.getpid(), set()
        end = time.monotonic() + PATIENCE
        while linux.LINUX and time.monotonic() < end:
            self._reap()
            orphans = linux.children(parent) - {self.program}
            if not orphans or self.ended:
                break
            linux.kill(orphans, signal.SIGKILL)
            killed.update(orphans)
            time.sleep(0.002)
        return len(killed)

    def _kill_all(self) -> None:
        if self.init:
            linux.kill([self.init], signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self.init, 0)  # returns when the whole namespace is gone
            self.init = None
            return
        if self.cgroup:
            linux.write_value(f"{self.cgroup}/pids.max", 0)
        if not linux.LINUX and self.program:
            with suppress(OSError):
                os.killpg(self.program, signal.SIGKILL)
        stopped: set[int] = set()
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            self._reap()
            alive = linux.children(os.getpid(), recursive=True)
            if not alive:
                return
            # A stopped process cannot fork: once no new ones are found, all can be killed together.
            linux.kill(alive - stopped, signal.SIGSTOP)
            if alive <= stopped:
                linux.kill(alive, signal.SIGKILL)
                time.sleep(0.002)
            stopped |= alive

    def _remove_cgroup(self) -> None:
        left = [self.cgroup] if self.cgroup else []
        linux.remove_cgroups(left, 1.0)
        self.cgroup = next(iter(left), None)


def main(setup_json: str) -> None:
    setup = json.loads(setup_json)
    control = socket.socket(fileno=setup["control"])
    control.set_inheritable(False)
    Supervisor(setup, control).supervise()
