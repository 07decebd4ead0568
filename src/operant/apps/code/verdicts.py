"""Verdicts of programs, each different one of which runs once."""

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple
from functools import cache, cached_property
from pathlib import Path
from typing import Protocol

from operant.sandbox.jail import Jail, JailOptions, Program, Verdict
from operant.sandbox.ray import RayJail
from operant.types import OperantError


class VerdictFile(Protocol):
    """A file of the run to which lines are added, such as a `runs.journal.Journal`."""

    path: Path

    def add(self, line: str) -> None: ...


class Verdicts:
    """Runs programs in a jail and remembers what became of them: samples of one policy are often equal.

    verdicts = Verdicts()
    [verdict] = verdicts([Program("x = 1", (Code("assert x == 1"),))])

    With `keep_in` it writes each verdict to a file of the run, where a resumed run reads it: a program that is close to
    its limit of time may end otherwise the next time.
    """

    def __init__(
        self,
        options: JailOptions | None = None,
        most: int = 20_000,
        make: Callable[[JailOptions], Jail | RayJail] = Jail,
    ):
        """most: programs that are remembered, the newest ones. make: what makes the jail, such as one on Ray."""
        self.options, self.most, self.make = options or JailOptions(), most, make
        self._known: dict[str, Verdict] = {}
        self._journal: VerdictFile | None = None

    @cached_property
    def jail(self) -> Jail | RayJail:
        """Made when it is first used. Raises: OperantError for limits that it cannot keep on this machine."""
        return self.make(self.options)

    def close(self) -> None:
        """End the processes of a jail that keeps some; the next program makes another one."""
        if isinstance(jail := vars(self).get("jail"), RayJail):
            jail.close()
            del self.jail

    def __call__(self, programs: Sequence[Program]) -> list[Verdict]:
        """The verdict of each program. Raises: OperantError of the jail."""
        keys = [key_of(program, self.options) for program in programs]
        new = {key: program for key, program in zip(keys, programs, strict=True) if key not in self._known}
        if new:
            made = dict(zip(new, self.jail.run(list(new.values())), strict=True))
            self._known |= made
            if self._journal is not None:
                lines = [json.dumps([key, *astuple(verdict)]) + "\n" for key, verdict in made.items()]
                with suppress(OperantError):  # the disk refuses: the lines wait, and are written before the next ones
                    self._journal.add("".join(lines))
        found = [self._known[key] for key in keys]
        self._forget()
        return found

    def keep_in(self, journal: VerdictFile) -> None:
        """Write verdicts to a file of the run from now on, and read those of the run so far there."""
        self._journal = journal
        text = journal.path.read_text(encoding="utf-8") if journal.path.is_file() else ""
        if text and not text.endswith("\n"):
            journal.add("\n")
        for line in text.splitlines():
            with suppress(ValueError):  # a kill may have cut the last line
                key, outcome, results, *others = json.loads(line)
                self._known[key] = Verdict(outcome, tuple(results), *others)
        self._forget()

    def _forget(self) -> None:
        for key in list(self._known)[: -self.most]:
            del self._known[key]


@cache
def shared(options: JailOptions) -> Verdicts:
    """The verdicts of one jail for all that ask with these options."""
    return Verdicts(options)


def key_of(program: Program, options: JailOptions) -> str:
    """What the verdict of a program depends on, but for `at_once`, as 32 hexadecimal digits."""
    tests = [(type(test).__name__, *astuple(test)) for test in program.tests]
    limits = (options.level, options.seconds, options.memory, options.of(len(program.tests), program.judge).compare)
    text = json.dumps([program.source, program.setup, tests, limits, *filter(None, [program.judge])])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]
