"""Untrusted programs against tests, each in a fresh process behind the strongest wall that the machine allows.

jail = Jail(JailOptions(seconds=4.0))
jail.level                        # "namespaces", "landlock", "process" or "container"
[verdict] = jail.run([Program("def double(x): return 2 * x", [Code("assert double(2) == 4")])])
verdict.outcome, verdict.results  # "passed", ("passed",)

`harness.py`, which runs inside, describes what a verdict rests on, and docs/sandbox.md what is promised.
"""

import contextlib
import itertools
import json
import marshal
import math
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import BinaryIO

from operant.sandbox import levels, linux
from operant.sandbox.levels import JailOptions
from operant.types import OUTCOMES, OperantError, cores

__all__ = ["Code", "Jail", "JailOptions", "Program", "Stdin", "Verdict"]

THREADS_OF_USER = 4096
"""Processes and threads of the user, all together, at which no program starts another thread. It does not bind root."""

BOOT = """
import os
def take():
    size = 4
    for head in (True, False):
        data = b""
        while len(data) < size:
            part = os.read(0, min(size - len(data), 1 << 24))
            if not part: os._exit(1)
            data += part
        size = int.from_bytes(data, "big")
        if not head: return data
import marshal
"""
"""Reads the harness and what it asks for from descriptor 0: each is preceded by its length."""


@dataclass(frozen=True)
class Code:
    """A test as Python code, such as an assertion. It meets stand-ins for what the program defines."""

    code: str
    """Such as `assert f(2) == 4`."""


@dataclass(frozen=True)
class Stdin:
    """A test that runs the program with a standard input, and looks at what it has printed."""

    given: str
    """What the program reads."""
    expected: str | None
    """What it should print; None: anything, and the message of the verdict is what it has printed."""


Test = Code | Stdin
_numbers = itertools.count()
_left: list[str] = []
"""Cgroups of programs whose last process is not gone yet."""


@dataclass(frozen=True)
class Program:
    """A program and its tests."""

    source: str
    """Its text."""
    tests: Sequence[Test]
    """In their order."""
    setup: str = ""
    """Code that runs before the tests, beside them."""
    judge: str = ""
    """apps: judged as by the published judge of APPS. Each test has `seconds` of its own, and a program that reads a
    standard input may return at its top level."""


@dataclass(frozen=True)
class Verdict:
    """What became of a program."""

    outcome: str
    """One of `types.OUTCOMES`: that of the first test that has not passed."""
    results: tuple[str, ...]
    """The outcome of each test."""
    message: str = ""
    """Of the first test that did not pass, such as "IndexError: list index out of range (line 3)"; or the first's."""
    failed: int | None = None
    """The index of that test."""
    seconds: float = 0.0
    """Processor time of the program."""
    trusting: tuple[int, ...] = ()
    """The tests that asked the program how two of its own objects compare, or what they make: these trust its word."""

    @property
    def share(self) -> float:
        """The share of the tests that it has passed."""
        return self.results.count("passed") / len(self.results) if self.results else 0.0


class Jail:
    """Runs programs. It chooses its level when it is made, and says so in `describe`.

    Raises: OperantError with the reason if no level, or the one that was asked for, works, and for a deadline within
    which not even a program of two lines ends.
    """

    def __init__(self, options: JailOptions | None = None):
        self.options = options or JailOptions()
        if os.name != "posix":
            raise OperantError("programs run in processes that fork, which this system has not: use Linux or macOS")
        self.at_once = self.options.at_once or cores()
        asked = self.options.level
        self.weaker: list[str] = []
        """Why no stronger level is in force."""
        tried = [name for name in levels.UNTRUSTED if name != "container"] if asked == "auto" else [asked]
        for self.level in tried:
            usual = replace(self.options, level=self.level, seconds=4.0, at_once=1, compare="strict")
            reason = _trial(usual)
            if not reason:
                seconds = self.options.seconds
                if seconds < usual.seconds and (short := _trial(replace(usual, seconds=seconds))):
                    raise OperantError(f"seconds is {seconds:g}: {short}; use 4.0, for instance")
                return
            self.weaker.append(f"{self.level}: {reason}")
        raise OperantError(f"no program can be isolated here: {'; '.join(self.weaker)}; another level may work")

    def describe(self) -> str:
        """The level in force and the limits, for a log."""
        level, options = levels.LEVELS[self.level], self.options
        limits = f"{options.seconds:g} s of processor time, {options.memory >> 20} MB, {self.at_once} at once"
        if self.level != "container" and os.getuid() == 0 and not linux.cgroups_work():
            limits += ", no cgroup for its threads"
        why = f" (not stronger: {'; '.join(self.weaker)})" if self.weaker else ""
        return f"{self.level}: {level.about}; {'a' if level.boundary else 'no'} security boundary; {limits}{why}"

    def run(self, programs: Sequence[Program]) -> list[Verdict]:
        """The verdict of each program, whatever it does. Interrupted, it leaves no process behind."""
        return _run(replace(self.options, level=self.level), self.at_once, programs)


