"""The public `train` and `steps`: a run with its report and its diagnosis.

run = train("builtin:reviews-lm", tasks="builtin:openings/train", reward="builtin:sentiment", steps=50)
for metrics in steps(...): ...          # the same, a step at a time
"""

from collections.abc import Iterator
from typing import Any

from operant.diagnosis.observer import DiagnosisObserver
from operant.report.observer import ReportObserver
from operant.runs import trainer
from operant.runs.run import Run


def train(
    policy: Any = None,
    tasks: Any = None,
    reward: Any = None,
    *,
    algorithm: str | None = None,
    out: Any = None,
    **given: Any,
) -> Run:
    """Train to the end and return the run. Options are those of the command line: `kl={"coef": 0.1}`, `steps=50`.

    `policy`: a name, a transformers model (with `tokenizer=`) or a Policy. `reward`: any function from rollouts to
    scores. `resume=True` goes on with the run in `out`; an option beside it is a changed one. Ctrl-C ends after the
    step, and saves.
    Raises: OperantError for whatever the user can mend.
    """
    *_, run = runs(out, **_named(policy=policy, tasks=tasks, reward=reward, algorithm=algorithm), **given)
    return run


def steps(
    policy: Any = None,
    tasks: Any = None,
    reward: Any = None,
    *,
    algorithm: str | None = None,
    out: Any = None,
    **given: Any,
) -> Iterator[dict[str, float]]:
    """As `train`, handing out the metrics of every step; stop asking, and the run ends with that step."""
    seen = 0
    for run in runs(out, **_named(policy=policy, tasks=tasks, reward=reward, algorithm=algorithm), **given):
        if len(run.metrics) > seen:
            seen = len(run.metrics)
            yield run.metrics[-1]


def runs(out: Any = None, **given: Any) -> Iterator[Run]:
    """As `trainer.runs`, which hands out the run itself, with a diagnosis and a report."""
    return trainer.runs(out, observers=(DiagnosisObserver(), ReportObserver()), **given)


def _named(**positional: Any) -> dict[str, Any]:
    """The arguments that were given: one that is None is left to the recipe."""
    return {name: value for name, value in positional.items() if value is not None}
