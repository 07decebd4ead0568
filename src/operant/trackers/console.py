"""What a run shows while it runs: a progress bar at a terminal, plain lines elsewhere, and replies now and then.

    console = Console()                    # or Console(total=100)
    console.start({"steps": 100})
    console.log(12, {"reward/mean": 0.71, "kl/per_reply": 3.2, ...})

`before_after` prints the same queries' replies from before and after training, side by side.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

_SHOWN = {
    "supervised/loss": "loss {:.3f}",
    "reward/mean": "reward {:.3f}",
    "kl/per_reply": "KL {:.2f}",
    "policy/entropy": "entropy {:.2f}",
    "policy/clip_fraction": "clip {:.2f}",
}


class Console:
    """A tracker for people. At a terminal the bar moves with every step.

    total: steps of the run. every: steps between plain lines. samples_every: steps between sample replies, 0 for none.
    What is not given, the run's configuration says: `steps`, `samples_every`.
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
        self._live: Any = None
        self._first: tuple[int, float] | None = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Show the bar, at a terminal."""
        self.total = self.total or int(config.get("steps", 0))
        if self.samples_every is None:
            self.samples_every = int(config.get("samples_every", 10))
        if _is_terminal(self._output):
            self._live = _bar(self._output, self.total)
            self._live.start()

    def log(self, step: int, metrics: Mapping[str, float], /) -> None:
        """Move the bar, or print a line."""
        now = time.monotonic()
        if self._first is None:  # a resumed run does not begin at 1
            self._first = step - 1, now - metrics.get("time/step", 0.0)
        shown = [text.format(metrics[name]) for name, text in _SHOWN.items() if metrics.get(name) is not None]
        if metrics.get("tokens/per_second") is not None:
            shown.append(f"{_short(metrics['tokens/per_second'])} tok/s")
        left = (now - self._first[1]) / max(step - self._first[0], 1) * (self.total - step)
        if self._live is not None:
            clock = f"{_clock(left)} left"
            room = self._live.console.width - len(f"{step}/{self.total}") - len(clock) - 7  # bar and gaps
            while len(" ".join(shown)) > room and shown:  # a narrow window shows fewer
                shown.pop()
            self._live.update(0, total=self.total, completed=step, numbers=" ".join(shown), left=clock)
        elif step % self.every == 0 or step >= self.total:
            self._print("  ".join([f"step {step}/{self.total}", *shown, f"{_clock(left)} left"]))

    def rollouts(self, step: int, rows: Sequence[Mapping[str, Any]], /) -> None:
        """Print the first replies, every `samples_every` steps and at the end."""
        if not self.samples_every or (step % self.samples_every and step != self.total):
            return
        for row in rows[: self.samples]:
            score = "" if row.get("reward") is None else f" [{row['reward']:.2f}]"
            self._print(f"  {plain(row['query'])} | {plain(row['reply'])}{score}")

    def distributions(self, step: int, told: Mapping[str, Any], /) -> None:
        """Nothing: the page draws them."""

    def note(self, text: str) -> None:
        """Print a sentence about the run."""
        self._print(plain(text))

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            emit(text, self._output)


def before_after(rows: Sequence[tuple[str, str, float, str, float]], output: TextIO | None = None) -> None:
    """Print (query, before, score, after, score) as a table, or as plain lines where the output is no terminal."""
    out: TextIO = sys.stdout if output is None else output
    if not _is_terminal(out):
        for query, before, old, after, new in rows:
            emit(f"{plain(query)}\n  before {old:6.3f} |{plain(before)}\n  after  {new:6.3f} |{plain(after)}", out)
        return
    from rich.console import Console as RichConsole
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=True, pad_edge=False, expand=True)
    for title, ratio in (("opening", 2), ("before", 4), ("score", None), ("after", 4), ("score", None)):
        table.add_column(title, ratio=ratio, min_width=5, justify="left" if ratio else "right")
    for query, before, old, after, new in rows:
        texts = [plain(query), plain(before), f"{old:.2f}", plain(after), f"{new:.2f}"]
        table.add_row(*map(Text, texts))
    RichConsole(file=out).print(table)


def plain(text: str) -> str:
    """On one line and without characters that would move the cursor or change its colour."""
    return "".join(c if c.isprintable() else " " for c in text).rstrip()


def emit(text: str, output: TextIO) -> None:
    """Print, whatever the encoding of the output can hold."""
    encoding = getattr(output, "encoding", None) or "utf-8"
    print(text.encode(encoding, errors="replace").decode(encoding), file=output, flush=True)


def _is_terminal(output: TextIO) -> bool:
    return output.isatty() and os.environ.get("TERM") != "dumb"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(max(int(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _short(count: float) -> str:
    return f"{count:.0f}" if count < 1000 else f"{count / 1000:.1f}k" if count < 1e6 else f"{count / 1e6:.1f}M"


def _bar(output: TextIO, total: int) -> Any:
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    count, numbers, left = "{task.completed}/{task.total}", "{task.fields[numbers]}", "{task.fields[left]}"
    texts = [TextColumn(text, markup=False, table_column=Column(no_wrap=True)) for text in (count, numbers, left)]
    bar = Progress(texts[0], BarColumn(bar_width=None), *texts[1:], console=RichConsole(file=output), expand=True)
    bar.add_task("train", total=total, numbers="", left="")
    return bar
