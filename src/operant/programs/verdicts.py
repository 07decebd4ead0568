"""Verdicts of programs, each different one of which runs once."""

from collections.abc import Sequence
from functools import cache

from operant.sandbox.jail import Jail, JailOptions, Program, Verdict


class Verdicts:
    """Runs programs in a jail and remembers what became of them: samples of one policy are often equal.

    verdicts = Verdicts(Jail())
    [verdict] = verdicts([Program("x = 1", (Code("assert x == 1"),))])
    """

    def __init__(self, jail: Jail, most: int = 20_000):
        """most: programs that are remembered, the newest ones."""
        self.jail, self.most = jail, most
        self.known: dict[Program, Verdict] = {}

    def __call__(self, programs: Sequence[Program]) -> list[Verdict]:
        """The verdict of each program. Raises: OperantError of the jail."""
        if new := [program for program in dict.fromkeys(programs) if program not in self.known]:
            self.known |= zip(new, self.jail.run(new), strict=True)
        found = [self.known[program] for program in programs]
        for program in list(self.known)[: max(0, len(self.known) - self.most)]:
            del self.known[program]
        return found


@cache
def shared(options: JailOptions) -> Verdicts:
    """The verdicts of one jail for all that ask with these options."""
    return Verdicts(Jail(options))
