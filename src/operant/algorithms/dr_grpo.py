r"""Dr. GRPO: GRPO without a deviation, and every token with one weight for all lengths.

[Liu et al. 2025](https://arxiv.org/abs/2503.20783). The advantage is $r_i - \mathrm{mean}(r)$, and a reply's sum over
its tokens is divided by the same constant, the limit of length `sampling.max_tokens`. So neither easy nor hard
prompts, and neither short nor long replies, are preferred: the gradient is that of the mean score, times a constant.
`grpo` divides by the group's deviation and by the length of each reply. TRL's `loss_type="dr_grpo"` divides by the
same constant, and keeps the deviation unless `scale_rewards=False`; verl's `seq-mean-token-sum-norm` divides by the
width of the batch unless `loss_scale_factor` is set, and keeps the deviation unless `norm_adv_by_std_in_grpo=False`.
"""

from operant.algorithms.base import COMPARED, Comparison
from operant.objectives import groups, losses

ALGORITHM = Comparison(
    losses.surrogate,
    groups.with_groups,
    per="horizon",
    title="Dr. GRPO",
    defaults=COMPARED | {"advantage.scale": False},
)
