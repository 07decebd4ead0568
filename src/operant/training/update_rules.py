"""The update rules by name. A new rule is a file of its own beside `update.py`, and an entry here.

A rule takes the arguments of `update` and returns an `UpdateResult`: the metrics, and the optimizer step that was
refused because of NaN or infinity, if any. Every rank calls it, once a training step.
"""

from collections.abc import Callable

from operant.training.update import UpdateResult, update

UPDATE_RULES: dict[str, Callable[..., UpdateResult]] = {"gradient": update}
"""Name -> the function that moves the weights. `Algorithm.update` chooses one."""
