"""A fixed set of queries that policy and reference answer with the same random numbers: what training changed, to read.

The answers are rows as `metrics.rollout_table` makes them, with everything that is known of each token.
"""

from dataclasses import dataclass, replace
from typing import Any

from operant import distributed
from operant.engines.native.engine import NativeEngine
from operant.metrics import collect
from operant.metrics.rollout_table import rows
from operant.rewards import judge
from operant.sampling import token_pieces
from operant.tally import Tally
from operant.training.learner import Learner
from operant.types import RewardFn, Rollout, Task


@dataclass(frozen=True)
class Answers:
    """What was said to the probe queries, as rows, and what it came to as metrics."""

    rows: list[dict[str, Any]]
    metrics: dict[str, float]
    kl: float | None = None
    """`kl/per_reply` of those that would be learnt from."""


class Probes:
    """`probes = Probes(learner, tasks[:32], reward)`; `probes.ask()` changes nothing of the training."""

    def __init__(self, learner: Learner, tasks: list[Task], reward: RewardFn | None):
        self.learner, self.reward = learner, reward
        # A query of its own each, so that the same text twice is not two attempts at one task.
        self.tasks = [replace(task, id=f"probe/{i}/{task.id}") for i, task in enumerate(tasks)]

    def ask(self) -> Answers:
        """The policy's answers now."""
        answers = self._judged(self.learner.play(self.tasks, stream="probe"))
        tally = Tally()
        tally.mean("probe/reward", _scores(answers))
        if answers.kl is not None:
            tally.add("probe/kl_per_reply", answers.kl)
        return replace(answers, metrics=tally.result())

    def ask_reference(self) -> Answers | None:
        """The reference's answers; None where there is none."""
        reference = self.learner.reference
        if reference is None:
            return None
        answers = self._judged(self.learner.play(self.tasks, stream="probe", engine=NativeEngine(reference.policy)))
        tally = Tally()
        tally.mean("probe/reference_reward", _scores(answers))
        return replace(answers, metrics=tally.result())

    def query_share(self) -> dict[str, float]:
        """How much of the score the query decides, from two answers of the policy to each."""
        twice = [task for task in self.tasks for _ in range(2)]
        answers = self._judged(self.learner.play(twice, stream="probe"))
        known = [row for row in answers.rows if row["reward"] is not None]
        share = collect.query_share([row["reward"] for row in known], [row["group"] for row in known])
        return {} if share is None else {"probe/query_share": share}

    def _judged(self, rollouts: list[Rollout]) -> Answers:
        learner = self.learner
        with learner.timing("probe"):
            judged = distributed.together(lambda: judge(self.reward, learner.as_seen(rollouts), pays=learner.pays))
            batch, kept = learner.preview(rollouts, judged.scores)
            tokenizer = learner.policy.tokenizer
            told = rows(rollouts, judged.scores, judged.parts, batch, kept, lambda ids: token_pieces(tokenizer, ids))
            kl = collect.of_batch(batch, 0.0).result().get("kl/per_reply")
        return Answers(told, {}, kl)


def _scores(answers: Answers) -> list[float]:
    return [row["reward"] for row in answers.rows if row["reward"] is not None]
