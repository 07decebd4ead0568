"""pass@k and n@k of held-out programs, by name: `--evaluation.samples 20 --evaluation.metrics pass@1,pass@8,1@20`."""

from collections.abc import Sequence
from statistics import fmean
from typing import Literal

from operant.apps.code.problems import problem_of
from operant.apps.code.verdicts import shared
from operant.metrics.passes import numbers_in, of_samples
from operant.sandbox.jail import JailOptions
from operant.types import OperantError, Rollout, Task

LIMITS = JailOptions()


class PassAt:
    """The mean over tasks of `metrics.passes.pass_at_k`, or of `n_at_k`, from all replies to each task.

    level, seconds, memory, at_once, compare: the limits of `JailOptions`. Programs run once for all such metrics with
    the same limits.
    """

    n: int | None = None
    k = 1

    def __init__(
        self,
        *,
        level: str = LIMITS.level,
        seconds: float = LIMITS.seconds,
        memory: int = LIMITS.memory,
        at_once: int | None = LIMITS.at_once,
        compare: Literal["auto", "strict", "apps"] = "auto",
    ):
        self.options = JailOptions(level=level, seconds=seconds, memory=memory, at_once=at_once, compare=compare)

    def check(self) -> None:
        """Make the jail. Raises: OperantError for limits that it cannot keep on this machine."""
        _ = shared(self.options).jail

    def check_task(self, task: Task) -> None:
        """Raises: OperantError for a task without tests, or for n@k without example tests."""
        if not problem_of(task).examples and self.n is not None:
            raise OperantError(
                f"{self.n}@{self.k} keeps programs that pass the example tests, and task {task.id!r} has none: ask for "
                f"pass@{self.k}"
            )

    def __call__(self, rollouts: list[Rollout]) -> float:
        texts: dict[str, tuple[Task, list[str]]] = {}
        for rollout in rollouts:
            texts.setdefault(rollout.task.id, (rollout.task, []))[1].append(rollout.reply)
        return fmean(self.of_tasks([*texts.values()]))

    def of_tasks(self, replies: Sequence[tuple[Task, Sequence[str]]]) -> list[float]:
        """The number of each task, given with all replies to it. Raises: OperantError for fewer replies than k."""
        run, name = shared(self.options), f"{self.n or 'pass'}@{self.k}"
        problems = [(problem_of(task), texts) for task, texts in replies]
        programs = [problem.program(text) for problem, texts in problems for text in texts]
        examples = [problem.program(text, examples=True) for problem, texts in problems for text in texts]
        right = iter([verdict.outcome == "passed" for verdict in run(programs)])
        kept = iter([verdict.outcome == "passed" for verdict in run(examples)] if self.n else [True] * len(programs))
        return [of_samples(name, [(next(right), next(kept)) for _ in texts]) for _, texts in problems]


def metric_named(name: str) -> type[PassAt]:
    """The metric of a name such as "pass@8" or "1@20". Raises: OperantError as `numbers_in`."""
    n, k = numbers_in(name) or (None, 1)
    return type(name, (PassAt,), {"n": n, "k": k, "__doc__": PassAt.__doc__})
