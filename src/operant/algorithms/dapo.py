r"""DAPO: GRPO with a higher upper clip, a mean over tokens, and a soft limit of length.

[Yu et al. 2025](https://arxiv.org/abs/2503.14476). The advantage is GRPO's, divided by the group's deviation. The
surrogate is clipped at $1 - 0.2$ and $1 + 0.28$, the loss is the mean over all tokens of a step, and there is no KL.
Equation 8 of the paper has the mean over the tokens of a group, and then over groups (`update.per=group`); verl, in
which the paper's runs were made, and TRL take all tokens of a batch, as here.

- A group whose replies all have one score teaches nothing. `redraw` plays other prompts in its place ("dynamic
  sampling"), in at most so many rounds; the paper names no bound, verl's `max_num_gen_batches` is one. What the last
  round leaves stays, with advantages of 0, so that a step has its size: `policy/advantage_zero` counts it.
  `rollout/drawn_per_used` is the price, and log.txt names the prompts that were thrown away. `Learner.step` trains on
  what it is given.
- `score.overlong_tokens` takes score from replies that come near to their limit: nothing at that many tokens before it,
  `score.overlong_penalty` (1) at it, in proportion between ("soft overlong punishment"). The paper takes a fifth of the
  limit. TRL has it as the reward `get_soft_overlong_punishment`, verl as `overlong_buffer_cfg`.
"""

from operant.algorithms.base import COMPARED, Comparison
from operant.objectives import groups, losses

ALGORITHM = Comparison(
    losses.surrogate,
    groups.with_groups,
    defaults=COMPARED | {"redraw": 4, "loss.clip": 0.2, "loss.clip_high": 0.28},
)
