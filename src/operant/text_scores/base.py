"""What all scores of texts share: the references of a task, what its target gives, and which tasks are refused."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any

from operant.types import OperantError, Rollout, Task, shown

SEVERAL = {"max": max, "mean": fmean}
"""What a score makes of its values for several references, by the value of the option `several`."""


class Score:
    """A number for each reply: `Rouge("rougeL")(rollouts)`, and so a reward. Options are the constructor's arguments.

    `check` loads what the score needs, such as a model or a package's data, and `read_tasks` takes what it needs of all
    tasks of a run; both are called before training. `measured`, where there is one, returns what an evaluation logs
    instead: numbers of single replies (lists) and of all replies (floats) by name.
    Raises: OperantError for a task that the score cannot judge, which it names.
    """

    __name__ = ""
    needs_references = True
    uses: tuple[Any, ...] = ()
    """Other rewards that it calls."""

    def __call__(self, rollouts: list[Rollout]) -> list[float]:
        """One number for each rollout, from its last reply and the references of its task."""
        return [self.of(rollout.reply, self.references(rollout.task)) for rollout in rollouts]

    def of(self, reply: str, references: Sequence[str]) -> float:
        """The number of a reply with these references, of which there is at least one."""
        raise NotImplementedError

    def check(self) -> None:
        """Load what the score needs. Raises: OperantError for what is missing."""

    def check_task(self, task: Task) -> None:
        """Raises: OperantError for a task that the score cannot judge."""
        if self.needs_references:
            self.references(task)

    def read_tasks(self, tasks: Sequence[Task]) -> None:
        """Take what the score needs of all tasks of a run."""

    def references(self, task: Task) -> list[str]:
        """The references of a task. Raises: OperantError if it has none."""
        check_references(f"score {self.__name__!r}", task)
        return references(task)


def references(task: Task) -> list[str]:
    """The texts that a reply to the task is compared with: its references, or else its demonstrated replies.

    Of labelled replies, those with the highest score.
    """
    best = max(task.scores, default=0.0)
    replies = zip(task.replies, task.scores or [best] * len(task.replies), strict=True)
    return list(task.references) or [reply for reply, score in replies if isinstance(reply, str) and score == best]


def check_references(what: str, task: Task) -> None:
    """Raises: OperantError that begins with `what`, for a task without references, or with blank ones only."""
    found = references(task)
    if not any(text.strip() for text in found):
        raise OperantError(
            f"{what} compares replies with references, and task {task.id!r} has {'blank ones' if found else 'none'}: "
            "name the field that holds them, --data.reference-field NAME (of a form, --form.target NAME), give "
            "Task(..., references=(...)), or leave that row out"
        )


def check_tasks(part: Any, what: str, tasks: Sequence[Task]) -> None:
    """Refuse tasks that a reward or metric cannot judge: those without references, or that its `check_task` refuses.

    Raises: OperantError that names the first such task; of references it begins with `what`.
    """
    for task in tasks:
        if getattr(part, "needs_references", False):
            check_references(what, task)
        if callable(check := getattr(part, "check_task", None)):
            check(task)


def target_of(task: Task, field: str | None, what: str) -> Any:
    """`task.target`, or with `field` that key of it. Raises: OperantError that begins with `what`, if it lacks it."""
    if field is None:
        return task.target
    if not isinstance(task.target, Mapping) or field not in task.target:
        raise OperantError(
            f"{what}: the target of the task {task.id!r} is {shown(task.target)}, which has no {field!r}: several "
            f"fields become a mapping, as with --data.target-field {field},OTHER"
        )
    return task.target[field]


def target_words(task: Task, field: str | None, what: str) -> list[str]:
    """The word, or words, in the target of a task. Raises: OperantError that begins with `what`, for anything else."""
    target = target_of(task, field, what)
    words = [target] if isinstance(target, str) else target
    if not isinstance(words, (list, tuple)) or not words or not all(isinstance(w, str) and w for w in words):
        raise OperantError(
            f"{what}: the target of the task {task.id!r} is {shown(target)}; it must be a word "
            "or a list of words, as from --data.target-field target or Task(id, prompt, target='music')"
        )
    return list(words)


def of_several(name: str, chosen: str) -> Callable[[Sequence[float]], float]:
    """The function that joins the values for several references. Raises: OperantError for an unknown one."""
    if chosen not in SEVERAL:
        raise OperantError(f"{name}: several={shown(chosen)}: of several references, take max or mean")
    return SEVERAL[chosen]


@contextmanager
def of_extra(name: str) -> Iterator[None]:
    """Turn a missing package inside this context into a sentence with its remedy; `name` is what needs it."""
    try:
        yield
    except ImportError as error:
        raise OperantError(f"{name} needs a package: pip install 'operant[metrics]'") from error


def f_measure(precision: float, recall: float) -> float:
    """The harmonic mean of precision and recall; 0 if both are 0."""
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0
