"""The console output of a run: a progress bar in a terminal, plain lines elsewhere, and sample replies.

console = Console()                    # or Console(total=100)
console.start({"steps": 100})
console.log(12, {"reward/mean": 0.71, "kl/per_reply": 3.2, ...})
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

_NUMBERS = {
    "supervised/loss": "loss {:.3f}",
    "preference/loss": "loss {:.3f}",
    "preference/accuracy": "accuracy {:.0%}",
    "game/won": "won {:.0%}",
    "reward/mean": "reward {:.3f}",
    "kl/per_reply": "KL {:z.2f}",
    "policy/entropy": "entropy {:.2f}",
    "policy/clip_fraction": "clip {:.2f}",
}

LONGEST = 300
"""Characters of a query or reply among the samples."""


def without_given_kl(metrics: Mapping[str, float]) -> Mapping[str, float]:
    """The metrics without the KL of given replies, which is a log-ratio: the policy has not drawn them."""
    if "reward/mean" in metrics or not {"preference/loss", "supervised/loss"} & metrics.keys():
        return metrics
    return {name: value for name, value in metrics.items() if name != "kl/per_reply"}


class Console:
    """A tracker that prints. In a terminal it shows a progress bar.

    total: number of steps (0: from the option `steps`). every: steps between plain lines. samples_every: steps between
    sample replies, 0 for none (None: from the option `samples_every`). samples: replies per sample.
    """

    def __init__(
        self,
        total: int = 0,
        *,
        every: int = 1,
        samples_every: int | None = None,
        samples: int = 2,
        output: TextIO | None = None,
    ) -> None:
        self.total, self.every, self.samples_every, self.samples = total, max(every, 1), samples_every, samples
        self._output: TextIO = sys.stdout if output is None else output
        self._bar: Any = None
        self._begin: tuple[int, float] | None = None
        """The step before the first one of this process, and the time at which that began."""

    def start(self, config: Mapping[str, object]) -> None:
        self.total = self.total or int(config.get("steps", 0))
        if self.samples_every is None:
            self.samples_every = int(config.get("samples_every", 10))
        if _is_terminal(self._output):
            from rich.console import Console as RichConsole
            from rich.progress import BarColumn, Progress, TextColumn
            from rich.table import Column

            count, numbers, left = (
                TextColumn(text, markup=False, table_column=Column(no_wrap=True))
                for text in ("{task.completed}/{task.total}", "{task.fields[numbers]}", "{task.fields[left]}")
            )
            columns = (count, BarColumn(bar_width=None), numbers, left)
            self._bar = Progress(*columns, console=RichConsole(file=self._output), expand=True)
            self._bar.add_task("train", total=self.total, numbers="", left="")
            self._bar.start()

    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        numbers, clock = self.line(step, metrics)
        if self._bar is not None:
            width = self._bar.console.width - len(f"{step}/{self.total}") - len(clock) - 7  # bar and gaps
            while len(" ".join(numbers)) > width and numbers:  # a narrow window shows fewer numbers
                numbers.pop()
            self._bar.update(0, total=self.total, completed=step, numbers=" ".join(numbers), left=clock)
        elif step % self.every == 0 or step >= self.total:
            self._print("  ".join([f"step {step}/{self.total}", *numbers, clock]))

    def line(self, step: int, metrics: Mapping[str, float]) -> tuple[list[str], str]:
        now = time.monotonic()
        if self._begin is None:  # a resumed run does not begin at step 1
            self._begin = step - 1, now - metrics.get("time/step", 0.0)
        metrics = without_given_kl(metrics)
        numbers = [text.format(metrics[name]) for name, text in _NUMBERS.items() if metrics.get(name) is not None]
        outcomes = {name.removeprefix("outcome/"): x for name, x in metrics.items() if name.startswith("outcome/")}
        numbers += [f"{plain(name)} {share:.2f}" for name, share in list(outcomes.items())[:4]]
        if (speed := metrics.get("tokens/per_second")) is not None:
            short = f"{speed:.0f}" if speed < 1000 else f"{speed / 1000:.1f}k" if speed < 1e6 else f"{speed / 1e6:.1f}M"
            numbers.append(f"{short} tok/s")
        left = (now - self._begin[1]) / max(step - self._begin[0], 1) * (self.total - step)
        return numbers, f"{duration(left)} left"

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]], /) -> None:
        if not self.samples_every or (step % self.samples_every and step != self.total):
            return
        for row in episodes(rows, self.samples):
            score = "" if row.get("reward") is None else f" [{row['reward']:.2f}]"
            outcome, message = row.get("outcome") or "", row.get("message") or ""
            # A message may begin with the outcome: `tests: failed test: ...` of `tests/failed test`.
            message = message.removeprefix(outcome.replace("/", ": ", 1) + ": ")
            remark = ": ".join(filter(None, (outcome, message)))
            remark = remark if len(remark) <= 100 else remark[:97] + "..."
            given = "from the data: " if row["given"] else ""
            texts = [x if len(x) <= LONGEST else f"{x[:LONGEST]}..." for x in (row["query"], *row["replies"])]
            self._print(f"  {given}{' | '.join(map(plain, texts))}{score}{remark and f' ({plain(remark)})'}")

    def distributions(self, step: int, parts: Mapping[str, Any], /) -> None:
        """Do nothing: distributions are in the report."""

    def note(self, text: str) -> None:
        self._print(plain(text))

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            emit(text, self._output)


def episodes(rows: Sequence[Mapping[str, Any]], most: int) -> list[dict[str, Any]]:
    """The last rows of the first attempts of a step, each with its `replies`, or the first two and the last one with
    their number between, and whether all are `given`, and none is the policy's."""
    by_attempt: dict[object, list[Mapping[str, Any]]] = {}
    for place, row in enumerate(rows):
        attempt = row.get("rollout", place)
        if attempt not in by_attempt and len(by_attempt) == most:
            break
        by_attempt.setdefault(attempt, []).append(row)
    found = []
    for turns in by_attempt.values():
        replies = [turn["reply"] for turn in turns]
        replies = replies if len(replies) <= 3 else [*replies[:2], f"... {len(replies)} turns ...", replies[-1]]
        given = all(turn.get("logprobs") is None for turn in turns)
        found.append({**turns[-1], "replies": replies, "given": given})
    return found


def before_after(rows: Sequence[tuple[str, str, float | None, str, float | None]], out: TextIO | None = None) -> None:
    """Print rows of (query, before, score or None, after, score or None), as a table in a terminal, else as lines."""
    out = sys.stdout if out is None else out
    if not _is_terminal(out):
        for query, before, old, after, new in rows:
            scores = ["" if score is None else f"{score:6.3f} " for score in (old, new)]
            emit(f"{plain(query)}\n  before {scores[0]}|{plain(before)}\n  after  {scores[1]}|{plain(after)}", out)
        return
    from rich.console import Console as RichConsole
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=True, pad_edge=False, expand=True)
    for title, ratio in (("opening", 2), ("before", 4), ("score", None), ("after", 4), ("score", None)):
        table.add_column(title, ratio=ratio, min_width=5, justify="left" if ratio else "right")
    for query, before, old, after, new in rows:
        scores = ["" if score is None else f"{score:.2f}" for score in (old, new)]
        texts = [plain(query), plain(before), scores[0], plain(after), scores[1]]
        table.add_row(*map(Text, texts))
    RichConsole(file=out).print(table)


def plain(text: str) -> str:
    """Return the text on one line, without characters that would move the cursor or change its colour."""
    return "".join(c if c.isprintable() else " " for c in text).rstrip()


def emit(text: str, output: TextIO | None = None) -> None:
    """Print lines to an output: nothing that controls a terminal, and `?` for what its encoding lacks."""
    output = sys.stdout if output is None else output
    text = "".join(c if c.isprintable() or c in "\t\n" else " " for c in text)
    print(text.encode(coding := output.encoding or "utf-8", "replace").decode(coding), file=output, flush=True)


def emit_json(value: object, indent: int | None = None) -> None:
    """Print a value as JSON, in which characters that may control a terminal are escaped."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    emit("".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text))


def _is_terminal(output: TextIO) -> bool:
    return output.isatty() and os.environ.get("TERM") != "dumb"


def duration(seconds: float) -> str:
    """Format seconds as minutes, or as hours: `1:05`, `2:00:07`."""
    minutes, seconds = divmod(max(int(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
