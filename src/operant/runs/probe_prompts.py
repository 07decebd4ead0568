"""Fixed prompts that policy and reference answer with the same random numbers, to show the effect of training.

The answers are rows as `metrics.rollout_table` returns them, with all columns of each token.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from operant import distributed
from operant.metrics import collect
from operant.metrics.rollout_table import rows
from operant.rewards import judge
from operant.sampling import token_pieces
from operant.tally import Tally
from operant.training.learner import Learner
from operant.types import RewardFn, Rollout, Task


@dataclass(frozen=True)
class Answers:
    """The answers to the probe prompts, as rows, and their metrics."""

    rows: list[dict[str, Any]]
    metrics: dict[str, float]
    kl: float | None = None
    """`kl/per_reply` of the answers that a step would train on."""


class Probes:
    """Probe prompts and their reward. Answering them does not change the training.

    probes = Probes(learner, tasks[:32], reward)
    probes.ask().metrics
    """

    def __init__(self, learner: Learner, tasks: list[Task], reward: RewardFn | None):
        self.learner, self.reward = learner, reward
        # Each has an id of its own, so that the same text twice does not count as two samples of one task.
        self.tasks = [replace(task, id=f"probe/{i}/{task.id}") for i, task in enumerate(tasks)]

    def ask(self) -> Answers:
        """The answers of the current policy."""
        answers = self._judged(self.learner.play(self.tasks, stream="probe"))
        tally = Tally()
        scores = _scores(answers)
        tally.mean("probe/reward", scores)
        tally.add("probe/count", len(scores), 0.0)
        if answers.kl is not None:
            tally.add("probe/kl_per_reply", answers.kl)
        return replace(answers, metrics=tally.result())

    def ask_reference(self) -> Answers | None:
        """The answers of the reference; None without a reference."""
        reference = self.learner.reference
        if reference is None:
            return None
        with self.learner.engine_of(reference.policy) as engine:
            answers = self._judged(self.learner.play(self.tasks, stream="probe", engine=engine))
        tally = Tally()
        tally.mean("probe/reference_reward", _scores(answers))
        return replace(answers, metrics=tally.result())

    def query_share(self) -> dict[str, float]:
        """The share of the score's variance that the prompt explains, from two answers to each prompt."""
        twice = [task for task in self.tasks for _ in range(2)]
        answers = self._judged(self.learner.play(twice, stream="probe"))
        known = [row for row in answers.rows if row["reward"] is not None]
        share = collect.query_share([row["reward"] for row in known], [row["group"] for row in known])
        return {} if share is None else {"probe/query_share": share}

    def _judged(self, rollouts: list[Rollout]) -> Answers:
        learner = self.learner
        with learner.timing("probe"):
            judged = distributed.together(lambda: judge(self.reward, learner.as_seen(rollouts), pays=learner.pays))
            batch, places = learner.preview(rollouts, judged.scores)
            pieces = partial(token_pieces, learner.policy.tokenizer)
            table = rows(rollouts, judged.scores, judged.parts, batch, places, pieces, judged.remarks)
            kl = collect.of_batch(batch, 0.0).result().get("kl/per_reply")
        return Answers(table, {}, kl)


def _scores(answers: Answers) -> list[float]:
    return [row["reward"] for row in answers.rows if row["reward"] is not None]
