r"""NLPO: PPO whose replies are drawn from the tokens that a slower copy of the policy finds likely.

[Ramamurthy et al. 2023](https://arxiv.org/abs/2210.01241), RL4LMs. A mask policy, a copy of the policy that is renewed
every `mask.every` steps, decides at each place which tokens may be drawn; the policy decides among them:

$$\mathcal V_t = \text{top-}p\big(\pi_\psi(\cdot \mid s_t)\big), \qquad
  \tilde\pi(a \mid s_t) = \frac{\pi(a \mid s_t)\,[a \in \mathcal V_t]}{\sum_{b \in \mathcal V_t} \pi(b \mid s_t)}$$

- The mask is part of sampling and of scoring: each token is stored with the ids that could be drawn, and travels with
  them through minibatches and ranks, so the ratio of unchanged weights is 1. PPO's ratio is that of the masked
  distribution; KL is measured between the unmasked ones of policy and reference, as there.
- **Which mask**: `sampling.top_p=0.9` with at least `sampling.top_p_least=100` tokens is the learned top-p of the
  paper; `sampling.top_k` is a learned top-k; `--mask.by policy` lets the policy itself truncate. Stop tokens are always
  allowed (`sampling.keep_stops`), but for greedy replies.
- **How old**: the copy is equal to the policy at the start, and again after every `mask.every` steps. In the released
  code of RL4LMs the sampler kept the first copy, so that its mask never changed: `--mask.every 0`, or the preset
  `rl4lms-nlpo-as-released`.
- Evaluation and probes in the run draw with the same mask. The copy takes the memory of the trained weights. It is in
  the checkpoints and not in the export, so `operant eval` and `generate` truncate the exported policy's own
  distribution.
"""

from dataclasses import replace

from operant.algorithms import ppo
from operant.algorithms.base import Algorithm

ALGORITHM: Algorithm = replace(
    ppo.ALGORITHM,
    options=("mask",),
    copies={"reference": "frozen", "mask": ("every", 5)},
    defaults={
        "sampling.top_p": 0.9,
        "sampling.top_p_least": 100,
        "sampling.keep_stops": True,
        "sampling.truncation": "stored",
    },
)
