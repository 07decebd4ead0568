"""Rollouts as plain data and back, and what a reward may answer as plain data: what crosses a pipe, as JSON.

A rollout arrives as it was sent, but for tuples in `target` and `info` (lists there), and without `allowed`, `states`
and `sampling`, which no reward reads.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from operant.types import OperantError, Rollout, Task, Turn

LEFT_OUT = ("allowed", "states", "sampling")


def rollout_to_plain(rollout: Rollout) -> dict[str, Any]:
    """Raises: OperantError where `target`, `info` or a prompt holds something else than plain data."""
    told = _fields(rollout)
    told["task"] = _fields(rollout.task)
    told["turns"] = [_fields(turn) for turn in rollout.turns]
    return _checked(told, f"of task {rollout.task.id!r}, rollout")


def rollout_from_plain(told: Mapping[str, Any]) -> Rollout:
    """What `rollout_to_plain` made."""
    task = Task(**{**told["task"], "replies": tuple(told["task"]["replies"])})
    return Rollout(**{**told, "task": task, "turns": [Turn(**turn) for turn in told["turns"]]})


def listed(answers: Any) -> list[Any] | None:
    """What a reward has returned as a list, one entry a rollout; None where it is no list of any kind."""
    alone = isinstance(answers, (str, bytes, Mapping)) or getattr(answers, "ndim", 1) == 0
    return list(answers) if isinstance(answers, Iterable) and not alone else None


def answer_to_plain(answer: Any) -> dict[str, Any]:
    """One entry as {"value": ...}; {"odd": in words} for what no reward may return."""
    try:
        return {"value": _checked(_numbers(answer), "")}
    except OperantError:
        return {"odd": f"{repr(answer)[:80]}, a {type(answer).__name__}"}


def _numbers(answer: Any) -> Any:
    """Arrays and tensors as numbers and lists of them."""
    if isinstance(answer, Mapping):
        return {str(k): _numbers(v) for k, v in answer.items()}
    return answer.tolist() if hasattr(answer, "tolist") else answer


def _fields(made: Any) -> dict[str, Any]:
    return {f.name: getattr(made, f.name) for f in fields(made) if f.name not in LEFT_OUT}


def _checked(value: Any, where: str) -> Any:
    """`value`, all of it plain. Raises: OperantError that says where it is not."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_checked(part, f"{where}[{i}]") for i, part in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _checked(part, f"{where}.{key}") for key, part in value.items()}
    said = "a mapping whose keys are no text" if isinstance(value, Mapping) else f"a {type(value).__name__}"
    raise OperantError(
        f"{where} is {said}, which does not cross to an isolated reward: "
        "it takes text, numbers, true and false, None, lists, and mappings with text as keys"
    )
