"""What becomes of a program on the tests of its task, in a jail (`sandbox.jail`): the reward `tests` and the world
`programs`, in which the policy reads that and writes again.

operant train code --reward.kind fraction --reward.seconds 2
operant train code --env programs --env.turns 3

CodeRL (Le et al. 2022, equation 6) pays by four outcomes: -1 for a program that does not compile, -0.6 for one that
raises, -0.3 for one that fails a test and 1 for one that passes all.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from operant.apps.code.problems import problem_of
from operant.apps.code.verdicts import VerdictFile, Verdicts
from operant.rewards.feedback import Feedback
from operant.rewards.text_scores import references
from operant.sandbox.jail import JailOptions, Verdict
from operant.sandbox.ray import PROGRAMS, RayJail, RaySession
from operant.types import OUTCOMES, Judgement, OperantError, Rollout, Task, require, shown

__all__ = ["Programs", "UnitTests"]

CODERL: dict[str, float] = dict(zip(OUTCOMES, (-1.0, -0.6, -0.3, 1.0), strict=True))
"""The score of each outcome in CodeRL."""
LIMITS = JailOptions()
NAMED = 5
"""Bad references that are named with their outcome and message."""
LISTED = 100
"""Further ones that are named."""
Kind = Literal["ladder", "passed", "fraction"]
References = Literal["warn", "refuse", "drop", "skip"]


class UnitTests:
    """Scores of programs by their tests: `UnitTests(kind="passed")(rollouts)`, a `Judgement` for each with its outcome.

    kind: `ladder`, the number of the outcome in `outcomes`; `passed`, 1 if all tests pass and 0 if not; `fraction`, the
    share of the tests that pass. outcomes: a mapping from outcomes to scores, or four numbers from the worst outcome to
    the best; by default CodeRL's. message: that of the first of `all` tests that fails, or of the `examples`, which the
    policy may read; it is empty once they pass. references: the reference solutions of all tasks run once before
    training; those that fail their own tests are named (`warn`), refuse the run (`refuse`), or `drop` their tasks;
    `skip`: they do not run. level, seconds, memory, at_once, compare: the limits of `JailOptions`. ray: number of
    actors of Ray that judge the programs, each `at_once` (by default one) at a time; 0: this process does. ray_address:
    the cluster (`host:port` or `auto`); None: the Ray that this process uses already, or one of its own.
    Each program runs once on its tests, and a resumed run reads its verdict in the run folder (`Verdicts.keep_in`).
    Raises: OperantError for outcomes that lack one of the four or name another.
    """

    __name__ = "tests"
    ends_with_run = True
    """Whether `close` is called at the end of a run."""

    def __init__(
        self,
        *,
        kind: Kind = "ladder",
        outcomes: Any = None,
        message: Literal["all", "examples"] = "all",
        references: References = "warn",
        level: str = LIMITS.level,
        seconds: float = LIMITS.seconds,
        memory: int = LIMITS.memory,
        at_once: int | None = LIMITS.at_once,
        compare: str = LIMITS.compare,
        ray: int = 0,
        ray_address: str | None = None,
    ):
        self.kind, self.message, self.references = kind, message, references
        self.outcomes = ladder(outcomes)
        if ray < 0 or (ray_address is not None and not ray):
            why = "ray is a number of actors, and 0 judges programs in this process, without an address"
            raise OperantError(f"reward.ray={ray} with reward.ray_address={shown(ray_address)}: {why}")
        limits = JailOptions(level=level, seconds=seconds, memory=memory, at_once=at_once, compare=compare)
        if ray:
            session = RaySession(PROGRAMS, address=ray_address, count=ray, cpus=float(at_once or 1))
            self.verdicts = Verdicts(limits, make=partial(RayJail, session))
        else:
            self.verdicts = Verdicts(limits)
        self.notes: list[str] = []
        """Sentences for the log of a run: the level of the jail, and bad references."""
        self.bad: dict[str, Verdict] = {}
        """The verdicts of references that do not pass their own tests, by their task."""

    def __call__(self, rollouts: list[Rollout]) -> list[Judgement]:
        """The judgement of the program in each last reply. Equal programs of a task run once."""
        problems = [problem_of(rollout.task) for rollout in rollouts]
        replies = [rollout.reply for rollout in rollouts]
        verdicts = self.verdicts([problem.program(reply) for problem, reply in zip(problems, replies, strict=True)])
        read = verdicts
        if self.message == "examples":
            both = zip(problems, replies, strict=True)
            read = self.verdicts([problem.program(reply, examples=bool(problem.examples)) for problem, reply in both])
        return [
            Judgement(
                self.score(verdict),
                {"passed": float(verdict.outcome == "passed"), "share": verdict.share},
                verdict.outcome,
                "" if of_message.outcome == "passed" else f"{of_message.outcome}: {of_message.message}",
            )
            for verdict, of_message in zip(verdicts, read, strict=True)
        ]

    def score(self, verdict: Verdict) -> float:
        """The number that a verdict is worth."""
        if self.kind == "fraction":
            return verdict.share
        return float(verdict.outcome == "passed") if self.kind == "passed" else self.outcomes[verdict.outcome]

    def check(self) -> None:
        """Make the jail. Raises: OperantError for limits that it cannot keep on this machine."""
        if not self.notes:
            jail = self.verdicts.jail
            self.notes.append(f"programs run at level {jail.describe()}")

    def check_task(self, task: Task) -> None:
        """Raises: OperantError for a task without tests."""
        problem_of(task)

    def read_tasks(self, tasks: Sequence[Task]) -> None:
        """Run the reference solutions of all tasks but those whose row says that it is verified, and note bad ones.

        Raises: OperantError that names them, with references=refuse, or with references=drop if none is left.
        """
        if self.references == "skip":
            return
        checked = [task for task in tasks if not task.target.get("verified")]
        solved = [(task, found[0]) for task in checked if (found := references(task))]
        verdicts = self.verdicts([problem_of(task).program(solution) for task, solution in solved])
        pairs = zip(solved, verdicts, strict=True)
        self.bad = {task.id: verdict for (task, _), verdict in pairs if verdict.outcome != "passed"}
        if not self.bad:
            return
        counts = Counter(verdict.outcome for verdict in self.bad.values())
        listed = [f"task {task!r}: {bad.outcome}: {bad.message or 'no message'}" for task, bad in self.bad.items()]
        listed = "; ".join(listed[:NAMED])
        if others := [*map(repr, self.bad)][NAMED:]:
            more = f" and {len(others) - LISTED:,} more" if len(others) > LISTED else ""
            listed += f"; and the tasks {', '.join(others[:LISTED])}{more}"
        text = (
            f"{len(self.bad)} of {len(solved)} reference solutions do not pass their own tests "
            f"({', '.join(f'{counts[name]} {name}' for name in OUTCOMES if counts[name])}): {listed}"
        )
        if len(self.bad) == len(tasks) and self.references in ("refuse", "drop"):
            raise OperantError(f"{text}. Repair them: no task would be left to train on")
        require(self.references != "refuse", f"{text}. Repair these rows, or leave them out: --reward.references drop")
        dropped = "; these tasks are left out" if self.references == "drop" else ""
        self.notes.append(text + dropped)

    def usable(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks to train on: with references=drop, those whose reference is not bad."""
        return [task for task in tasks if self.references != "drop" or task.id not in self.bad]

    def close(self) -> None:
        """End the actors of Ray; programs that are judged later start others."""
        self.verdicts.close()

    def keep_in(self, journal: VerdictFile) -> None:
        """Write verdicts to a journal from now on, and read those of an earlier part of the run there."""
        self.verdicts.keep_in(journal)


