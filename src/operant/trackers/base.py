"""What a tracker shows of a run, and what all of them share: `TensorBoard`, `WandB` and `Trackio` only write it down.

A subclass has `begin(config)`, `write(step, Shown)` and `shut(failed)`. A number that is not finite is left out; so is
a step that an earlier session of the same run has told already.
"""

import io
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from operant.storage import atomic_io
from operant.tally import Histogram

COLUMNS = ("step", "query", "reply", "reward", "KL", "tokens", "end")
"""Of the table of replies; KL in nats, summed over the reply."""
REPLIES = 32
"""At most so many replies of a step."""
PROJECT = "operant"
"""Where a tracker keeps several projects, runs go to this one, unless the tracker's own environment names another."""


@dataclass(frozen=True)
class Shown:
    """A part of a step. Counts stay binned: a tracker gets the grid, never the values."""

    scalars: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)
    replies: list[list[Any]] = field(default_factory=list)


class Copy:
    """A tracker that copies a run to `folder`/`name`, as far as it has not been copied.

    folder: the run folder. say: takes a sentence for the run's log.
    """

    name = ""
    """Of the tracker, of its package and of its extra."""

    def __init__(self, folder: str | Path, say: Callable[[str], Any]) -> None:
        self.run, self.folder, self.say = Path(folder), Path(folder) / self.name, say
        self.memory: dict[str, Any] = {}
        self.samples_every = self.total = self.told = 0

    def begin(self, config: Mapping[str, Any]) -> None:
        """Begin, or go on with what `memory` names; `told` is the last step that was told before."""
        raise NotImplementedError

    def write(self, step: int, shown: Shown) -> None:
        """Take a part of a step; parts of one step follow each other."""
        raise NotImplementedError

    def shut(self, failed: bool) -> None:
        """End. failed: the run ends with an error."""
        raise NotImplementedError

    # --- what the run calls -------------------------------------------------------------------------------------------

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin, or go on."""
        self.total, self.samples_every = int(config.get("steps", 0)), int(config.get("samples_every", 10))
        with atomic_io.explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        if self._memory.is_file():
            self.memory = json.loads(self._memory.read_text(encoding="utf-8"))
        self.told = self.memory.get("step", 0)
        self.begin(config)
        self._remember()

    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        """One step's numbers, which end the step."""
        self._write(step, Shown(finite(metrics)))
        self.memory["step"] = max(step, self.memory.get("step", 0))
        self._remember()

    def distributions(self, step: int, told: Mapping[str, Any], /) -> None:
        """One step's histograms, and norms by block as scalars."""
        self._write(step, Shown(norms(told), histograms(told)))

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]], /) -> None:
        """A table of replies, every `samples_every` steps and at the end."""
        if self.samples_every and (step % self.samples_every == 0 or step == self.total):
            self._write(step, Shown(replies=replies(step, rows)))

    def close(self) -> None:
        """End, and say whether an error ended the run; somebody who stops asking for steps is none."""
        self.shut(failed=sys.exc_info()[0] not in (None, GeneratorExit))

    def _write(self, step: int, shown: Shown) -> None:
        if step > self.told:
            try:
                self.write(step, shown)
            except Exception:  # nobody will call `close` on a tracker that failed
                with suppress(Exception):
                    self.shut(failed=True)
                raise

    @property
    def _memory(self) -> Path:
        return self.folder / "operant.json"

    def _remember(self) -> None:
        atomic_io.write(self._memory, json.dumps(self.memory))


def finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that can be drawn; the step itself is the axis."""
    held = {k: v for k, v in metrics.items() if k != "step" and isinstance(v, (int, float))}
    return {k: float(v) for k, v in held.items() if math.isfinite(v)}


def norms(told: Mapping[str, Any]) -> dict[str, float]:
    """`blocks/gradient/block 0` and its like."""
    blocks = told.get("blocks", {})
    return finite({f"blocks/{kind}/{block}": norm for kind, of in blocks.items() for block, norm in of.items()})


def histograms(told: Mapping[str, Any]) -> dict[str, Histogram]:
    """`histograms/reward`, `gradients/<tensor>` and their like."""
    groups = ("histograms", "gradients")
    held = {f"{group}/{name}": h for group in groups for name, h in told.get(group, {}).items() if h is not None}
    return {name: h if isinstance(h, Histogram) else Histogram.from_plain(h) for name, h in held.items()}


def edges(histogram: Histogram) -> list[float]:
    """Both ends of every bin, one more than there are bins."""
    return [(histogram.start + i) * histogram.width for i in range(len(histogram.counts) + 1)]


def replies(step: int, rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """One line a reply, in the order of `COLUMNS`."""
    return [
        [step, r["query"], r["reply"], r.get("reward"), _sum(r.get("kl")), r.get("reply_tokens"), r.get("end")]
        for r in rows[:REPLIES]
    ]


def _sum(per_token: Sequence[float] | None) -> float | None:
    return None if per_token is None else float(sum(per_token))


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing of the block reaches the console, which belongs to the run."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield
