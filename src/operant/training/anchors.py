"""The states in which turns begin, for methods that compare turns of the same state."""

from collections.abc import Sequence

import torch

from operant.types import Batch, OperantError, Rollout


def with_anchors(batch: Batch, rollouts: Sequence[Rollout], algorithm: str, turn_discount: float = 1.0) -> Batch:
    """Add `anchors` to a batch of these rollouts: equal numbers for equal `Turn.key`s in a group.

    All attempts at a task begin in the same state, so a first turn needs no key. `extra` gets `discounted` [B, T]: what
    `turn_discount` has taken from the rewards of turns that are not trained on, so that whole episodes are compared by
    the plain sum of their rewards.
    Raises: OperantError for a later turn that is trained on and has none.
    """
    numbers: dict[tuple[int, str], int] = {}
    table = torch.full((max(len(rollouts), 1), max((len(r.turns) for r in rollouts), default=1)), -1)
    for episode, rollout in enumerate(rollouts):
        for index, turn in enumerate(rollout.turns):
            if index and turn.trained and not turn.key:
                raise OperantError(
                    f"algorithm={algorithm} compares turns that begin in the same state, and turn {index + 1} of task "
                    f"{rollout.task.id!r} has no key: let the world's step return Step(key=...), a text that is equal "
                    "in equal states, or use grpo"
                )
            table[episode, index] = numbers.setdefault((rollout.group, turn.key), len(numbers))
    found = table.to(batch.turns.device)[batch.episodes[:, None], batch.turns.clamp(min=0)]
    taken, seen = torch.zeros_like(batch.rewards), set[int]()
    for row, episode in enumerate(batch.episodes.tolist() if rollouts else ()):
        if episode not in seen:  # at the first action of an episode
            taken[row, int(batch.actions[row].int().argmax())] = discounted(rollouts[episode], turn_discount)
        seen.add(episode)
    return batch.with_(anchors=torch.where(batch.actions, found, -1), extra={"discounted": taken})


def discounted(rollout: Rollout, turn_discount: float) -> float:
    """What a discount of every turn in between takes from the rewards of turns behind the trained one before them."""
    total, behind = 0.0, None
    for turn in rollout.turns:
        behind = 0 if turn.trained else None if behind is None else behind + 1
        total += turn.reward * (1 - turn_discount**behind) if behind else 0.0
    return total
