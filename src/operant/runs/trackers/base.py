"""The common part of the trackers that copy a run to another package: `TensorBoard`, `WandB` and `Trackio`.

`ExternalTracker` decides what is logged, and when. A subclass writes it: `begin(config)`, `write(step, data)` and
`end(failed)`. NaN and infinity are left out, and so are the steps that an earlier process of the same run has logged.
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

COLUMNS = ("step", "query", "reply", "reward", "KL", "tokens", "end", "outcome", "message")
"""The columns of the table of replies. KL is in nats, summed over the reply."""
REPLIES = 32
"""The largest number of replies that are logged of a step."""
PROJECT = "operant"
"""The project of the runs in a tracker with several projects, unless the tracker's environment variable names one."""


@dataclass(frozen=True)
class StepData:
    """A part of the data of one step. Histograms have bins and counts, not the single values."""

    scalars: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)
    replies: list[list[object]] = field(default_factory=list)


class ExternalTracker:
    """A tracker that copies a run to another package, with its files in the folder `name` of the run folder.

    run_folder: the folder of the run. log_message: adds a sentence to the log of the run.
    """

    name = ""
    """The name of the tracker, of its package and of its extra."""

    def __init__(self, run_folder: str | Path, log_message: Callable[[str], object]) -> None:
        self.run_folder, self.folder = Path(run_folder), Path(run_folder) / self.name
        self._state_path = self.folder / "operant.json"
        self.log_message = log_message
        self.samples_every = self.total_steps = 0
        self._handled = sys.exc_info()[1]  # a program may train again where it handles an error
        self.state: dict[str, Any] = {}
        """What a resumed run has to know, stored in `operant.json`: the last step, and the name or id of the run."""
        self.skip_until = 0
        """Steps up to this one were logged by an earlier process of the run, and are skipped."""

    def begin(self, config: Mapping[str, object]) -> None:
        """Begin a new run, or continue the one that `state` names."""
        raise NotImplementedError

    def write(self, step: int, data: StepData) -> None:
        """Write a part of a step. The parts of one step are written one after another."""
        raise NotImplementedError

    def end(self, failed: bool) -> None:
        """End the run. failed: whether it ends with an error."""
        raise NotImplementedError

    def start(self, config: Mapping[str, object]) -> None:
        self.total_steps, self.samples_every = int(config.get("steps", 0)), int(config.get("samples_every", 10))
        with atomic_io.explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        if self._state_path.is_file():
            self.state = json.loads(self._state_path.read_text(encoding="utf-8"))
        self.skip_until = self.state.get("step", 0)
        self.begin(config)
        self._save_state()

    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        """Log the metrics of a step. They are its last part."""
        self._write(step, StepData(finite(metrics)))
        self.state["step"] = max(step, self.state.get("step", 0))
        self._save_state()

    def distributions(self, step: int, parts: Mapping[str, Any], /) -> None:
        """Log the histograms of a step, and its norms by block as scalars such as `blocks/gradient/block 0`."""
        kinds = parts.get("blocks", {}).items()
        norms = {f"blocks/{kind}/{block}": norm for kind, blocks in kinds for block, norm in blocks.items()}
        groups = {group: parts.get(group, {}) for group in ("histograms", "gradients")}.items()
        given = {f"{group}/{name}": x for group, named in groups for name, x in named.items() if x is not None}
        histograms = {n: x if isinstance(x, Histogram) else Histogram.from_plain(x) for n, x in given.items()}
        self._write(step, StepData(finite(norms), histograms))

    def rollouts(self, step: int, rows: Sequence[Mapping[str, object]], /) -> None:
        if self.samples_every and (step % self.samples_every == 0 or step == self.total_steps):
            self._write(step, StepData(replies=replies(step, rows)))

    def close(self) -> None:
        """End the run, as failed if an error ended it. A caller who stops iterating over steps is not an error."""
        error = sys.exc_info()[1]
        self.end(failed=error not in (None, self._handled) and not isinstance(error, GeneratorExit))

    def _write(self, step: int, data: StepData) -> None:
        if step > self.skip_until:
            try:
                self.write(step, data)
            except Exception:  # a tracker that failed is dropped, so its `close` is never called
                with suppress(Exception):
                    self.end(failed=True)
                raise

    def _save_state(self) -> None:
        atomic_io.write(self._state_path, json.dumps(self.state))


def finite(metrics: Mapping[str, object]) -> dict[str, float]:
    numbers = {name: x for name, x in metrics.items() if name != "step" and isinstance(x, (int, float))}
    return {name: float(x) for name, x in numbers.items() if math.isfinite(x)}


def edges(histogram: Histogram) -> list[float]:
    return [(histogram.start + i) * histogram.width for i in range(len(histogram.counts) + 1)]


def replies(step: int, rows: Sequence[Mapping[str, Any]]) -> list[list[object]]:
    """Return the first `REPLIES` replies as lists in the order of `COLUMNS`; of one whose KL has NaN, it is None."""
    table = []
    for row in rows[:REPLIES]:
        kl = None if row.get("kl") is None or None in row["kl"] else float(sum(row["kl"]))
        others = [row.get(name) for name in ("reply_tokens", "end", "outcome", "message")]
        table.append([step, row["query"], row["reply"], row.get("reward"), kl, *others])
    return table


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress all output of the block, because the console belongs to the run."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield
