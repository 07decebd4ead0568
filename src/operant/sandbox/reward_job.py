"""What a worker does that holds a reward: rollouts are made of plain data, judged, and the answers made plain."""

from collections.abc import Callable
from typing import Any

from operant.import_by_name import find
from operant.sandbox.serialise import answer_to_plain, listed, rollout_from_plain


def reward(spec: str) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    """The reward `module:function` or `file.py:function` as a function from plain rollouts to plain answers."""
    place, _, name = spec.rpartition(":")
    found = find("reward", place, name)

    def judge(told: list[dict[str, Any]]) -> dict[str, Any]:
        said = found([rollout_from_plain(rollout) for rollout in told])
        answers = listed(said)
        if answers is None:
            return {"odd": f"a {type(said).__name__}"}
        return {"answers": [answer_to_plain(answer) for answer in answers]}

    return judge
