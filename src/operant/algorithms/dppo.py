r"""DPPO: tokens are left out where the policy has moved too far in probability, not in ratio.

[Qi et al. 2026](https://arxiv.org/abs/2602.04879). A ratio of 2 is a small move for a token of probability 0.001 and a
large one for a token of 0.4. With $p$ the probability of the token now and $q$ when it was drawn, a token has no
gradient if $|p - q| > 0.15$ (`loss.distance=tv`; `kl` takes $\mathrm{KL}(q\,\|\,p)$ of the two outcomes "this token"
and "another", with 0.05) and its advantage would move it farther:

$$\text{loss} = -\frac{1}{\sum_i |y_i|}\sum_{i,t} M_{i,t}\,\min(\rho_{i,t}, 20)\,A_i$$

As in the authors' code, a token with a ratio above 20 keeps a gradient: that of $\log \pi$, with a weight of 20.

The paper's forms over the k likeliest tokens are left out: they need those tokens of the policy that drew the replies.
"""

from operant.algorithms.base import Comparison
from operant.objectives import groups, ratios

ALGORITHM = Comparison(ratios.divergence_mask, groups.with_groups)
