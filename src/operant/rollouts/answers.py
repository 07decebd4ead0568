"""A world's answers, checked: it is the user's code, and may raise or answer anything. torch is not imported."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, get_args

import numpy as np

from operant.types import Env, Failure, OperantError, Step, Task, describe_error, shown


def name_of(env: Any) -> str:
    """The world's name in messages."""
    return getattr(env, "__name__", None) or type(env).__name__


def reset(env: Env, tasks: Mapping[int, Task]) -> dict[int, Step]:
    """The first step of each slot. Raises: OperantError as `step` does."""
    return _ask(env, "reset", tasks, tasks)


def step(env: Env, replies: Mapping[int, str], tasks: Mapping[int, Task]) -> dict[int, Step]:
    """The world's answer to the reply of each slot. `tasks`: the task of each slot, for messages.

    Raises: OperantError for an exception in the world, or an answer that is not allowed; it names the world and tasks.
    """
    return _ask(env, "step", replies, tasks)


def _ask(env: Env, call: str, given: Mapping[int, Any], tasks: Mapping[int, Task]) -> dict[int, Step]:
    world = f"world {name_of(env)!r}"
    try:
        steps: Any = getattr(env, call)(given)
    except OperantError:
        raise
    except Exception as error:
        raise OperantError(
            f"{world}: {call} raised {describe_error(error)} for {_listed(tasks, list(given))}; fix the world, or let "
            "it answer Step(failed='raised') for the episodes that cannot go on"
        ) from error
    if not isinstance(steps, Mapping):
        raise OperantError(f"{world}: {call} returned {shown(steps)}; it must return a dict from slot to Step")
    missing, foreign = [s for s in given if s not in steps], [s for s in steps if s not in given]
    if missing or foreign:
        wrong = [f"it has not answered for {_listed(tasks, missing)}"] if missing else []
        wrong += [f"it answered for slots {shown(foreign)}, which it was not asked about"] if foreign else []
        raise OperantError(
            f"{world}: {call} was called with slots {shown(list(given))}, and {' and '.join(wrong)}; it must return "
            "one Step for every slot that it is called with, and for no other"
        )
    for slot in given:
        if (why := _fault(steps[slot], first=call == "reset")) is not None:
            raise OperantError(f"{world}: {call} answered for {_listed(tasks, [slot])} with {why}")
    return {slot: steps[slot] for slot in given}


def _fault(step: Any, *, first: bool) -> str | None:
    """What is wrong with an answer, and the remedy; None if nothing is. `first`: it is the first of its episode."""
    if not isinstance(step, Step):
        return f"{shown(step)}; it must be an operant.Step"
    flags = [n for n in ("fresh", "terminated", "truncated", "trained") if not isinstance(getattr(step, n), _FLAG)]
    options = step.options
    faults = {
        f"text={shown(step.text)}; it must be a str": not isinstance(step.text, str),
        f"{''.join(flags[:1])}, which must be True or False": bool(flags),
        f"reward={shown(step.reward)}; it must be a finite number": not _is_finite(step.reward),
        f"info={shown(step.info)}; it must be a dict": not isinstance(step.info, Mapping),
        f"failed={shown(step.failed)}; it must be None or one of {', '.join(get_args(Failure))}": (
            step.failed is not None and step.failed not in get_args(Failure)
        ),
        f"options={shown(options)}; they must be a list of at least one text, none of them empty, or None": (
            options is not None
            and not (isinstance(options, (list, tuple)) and options and all(isinstance(o, str) and o for o in options))
        ),
        "an episode that has already ended; it must begin with something to reply to": (
            first and (step.terminated or step.truncated)
        ),
    }
    return next((fault for fault, is_there in faults.items() if is_there), None)


_FLAG = (bool, np.bool_)


def _is_finite(reward: Any) -> bool:
    return isinstance(reward, (Real, np.number)) and math.isfinite(reward)


def _listed(tasks: Mapping[int, Task], slots: list[int]) -> str:
    """`slot 3 (task 'maze/7')`; of many slots, the first three and the number of the others."""
    named = ", ".join(f"slot {slot} (task {tasks[slot].id!r})" for slot in slots[:3])
    return named + (f" and {len(slots) - 3} more" if len(slots) > 3 else "")
