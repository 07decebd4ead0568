"""A reward: any function from rollouts to one score each. Its further arguments are its options."""

from operant.types import Rollout


def brevity(rollouts: list[Rollout], *, target: int = 20, slope: float = 0.05) -> list[float]:
    """1 for a reply of at most `target` characters, less by `slope` for each character above.

    Options: --reward brevity --reward.target 12
    """
    return [1.0 - slope * max(0, len(rollout.reply) - target) for rollout in rollouts]
