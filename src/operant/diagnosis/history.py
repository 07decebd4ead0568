"""The nouns of a diagnosis: what is known of a run, and what is found in it."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from operant.metrics import collect
from operant.options import read_mapping
from operant.storage import atomic_io
from operant.types import OperantError

RECENT = 5
"""Steps that "now" is an average of: one step's batch is noisy, and more would hide a collapse."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: `Finding("empty", "problem", "62 % of the replies are empty.", ...)`."""

    name: str
    level: Literal["problem", "warning", "note"]
    """A problem: do not trust the run. A warning: look. A note: good to know."""
    message: str
    """One plain sentence with the numbers of the evidence."""
    cause: str
    """The likeliest one, and how sure that is."""
    remedy: str
    """What to do, with the option's name."""
    metrics: tuple[str, ...] = ()
    """The curves that show it."""
    step: int = 0
    """The first step of it, where that can be told; else the newest."""


@dataclass(frozen=True)
class History:
    """What is known of a run so far; everything but `metrics` may be missing."""

    metrics: Sequence[Mapping[str, Any]]
    """One object a step."""
    rows: Sequence[Row] = ()
    """Replies of the newest step, with the columns of `registry.COLUMNS`."""
    reference: Sequence[Row] = ()
    """The reference's replies to the probe queries."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Options by full name: `{"kl.coef": 0.1}`."""
    declared: Mapping[str, Any] = field(default_factory=dict)
    """How the caller says that the replies were sampled, where they came from elsewhere."""
    foreign: bool = False
    """Whether the newest replies came from elsewhere."""
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    """Held-out tasks `before` and `after`, as `evaluation.json` holds them."""

    @property
    def step(self) -> int:
        """The newest step."""
        return int(self.metrics[-1].get("step", len(self.metrics))) if self.metrics else 0

    @property
    def trained(self) -> int:
        """Steps that replies were learnt from, whether a reward judged them or they were given."""
        return len(self.values("reward/mean")) or len(self.values("supervised/loss"))

    def values(self, name: str) -> list[float]:
        """Every finite value of a metric, in order."""
        return [float(m[name]) for m in self.metrics if _known(m.get(name))]

    def first(self, name: str) -> float | None:
        """The first value: before training, where the history is whole."""
        return next((float(m[name]) for m in self.metrics if _known(m.get(name))), None)

    def recent(self, name: str, steps: int = RECENT) -> float | None:
        """The mean of the last values."""
        held = self.values(name)[-steps:]
        return sum(held) / len(held) if held else None

    def since(self, name: str, odd: Callable[[float], bool]) -> int:
        """The first step of the last unbroken run of values that are `odd`; the newest step where there is none."""
        found = None
        for i, m in enumerate(self.metrics):
            if _known(m.get(name)):
                found = (found or int(m.get("step", i + 1))) if odd(float(m[name])) else None
        return found or self.step

    def option(self, name: str, default: Any = None) -> Any:
        """An option of the run; `default` where it is not known."""
        return self.config.get(name, default)

    @property
    def texts(self) -> list[str]:
        """The newest replies."""
        return [str(row.get("reply") or "") for row in self.rows]

    def usual(self, name: str) -> list[float]:
        """A text metric before training: of the first step, and of the reference's replies, where they are known."""
        said = collect.of_texts([str(row.get("reply") or "") for row in self.reference]).result()
        return [x for x in (self.first(name), said.get(name)) if x is not None]


def _known(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


# --- words for numbers ------------------------------------------------------------------------------------------------


def percent(share: float) -> str:
    """`93 %`; small shares keep a decimal."""
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.1f} %"


def number(x: float) -> str:
    """Three digits, without an exponent where that can be read."""
    return f"{x:.3g}" if 1e-3 <= abs(x) < 1e5 or x == 0 else f"{x:.1e}"


# --- from disk --------------------------------------------------------------------------------------------------------


def read_history(folder: str | Path) -> History:
    """What a run folder knows; files that are not there are left out. Raises: OperantError for an unreadable one."""
    folder = Path(folder)
    replies = sorted((folder / "rollouts").glob("step-*.parquet"))
    return History(
        metrics=[_numbers(record) for record in atomic_io.records(folder / "metrics.jsonl")],
        rows=_rows(replies[-1]) if replies else [],
        reference=_rows(folder / "probes" / "reference.parquet"),
        config=flat(_config(folder / "config.yaml")),
        evaluation=_json(folder / "evaluation.json"),
    )


def _numbers(record: Row) -> dict[str, Any]:
    """What of a record is a number, or was one that is not finite (null)."""
    held = {k: v for k, v in record.items() if v is None or isinstance(v, (int, float))}
    return {k: v if v is None or math.isfinite(v) else None for k, v in held.items()}


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path).to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise OperantError(f"{path} cannot be read ({error}); delete it") from error


def _config(path: Path) -> Any:
    return read_mapping(path) if path.is_file() else {}


def _json(path: Path) -> Any:
    if not path.is_file():
        return {}
    with atomic_io.explained(path, "read"), open(path, encoding="utf-8") as file:
        try:
            return json.load(file)
        except json.JSONDecodeError as error:
            raise OperantError(f"{path} is no JSON: {error}; delete it") from error


def flat(config: Any) -> dict[str, Any]:
    """Groups to full names; values that are no groups (a mapping of rewards, too) stay."""
    flat: dict[str, Any] = {}
    for name, value in (config if isinstance(config, Mapping) else {}).items():
        inner = value if isinstance(value, Mapping) and name != "reward" else None
        flat |= {name: value} if inner is None else {f"{name}.{k}": v for k, v in inner.items()}
    return flat
