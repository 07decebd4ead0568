"""The handler of a worker that plays a world: one episode at a time, each in a world of its own."""

from collections.abc import Callable
from typing import Any

from operant.import_by_name import find_function
from operant.rollouts.answers import checked
from operant.sandbox.serialise import step_to_plain, task_from_plain
from operant.types import Env, Task


def world(argument: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The handler for the world that `argument["spec"]` names: it is made with `argument["options"]`.

    A request is {} (make a world and tell about it), {"slot", "task"} (begin an episode) or {"slot", "reply"}.
    """
    place, _, name = argument["spec"].rpartition(":")
    make = find_function("world", place, name)
    env: Env | None = None
    tasks: dict[int, Task] = {}

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal env, tasks
        if "slot" not in request:
            return {"pays": bool(getattr(make(**argument["options"]), "pays", True))}
        slot = request["slot"]
        if "task" in request:
            env = None  # the last episode's world goes before the next one is made
            env, tasks = make(**argument["options"]), {slot: task_from_plain(request["task"])}
            steps = env.reset(tasks)
        elif env is None:
            return {"lost": True}
        else:
            steps = env.step({slot: request["reply"]})
        return step_to_plain(checked(f"{name}.{'reset' if 'task' in request else 'step'}", steps, tasks, [slot])[slot])

    return answer