@cache
def _trial(options: JailOptions) -> str:
    """Why a level does not work here; empty if it does."""
    program = Program("import math\ndef f(x): return math.floor(x)", [Code("assert f(1.5) == 1")])
    try:
        [verdict] = _run(options, 1, [program])
    except OperantError as error:
        return str(error)
    return "" if verdict.outcome == "passed" else f"a program that passes elsewhere gets: {verdict.message}"


def _run(options: JailOptions, at_once: int, programs: Sequence[Program]) -> list[Verdict]:
    verdicts: dict[int, Verdict] = {}
    waiting = list(enumerate(programs))[::-1]
    running: dict[Prisoner, int] = {}
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or running:
                while waiting and len(running) < at_once:
                    index, program = waiting.pop()
                    prisoner = Prisoner(options, program)
                    running[prisoner] = index
                    selector.register(prisoner.output, selectors.EVENT_READ, prisoner)
                for key, _ in selector.select(0.25):
                    if key.data.read():
                        continue
                    selector.unregister(key.fileobj)
                    verdicts[running.pop(key.data)] = key.data.verdict()
                for prisoner in running:
                    prisoner.watch()
        finally:
            for prisoner in running:
                prisoner.end()
            linux.remove_cgroups(_left, linux.PATIENCE)
    return [verdicts[index] for index in range(len(programs))]


