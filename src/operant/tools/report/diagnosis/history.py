"""The types of a diagnosis: `History`, the data of a run so far, and `Finding`, one thing that is wrong with it.

`latest` makes a history of a learner or run in memory, `read_history` of a run folder.
"""

import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from operant.metrics import collect
from operant.options import flat, values
from operant.runs.folder import of_scores, read_config
from operant.runs.scored_rollouts import as_rows
from operant.sampling import token_pieces
from operant.storage import atomic_io
from operant.types import OperantError

RECENT = 5
"""The current value of a metric is its mean over this many steps: one step is noisy, more would hide a collapse."""

Row = Mapping[str, Any]
Level = Literal["problem", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: `Finding("empty", "problem", "62 % of the replies are empty.", ...)`."""

    name: str
    """The name of the rule that found it."""
    level: Level
    """A problem means that the run cannot be trusted; a warning should be looked into; a note is for information."""
    message: str
    """One sentence with the numbers of the evidence."""
    cause: str
    """The likeliest cause."""
    remedy: str
    """What to do, with the name of the option."""
    metrics: tuple[str, ...] = ()
    """The metrics whose curves show it."""
    step: int = 0
    """The step at which it began if that is known, else the newest step."""

    def __repr__(self) -> str:
        return f"<{self.level} {self.name}, step {self.step}: {self.message} Remedy: {self.remedy}>"


_FILE = Path(__file__).parent / "findings.toml"
FINDINGS: dict[str, dict[str, Any]] = tomllib.loads(_FILE.read_text(encoding="utf-8"))
"""The sentences of every finding, by its name."""


def finding(
    name: str, step: int, *, level: Level | None = None, metrics: Sequence[str] = (), **parts: str | float
) -> Finding:
    """Return a finding of `FINDINGS` with `parts` put into its sentences. level, metrics: in place of those there."""
    entry = FINDINGS[name]
    message, cause, remedy = (entry[sentence].format(step=step, **parts) for sentence in ("message", "cause", "remedy"))
    shown = tuple(metrics) or tuple(metric.format(**parts) for metric in entry["metrics"])
    return Finding(name, level or entry["level"], message, cause, remedy, shown, step)


def too_large(
    history: "History", name: str, metric: str, limit: float, steps: int = RECENT, /, **parts: str | float
) -> Finding | None:
    """The finding `name` where a share is at its limit or above it; None below, and without the metric."""
    share = history.recent(metric, steps)
    if share is None or share < limit:
        return None
    return finding(name, history.since(metric, lambda x: x >= limit), share=percent(share), **parts)


@dataclass(frozen=True, eq=False)
class History:
    """The data of a run so far. Every field but `metrics` may be empty."""

    metrics: Sequence[Mapping[str, Any]]
    """The metrics of every step, in order."""
    rows: Sequence[Row] = ()
    """The replies of the newest step, with the columns of `registry.COLUMNS`."""
    reference: Sequence[Row] = ()
    """The replies of the reference model to the probe prompts."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The options by full name: `{"kl.coef": 0.1}`."""
    declared: Mapping[str, Any] = field(default_factory=dict)
    """The sampling settings that the caller declared for external replies."""
    external: bool = False
    """Whether the newest replies were generated outside of operant."""
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    """The held-out evaluation `before` and `after` training, in the format of `evaluation.json`."""
    rescored: int = 0
    """The last step before a resume changed the reward or the world, so that earlier scores are of another kind."""

    @property
    def step(self) -> int:
        """The newest step."""
        return int(self.metrics[-1].get("step", len(self.metrics))) if self.metrics else 0

    @property
    def supervised(self) -> bool:
        """Whether the run trains on demonstrations or labelled replies, whose texts are not the policy's own."""
        return bool(self.values(self.loss)) and not self.values("reward/mean")

    @property
    def kl(self) -> float | None:
        """KL per reply now; None of given replies: their log-ratio is no KL, and may be below 0."""
        return None if self.supervised else self.recent("kl/per_reply")

    @property
    def loss(self) -> str:
        """The metric that training on given replies lowers."""
        return next((name for name in ("preference/loss", "critic/loss") if self.values(name)), "supervised/loss")

    @property
    def plays(self) -> bool:
        """Whether the tasks are text games."""
        return bool(self.values("game/turns"))

    @property
    def trained_steps(self) -> int:
        """The number of steps that trained on replies, with a reward or as demonstrations."""
        return len(self.values("reward/mean")) or len(self.values(self.loss))

    def values(self, name: str) -> list[float]:
        """Return every finite value of a metric, in order."""
        return [float(m[name]) for m in self.metrics if is_finite(m.get(name))]

    def first(self, name: str) -> float | None:
        """Return the first value of a metric: the one before training if the history is complete."""
        return next(iter(self.values(name)), None)

    def last(self, name: str, steps: int = RECENT) -> list[float]:
        """Return the last `steps` values of a metric."""
        return self.values(name)[-steps:]

    def recent(self, name: str, steps: int = RECENT) -> float | None:
        """Return the mean of the last `steps` values of a metric."""
        return sum(last) / len(last) if (last := self.last(name, steps)) else None

    def since(self, name: str, is_odd: Callable[[float], bool]) -> int:
        """Return the first step of the last unbroken run of odd values, or the newest step if the last one is fine."""
        begin = None
        for i, m in enumerate(self.metrics):
            if is_finite(m.get(name)):
                begin = (begin or int(m.get("step", i + 1))) if is_odd(float(m[name])) else None
        return begin or self.step

    def option(self, name: str, default: object = None) -> Any:
        """Return an option of the run, or `default` if it is not known."""
        return self.config.get(name, default)

    @property
    def texts(self) -> list[str]:
        """The texts of the newest replies."""
        return [str(row.get("reply") or "") for row in self.rows]

    def usual(self, name: str) -> list[float]:
        """Return a text metric before training: of the first step and of the reference's replies, as far as known."""
        return [x for x in (self.first(name), self._of_reference.get(name)) if x is not None]

    @cached_property
    def _of_reference(self) -> dict[str, float]:
        return collect.of_texts([str(row.get("reply") or "") for row in self.reference]).result()


def is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def percent(share: float) -> str:
    """Format a share as `93 %`; small ones keep a decimal."""
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.1f} %"


