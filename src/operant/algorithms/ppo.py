r"""PPO: a clipped policy gradient with a critic.

[Its own page](methods/ppo.md): equation, details, presets, measured curves. In one file without the library:
[`recipes/minimal_ppo.py`](../recipes/minimal_ppo.py).
"""

from operant.algorithms.base import Needs, Rewarded
from operant.objectives import advantages, losses

ALGORITHM = Rewarded(losses.ppo, advantages.with_gae, needs=Needs(critic=True))