class Programs(Feedback):
    """`Feedback` of the reward `tests`: the policy reads the message of the first example that its program fails.

    An episode ends with a program that passes its examples, or after `turns` programs; that one is paid by the tests
    that decide. A task without examples shows the policy messages of these. text: what is put after each program, with
    the message in place of {message}. The other options are those of the reward.
    """

    def __init__(
        self,
        turns: int = 3,
        text: str = "\n# {message}\n",
        *,
        kind: Kind = "ladder",
        outcomes: Any = None,
        level: str = LIMITS.level,
        seconds: float = LIMITS.seconds,
        memory: int = LIMITS.memory,
        at_once: int | None = LIMITS.at_once,
        compare: str = LIMITS.compare,
    ):
        limits: Any = {"level": level, "seconds": seconds, "memory": memory, "at_once": at_once, "compare": compare}
        super().__init__(UnitTests(kind=kind, outcomes=outcomes, message="examples", **limits), turns, text)


def ladder(outcomes: object) -> dict[str, float]:
    """The score of each outcome from a mapping, four numbers, or None: CodeRL's."""
    if outcomes is None:
        return CODERL
    given, listed = outcomes.split(",") if isinstance(outcomes, str) else outcomes, not isinstance(outcomes, Mapping)
    if isinstance(given, (list, tuple)) and len(given) == len(OUTCOMES):
        given = dict(zip(OUTCOMES, given, strict=True))
    try:
        if isinstance(given, Mapping) and set(given) <= set(OUTCOMES) and given:
            scores = CODERL | {name: float(number) for name, number in given.items()}
            if all(map(math.isfinite, scores.values())) and not (listed and scores[OUTCOMES[0]] > scores["passed"]):
                return scores
    except (TypeError, ValueError):
        pass
    raise OperantError(
        f"outcomes={shown(outcomes)}: give four finite numbers, from the worst outcome to the best, or a mapping with "
        f"the names {', '.join(OUTCOMES)}"
    )
