"""The public `train` and `steps`: a run with its report and its diagnosis.

run = train("builtin:reviews-lm", tasks="builtin:openings/train", reward="builtin:sentiment", steps=50)
for metrics in steps(...): ...          # the same run, as a generator of the metrics of each step
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from operant.runs import trainer
from operant.runs.run import Observer, Run
from operant.runs.trackers.trackers import Tracker
from operant.tools.report.display import display
from operant.tools.report.observers import DiagnosisObserver, ReportObserver
from operant.tools.report.prompts import PromptsObserver
from operant.types import OperantError, RewardFn

if TYPE_CHECKING:
    from operant.keywords import TrainArguments


class TrlReward(Protocol):
    """A reward that is called as TRL's trainers call theirs."""

    def __call__(self, *, prompts: Any, completions: Any, **kwargs: Any) -> object: ...


Reward = RewardFn | TrlReward | str | Mapping[Any, Any] | Sequence[Any] | None


def train(
    policy: object = None,
    tasks: object = None,
    reward: Reward = None,
    *,
    algorithm: str | None = None,
    args: object = None,
    out: str | Path | None = None,
    observers: Sequence[Observer] = (),
    quiet: bool = False,
    **options: "Unpack[TrainArguments]",
) -> Run:
    """Train to the end and return the run. The options are those of the command line: `kl={"coef": 0.1}`, `steps=50`.

    It prints what the command line prints: a progress bar in a terminal, and a line for each step elsewhere. In a
    notebook it draws a live chart in the cell instead. Both also show the findings. quiet: show nothing.
    policy: a name, a transformers model (with `tokenizer=`) or a Policy. reward: any function from rollouts to scores,
    or a list of them, which are added. args: a `GRPOConfig` of TRL 1.16 or its like; the options here overrule it.
    With `resume=True` the run in `out` is resumed; other options then replace its recorded ones. Ctrl-C stops after the
    current step and saves. observers: called at the start, after every step and at the end, after diagnosis and report.
    Raises: OperantError for an error that the user can correct.
    """
    arguments = _arguments(args, options, policy=policy, tasks=tasks, reward=reward, algorithm=algorithm, out=out)
    *_, run = runs(observers=observers, quiet=quiet, **arguments)
    return run


def steps(
    policy: object = None,
    tasks: object = None,
    reward: Reward = None,
    *,
    algorithm: str | None = None,
    args: object = None,
    out: str | Path | None = None,
    observers: Sequence[Observer] = (),
    quiet: bool = False,
    **options: "Unpack[TrainArguments]",
) -> Generator[dict[str, float]]:
    """Train like `train`, and yield the metrics of each step. Leaving the loop saves the run and ends it, as Ctrl-C."""
    seen = None
    arguments = _arguments(args, options, policy=policy, tasks=tasks, reward=reward, algorithm=algorithm, out=out)
    with closing(runs(observers=observers, quiet=quiet, **arguments)) as going:
        for run in going:
            if seen is not None and len(run.metrics) > seen:
                yield run.metrics[-1]
            seen = len(run.metrics)  # those of an earlier session are there before the first step


def runs(
    out: str | Path | None = None,
    *,
    observers: Sequence[Observer] = (),
    show: Iterable[Tracker] = (),
    quiet: bool = False,
    **options: object,
) -> Generator[Run]:
    """Train with a diagnosis, a report and a display, and yield the run itself as `trainer.runs` does.

    show: trackers besides the display and the option `trackers`.
    Raises: OperantError if `observers` is not a list of observers.
    """
    if not isinstance(observers, Sequence) or not all(isinstance(observer, Observer) for observer in observers):
        raise OperantError(f"observers={observers!r}: give a list of objects of a subclass of operant.Observer")
    shown, run = [] if quiet else [display()], None
    usual = (PromptsObserver(), DiagnosisObserver(), ReportObserver(), *shown)
    made = trainer.runs(out, show=[*shown, *show], observers=(*usual, *observers), **options)
    with suppress(GeneratorExit), closing(made) as going:
        for run in going:
            yield run
    if shown and run is not None and run.first:
        shown[0].end(run)


def _arguments(args: object, options: Mapping[str, object], **arguments: object) -> dict[str, object]:
    """The arguments that are not None, with the options and those of a configuration object below them."""
    known = {name: value for name, value in arguments.items() if value is not None} | dict(options)
    if args is not None:
        from operant.tools.migrate.configuration import with_configuration

        known = with_configuration(args, known)
    return known