def number(x: float) -> str:
    """Format a number with three digits, without an exponent if it is of a readable size."""
    return f"{x:.3g}" if 1e-3 <= abs(x) < 1e5 or x == 0 else f"{x:.1e}"


def capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


def counted(n: float, thing: str) -> str:
    """Format a number of things: `1 reply`, `2 replies`."""
    things = f"{thing[:-1]}ies" if thing.endswith("y") else f"{thing}s"
    return f"{n:.10g} {thing if n == 1 else things}"


def latest(source: Any) -> History:
    """Return the history of a `Learner` or of a `Run`; it has no replies before the first step.

    Raises: OperantError for a file of probes that cannot be read.
    """
    learner = getattr(source, "learner", source)
    config = learner.option_values() | {"reference": "none" if learner.reference is None else "given"}
    history = History(list(learner.history), config=config)
    last, tokenizer = learner.last_step, learner.policy.tokenizer
    if last is not None:
        pieces = partial(token_pieces, tokenizer) if tokenizer is not None else None
        table = as_rows(last.rollouts, last.scores, None, last.batch, last.places, pieces)
        info = last.rollouts[0].info if last.rollouts else {}
        history = replace(history, rows=table, declared=info.get("declared", {}), external="declared" in info)
    if learner is source:
        return history
    config |= values(source.config.train)
    config |= {f"evaluation.{name}": value for name, value in values(source.config.evaluation).items()}
    reference, rescored = _rows(source.folder.probes_path / "reference.parquet"), _rescored(source.folder.path)
    return replace(history, metrics=source.metrics, reference=reference, config=config, rescored=rescored)


def read_history(folder: str | Path) -> History:
    """Read the history of a run folder. Missing files are left out. Raises: OperantError for an unreadable file."""
    rollouts = (folder := Path(folder)) / "rollouts"
    newest = max((atomic_io.step_of(path) or 0 for path in rollouts.glob("step-*.parquet")), default=0)
    return History(
        metrics=[
            {name: x if is_finite(x) else None for name, x in record.items() if x is None or isinstance(x, int | float)}
            for record in atomic_io.records(folder / "metrics.jsonl")
        ],
        rows=_rows(rollouts / f"{atomic_io.step_name(newest)}.parquet"),
        reference=_rows(folder / "probes" / "reference.parquet"),
        config=flat(read_config(folder)) if (folder / "config.yaml").is_file() else {},
        evaluation=read_json(folder / "evaluation.json"),
        rescored=_rescored(folder),
    )


def _rescored(folder: Path) -> int:
    return max((r["step"] for r in atomic_io.records(folder / "changes.jsonl") if of_scores(r["name"])), default=0)


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:  # pq.read_table would import pyarrow's datasets, for a third of a second
            return file.read(use_threads=False).to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise OperantError(f"{path} cannot be read ({error}); delete it") from error


def read_json(path: Path) -> Any:
    """What a JSON file of a run holds; an empty mapping without the file. Raises: OperantError for a damaged one."""
    if not path.is_file():
        return {}
    with atomic_io.explained(path, "read"), open(path, encoding="utf-8") as file:
        try:
            return json.load(file)
        except ValueError as error:
            raise OperantError(f"{path} is not valid JSON: {error}; delete it") from error
