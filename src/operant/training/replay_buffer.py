"""Earlier replies that a step learns from again, for methods whose loss holds for replies from any source.

A buffer keeps the replies of past steps with their scores. The update learns from as many replies as were scored: a
share of them drawn from the buffer, with replacement, the others from those of the step. Like replies from elsewhere,
none of them has the log-probs of its sampler.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from operant import distributed
from operant.bounds import bounded, check_bounds
from operant.objectives.kl import EXACT
from operant.sampling import counter, uniforms
from operant.tally import Tally
from operant.training.options import OptionGroups
from operant.training.select import TrainingBatch, age
from operant.types import OperantError, Rollout, Task, Total, Turn


@dataclass(frozen=True)
class ReplayOptions:
    """How much a step learns from earlier replies."""

    share: float = bounded(0.0, at_least=0, at_most=1)
    """Share of the replies of each update, over all ranks, that are drawn from the buffer, in which those of the step
    itself are, too. 0: none, on-policy; 1: all, off-policy."""
    capacity: int = bounded(10_000, at_least=1)
    """Replies that the buffer keeps, over all ranks: the newest ones."""

    def __post_init__(self) -> None:
        check_bounds(self, "replay")

    def check_with(self, options: OptionGroups) -> None:
        """Refuse options of a learner, by group, with which a buffer would be used wrongly."""
        share, kl = self.share, options["kl"]
        if share and (importance := options["learner"].importance) != "none":
            raise OperantError(
                f"learner.importance={importance} with replay.share={share:g}: a reply of the buffer has no log-probs "
                "of its sampler, and the loss needs none; leave importance out"
            )
        if share and kl.loss_coef and kl.loss_kind not in EXACT:
            raise OperantError(
                f"kl.loss_kind={kl.loss_kind} with replay.share={share:g}: it is estimated from tokens that the policy "
                "has drawn, and it has not drawn those of the buffer; use kl.loss_kind=reverse, or kl.loss_coef=0"
            )
        if share and options["advantage"].get("standardise") == "group":
            raise OperantError(
                f"advantage.standardise=group with replay.share={share:g}: a reply of the buffer stands alone, without "
                "the others to its task, so its reward would become 0; use step or none"
            )


@dataclass(frozen=True)
class PastReply:
    """A reply in the buffer."""

    task: str
    """Id of its task."""
    turns: list[Turn]
    """Without what its sampler said of them."""
    score: Total
    """As it is trained on: penalised, scaled and clipped."""
    version: int
    """Of the weights that generated it."""


class ReplayBuffer:
    """The replies of past steps, equal on all ranks; what a step draws depends on seed, step and number alone,
    and not on how many ranks there are."""

    def __init__(self, options: ReplayOptions, seed: int, max_staleness: int | None = None):
        """max_staleness: replies that are more than so many steps old leave the buffer."""
        self.options, self.seed, self.max_staleness = options, seed, max_staleness
        self.kept: list[PastReply] = []
        self._then: list[PastReply] = []

    def __len__(self) -> int:
        return len(self.kept)

    def mixed(self, selected: TrainingBatch, version: int) -> TrainingBatch:
        """The replies that the update learns from, with metrics. Every rank must call.

        version: of the policy, from which the random numbers follow, too. `keep` then makes the replies of this step
        part of the buffer.
        """
        bare: dict[str, Any] = dict.fromkeys(("logprobs", "values", "allowed", "states"))  # as turns from elsewhere
        numbers = distributed.numbers([r.place for r in selected.rollouts])
        new = [
            replace(r, turns=[replace(turn, **bare) for turn in r.turns], place=number)
            for r, number in zip(selected.rollouts, numbers, strict=True)
        ]
        ages = [max(age(turn, version) for turn in r.turns) for r in selected.rollouts]
        fresh = {
            number: PastReply(r.task.id, r.turns, score, version - old)
            for number, r, score, old in zip(numbers, new, selected.scores, ages, strict=True)
        }
        of_step = {number: one for part in distributed.gathered(fresh) for number, one in part.items()}
        order = sorted(of_step)  # that of one process, so that neither the draw nor the buffer depends on the ranks
        pool = [*self.kept, *(of_step[number] for number in order)][-self.options.capacity :]
        if self.max_staleness is not None:
            pool = [one for one in pool if version - one.version <= self.max_staleness]
        keys = [counter(self.seed, "replay", version, i) for i in range(len(order))]
        count = round(self.options.share * len(order))
        drawn = [pool[int(u * len(pool))] for u in uniforms(keys, 0)[:count].tolist()]
        given_up = sorted(uniforms(keys, 1).argsort()[len(order) - count :].tolist())
        instead = {order[at]: one for at, one in zip(given_up, drawn, strict=True)}
        mine = [(i, instead[number]) for i, number in enumerate(numbers) if number in instead]
        stay = [i for i, number in enumerate(numbers) if number not in instead]
        again = [
            Rollout(Task(one.task, ""), -1 - numbers[i], one.turns, [""] * len(one.turns), place=numbers[i])
            for i, one in mine
        ]
        tally, old = Tally(), [version - one.version for _, one in mine] + [ages[i] for i in stay]
        tally.extreme("replay/size", len(pool))
        tally.mean("rollout/staleness", old)
        if old:
            tally.extreme("rollout/staleness_max", max(old))
        self._then = pool
        return replace(
            selected,
            rollouts=[new[i] for i in stay] + again,
            scores=[selected.scores[i] for i in stay] + [one.score for _, one in mine],
            places=[selected.places[i] for i in stay] + [-1] * len(mine),
            tally=selected.tally.merge(tally),
        )

    def keep(self) -> None:
        """Take in the replies of the last step, which was not refused."""
        self.kept = self._then

    def state_dict(self) -> dict[str, object]:
        """All token ids in one tensor, and the lengths and rewards of each turn."""
        turns = [turn for one in self.kept for turn in one.turns]
        ids = [token for turn in turns for token in (*turn.prompt, *turn.action)]
        sizes = [[len(turn.prompt), len(turn.action)] for turn in turns]
        paid = [[turn.end, turn.reward, turn.next_value, turn.trained] for turn in turns]
        kept = [[one.task, len(one.turns), one.score, one.version] for one in self.kept]
        return {"ids": torch.tensor(ids, dtype=torch.int32), "sizes": sizes, "paid": paid, "kept": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        pieces = iter(state["ids"].split([size for pair in state["sizes"] for size in pair]))
        paid = [dict(zip(("end", "reward", "next_value", "trained"), row, strict=True)) for row in state["paid"]]
        turns = (Turn(next(pieces).tolist(), next(pieces).tolist(), **fields) for fields in paid)
        self.kept = [PastReply(task, [next(turns) for _ in range(n)], *rest) for task, n, *rest in state["kept"]]
