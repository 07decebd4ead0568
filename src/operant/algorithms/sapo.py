r"""SAPO: a sigmoid of the ratio in the place of the clip.

[Gao et al. 2025](https://arxiv.org/abs/2511.20347). With GRPO's advantage and $f(\rho) =
\frac{4}{\tau}\,\sigma(\tau(\rho - 1))$, where $\tau$ is 1 for advantages above 0 and 1.05 for others:

$$\text{loss} = -\frac{1}{n}\sum_i \frac{1}{|y_i|}\sum_t f(\rho_{i,t})\,A_i$$

At $\rho = 1$ the gradient is the policy gradient; away from it, it fades instead of ending. The larger temperature
lets tokens of bad replies fade sooner, as lowering one token raises all others, most of them never drawn.
"""

from operant.algorithms.base import Comparison
from operant.objectives import groups, ratios

ALGORITHM = Comparison(ratios.soft_gate, groups.with_groups, per="episode")
