"""Processes that need no imports, because they are forked from the one that runs the tests."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import IO

import pytest
import torch

from operant.tools.cli import main


class Child:
    """`work()` in a forked process; its exit code is what the work returns, 99 after a traceback.

    child = Child(lambda: 0)
    child.ends() == 0
    """

    def __init__(self, work: Callable[[], int | None], output: str | None = None):
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(_run(work, output))
        self.status: int | None = None

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def running(self) -> bool:
        if self.status is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if done else None
        return self.status is None

    def ends(self, within: float = 120.0) -> int:
        """The exit code, negative for a signal. Kills the process and fails if it does not end in time."""
        end = time.monotonic() + within
        while self.running():
            if time.monotonic() > end:
                self.kill()
                os.waitpid(self.pid, 0)
                raise AssertionError(f"still running after {within:.0f} s")
            time.sleep(0.01)
        return os.waitstatus_to_exitcode(self.status)


class Forked(Child):
    """What `subprocess.Popen` is to a sweep: `python -m operant ...` in a forked process, with its output in a file."""

    @classmethod
    def instead(cls, monkeypatch: pytest.MonkeyPatch) -> None:
        """The runs of a sweep are forked."""
        names = {"Popen": cls, "DEVNULL": subprocess.DEVNULL, "STDOUT": subprocess.STDOUT}
        monkeypatch.setattr("operant.tools.sweep.processes.subprocess", SimpleNamespace(**names))

    def __init__(self, command: Sequence[str], *, stdout: IO[str], env: Mapping[str, str], **more: object):
        super().__init__(lambda: os.environ.update(env) or main(command[3:]), output=stdout.name)

    send_signal = Child.kill

    def poll(self) -> int | None:
        return None if self.running() else os.waitstatus_to_exitcode(self.status)

    wait = Child.ends


def _run(work: Callable[[], int | None], output: str | None) -> int:
    if output is not None:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1, closefd=False), os.fdopen(2, "w", 1, closefd=False)
    torch.set_num_threads(torch.get_num_threads())  # makes torch's pool anew; threads that did so at once may find none
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    try:
        return work() or 0
    except SystemExit as end:
        if isinstance(end.code, str):
            os.write(2, f"{end.code}\n".encode())
            return 1
        return end.code or 0
    except BaseException:
        with suppress(BaseException):
            os.write(2, traceback.format_exc().encode())
        return 99


def until(true: Callable[[], object], within: float = 120.0) -> None:
    """Wait until `true()` is true. Raises: AssertionError after `within` seconds."""
    end = time.monotonic() + within
    while not true():
        assert time.monotonic() < end, f"still false after {within:.0f} s"
        time.sleep(0.005)


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return made.getsockname()[1]


@contextmanager
def served(server):
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# Hides packages from `find_spec` as well as from `import`: a package that asks whether another is there hears no.
HIDE = """
import importlib.machinery, sys
hidden, finder = set({names!r}.split()), importlib.machinery.PathFinder
original = finder.find_spec
def find_spec(fullname, path=None, target=None):
    return None if fullname.split(".")[0] in hidden else original(fullname, path, target)
finder.find_spec = find_spec
"""


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()
