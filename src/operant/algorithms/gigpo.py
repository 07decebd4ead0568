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
  A first turn needs none, because all attempts at a task begin alike, so that in a world of one turn GiGPO is GRPO with
  advantages times $1 + \omega$. A later turn without a key is refused.
- A turn that is not trained on is in no comparison. It is a turn of $G$ like any other: its reward counts, and what
  comes after it is discounted by it too. $R_i$ has no discount.
- `advantage.turn_gamma` is $\gamma$, `advantage.omega` $\omega$; `advantage.scale=false` omits both divisions.
- KL is charged in the loss, as in GRPO. `samples` below 2 is refused.
"""

from operant.algorithms import grpo
from operant.algorithms.base import Algorithm, Needs
from operant.objectives import losses
from operant.objectives.turn_returns import with_states

ALGORITHM = Algorithm(
    losses.surrogate,
    with_states,
    copies={"reference": "frozen"},
    needs=Needs(samples=2, keys=True),
    kl=("loss",),
    defaults=grpo.DEFAULTS,
    title="GiGPO",
)

PRESETS: dict[str, dict[str, object]] = {}
