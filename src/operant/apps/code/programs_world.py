"""A world of programs: write, read what the example tests say, write again. The last program is paid by all tests.

operant train code --env programs --env.turns 3
"""

from typing import Any

from operant.apps.code.unit_tests import LIMITS, Kind, UnitTests
from operant.rewards.feedback import Feedback


class Programs(Feedback):
    """`Feedback` of the reward `tests`: the policy reads the message of the first example that its program fails.

    An episode ends with a program that passes its examples, or after `turns` programs; that one is paid by the tests
    that decide. A task without examples shows the policy messages of these. text: what is put after each program, with
    the message in place of {message}. The other options are those of the reward.
    """

    def __init__(
        self,
        turns: int = 3,
        text: str = "\n# {message}\n",
        *,
        kind: Kind = "ladder",
        outcomes: Any = None,
        level: str = LIMITS.level,
        seconds: float = LIMITS.seconds,
        memory: int = LIMITS.memory,
        at_once: int | None = LIMITS.at_once,
        compare: str = LIMITS.compare,
    ):
        limits: Any = {"level": level, "seconds": seconds, "memory": memory, "at_once": at_once, "compare": compare}
        super().__init__(UnitTests(kind=kind, outcomes=outcomes, message="examples", **limits), turns, text)
