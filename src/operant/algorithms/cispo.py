r"""CISPO: the ratio is a weight that is cut and has no gradient, so that every token is learnt from.

[MiniMax-M1, 2025](https://arxiv.org/abs/2506.13585), and [ScaleRL, 2025](https://arxiv.org/abs/2510.13786):

$$\text{loss} = -\frac{1}{\sum_i |y_i|}\sum_{i,t} \mathrm{stop}(w_{i,t})\, A_i \log \pi(y_{i,t}), \qquad
  w = \min(\rho, \text{bound})$$

A clipped surrogate has no gradient at a token beyond its bound; here it keeps the gradient of the bound. The bound has
two published meanings under one name: at most `loss.high` (`loss.bound=weight`: ScaleRL, TRL's `epsilon_high`; 5 is in
the middle of the 4 to 8 that ScaleRL found alike), and at most 1 + `loss.high` (`loss.bound=excess`: MiniMax-M1,
verl). The papers set no lower bound, verl 1 - `clip_ratio_low`; `loss.low` sets one.
"""

from operant.algorithms.base import Algorithm, Needs
from operant.objectives import advantages, ratios

DEFAULTS: dict[str, object] = {"samples": 8, "update.epochs": 1, "kl.coef": 0.0}

ALGORITHM = Algorithm(
    ratios.clipped_weight,
    advantages.with_groups,
    copies={"reference": "frozen"},
    needs=Needs(samples=2),
    kl=("loss",),
    defaults=DEFAULTS,
)
