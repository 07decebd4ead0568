"""The handler of a worker that runs a reward: plain rollouts are rebuilt, judged, and the answers made plain."""

from collections.abc import Callable
from typing import Any

from operant.import_by_name import find_function
from operant.sandbox import reward_call
from operant.sandbox.serialise import answer_to_plain, as_list, rollout_from_plain


def reward(spec: str) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    """The reward `module:function` or `file.py:function` as a function from plain rollouts to plain answers."""
    place, _, name = spec.rpartition(":")
    function = find_function("reward", place, name)

    def judge(rollouts: list[dict[str, Any]]) -> dict[str, Any]:
        returned = reward_call.call(function, [rollout_from_plain(rollout) for rollout in rollouts])
        answers = as_list(returned)
        if answers is None:
            return {"odd": "None" if returned is None else f"one {type(returned).__name__}"}
        return {"answers": [answer_to_plain(answer) for answer in answers]}

    return judge
