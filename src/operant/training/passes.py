"""What a step computes of its replies, from rows to what is descended on: the passes before the update.

A learner makes them once a step; `operant replay` makes those of a refused step again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from operant.algorithms import Algorithm
from operant.models.policy import Policy
from operant.models.reference import PolicyCopy
from operant.options import values
from operant.rollouts.collate import collate, nothing
from operant.sampling import Sampling
from operant.training.lessons import Lesson
from operant.training.microbatch import Budget
from operant.training.objective import Objective, minibatch_whitening
from operant.training.scoring import Ends, ends, observe, pay, with_ends, with_states
from operant.types import Batch


@dataclass
class Passes:
    """Under the options of a learner, by group."""

    policy: Policy
    reference_copy: PolicyCopy | None
    """What KL is measured against."""
    algorithm: Algorithm
    options: Mapping[str, Any]
    budget: Budget

    @property
    def reference(self) -> Policy | None:
        return None if self.reference_copy is None else self.reference_copy.policy

    def given(self) -> dict[str, Any]:
        """The options by name."""
        return {f"{g}.{k}": v for g, made in self.options.items() for k, v in values(made).items()}

    def looked_at(self, lesson: Lesson, sampling: Sampling) -> tuple[Batch, Ends, Batch]:
        """The replies as rows, what the critic is to be asked after, and the rows with what decoding did not tell."""
        batch, after = self.collated(lesson)
        return batch, after, self.observed(batch, after, sampling)

    def collated(self, lesson: Lesson) -> tuple[Batch, Ends]:
        """The replies as rows, and what the critic is to be asked after, by episode."""
        if not lesson.rollouts:  # another rank has some
            return nothing(self.policy.numbers).to(self.policy.device), {}
        joined, lengths_too = not self.policy.encoder_decoder, self.options["learner"].on_length == "bootstrap"
        batch = collate(lesson.rollouts, lesson.scores, joined=joined, numbers=self.policy.numbers)
        after = ends(lesson.rollouts, lengths_too=lengths_too) if self.policy.has_values else {}
        return batch.to(self.policy.device), after

    def observed(self, batch: Batch, after: Mapping[int, Sequence[list[int]]], sampling: Sampling) -> Batch:
        """The batch with what decoding did not tell. Of given replies, nothing is asked: their loss is all there is."""
        if self.algorithm.source == "data":
            return with_states(batch, self.policy, self.budget.tokens)
        again, kl, micro = self.options["learner"].rescore, self.options["kl"], self.budget.tokens
        again = self.policy.rounds if again is None else again
        batch = observe(batch, self.policy, self.reference, sampling, kl, micro_tokens=micro, again=again)
        return with_ends(batch, after, self.policy, micro)

    def credited(self, batch: Batch, coef: float) -> Batch:
        """The batch with KL paid at `coef` a nat, and advantages."""
        batch = pay(batch, coef, direct=self.options["kl"].direct)
        if self.algorithm.advantage is not None:
            batch = self.algorithm.advantage(batch, **self.options["advantage"])
        return batch

    def objective(self, sampling: Sampling) -> Objective:
        """What is descended on."""
        row, loss, advantage = self.algorithm, self.options["loss"], self.options["advantage"]
        return Objective(
            loss=partial(row.loss, **loss),
            unit=row.unit,
            per=row.per,
            horizon=sampling.max_tokens,
            entropy_gradient=bool(loss.get("entropy_coef")),
            whiten=minibatch_whitening(advantage.get("whiten_scope", "none"), advantage.get("unbiased", False)),
            kl=self.options["kl"] if self.reference is not None else None,
            reference=self.reference,
        )
