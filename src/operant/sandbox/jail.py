"""Untrusted programs against tests, each in a fresh process behind the strongest wall that the machine allows.

jail = Jail(JailOptions(seconds=4.0))
jail.level                        # "namespaces", "landlock", "process" or "container"
[verdict] = jail.run([Program("def double(x): return 2 * x", [Code("assert double(2) == 4")])])
verdict.outcome, verdict.results  # "passed", ("passed",)
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

OUTCOMES = ("compile error", "runtime error", "failed test", "passed")
"""What may become of a program, from worst to best."""


@dataclass(frozen=True)
class Code:
    """A test as Python code, such as an assertion. It meets stand-ins for what the program defines."""

    code: str


@dataclass(frozen=True)
class Stdin:
    """A test that runs the program with a standard input, and looks at what it has printed."""

    given: str
    expected: str


Test = Code | Stdin


@dataclass(frozen=True)
class Program:
    """A program and its tests. `setup` is code that runs before the tests, beside them."""

    source: str
    tests: Sequence[Test]
    setup: str = ""


@dataclass(frozen=True)
class Verdict:
    """What became of a program."""

    outcome: str
    """One of OUTCOMES: that of the first test that has not passed."""
    results: tuple[str, ...]
    """The outcome of each test."""
    message: str = ""
    """Of the first test that has not passed, such as "IndexError: list index out of range (line 3)"."""
    failed: int | None = None
    """The index of that test."""
    seconds: float = 0.0
    """Processor time of the program."""

    @property
    def share(self) -> float:
        """The share of the tests that it has passed."""
        return self.results.count("passed") / len(self.results) if self.results else 0.0


@dataclass(frozen=True)
class JailOptions:
    """Limits of a program, and the level of isolation."""

    level: str = "auto"
    seconds: float = 4.0
    """Processor time of a program over all its tests."""
    memory: int = 512 << 20
    """Bytes of address space."""
    at_once: int | None = None
    """Programs at the same time; None: as many as there are cores."""
    compare: str = "strict"
    """How printed output is compared: strict (equal but for white space at the ends of lines and of the text), apps."""


STAND_IN = """
import json, sys, io, contextlib
given = json.load(sys.stdin); out = []
def tell(kind, error): return [kind, f"{type(error).__name__}: {error}"]
try: code = compile(given["source"], "program", "exec")
except Exception as error: print(json.dumps([tell("compile error", error)] * len(given["tests"]))); sys.exit()
for test in given["tests"]:
    names = {"__name__": "program" if "code" in test else "__main__"}
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            if "given" in test: sys.stdin = io.StringIO(test["given"])
            exec(code, names)
            if "code" in test: exec(given["setup"], names); exec(test["code"], names)
        if "code" not in test: assert printed.getvalue().split() == test["expected"].split()
        out.append(["passed", ""])
    except AssertionError as error: out.append(tell("failed test", error))
    except BaseException as error: out.append(tell("runtime error", error))
print(json.dumps(out))
"""


class Jail:
    """Runs programs. It chooses its level when it is made, and says so in `describe`."""

    def __init__(self, options: JailOptions | None = None):
        self.options = options or JailOptions()
        self.level = "process"

    def describe(self) -> str:
        """The level in force and the limits, for a log."""
        return f"{self.level}: a stand-in"

    def run(self, programs: Sequence[Program]) -> list[Verdict]:
        """The verdict of each program, whatever it does."""
        with ThreadPoolExecutor(self.options.at_once or 2) as pool:
            return list(pool.map(self._one, programs))

    def _one(self, program: Program) -> Verdict:
        given = {"source": program.source, "setup": program.setup, "tests": [vars(test) for test in program.tests]}
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", STAND_IN],
                input=json.dumps(given),
                capture_output=True,
                text=True,
                timeout=self.options.seconds,
            )
            found = json.loads(done.stdout)
        except (subprocess.TimeoutExpired, ValueError):
            found = [["runtime error", "no answer in time"]] * len(program.tests)
        kinds = [kind for kind, _ in found]
        failed = next((i for i, kind in enumerate(kinds) if kind != "passed"), None)
        outcome, message = ("passed", "") if failed is None else found[failed]
        return Verdict(outcome, tuple(kinds), message, failed)
