"""How a reward function is called, here and in a worker: with rollouts, or with the keywords of TRL's.

def reward(rollouts): ...                       # operant's
def reward(prompts, completions, **kwargs): ...  # TRL's: a function or object with an argument `completions`
async def reward(...): ...                       # either of them

torch is not imported.
"""

import asyncio
import functools
import inspect
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from operant.import_by_name import find_function
from operant.sandbox.serialise import answer_to_plain, rollout_from_plain
from operant.types import Judgement, OperantError, Rollout, as_list, require

GIVEN = ("prompts", "completions", "completion_ids")
"""What a function of TRL's form gets of every reply."""
OF_A_TRAINER = ("trainer_state", "environments")
"""What only TRL's trainer has."""
LOGS = ("log_extra", "log_metric")
"""Functions by which a function of TRL's form says more than its scores."""
_ONE_LOOP = threading.Lock()


def as_in_trl(reward: object) -> bool:
    """Whether a function or object is called with `completions` or their ids, as TRL's reward functions are."""
    if not callable(reward) or inspect.isclass(reward):
        return False
    try:
        return not {"completions", "completion_ids"}.isdisjoint(inspect.signature(reward).parameters)
    except (ValueError, TypeError):  # some functions written in C do not say
        return False


def call(reward: Callable[..., object], rollouts: Sequence[Rollout]) -> object:
    """What the reward returns for these rollouts.

    A function of TRL's form gets lists with one entry a reply: texts, or messages where the task's prompt is messages;
    the ids of the last reply; and the columns of the task. These are the keys of its target, if that is a mapping, with
    None for a task that lacks one; of other targets a single further argument without a default gets the target itself.
    What it says by `log_metric(name, number)` becomes a part of each answer, and by `log_extra(column, values)` the
    answers' message.
    A coroutine is awaited.
    Raises: OperantError for an argument that has no value.
    """
    if not as_in_trl(reward):
        return _awaited(reward(rollouts))
    log = _Log()
    returned = _awaited(reward(**keywords(reward, rollouts, log)))
    answers = as_list(returned)  # a generator says more only while it is read
    return returned if answers is None else log.beside(answers)


def _awaited(returned: object) -> object:
    if not inspect.iscoroutine(returned):
        return returned
    with _ONE_LOOP:
        loop = event_loop(os.getpid())
    return asyncio.run_coroutine_threadsafe(returned, loop).result()


class _Log:
    """What a function of TRL's form says beside its scores."""

    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.extra: dict[str, Sequence[object]] = {}

    def log_metric(self, name: str, value: float) -> None:
        self.metrics[name] = float(value)

    def log_extra(self, column: str, values: Sequence[object]) -> None:
        self.extra[column] = values

    def beside(self, answers: Sequence[object]) -> Sequence[object]:
        """The answers as judgements that say it too. Raises: OperantError for a column of another length."""
        if not (self.metrics or self.extra):
            return answers
        for column, values in self.extra.items():
            same = len(values) == len(answers)
            require(same, f"log_extra({column!r}, ...): {len(values)} values for {len(answers)} replies")
        rows = zip(*([f"{column}: {value}" for value in values] for column, values in self.extra.items()))
        lines = ["\n".join(row) for row in rows] or [""] * len(answers)
        return [Judgement(x, dict(self.metrics), message=line) for x, line in zip(answers, lines)]


def waits(reward: object) -> bool:
    """Whether a reward is an async function, or an object with an async `__call__`."""
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)


@functools.cache
def event_loop(process: int) -> asyncio.AbstractEventLoop:
    """The loop that async rewards of this process run in: the same one at every step, as their clients belong to it.

    It has a thread of its own, as a notebook's thread has a loop already.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"async rewards of {process}", daemon=True).start()
    return loop


def keywords(reward: Callable[..., object], rollouts: Sequence[Rollout], log: object = None) -> dict[str, object]:
    """The arguments of a function of TRL's form. Raises: OperantError for one that has no value."""
    known: dict[str, Any] = {name: [] for name in GIVEN}
    for rollout in rollouts:
        chat = bool(rollout.task.prompt) and isinstance(rollout.task.prompt[0], Mapping)
        messages = [{"role": "assistant", "content": text} for text in rollout.texts]
        known["prompts"].append(rollout.task.prompt if chat else rollout.query)
        known["completions"].append(messages if chat else "".join(rollout.texts))
        known["completion_ids"].append(rollout.ids)
    targets = [r.task.target for r in rollouts]
    rows = [{} if target is None else target for target in targets]
    mappings = rows if all(isinstance(row, Mapping) for row in rows) else []
    named = dict.fromkeys(name for row in mappings for name in row)
    columns = [name for name in named if isinstance(name, str) and name not in GIVEN]
    known |= {name: [row.get(name) for row in rows] for name in columns}
    known |= {name: getattr(log or _Log(), name) for name in LOGS}
    parameters = inspect.signature(reward).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = [name for name in required if name not in known]
    there = any(target is not None for target in targets)
    if len(missing) == 1 and missing[0] not in OF_A_TRAINER and not columns and there:
        known[missing.pop()] = targets
    if missing:
        only = "only TRL's trainer has that: give it a default"
        if missing[0] not in OF_A_TRAINER:
            only = (
                f"name the columns that it needs with data.target_field={','.join(missing)}, or from Python give each "
                "Task a mapping of them as its target"
            )
        name = getattr(reward, "__name__", "of this form")
        have = f" (they have {', '.join(columns)})" if columns else ""
        raise OperantError(f"reward {name!r} asks for {', '.join(missing)}, which the tasks do not have{have}; {only}")
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        known = {name: value for name, value in known.items() if name in {p.name for p in parameters}}
    return known


def judge_plain(spec: str) -> Callable[[list[dict[str, object]]], dict[str, object]]:
    """The reward `module:function` or `file.py:function` as a function from plain rollouts to plain answers."""
    place, _, name = spec.rpartition(":")
    function = find_function("reward", place, name)

    def judge(rollouts: list[dict[str, object]]) -> dict[str, object]:
        returned = call(function, [rollout_from_plain(rollout) for rollout in rollouts])
        answers = as_list(returned)
        if answers is None:
            return {"odd": "None" if returned is None else f"one {type(returned).__name__}"}
        return {"answers": [answer_to_plain(answer) for answer in answers]}

    return judge
