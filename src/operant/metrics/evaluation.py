"""Metrics of held-out replies by name, beside their reward: one number for each reply, or one for all of them.

    def short(rollouts: list[Rollout], *, words: int = 10) -> list[float]:      # one number a reply: its mean is logged
        return [float(len(r.reply.split()) <= words) for r in rollouts]

    def vocabulary(rollouts: list[Rollout]) -> float:                           # one number for all replies
        return float(len({word for r in rollouts for word in r.reply.split()}))

A metric is such a function, whose keyword arguments are its options, or a class whose constructor takes them and whose
instances are such functions. It may return a mapping of several numbers for all replies, and None where there is
nothing to measure, or a mapping whose values are numbers of all replies, or lists with one for each. With an attribute
`needs_references = True`, it is refused for tasks without references. Of an instance, `check()` is called before models
load, `check_task(task)` may refuse a task, `read_tasks(tasks)` gets all held-out tasks, and `measured(rollouts)`, where
there is one, is called instead of the instance itself.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from operant.import_by_name import Lazy, Table
from operant.metrics.passes import numbers_in
from operant.metrics.registry import CHOSEN, METRICS
from operant.options import Factory, compose, defaults, read
from operant.rewards.text_scores import OF_ALL, SCORES, RewardBase, check_tasks, prepare, references
from operant.rewards.words import ngrams, words
from operant.types import OperantError, Rollout, Task, as_list, of_user, require, shown, with_defaults


@dataclass(frozen=True)
class EvaluationMetric:
    """A metric with its options: `resolve("exact_match")[0].measure(rollouts)`."""

    name: str
    measure: Callable[[list[Rollout]], Any]
    made: Any
    """The function or instance itself, with the attributes that say what it needs."""

    def check(self) -> None:
        """Load what the metric needs. Raises: OperantError for what is missing."""
        with_defaults(self.made, RewardBase).check()


@dataclass(frozen=True)
class Measured:
    """The numbers of the metrics of an evaluation, by name."""

    of_replies: Mapping[str, list[float | None]] = field(default_factory=dict)
    """One number for each reply."""
    of_all: Mapping[str, float] = field(default_factory=dict)
    """One number for all replies."""


NOTHING = Measured()
"""What an evaluation without chosen metrics has measured."""


class ExactMatch:
    """1 for a reply that equals one of its references, without spaces at the ends; otherwise 0."""

    needs_references = True

    def __init__(self, *, ignore_case: bool = False):
        self.plain = (lambda text: text.strip().lower()) if ignore_case else str.strip

    def __call__(self, rollouts: list[Rollout]) -> list[float]:
        return [float(self.plain(r.reply) in map(self.plain, references(r.task))) for r in rollouts]


class Distinct:
    """Different n-grams of words over all n-grams of all replies (distinct-n, arXiv:1510.03055)."""

    def __init__(self, *, n: int = 2):
        require(n >= 1, f"evaluation.metrics.distinct.n={n}: it must be at least 1")
        self.n = n

    def __call__(self, rollouts: list[Rollout]) -> float | None:
        grams = [gram for r in rollouts for gram in ngrams(words(r.reply), self.n).elements()]
        return len(set(grams)) / len(grams) if grams else None


EVALUATION_METRICS = Table(
    "evaluation metric",
    "operant.metrics",
    {
        **SCORES.data,
        **OF_ALL.data,
        "distinct": Distinct,
        "exact_match": ExactMatch,
        "style_transfer": "operant.apps.prompts.style_transfer:TransferQuality",
    },
)

PASSES = Lazy({"pass@k": "operant.apps.code.pass_at:metric_named"})
"""What makes the metric of a name such as "pass@8"."""


def _found(name: str) -> Any:
    """The class or function of a metric. Raises: OperantError for an unknown name."""
    return PASSES["pass@k"](name) if numbers_in(name) is not None else EVALUATION_METRICS.find(name)


def chosen(given: object) -> dict[str, Mapping[str, object]]:
    """The names in the option `evaluation.metrics`, each with its options.

    given: names, separated by commas or in a list, or a mapping from names to options.
    """
    given = read(given)
    if given is None or isinstance(given, str):
        given = [name.strip() for name in (given or "").split(",") if name.strip()]
    if isinstance(given, (list, tuple)) and all(isinstance(name, str) for name in given):
        given = dict.fromkeys(given)
    if isinstance(given, Mapping):
        found: dict[Any, Any] = {name: {} if options is None else options for name, options in given.items()}
        if all(isinstance(name, str) and isinstance(options, Mapping) for name, options in found.items()):
            return found
    raise OperantError(
        f"evaluation.metrics={shown(given)}: give names separated by commas, such as bleu,exact_match, or a mapping "
        "from names to options, such as {bleu: {max_n: 2}}"
    )


def metric_names(given: object) -> dict[str, str]:
    """The name of each chosen metric in the logs, with the name that it was chosen by: that of the function."""
    names: dict[str, str] = {}
    for full in chosen(given):
        name = full.rpartition(":")[2].rpartition(".")[2].replace("-", "_")
        if name in names:
            raise OperantError(
                f"evaluation.metrics: {names[name]!r} and {full!r} would both be logged as evaluate/{name}; rename one"
            )
        if (taken := METRICS.get(f"evaluate/{name}")) is not None and taken.group != CHOSEN:
            raise OperantError(f"evaluation.metrics: {full!r} would be logged as {taken.name}, which exists; rename it")
        names[name] = full
    return names


def resolve(given: object, start: str | None = None) -> list[EvaluationMetric]:
    """The chosen metrics with their options, ready to measure; `given` is the option `evaluation.metrics`.

    start: the model that a run begins from, for metrics with `reads_start` and no model of their own; None: none.
    """
    options, metrics = chosen(given), list[EvaluationMetric]()
    for name, full in metric_names(given).items():
        head, _, argument = full.partition(":")
        if argument and head in EVALUATION_METRICS.names():
            known = _found(head)
            first = next(iter(defaults(Factory(known, skip=int(not inspect.isclass(known))))), "option")
            raise OperantError(
                f"evaluation metric {full!r}: only a reward has its argument behind the name; give the metric's "
                f"options as a mapping, such as {{{head}: {{{first}: {argument}}}}}"
            )
        found = _found(full)
        if not callable(found):
            raise OperantError(f"metric {full!r} is of type {type(found).__name__}; name a function or a class")
        group = f"evaluation.metrics.{name}"
        own = {"model": start} if start and with_defaults(found, RewardBase).reads_start else {}
        named = {group: Factory(found, skip=int(not inspect.isclass(found)))}
        own = compose(named, {group: own | {**options[full]}})[group]
        made, measure = found, partial(found, **own)
        if inspect.isclass(found):
            with of_user(f"{group}: {found.__name__} refuses {own}: ", "; change or leave out one"):
                made = found(**own)
                measure = getattr(made, "measured", made)
        metrics.append(EvaluationMetric(name, measure, made))
    return metrics


def prepared(metrics: Sequence[EvaluationMetric], tasks: Sequence[Task], *, alone: bool = False) -> None:
    """Let the metrics see the held-out tasks; `alone`: only some of them.

    Raises: OperantError for a task that a metric cannot judge, such as one without references.
    """
    for metric in metrics:
        (check_tasks if alone else prepare)(metric.made, f"evaluation metric {metric.name!r}", tasks)


def measure(metrics: Sequence[EvaluationMetric], rollouts: list[Rollout]) -> Measured:
    of_replies: dict[str, list[float | None]] = {}
    of_all: dict[str, float] = {}
    for metric in metrics:
        rule = "it must return one number for each reply, or one number (or a mapping of numbers) for all"
        with of_user(f"evaluation metric {metric.name!r} failed: ", f"; {rule}"):
            found = metric.measure(rollouts)
            several = found.items() if isinstance(found, Mapping) else [("", found)]
            known = {f"{metric.name}/{key}" if key else metric.name: x for key, x in several if x is not None}
            lists = {name: each for name, x in known.items() if (each := as_list(x)) is not None}
            of_replies |= {
                name: [None if x is None or x != x else float(x) for x in each] for name, each in lists.items()
            }
            of_all |= {name: float(x) for name, x in known.items() if name not in lists}
        counts = [len(each) for each in lists.values() if len(each) != len(rollouts)]
        if counts:
            raise OperantError(
                f"evaluation metric {metric.name!r} returned {counts[0]} numbers for {len(rollouts)} replies: return "
                "one for each, None where there is nothing to measure; or one float for all"
            )
    return Measured(of_replies, of_all)
