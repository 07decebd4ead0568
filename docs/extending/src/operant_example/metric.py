"""A metric of held-out replies. Its further arguments are its options."""

from operant.types import Rollout


def share_of_digits(rollouts: list[Rollout], *, least: int = 1) -> list[float]:
    """1 for each reply with at least `least` digits. Options: --evaluation.metrics share_of_digits"""
    return [float(sum(c.isdigit() for c in rollout.reply) >= least) for rollout in rollouts]
