"""Attempts at tasks and their scores, chunk by chunk: one chunk is judged while the next is generated.

The chunks are fixed by the tasks alone, a prompt's samples stay together, and random numbers know nothing of chunks. So
a reward that looks at one rollout at a time gives the numbers that it gives without them.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

from operant.distributed import deal
from operant.rewards import Judged, judge
from operant.rollouts.demonstrations import Demonstrations
from operant.training.learner import Learner
from operant.types import RewardFn, Rollout, Task


def attempt(
    learner: Learner, tasks: Sequence[Task], reward: RewardFn | None, *, chunks: int = 1, samples: int = 1
) -> tuple[list[Rollout], Judged]:
    """A rollout for each of this rank's tasks, and what the reward says of them. Counts `generate` and `reward`.

    `chunks`: how often the reward is called, with a part of the prompts each; above 1, in a thread of its own, one call
    after the other, and `reward` counts what was waited for it. `samples`: tasks in a row that stay together.
    Raises: OperantError of the reward; what is still being generated is given up.
    """
    mine, pays = deal([task.id for task in tasks]), learner.pays
    if chunks == 1:
        rollouts = learner.play(tasks, part=mine)
        with learner.timing("reward"):
            return rollouts, judge(reward, learner.as_seen(rollouts), pays=pays)
    rollouts: list[Rollout] = []
    asked: list[Future[Judged]] = []
    judge_of_chunks = ThreadPoolExecutor(1, thread_name_prefix="reward")
    try:
        for piece in cut(len(mine), chunks, samples):
            _raise_early(asked)
            played = learner.play(tasks, part=mine[piece])
            rollouts += played
            asked.append(judge_of_chunks.submit(judge, reward, learner.as_seen(played), pays=pays))
        with learner.timing("reward"):
            return rollouts, joined([future.result() for future in asked])
    finally:
        judge_of_chunks.shutdown(cancel_futures=True)


def given(demonstrations: Demonstrations, tasks: Sequence[Task]) -> tuple[list[Rollout], Judged]:
    """The replies of this rank's tasks, which nobody judges."""
    mine = deal([task.id for task in tasks])
    rollouts = demonstrations.rollouts([tasks[i] for i in mine], mine)
    return rollouts, judge(None, rollouts)


def cut(count: int, chunks: int, samples: int) -> Iterator[slice]:
    """Slices of `count` tasks, as equal as can be, whose borders are multiples of `samples`."""
    prompts = -(-count // samples)
    edges = [round(i * prompts / chunks) * samples for i in range(chunks + 1)]
    yield from (slice(a, min(b, count)) for a, b in pairwise(edges) if a < b)


def joined(judged: Sequence[Judged]) -> Judged:
    """What was said of the chunks as if it had been said at once."""
    names = dict.fromkeys(name for part in judged for name in part.parts)
    # A chunk that nobody judged is told under the reward's own name, beside which it may have named parts.
    kept = [n for n in names if all(n in j.parts for j in judged) or any(_said(j, n) for j in judged)]
    parts = {n: [v for j in judged for v in j.parts.get(n, [None] * len(j.scores))] for n in kept or names}
    failures = any(j.outcomes for j in judged)
    outcomes = [j.outcome(i) for j in judged for i in range(len(j.scores))] if failures else []
    notes = [note for j in judged for note in j.notes]
    return Judged([score for j in judged for score in j.scores], parts, outcomes, notes)


def _said(judged: Judged, name: str) -> bool:
    return any(value is not None for value in judged.parts.get(name, []))


def _raise_early(asked: Sequence[Future[Judged]]) -> None:
    """A reward that has failed by now ends the step before more is generated."""
    for future in asked:
        if future.done():
            future.result()