class Prisoner:
    """A program in its cell, seen from the run."""

    def __init__(self, options: JailOptions, program: Program):
        """Start it. Raises: OperantError if the machine has no room for it."""
        options = options.of(len(program.tests), program.judge)
        self.options, self.tests = options, program.tests
        make = levels.LEVELS[options.level].cell
        assert make is not None  # of a level of untrusted programs
        self.cell = cell = make(options)
        self.scratch: str | None = None
        # To enter a cgroup takes 20 ms: only for root, whom RLIMIT_NPROC does not bind.
        limited = cell.same and os.getuid() == 0 and cell.settings.get("uid") is None and linux.cgroups_work()
        name = f"operant-{os.getpid()}-{next(_numbers)}"
        self.cgroup = linux.new_cgroup(options.processes, name) if limited else None
        try:
            if cell.scratch:
                self.scratch = tempfile.mkdtemp(prefix="operant-")
                if cell.settings["uid"] is not None:
                    os.chown(self.scratch, cell.settings["uid"], -1)
            start = BOOT + ("exec(marshal.loads(take()))" if cell.same else "exec(take())")
            argv = [*cell.argv, "-I", "-S", "-c", start]
            self.nonce = os.urandom(16)
            with _file(_asked(options, cell, program, self.nonce)) as given:
                self.errors = _file(b"")
                self.process = subprocess.Popen(
                    linux.inside(self.cgroup, argv) if self.cgroup else argv,
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=self.errors,
                    cwd=self.scratch or "/",
                    env={} if cell.same else None,
                    start_new_session=True,  # so that Ctrl-C reaches the run alone
                )
        except OSError as error:
            self._clear()
            place = f"; programs write in {tempfile.tempdir or '/tmp'}, which TMPDIR moves" if cell.scratch else ""
            raise OperantError(f"a program cannot be started: {error.strerror}{place}") from None
        self.output = self.process.stdout
        self.text = b""
        self.asleep, self.seen = 0.0, (time.monotonic(), -1, {})
        self.begun = time.monotonic()
        self.killed = ""

    def read(self) -> bool:
        """Take what the checker has written. Returns whether more may come."""
        data = os.read(self.output.fileno(), 1 << 16)
        self.text += data
        return bool(data)

    def watch(self) -> None:
        """End it if it sleeps for too long."""
        now, options = time.monotonic(), self.options
        family = _times(self.process.pid) if self.cell.same else {}
        if not family:
            if now - self.begun > 10 * (options.patience + options.seconds):
                self.kill(f"has not ended within {10 * (options.patience + options.seconds):g} s of wall clock")
            return
        (then, last, before), youngest = self.seen, list(family)[-1]
        self.seen = (now, youngest, family)
        awake = sum(seconds - before[pid] for pid, seconds in family.items() if pid in before)
        if youngest == last and awake < 0.2 * (now - then):
            self.asleep += now - then
        if self.asleep > options.patience:
            self.kill(f"slept for more than {options.patience:g} s")

    def kill(self, why: str) -> None:
        self.killed = self.killed or why
        self.process.kill()
        if self.cell.name:
            subprocess.run([self.cell.argv[0], "kill", self.cell.name], capture_output=True)

    def end(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is None:
            self.kill("was ended")
        self.process.wait()
        self.output.close()
        self.errors.close()
        self._clear()

    def _clear(self) -> None:
        if self.scratch:
            try:
                os.rmdir(self.scratch)
            except OSError:  # a program may have nested its folders deeply, or closed them
                subprocess.run(["/bin/sh", "-c", 'chmod -R u+rwX "$0"; rm -rf "$0"', self.scratch], capture_output=True)
        if self.cgroup:
            _left.append(self.cgroup)
            linux.remove_cgroups(_left)
            self.cgroup = None

    def verdict(self) -> Verdict:
        """What became of it. Raises: OperantError if it never began."""
        self.process.wait()
        self.errors.seek(0)
        errors = self.errors.read(100_000).decode(errors="replace").strip().splitlines()
        self.end()
        ready, _, written = self.text.partition(b"\n")
        if ready != b"ready" and not self.killed:
            why = "no reason is given"
            if errors:
                why = errors[-1] if errors[0].startswith("Traceback") else " ".join(errors)[:300]
            raise OperantError(f"it does not start (exit status {self.process.returncode}): {why}")
        wanted = max(1, len(self.tests))
        found = _results(written, self.nonce, wanted)
        lost = self.killed or f"its checker has ended (exit status {self.process.returncode})"
        if self.process.returncode in (-signal.SIGXCPU, 128 + signal.SIGXCPU):
            lost = f"its answers kept the tests busy for more than {_busy(self.options)} s of processor time"
        spent = found[-1][2] if found else 0.0
        found += [["runtime error", lost, spent, False]] * (wanted - len(found))
        failed = next((i for i, test in enumerate(found) if test[0] != "passed"), None)
        outcome, message = found[failed or 0][:2]
        return Verdict(
            outcome,
            tuple(test[0] for test in found[: len(self.tests)]),
            message,
            failed if self.tests else None,
            found[-1][2],
            tuple(i for i, test in enumerate(found) if test[3]),
        )


def _results(written: bytes, nonce: bytes, wanted: int) -> list[list]:
    """The results that the checker has written, as far as it came: outcome, message, seconds, trusting.

    Each test has a frame: the nonce, a length, and JSON. With anything else all tests have failed.
    """
    found: list[list] = []
    while written:
        try:
            end = 20 + int.from_bytes(written[16:20], "big")
            index, *result = json.loads(written[20:end])
            outcome, message, seconds, trusting = result
            sound = written[:16] == nonce and index == len(found) < wanted and outcome in OUTCOMES
            if not (sound and isinstance(message, str) and isinstance(seconds, float) and isinstance(trusting, bool)):
                raise ValueError
        except (ValueError, TypeError, RecursionError):
            message = "what came as the result of a test is none, or a second one: a test must not write to its checker"
            return [["failed test", message, found[-1][2] if found else 0.0, False]] * wanted
        found.append(result)
        written = written[end:]
    return found


def _file(data: bytes) -> BinaryIO:
    linux = hasattr(os, "memfd_create")
    file = os.fdopen(os.memfd_create("operant"), "w+b") if linux else tempfile.TemporaryFile()  # noqa: SIM115
    file.write(data)
    file.seek(0)
    return file


def _asked(options: JailOptions, cell: levels.Cell, program: Program, nonce: bytes) -> bytes:
    """What the harness reads: itself, the program, and then, when the program has no part in it any more, the tests."""
    limits = [["RLIMIT_AS", options.memory], ["RLIMIT_CPU", int(options.seconds) + 2], ["RLIMIT_NOFILE", 64]]
    limits += [["RLIMIT_FSIZE", levels.SCRATCH], ["RLIMIT_CORE", 0], ["RLIMIT_NPROC", THREADS_OF_USER]]
    given = {"uid": None, "drop": False, "landlock": None, "folder": None, **cell.settings, "limits": limits}
    given |= {"run": os.getpid() if cell.parent else 0, "source": program.source, "names": levels.NAMES}
    each = options.seconds / max(1, len(program.tests)) if program.judge else options.seconds
    given |= {"seconds": each, "judge": program.judge, "compare": options.compare, "busy": _busy(options)}
    tests = [[test.code] if isinstance(test, Code) else [test.given, test.expected] for test in program.tests]
    asked = {"tests": tests or [[""]], "setup": program.setup, "nonce": nonce.hex()}
    parts = [_harness(cell.same), *(json.dumps(part).encode() for part in (given, asked))]
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _busy(options: JailOptions) -> int:
    """Seconds of processor time of the tests themselves: an answer such as `range(10**12)` may keep them busy."""
    return math.ceil(2 * options.seconds) + 2


@cache
def _harness(compiled: bool) -> bytes:
    source = resources.files("operant.sandbox").joinpath("harness.py").read_bytes()
    return marshal.dumps(compile(source, "harness.py", "exec")) if compiled else source


def _times(pid: int) -> dict[int, float]:
    """Seconds that the process and each descendant has run or waited for a processor; empty if that is not known."""
    found = {}
    with contextlib.suppress(OSError, IndexError, ValueError):
        waiting = [pid]
        while waiting:
            pid, total = waiting.pop(), 0
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/schedstat", encoding="ascii") as file:
                    total += sum(map(int, file.read().split()[:2]))
                with open(f"/proc/{pid}/task/{task}/children", encoding="ascii") as file:
                    waiting += map(int, file.read().split())
            found[pid] = total / 1e9
    return found
