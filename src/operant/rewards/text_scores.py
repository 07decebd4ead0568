"""Scores of texts by name: from replies and their references to numbers. Rewards and metrics of evaluations use them.

    score = SCORES["rouge"]("rougeL", several="mean")    # the constructor's arguments are the options
    score.check()                                        # loads what it needs: a model, data of a package
    prepare(score, "rouge", tasks)                       # refuses tasks that it cannot judge
    score(rollouts)                                      # one number for each reply: a reward
    score.measured(rollouts)                             # what an evaluation logs, where that is something else

A score depends on its reply and task alone, and never on the other replies of a call.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from operant.import_by_name import Lazy
from operant.types import OperantError, RewardFn, Rollout, Task, require, shown, with_defaults

SCORES = Lazy(
    {
        "bleu": "operant.apps.text.sacrebleu:Bleu",
        "chrf": "operant.apps.text.sacrebleu:Chrf",
        "ter": "operant.apps.text.sacrebleu:Ter",
        "rouge": "operant.apps.text.rouge_score:Rouge",
        "meteor": "operant.apps.text.nltk:Meteor",
        "cider": "operant.apps.text.cider:Cider",
        "bertscore": "operant.rewards.bertscore:BertScore",
        "parent": "operant.apps.text.parent:Parent",
        "consistency": "operant.apps.text.judged_by_classifier:Consistency",
        "intent": "operant.apps.text.judged_by_classifier:Intent",
        "coverage": "operant.apps.text.concepts:Coverage",
        "repeat_penalty": "operant.apps.text.concepts:RepeatPenalty",
        "increasing_numbers": "operant.apps.text.concepts:IncreasingNumbers",
        "dates": "operant.apps.text.concepts:Dates",
    }
)
"""Scores of single replies, by name: the classes."""
OF_ALL = Lazy(
    {"diversity": "operant.apps.text.concepts:Diversity", "perplexity": "operant.rewards.perplexity:Perplexity"}
)
"""What is measured of all replies together, by name."""
MEASURES = ("f", "precision", "recall")
SEVERAL = {"max": max, "mean": fmean}
"""What a score makes of its values for several references, by the value of the option `several`."""


class RewardBase:
    """The optional parts of a reward, a score or a metric, with the values of one that lacks them.

    `check` loads what it needs, such as a model. The tasks of a run are shown to `check_task` one by one, and to
    `read_tasks` and `usable` together; held-out ones to `read_held_out`. All of this happens before training.
    Raises: OperantError for what is missing, and for a task that it cannot judge.
    """

    needs_references: bool = False
    """Whether it compares replies with the references of tasks."""
    parts: Sequence[RewardFn] = ()
    """The rewards that it is made of, or calls."""
    reads_tokens: bool = False
    """Whether it reads the beginnings of replies, with the policy's tokenizer in its field `tokenizer`."""
    tokenizer: Any = None
    """The policy's, which a run sets before training."""
    wants_greedy: bool = False
    """Whether a run calls `see_greedy` first, with the policy's greedy reply to each prompt."""
    ends_with_run: bool = False
    """Whether `close` is called at the end of a run."""
    prompt_tokens: int | None = None
    """The room that it leaves for replies in its texts, in tokens; None: any."""
    notes: Sequence[str] = ()
    """Sentences for the log at the start of a run."""
    reads_start: bool = False
    """Whether a metric of an evaluation has an option `model` that is the run's first one if it names none."""

    def check(self) -> None:
        """Load what it needs. Raises: OperantError for what is missing."""

    def check_task(self, task: Task) -> None:
        """Raises: OperantError for a task that it cannot judge."""

    def read_tasks(self, tasks: Sequence[Task]) -> None:
        """Take what it needs of all tasks of a run."""

    def read_held_out(self, tasks: Sequence[Task]) -> None:
        """The same of all held-out tasks."""

    def for_held_out(self) -> RewardFn | None:
        """What judges held-out replies and probes in its place; None: it does so itself."""

    def usable(self, tasks: list[Task]) -> list[Task]:
        """The tasks without those that it leaves out."""
        return tasks

    def keep_in(self, journal: object) -> None:
        """Keep something for a resumed run, such as verdicts of programs, in a `runs.journal.Journal`."""

    def see_greedy(self, rollouts: list[Rollout]) -> None:
        """Take the greedy replies to the prompts of the next call."""

    def close(self) -> None:
        """End its processes."""


class Score(RewardBase):
    """A number for each reply: `Rouge("rougeL")(rollouts)`, and so a reward. Options are the constructor's arguments.

    `measured`, if there is one, returns what an evaluation logs, by name: a list of numbers of the replies, or a float.
    Raises: OperantError for a task that the score cannot judge, which it names.
    """

    __name__ = ""
    needs_references = True

    def __call__(self, rollouts: list[Rollout]) -> list[float]:
        """One number for each rollout, from its last reply and the references of its task."""
        return [self.of(rollout.reply, self.references(rollout.task)) for rollout in rollouts]

    def of(self, reply: str, references: Sequence[str]) -> float:
        """The number of a reply with these references, of which there is at least one."""
        raise NotImplementedError

    def check_task(self, task: Task) -> None:
        if self.needs_references:
            self.references(task)

    def references(self, task: Task) -> list[str]:
        """The references of a task. Raises: OperantError if it has none."""
        check_references(f"score {self.__name__!r}", task)
        return references(task)


class OfMeasures(Score):
    """A score with three numbers for each reply, of which it is one. As a metric it may be all of them, by name."""

    measure: str | None = None
    """`f`, `precision` or `recall`; None: as a reward f, as a metric all three."""

    def choose_measure(self, measure: str | None) -> None:
        """Raises: OperantError for an unknown measure."""
        if measure not in (None, *MEASURES):
            raise OperantError(f"{self.__name__}: measure={shown(measure)}: it must be f, precision or recall")
        self.measure = measure

    def numbers(self, rollouts: list[Rollout]) -> dict[str, list[float]]:
        """A list for each of `MEASURES`, with one number for each rollout."""
        raise NotImplementedError

    def __call__(self, rollouts: list[Rollout]) -> list[float]:
        return self.numbers(rollouts)[self.measure or "f"]

    def measured(self, rollouts: list[Rollout]) -> list[float] | dict[str, list[float]]:
        found = self.numbers(rollouts)
        return found if self.measure is None else found[self.measure]


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


def check_tasks(part: object, what: str, tasks: Sequence[Task]) -> None:
    """Refuse tasks that a reward or metric cannot judge: those without references, or that its `check_task` refuses.

    Raises: OperantError that names the first such task; of references it begins with `what`.
    """
    judge = with_defaults(part, RewardBase)
    for task in tasks:
        if judge.needs_references:
            check_references(what, task)
        judge.check_task(task)


def prepare(part: object, what: str, tasks: Sequence[Task]) -> None:
    """Refuse tasks that a reward or metric cannot judge, and let it read what it needs of all of them.

    Raises: OperantError that names the first such task; `what` names the part.
    """
    check_tasks(part, what, tasks)
    with_defaults(part, RewardBase).read_tasks(tasks)


def target_of(task: Task, field: str | None, what: str) -> object:
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
    """The function that joins the values for several references."""
    require(chosen in SEVERAL, f"{name}: several={shown(chosen)}: of several references, take max or mean")
    return SEVERAL[chosen]
