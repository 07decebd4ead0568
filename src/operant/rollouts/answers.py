"""A world's answers, checked: it is the user's code, and may raise, answer anything, or end the process.

torch is not imported.
"""

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, get_args

from operant.types import (
    Env,
    EnvBase,
    Failure,
    OperantError,
    Step,
    Task,
    Turn,
    describe_error,
    is_real,
    name_of,
    of_user,
    shown,
    with_defaults,
)


def reset(env: Env, tasks: Mapping[int, Task]) -> dict[int, Step]:
    """The first step of each slot. Raises: OperantError as `step` does, and for an episode that has already ended."""
    steps = _ask(env, "reset", tasks, tasks)
    if ended := [slot for slot, first in steps.items() if first.terminated or first.truncated]:
        begins = "an episode begins with something to reply to, or with Step(failed='raised')"
        raise OperantError(f"world {name_of(env)!r}: reset ended {_listed(tasks, ended)} before any reply; {begins}")
    return steps


def step(
    env: Env, replies: Mapping[int, str], tasks: Mapping[int, Task], turns: Mapping[int, Turn] | None = None
) -> dict[int, Step]:
    """The world's answer to the reply of each slot. `tasks`: the task of each slot, for messages. `turns`: those of the
    replies, which `on_turns` gets before.

    Raises: OperantError for an exception in the world, or an answer that is not allowed; it names the world and tasks.
    """
    if turns is not None and (hear := with_defaults(env, EnvBase).on_turns) is not None:
        with of_user(f"world {name_of(env)!r}: on_turns raised "):
            hear(turns)
    return _ask(env, "step", replies, tasks)


def _ask(env: Env, call: str, given: Mapping[int, object], tasks: Mapping[int, Task]) -> dict[int, Step]:
    try:
        with heard(f"world {name_of(env)!r}", "fix it, or play it in processes of its own: env=workers:file.py:World"):
            steps = getattr(env, call)(given)
    except OperantError:
        raise
    except (Exception, SystemExit) as error:  # a game may call sys.exit
        ends = " (an episode ends by terminated=True)" if "argument 'done'" in str(error) else ""
        what = f"world {name_of(env)!r}: {call} raised {describe_error(error)}{ends} for {_listed(tasks, list(given))}"
        fix = "fix the world, or let it answer Step(failed='raised') for the episodes that cannot go on"
        raise OperantError(f"{what}; {fix}") from error
    found = checked(f"world {name_of(env)!r}: {call}", steps, tasks, list(given))
    if any(step.at is not None for step in found.values()) and not with_defaults(env, EnvBase).branches:
        raise OperantError(f"world {name_of(env)!r} goes on from an earlier turn: it must have branches = True")
    return found


def checked(called: str, steps: object, tasks: Mapping[int, Task], slots: list[int]) -> dict[int, Step]:
    """The steps, if they are for these slots and each is allowed.

    called: the world and its method, with which an error begins. tasks: empty: it names none. Raises: OperantError.
    """
    if not isinstance(steps, Mapping):
        raise OperantError(f"{called} returned {shown(steps)}; it must return a dict from slot to Step")
    missing, foreign = [s for s in slots if s not in steps], [s for s in steps if s not in slots]
    if missing or foreign:
        wrong = [f"it has not answered for {_listed(tasks, missing)}"] if missing else []
        wrong += [f"it answered for slots {shown(foreign)}, which it was not asked about"] if foreign else []
        rule = "it must return one Step for every slot that it is called with, and for no other"
        asked = f" was called with slots {shown(slots)}, and" if tasks else ":"
        raise OperantError(f"{called}{asked} {' and '.join(wrong)}; {rule}")
    for slot in slots:
        if (why := fault(steps[slot])) is not None:
            raise OperantError(f"{called} answered for {_listed(tasks, [slot])} with {why}")
    return {slot: steps[slot] for slot in slots}


def read_step(fields: Mapping[str, object]) -> tuple[Step | None, str | None]:
    """The step whose fields an untrusted process has sent, and what is wrong with it; None: they are no fields."""
    try:
        paid: Any = fields.get("paid") or {}  # JSON has made texts of its numbers
        step = Step(**{**fields, "paid": {int(number): reward for number, reward in paid.items()}})
    except (TypeError, ValueError, AttributeError):
        return None, None
    return step, fault(step)


