r"""CISPO: the ratio is a weight that is cut and has no gradient, so that every token is learnt from.

[MiniMax-M1, 2025](https://arxiv.org/abs/2506.13585), and [ScaleRL, 2025](https://arxiv.org/abs/2510.13786):

$$\text{loss} = -\frac{1}{\sum_i |y_i|}\sum_{i,t} \mathrm{stop}(w_{i,t})\, A_i \log \pi(y_{i,t}), \qquad
  w = \min(\rho, \text{bound})$$

A clipped surrogate has no gradient at a token beyond its bound; here it keeps the gradient of the bound. The bound has
two published meanings under one name: at most `loss.high` (`loss.bound=weight`: ScaleRL, TRL's `epsilon_high`; 5 is in
the middle of the 4 to 8 that ScaleRL found alike), and at most 1 + `loss.high` (`loss.bound=excess`: MiniMax-M1,
verl). The papers set no lower bound, verl 1 - `clip_ratio_low`; `loss.low` sets one. Unless they are set, the bound is
0.2 in TRL, which cuts nearly every weight, and 0.8 to 1.2 in verl. The mean is over all tokens of a step, as there; the
papers' equations have it over the tokens of each group first (`update.per=group`).

`preset=scalerl` is ScaleRL's recipe: the bound 5, a mean over prompts of the mean over all their tokens
(`update.per=group`), scores less the mean of their group divided by the deviation of the batch
(`advantage.deviation=batch`: the deviation of scores less the mean of their group, where TRL's `scale_rewards="batch"`
takes that of the scores themselves), groups with equal scores left out (`learner.drop_equal`), and prompts with nine of
ten replies right drawn no more (`retire=0.9`, for rewards of 0 and 1; the paper's are -1 and 1, with the same
advantages), from 48 prompts with 16 replies each; `update.minibatch` would cut their groups. Where the model is in
bfloat16 (`model.precision`), its output head computes in float32 (`model.head_precision`), in training and in the
generation of the engine here; another engine has settings of its own. Only the rate, 5e-7, has
not been confirmed. Not in it: replies that are generated up to 8 updates ahead (PipelineRL-8; `rollouts_ahead` cannot
know which prompts retire), and interruption of long thoughts.
"""

from operant.algorithms.base import Comparison
from operant.objectives import groups, ratios

ALGORITHM = Comparison(ratios.clipped_weight, groups.with_groups)
