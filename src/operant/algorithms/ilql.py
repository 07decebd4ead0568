r"""ILQL: implicit language Q-learning; the values of tokens guide what a model of the replies says.

[Snell et al. 2022](https://arxiv.org/abs/2206.11871). It learns from replies of anyone, with rewards: recorded episodes
from elsewhere, or what the policy plays. Three heads on the policy's own states estimate V of a state and, twice, Q of
each token in it. With $Q = \min(Q_1, Q_2)$ and $\hat Q$ that of a copy that follows slowly,

$$\text{loss} = \sum_i \big(r + \gamma V(s') - Q_i(s, a)\big)^2 + L_2^\tau\big(\hat Q(s, a) - V(s)\big)
  - \alpha \sum_i \log \mathrm{softmax}\,Q_i(s)_a - \beta_{bc}\, w \log \pi(a \mid s),$$

the mean over tokens. $L_2^\tau(u) = |\tau - 1[u < 0]|\,u^2$: with $\tau$ near 1, V is that of the best tokens among
those that the replies took, and not of their mean. The third term keeps Q low where no reply has been. The language
model itself is trained to imitate the replies, with $w = 1$, or with $w = \exp(b\,(\hat Q - V))$ and
$b$ = `loss.awac_beta`. What it then says is $\pi(a \mid s)\exp(g\,Q(s, a))$ over its sum, with the guidance $g$ =
`sampling.guidance`:

```
operant train --algorithm ilql --env my_worlds.py:Maze --sampling.guidance 4
operant train --algorithm ilql --tasks prompts.txt --reward letters:e --evaluation.sampling "{guidance: 8}"
operant generate runs/ilql --guidance 8 --prompt "You are in"
```

- **Recorded episodes** come from `--replies FILE` or `learner.step(queries, responses, scores, episodes=...)`, without
  their probabilities. If there are none, the policy plays, guided if `sampling.guidance` is not 0.
- `advantage.gamma` is the discount between the tokens of a reply, and `advantage.turn_gamma` stands beside it between
  turns. `loss.tau` is the expectile, `loss.cql_coef` is $\alpha$, `loss.bc_coef` is $\beta_{bc}$.
- Q values take two times the vocabulary, for each token that is drawn or trained on; in training they exist in chunks,
  as the logits do. The heads are saved with the critic, and are loaded alone with it: an export is a language model
  for every other program. The copy for $\hat Q$ moves by 0.05 of the distance with each training step.
- A choice among given replies has no Q of its own: a world that names options is refused in training. Guidance scores
  the tokens of options as it scores all others.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from operant.algorithms.base import Algorithm, Needs
from operant.objectives.advantages import check_options, discounts_of, episode_index, gather, next_values, scatter
from operant.types import Batch, OperantError, Outputs, require


def look(batch: Batch, outputs: Callable[[str], Outputs]) -> Mapping[str, Tensor]:
    """Before the update: the smaller Q of each action by the copy that follows slowly."""
    q = outputs("target").q
    if q is None or batch.choices is not None:
        why = "which a choice among given replies has not: use a world without options"
        raise OperantError(f"algorithm ilql needs Q values of every action, {why}")
    return {"target_q": q["one"].minimum(q["two"])}


def with_discounts(batch: Batch, *, gamma: float = 0.99, turn_gamma: float = 1.0) -> Batch:
    """Add the discount between each action and the next one: `gamma`, and `gamma * turn_gamma` at the end of a turn.

    Each turn in between that is not trained on discounts by `gamma * turn_gamma` once more.
    """
    check_options(gamma=gamma, turn_gamma=turn_gamma)
    index = episode_index(batch)
    discounts = discounts_of(batch, index, gamma, turn_gamma)
    return batch.with_(extra={**batch.extra, "discount": scatter(discounts, index, batch.tokens.shape)})


def q_learning(
    out: Outputs,
    batch: Batch,
    *,
    tau: float = 0.7,
    cql_coef: float = 0.25,
    bc_coef: float = 1.0,
    awac_beta: float = 0.0,
) -> dict[str, Tensor]:
    """The loss of ILQL [B, T] (arXiv:2206.11871, equations 6 to 8).

    `tau`: the expectile of V. `cql_coef`: of the term that keeps Q low off the data. `bc_coef`: of the imitation, whose
    weights are exp(awac_beta * (Q - V)), at most 20. The batch contains whole episodes.
    """
    require(0 < tau < 1, f"loss.tau={tau}: it must lie between 0 and 1")
    if out.q is None or out.values is None:
        raise OperantError("algorithm ilql: the policy has no Q values; build it with value=ValueOptions(actions=True)")
    index, known = episode_index(batch), out.values.detach()
    ahead = next_values(gather(known, index), (index >= 0).sum(1), batch.bootstrap)
    target = batch.rewards + batch.extra["discount"] * scatter(ahead, index, batch.tokens.shape)
    errors = (out.q["one"] - target) ** 2 + (out.q["two"] - target) ** 2
    gap = batch.extra["target_q"] - out.values
    expectile = (gap.detach() < 0).to(gap).sub(tau).abs() * gap**2
    conservative = out.q["one_nll"] + out.q["two_nll"]
    weight = (awac_beta * gap.detach()).exp().clamp(max=20.0)
    imitation = -weight * out.logprobs
    return {
        "loss": errors + expectile + cql_coef * conservative + bc_coef * imitation,
        "ilql/q_error": errors.detach() / 2,
        "ilql/value_loss": expectile.detach(),
        "ilql/conservative": conservative.detach() / 2,
        "ilql/q": out.q["one"].minimum(out.q["two"]).detach(),
        "value/prediction": known,
        "supervised/loss": -out.logprobs.detach(),
    }


ALGORITHM = Algorithm(
    q_learning,
    with_discounts,
    look=look,
    copies={"target": ("polyak", 0.05)},
    with_values=("target",),
    needs=Needs(critic=True, action_values=True),
    defaults={"update.epochs": 1, "kl.coef": 0.0, "value.layers": 2, "value.init": "torch", "value.actions": True},
)
