"""Worlds by name. Each is a file of this package; other packages add theirs as entry points of `operant.envs`."""

from operant.import_by_name import Table

ENVS = Table(
    "environment",
    "operant.envs",
    {"feedback": "operant.rewards.feedback:Feedback", "single_turn": "operant.envs.single_turn:SingleTurn"},
)
"""The class or function that makes each environment; its arguments are the options `env.*`."""
