"""Compares models by the scores of their replies to the same tasks: a table, JSON, and a page of replies side by side.

Every number is of tasks: the scores of several replies to one task are averaged first. Differences and win rates are
between replies to the same task, and a task counts where both models have a score.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from operant.runs.judged_replies import JudgedReply
from operant.storage import atomic_io
from operant.tools.report import html
from operant.tools.report.diagnosis.intervals import of_differences, wilson
from operant.tools.report.downsample import short

SCRIPTS = ("charts.js", "models.js")
STYLES = ("style.css", "compare.css", "models.css")
MOST = 2000
"""Tasks whose replies are on the page."""
LONGEST = 4000
"""Characters of a reply on the page."""


@dataclass(frozen=True)
class Share:
    """A number with its 95 % interval, whose ends are None where there is a single task."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class ModelScore:
    """The scores of a model by one reward."""

    reward: str
    model: str
    tasks: int
    """Tasks with a score."""
    mean: float | None
    error: float | None
    """Standard error of the mean over the tasks; None for fewer than two."""
    difference: Share | None = None
    """To the first model, with its interval over the tasks, which are paired; None for the first."""
    won: Share | None = None
    """Share of the comparisons with the first model that it wins, ties halved, with Wilson's interval."""


@dataclass(frozen=True)
class Compared:
    """The replies of M models to N tasks."""

    models: Sequence[str]
    tasks: Sequence[Mapping[str, Any]]
    """[N] `id` and `prompt`, text or messages."""
    replies: Sequence[Sequence[Sequence[JudgedReply]]]
    """[M][N] the replies of each model to each task, as many for each."""
    rewards: Sequence[str]
    seed: int = 0
    """Of the bootstrap."""
    measured: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    """[M][N] by name: numbers of all replies of a model to a task, such as pass@8. They stand beside the rewards."""

    def rows(self) -> list[ModelScore]:
        names = [*self.rewards, *self.measured]
        return [self.score(name, place) for name in names for place in range(len(self.models))]

    def score(self, reward: str, place: int) -> ModelScore:
        own, first = self.known(reward, place), self.known(reward, 0)
        means = [statistics.fmean(scores) for scores in own if scores]
        mean = statistics.fmean(means) if means else None
        error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
        pairs = [(ours, theirs) for ours, theirs in zip(own, first, strict=True) if ours and theirs]
        known, none = (reward, self.models[place], len(means), mean, error), (None, None)
        if not place or not pairs:
            return ModelScore(*known)
        changes = [statistics.fmean(ours) - statistics.fmean(theirs) for ours, theirs in pairs]
        won = statistics.fmean(wins(*pair) for pair in pairs)
        ends = (of_differences(changes, seed=self.seed), wilson(won, len(pairs))) if len(pairs) > 1 else (none, none)
        return ModelScore(*known, Share(statistics.fmean(changes), *ends[0]), Share(won, *ends[1]))

    def known(self, reward: str, place: int) -> list[list[float]]:
        """[N] the scores of a model's replies to each task, without those that the reward abstained from."""
        if reward in self.measured:
            return [[number] for number in self.measured[reward][place]]
        scores = [[reply.scores[reward] for reply in replies] for replies in self.replies[place]]
        return [[score for score in of_task if score is not None] for of_task in scores]

    def tokens(self, place: int) -> float:
        return statistics.fmean(reply.tokens for replies in self.replies[place] for reply in replies)

    def table(self) -> list[dict[str, str]]:
        error = lambda row: "" if row.error is None else f" ± {row.error:.2g}"  # noqa: E731
        return [
            {
                "reward": row.reward,
                "model": row.model,
                "mean ± standard error": "no score" if row.mean is None else f"{row.mean:.4g}{error(row)}",
                "difference [95 %]": between(row.difference, "+.3g"),
                "win rate [95 %]": between(row.won, ".1%"),
                "tokens": f"{self.tokens(self.models.index(row.model)):.1f}",
                "tasks": str(row.tasks),
            }
            for row in self.rows()
        ]

    def label_rows(self) -> list[dict[str, object]]:
        """One row for each task with different replies, and the models that each is from."""
        rows = []
        for n, task in enumerate(self.tasks):
            found: dict[str, list[str]] = {}
            for model, replies in zip(self.models, self.replies, strict=True):
                for reply in replies[n]:
                    found[reply.text] = list(dict.fromkeys([*found.get(reply.text, []), model]))
            sources = [made_by[0] if len(made_by) == 1 else made_by for made_by in found.values()]
            rows += [{**task, "replies": [*found], "sources": sources}] if len(found) > 1 else []
        return rows

    def as_plain(self) -> dict[str, object]:
        replies = []
        for n, task in enumerate(self.tasks):
            listed = [
                {"source": model, "reply": reply.text, "tokens": reply.tokens, "scores": dict(reply.scores)}
                for model, of_model in zip(self.models, self.replies, strict=True)
                for reply in of_model[n]
            ]
            of_task = {name: [each[n] for each in numbers] for name, numbers in self.measured.items()}
            replies.append({**task, "replies": listed} | ({"metrics": of_task} if of_task else {}))
        lengths = {model: self.tokens(place) for place, model in enumerate(self.models)}
        return {"scores": [asdict(row) for row in self.rows()], "tokens": lengths, "tasks": replies}

    def page(self, path: str | Path, about: str) -> None:
        """Write the page. about: a sentence on how the replies were made. Raises: OperantError if the disk refuses."""
        data = {"about": about, "models": list(self.models), "rewards": list(self.rewards), "table": self.table()}
        data |= {"all": len(self.tasks), "tasks": [self.cell(n) for n in range(min(len(self.tasks), MOST))]}
        title = " and ".join(self.models) if len(self.models) < 3 else f"{len(self.models)} models"
        atomic_io.write(path, html.page(title, data, scripts=SCRIPTS, styles=STYLES))

    def cell(self, n: int) -> dict[str, object]:
        """What the page shows of a task: the prompt, and of each model [text, scores] of each reply."""
        sides = [
            [
                [html.cut(reply.text, LONGEST), [short(reply.scores[name]) for name in self.rewards]]
                for reply in of_model[n]
            ]
            for of_model in self.replies
        ]
        return {"prompt": html.cut(as_text(self.tasks[n]["prompt"]), LONGEST), "sides": sides}


def wins(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The share of the pairs of scores that ours wins, ties halved: `wins([1.0, 2.0], [1.0]) == 0.75`."""
    return statistics.fmean((a > b) + (a == b) / 2 for a in ours for b in theirs)


def between(share: Share | None, form: str) -> str:
    if share is None:
        return ""
    ends = "" if share.low is None or share.high is None else f" [{share.low:{form}}, {share.high:{form}}]"
    return f"{share.mean:{form}}{ends}"


def as_text(prompt: object) -> str:
    if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt):
        return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt)
    return str(prompt)