def fault(step: object) -> str | None:
    """What is wrong with an answer, and the remedy; None if nothing is."""
    if not isinstance(step, Step):
        return f"{shown(step)}; it must be an operant.Step"
    options, listed = step.options, isinstance(step.options, (list, tuple))
    texts = listed and bool(options) and all(isinstance(text, str) and text for text in options)
    examples = isinstance(step.examples, (list, tuple)) and all(
        isinstance(e, (list, tuple)) and len(e) == 2 and isinstance(e[0], str) and is_real(e[1]) for e in step.examples
    )
    paid = isinstance(step.paid, Mapping) and all(isinstance(k, int) and is_real(x) for k, x in step.paid.items())
    # Type names, because numpy's bool_ is none of Python's and numpy is not imported.
    kinds = {n: type(getattr(step, n)).__name__ for n in ("fresh", "terminated", "truncated", "trained")}
    rules = [
        *((name, isinstance(getattr(step, name), str), "a str") for name in ("text", "key")),
        *((name, kind in ("bool", "bool_"), "True or False") for name, kind in kinds.items()),
        ("reward", is_real(step.reward), "a finite number"),
        ("info", isinstance(step.info, Mapping), "a dict"),
        ("failed", step.failed is None or step.failed in get_args(Failure), f"one of {get_args(Failure)}, or None"),
        ("examples", examples, "a list of pairs, each a text and a finite number"),
        ("at", step.at is None or (isinstance(step.at, int) and step.at >= 0), "the number of a turn, or None"),
        ("paid", paid, "a dict from numbers of turns to finite numbers"),
        ("options", options is None or texts, "a list of one text or more, none of them empty, or None"),
    ]
    for name, good, rule in rules:
        if not good:
            return f"{name}={shown(getattr(step, name))}; it must be {rule}"
    for name, said in (("text", [step.text]), ("options", options or ()), ("examples", [e[0] for e in step.examples])):
        if any(map(SURROGATE.search, said)):
            return f"{name}={shown(getattr(step, name))}, which holds half a surrogate pair: cut between characters"
    return None


def _listed(tasks: Mapping[int, Task], slots: list[int]) -> str:
    """`slot 3 (task 'maze/7')`; of many slots, the first three and the number of the others."""
    named = ", ".join(f"slot {slot} (task {tasks[slot].id!r})" if tasks else "an episode" for slot in slots[:3])
    return named + (f" and {len(slots) - 3} more" if len(slots) > 3 else "")


SURROGATE = re.compile("[\ud800-\udfff]")  # half of a pair, which cannot be written
USUAL = {name: getattr(os, name) for name in ("_exit", "abort", "kill", "killpg", "execv", "execve")}
"""Of `os`; its other functions `exec...` call the last two."""
HEARD, HEARING = dict[tuple[int, int], tuple[str, str]](), threading.Lock()
"""By process and thread: whose calls it makes, and the remedy. The lock is held while that changes."""


@contextmanager
def heard(called: str, remedy: str) -> Iterator[None]:
    """Inside this context, a call that would end this process without a word raises OperantError with the remedy.

    called: such as "world 'Guess'". Other threads, and processes that it has forked, may still end so.
    """
    owner = os.getpid(), threading.get_ident()
    with HEARING:
        if not HEARD:
            for name in USUAL:
                USUAL[name] = getattr(os, name)
                setattr(os, name, partial(_instead, name))
        outer, HEARD[owner] = HEARD.get(owner), (called, remedy)
    try:
        yield
    finally:
        with HEARING:
            del HEARD[owner]
            if outer is not None:
                HEARD[owner] = outer
            elif not HEARD:
                os.__dict__.update(USUAL)


def _instead(name: str, *given: int, **named: object) -> object:
    own = HEARD.get((os.getpid(), threading.get_ident()))
    if own is None or (name.startswith("kill") and not _ends(*given)):
        return USUAL[name](*given, **named)
    caller = sys._getframe(1)
    while caller.f_globals is vars(os) and caller.f_back:  # os.execl calls os.execv
        caller = caller.f_back
    file, values = Path(caller.f_code.co_filename).name, ", ".join(map(str, given))
    called = f"os.{name}({values}) ({file}, line {caller.f_lineno})"
    raise OperantError(f"{own[0]} called {called}, which ends the process and the run with it; {own[1]}")


def _ends(target: int = 1, number: int = 0) -> bool:
    """Whether a signal to this process, or to its group, kills it; one that is handled says a sentence of its own."""
    own = target in (os.getpid(), os.getpgrp(), -os.getpgrp(), 0)
    deadly = [signal.Signals[f"SIG{name}"] for name in "TERM HUP QUIT ABRT SEGV KILL USR1 USR2 ALRM".split()]
    return own and number in deadly and signal.getsignal(number) == signal.SIG_DFL
