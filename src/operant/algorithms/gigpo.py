r"""GiGPO: attempts at one task are compared, and so are their turns that begin in the same state; no critic.

[Feng et al. 2025](https://arxiv.org/abs/2505.10978). For worlds of many turns. Several attempts at each task form a
group, and are compared as in GRPO. In addition, all turns of the group that begin in the same state are compared by the
returns from there on, which says which of the actions in that state was the better one:

$$A_{i,k} = \frac{R_i - \mathrm{mean}(R)}{\mathrm{std}(R)}
  + \omega\,\frac{G_{i,k} - \mathrm{mean}(G_s)}{\mathrm{std}(G_s)}, \qquad
  G_{i,k} = r_{i,k} + \gamma\,G_{i,k+1}$$

$R_i$ is the sum of the rewards of attempt $i$, and $G_s$ are the returns of all turns of the group that begin in the
state $s$ of turn $k$, also of turns of one attempt. The second term is 0 in a state where only one turn begins. All
tokens of a turn have its advantage; the loss is the clipped surrogate, averaged over tokens.

- The world says which states are equal: `Step.key` is a text that is the same in the same state ([worlds](worlds.md)).
  A first turn needs none, because all attempts at a task begin alike, so that in a world of one turn GiGPO has GRPO's
  advantages times $1 + \omega$ (and takes the mean over all tokens). A later turn without a key is refused.
- A turn that is not trained on is in no comparison. It is a turn of $G$ like any other: its reward counts, and what
  comes after it is discounted by it too. $R_i$ has no discount.
- `advantage.turn_gamma` is $\gamma$, `advantage.omega` $\omega$; `advantage.scale=false` omits both divisions.
- KL is charged in the loss, as in GRPO. `samples` below 2 is refused.
"""

from collections.abc import Sequence

import torch

from operant.algorithms import grpo
from operant.algorithms.base import Comparison
from operant.objectives import losses
from operant.objectives.advantages import episode_index
from operant.objectives.turn_returns import with_states
from operant.types import Batch, OperantError, Rollout


def with_anchors(batch: Batch, rollouts: Sequence[Rollout], turn_discount: float = 1.0) -> Batch:
    """Add `anchors` to a batch of these rollouts: equal numbers for equal `Turn.key`s in a group.

    All attempts at a task begin in the same state, so a first turn needs no key. `extra` gets `discounted` [B, T]: what
    `turn_discount` has taken from the rewards of turns that are not trained on, so that whole episodes are compared by
    the plain sum of their rewards.
    """
    numbers: dict[tuple[int, str], int] = {}
    table = torch.full((max(len(rollouts), 1), max((len(r.turns) for r in rollouts), default=1)), -1)
    for episode, rollout in enumerate(rollouts):
        for index, turn in enumerate(rollout.turns):
            if index and turn.trained and not turn.key:
                raise OperantError(
                    f"algorithm=gigpo compares turns that begin in the same state, and turn {index + 1} of task "
                    f"{rollout.task.id!r} has no key: let the world's step return Step(key=...), a text that is equal "
                    "in equal states, or use grpo"
                )
            table[episode, index] = numbers.setdefault((rollout.group, turn.key), len(numbers))
    found = table.to(batch.turns.device)[batch.episodes[:, None], batch.turns.clamp(min=0)]
    taken = torch.zeros_like(batch.rewards)
    if rollouts:  # at the first action of each episode
        first, of_each = episode_index(batch)[:, 0], [discounted(rollout, turn_discount) for rollout in rollouts]
        taken.view(-1)[first] = taken.new_tensor(of_each)
    return batch.with_(anchors=torch.where(batch.actions, found, -1), extra={"discounted": taken})


def discounted(rollout: Rollout, turn_discount: float) -> float:
    """What a discount of every turn in between takes from the rewards of turns behind the trained one before them."""
    total, behind = 0.0, None
    for turn in rollout.turns:
        behind = 0 if turn.trained else None if behind is None else behind + 1
        total += turn.reward * (1 - turn_discount**behind) if behind else 0.0
    return total


ALGORITHM = Comparison(losses.surrogate, with_states, collated=with_anchors, defaults=grpo.DEFAULTS, title="GiGPO")
