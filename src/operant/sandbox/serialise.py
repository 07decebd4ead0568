"""Rollouts and a reward's answers, tasks and a world's steps, as plain data that crosses a pipe as JSON.

A rollout arrives as it was sent, with these exceptions: tuples in `target` and `info` become lists, a `Judgement` there
becomes a mapping, and `allowed`, `states` and `sampling`, which no reward reads, are left out.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from operant.types import Judgement, OperantError, Rollout, Step, Task, Turn

LEFT_OUT = ("allowed", "states", "sampling")
FIELDS = [f.name for f in fields(Judgement)]


def rollout_to_plain(rollout: Rollout) -> dict[str, object]:
    """A rollout as plain data. Raises: OperantError if `target`, `info` or a prompt holds anything else."""
    plain = _fields(rollout) | {"task": _fields(rollout.task), "turns": [_fields(turn) for turn in rollout.turns]}
    return _plain(plain, f"of task {rollout.task.id!r}, rollout")


def rollout_from_plain(plain: dict[str, Any]) -> Rollout:
    return Rollout(**plain | {"task": task_from_plain(plain["task"]), "turns": [Turn(**one) for one in plain["turns"]]})


def task_to_plain(task: Task) -> dict[str, object]:
    """A task as plain data. Raises: OperantError if its prompt, target or replies hold anything else."""
    return _plain(_fields(task), f"task {task.id!r}")


def task_from_plain(plain: Mapping[str, Any]) -> Task:
    return Task(**{**plain, **{name: tuple(plain[name]) for name in ("replies", "scores", "references")}})


def step_to_plain(step: Step) -> dict[str, object]:
    """A world's step as plain data, from which `Step(**plain)` makes it again; arrays become lists.

    Raises: OperantError if `info` holds anything else.
    """
    return _plain(_numbers(_fields(step)), "the step")


def state_to_plain(state: object) -> object:
    """A world's state, from which `state_from_plain` makes it again: tuples stay tuples, and keys may be numbers.

    Raises: OperantError if it holds anything else than plain data.
    """
    if isinstance(state, (list, tuple)):
        parts = [state_to_plain(part) for part in state]
        return {"tuple": parts} if isinstance(state, tuple) else parts
    if isinstance(state, Mapping):
        return {"dict": [[_plain(key, "a key of the state"), state_to_plain(part)] for key, part in state.items()]}
    return _plain(state, "the state, or a part of it,")


def state_from_plain(plain: object) -> object:
    if isinstance(plain, list):
        return [state_from_plain(part) for part in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, parts),) = plain.items()
    if kind == "tuple":
        return tuple(map(state_from_plain, parts))
    return {key: state_from_plain(part) for key, part in parts}


def answer_to_plain(answer: object) -> dict[str, object]:
    """One entry as {"value": ...}, a `Judgement` as {"judgement": its fields}, else {"odd": description}."""
    try:
        if is_judgement(answer):
            return {"judgement": _plain({name: _numbers(getattr(answer, name)) for name in FIELDS}, "")}
        return {"value": _plain(_numbers(answer), "")}
    except OperantError:
        return {"odd": f"{repr(answer)[:80]}, of type {type(answer).__name__}"}


def answer_from_plain(plain: object) -> object:
    """The answer that `answer_to_plain` was called with. Raises: OperantError with a description of anything else."""
    plain = plain if isinstance(plain, dict) else {}
    judgement = plain.get("judgement")
    if isinstance(judgement, dict) and [*judgement] == FIELDS:
        return Judgement(**judgement)
    if "value" in plain:
        return plain["value"]
    raise OperantError(str(plain.get("odd", "nonsense")))


def is_judgement(answer: object) -> bool:
    """Whether an answer is a `Judgement`, without fields of a subclass."""
    return isinstance(answer, Judgement) and [f.name for f in fields(answer)] == FIELDS


def _numbers(answer: Any) -> object:
    """Arrays and tensors as numbers and lists of numbers."""
    if isinstance(answer, Mapping):
        return {str(key): _numbers(value) for key, value in answer.items()}
    return answer.tolist() if hasattr(answer, "tolist") else answer


def _fields(instance: Rollout | Task | Turn | Step | Judgement) -> dict[str, object]:
    return {f.name: getattr(instance, f.name) for f in fields(instance) if f.name not in LEFT_OUT}


def _plain(value: object, where: str) -> Any:
    """`value` with tuples as lists. Raises: OperantError with the place of the first part that is not plain data."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    value = _fields(value) if is_judgement(value) else value
    if isinstance(value, (list, tuple)):
        return [_plain(part, f"{where}[{i}]") for i, part in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(part, f"{where}.{key}") for key, part in value.items()}
    kind = "a mapping whose keys are not text" if isinstance(value, Mapping) else f"of type {type(value).__name__}"
    raise OperantError(
        f"{where} is {kind}, which cannot be sent to or from a worker process: "
        "it may hold text, numbers, true and false, None, lists, and mappings with text as keys"
    )
