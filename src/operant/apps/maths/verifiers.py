"""Tasksets of verifiers as tasks: `--tasks verifiers:gsm8k_v1 --tasks.split train`, the extra `verifiers`.

A task holds the taskset, its options and its index; the taskset's own rewards judge the reply.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from inspect import Parameter, Signature, signature
from itertools import islice
from pkgutil import iter_modules
from typing import Any

from operant.apps.maths.reasoning_gym import TESTED, need
from operant.import_by_name import nearest
from operant.options import parse
from operant.types import OperantError, of_user, require

PACKAGE, EXTRA, LOADS = "verifiers", "verifiers", "verifiers.v1"


def named(name: str) -> Callable[..., Iterator[dict[str, object]]]:
    """The function that makes the rows of a taskset; its arguments are the fields of the taskset's config, and `size`.

    Raises: OperantError for a taskset that is not installed or has an environment of its own, or without the package.
    """
    what = f"tasks=verifiers:{name}"
    need("verifiers", "verifiers", what)
    if os.getcwd() not in sys.path:  # where a taskset of the user's is
        sys.path.append(os.getcwd())
    with loading(name) as vf:
        config, env = config_type(name), vf.utils.loaders.environment_class(name)
        require(env is vf.SingleAgentEnv, f"{what} has an environment of its own: only tasks are read here")
        defaults = config.model_construct().model_dump(mode="json")
    own = {key: field.annotation for key, field in config.model_fields.items() if key != "id"}
    cut = {} if "size" in own else {"size": int | None}
    kinds = cut | {key: kind if kind in (bool, int, float, str) else Any for key, kind in own.items()}

    def verifiers(**options: object) -> Iterator[dict[str, object]]:
        size = options.pop("size", None) if cut else None
        require(size is None or size >= 1, f"tasks.size={size}: it must be at least 1, or none")
        changed = {key: value for key, value in options.items() if value != defaults.get(key)}
        with loading(name):
            given = {key: readable(value, own[key], f"tasks.{key}") for key, value in changed.items()}
            made = json.dumps({"first": size, "config": given}, default=str)
            found = tasks(name, made)
            for task in found:
                check(task, what)
        target = {"set": f"verifiers:{name}", "options": made}
        return ({"prompt": prompt(task), "target": target | {"index": i}} for i, task in enumerate(found))

    verifiers.__annotations__ = kinds
    arguments = [Parameter(key, Parameter.KEYWORD_ONLY, default=defaults.get(key)) for key in kinds]
    verifiers.__signature__ = Signature(arguments)  # type: ignore[attr-defined]
    return verifiers


@contextmanager
def loading(name: str) -> Iterator[Any]:
    """Describe what the loading of a taskset by the package raises inside this context. Raises: OperantError."""
    what = f"tasks=verifiers:{name}"
    with of_user(f"{what} cannot be loaded: "):
        import verifiers.v1.tasksets
        from pydantic import ValidationError

        try:
            yield verifiers.v1
        except ValidationError as error:
            wrong = [f"tasks.{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
            raise OperantError(f"{what}: {'; '.join(wrong)}") from error
        except ModuleNotFoundError as error:
            module = name.rsplit("/", 1)[-1].partition("@")[0].replace("-", "_").lower()
            if isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name != module:  # which it imports
                raise error.__cause__ from None
            hint = nearest(module, [one.name for one in iter_modules([os.getcwd(), *verifiers.v1.tasksets.__path__])])
            raise OperantError(f"{what}: no package has that name, and no file in this folder{hint}") from error


def readable(value: object, kind: object, name: str) -> object:
    """An option as a field of that type takes it: as it is, or else read as YAML. Raises: OperantError."""
    from pydantic import TypeAdapter, ValidationError

    try:
        TypeAdapter(kind).validate_python(value)
    except ValidationError:
        return parse(value, name) if isinstance(value, str) else value
    return value


def config_type(name: str) -> Any:
    """The class of a taskset's config."""
    vf = import_module(LOADS)
    taskset = vf.utils.loaders.taskset_class(name)
    return vf.utils.generic.concrete_type(taskset, vf.TasksetConfig, origin=vf.Taskset) or vf.TasksetConfig


@cache
def tasks(name: str, options: str) -> Sequence[Any]:
    """The first tasks of a taskset, or all of them. options: their number and the taskset's config, as JSON."""
    from verifiers.v1.utils.loaders import load_taskset

    given = json.loads(options)
    taskset = load_taskset(config_type(name).model_validate(given["config"] | {"id": name}))
    what = f"tasks=verifiers:{name}"
    require(taskset.bounded or given["first"], f"{what} never ends: say how many tasks, as in --tasks.size 1000")
    require(not type(taskset).toolsets(taskset.config), f"{what} has tools, which are not served here")
    return list(islice(taskset, given["first"]))


def check(task: Any, what: str) -> None:
    """Raises: OperantError for a task that needs more than one answer, or one that has no reward."""
    vf = import_module(LOADS)
    kind, data = type(task), task.data
    scored = [*task.hooks("reward"), *(judge.score for judge in task.plugged_judges())]
    runtimes = [signature(function).parameters.get("runtime") for function in scored]
    parts = [part for message in messages(data) if isinstance(message.content, list) for part in message.content]
    reasons = {
        "tools": kind.toolsets(task.config),
        "a container": kind.NEEDS_CONTAINER or data.image,
        "a user who begins": data.prompt is None,
        "an image": any(part.type != "text" for part in parts),
        "a setup of its own": kind.setup is not vf.Task.setup or kind.finalize is not vf.Task.finalize,
        "functions that intercept messages": vf.utils.decorators.discover_decorated(task, "intercept"),
        "rewards that look into a runtime": any(p is not None and p.default is Parameter.empty for p in runtimes),
    }
    if found := [reason for reason, there in reasons.items() if there]:
        raise OperantError(f"{what}: task {data.idx} has {' and '.join(found)}; only texts with one answer are played")
    require(scored, f"{what}: task {data.idx} has no reward that could be learned from")


def prompt(task: Any) -> str | list[dict[str, str]]:
    """The prompt of a task: a text, or the messages of a chat with their system prompt."""
    from verifiers.v1.types import content_text

    if isinstance(task.data.prompt, str) and task.data.system_prompt is None:
        return task.data.prompt
    return [{"role": message.role, "content": content_text(message.content)} for message in messages(task.data)]


def messages(data: Any) -> list[Any]:
    """The messages before the reply."""
    from verifiers.v1 import SystemMessage, UserMessage

    system = [] if data.system_prompt is None else [SystemMessage(content=data.system_prompt)]
    return system + ([UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt or ()))


def paid(name: str, options: str, index: int, reply: str) -> float:
    """The sum of the weighted rewards of a reply, as verifiers has it."""
    vf = import_module(LOADS)
    task = tasks(name, options)[index]
    chat = [*messages(task.data), vf.AssistantMessage(content=reply)]
    nodes = [vf.graph.MessageNode(parent=i - 1 if i else None, message=message) for i, message in enumerate(chat)]
    nodes[-1].sampled = True
    of = vf.trace.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    agent, state = vf.trace.AgentInfo(config=vf.AgentConfig()), vf.state.state_cls(type(task))()
    trace = vf.Trace(task=of, agent=agent, state=state, nodes=nodes, is_completed=True, ok=True)
    asyncio.run(task.score(trace))
    return float(trace.reward)


def first(name: str, options: str) -> list[list[object]]:
    """Of the first tasks, as `reasoning_gym.first`. A taskset has no answers of its own."""
    return [[task.key, None] for task in tasks(name, options)[:TESTED]]
