"""A share of a run's own tasks that is held out for its evaluation.

training, held_out = split_off(tasks, share("10%"), seed=0)
"""

import re
from typing import Any

from operant.sampling import counter
from operant.types import OperantError, Task, shown


def share(value: Any) -> float | None:
    """The part that a percentage names, 0.1 of "10%"; None of anything else.

    Raises: OperantError for an impossible one.
    """
    found = re.fullmatch(r"\s*(-?\d{1,9}(?:\.\d{1,9})?)\s*%\s*", value) if isinstance(value, str) else None
    if found is None:
        return None
    if not 0 < (percent := float(found[1])) < 100:
        raise OperantError(f"evaluate={shown(value)}: a share of the tasks is above 0% and below 100%, such as 10%")
    return percent / 100


def rows_that_decide(part: float) -> int:
    """So many tasks tell whether that part of them leaves any to train on: with more, one is left anyway."""
    return int(0.5 / (1 - part)) + 2


def split_off(tasks: list[Task], part: float, seed: int) -> tuple[list[Task], list[Task]]:
    """The tasks to train on and those that are held out, each in the order of `tasks`.

    Which ones are held out depends on the seed and on their ids alone, so it is the same in a resumed run.
    Raises: OperantError for tasks that are too few.
    """
    count = max(1, round(part * len(tasks)))
    if count >= len(tasks):
        raise OperantError(
            f"evaluate={100 * part:g}%: of {len(tasks)} tasks none would be left to train on; give more tasks, or "
            "name a file of held-out ones"
        )
    chosen = {task.id for task in sorted(tasks, key=lambda task: counter(seed, "held out", task.id))[:count]}
    return [task for task in tasks if task.id not in chosen], [task for task in tasks if task.id in chosen]
