"""The public `train` and `steps`: a run with its report and its diagnosis.

run = train("builtin:reviews-lm", tasks="builtin:openings/train", reward="builtin:sentiment", steps=50)
for metrics in steps(...): ...          # the same run, as a generator of the metrics of each step
"""

from collections.abc import Iterator, Sequence
from typing import Any

from operant.diagnosis.observer import DiagnosisObserver
from operant.report.observer import ReportObserver
from operant.runs import trainer
from operant.runs.run import Observer, Run
from operant.types import OperantError


def train(
    policy: Any = None,
    tasks: Any = None,
    reward: Any = None,
    *,
    algorithm: str | None = None,
    out: Any = None,
    observers: Sequence[Observer] = (),
    **options: Any,
) -> Run:
    """Train to the end and return the run. The options are those of the command line: `kl={"coef": 0.1}`, `steps=50`.

    policy: a name, a transformers model (with `tokenizer=`) or a Policy. reward: any function from rollouts to scores.
    With `resume=True` the run in `out` is resumed; other options then replace its recorded ones. Ctrl-C stops after the
    current step and saves. observers: called after every step and at the end, after diagnosis and report.
    Raises: OperantError for an error that the user can correct.
    """
    arguments = _without_none(policy=policy, tasks=tasks, reward=reward, algorithm=algorithm)
    *_, run = runs(out, observers=observers, **arguments, **options)
    return run


def steps(
    policy: Any = None,
    tasks: Any = None,
    reward: Any = None,
    *,
    algorithm: str | None = None,
    out: Any = None,
    observers: Sequence[Observer] = (),
    **options: Any,
) -> Iterator[dict[str, float]]:
    """Train like `train`, and yield the metrics of each step. Closing the generator ends the run after that step."""
    seen, arguments = 0, _without_none(policy=policy, tasks=tasks, reward=reward, algorithm=algorithm)
    for run in runs(out, observers=observers, **arguments, **options):
        if len(run.metrics) > seen:
            seen = len(run.metrics)
            yield run.metrics[-1]


def runs(out: Any = None, *, observers: Sequence[Observer] = (), **options: Any) -> Iterator[Run]:
    """Train with a diagnosis and a report, and yield the run itself as `trainer.runs` does.

    Raises: OperantError if `observers` is not a list of observers.
    """
    if not isinstance(observers, Sequence) or not all(isinstance(observer, Observer) for observer in observers):
        raise OperantError(f"observers={observers!r}: give a list of objects of a subclass of operant.Observer")
    return trainer.runs(out, observers=(DiagnosisObserver(), ReportObserver(), *observers), **options)


def _without_none(**arguments: Any) -> dict[str, Any]:
    """The arguments that are not None; the recipe or the defaults decide about the others."""
    return {name: value for name, value in arguments.items() if value is not None}
