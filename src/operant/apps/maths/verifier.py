"""What compares answers in a process of its own, because replies can make it hang or end: math-verify, the
`score_answer` of reasoning-gym's sets, and the rewards of verifiers' tasksets.

judge = verifier(["math_verify"])        # in a worker of `sandbox.pool`
judge({"reply": "$\\\\frac{1}{2}$", "answer": "0.5"})          # {"score": 1.0, "outcome": "right"}
judge({"reply": "94*4-61-6", "set": "countdown", "index": 0, "options": "{}"})
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from operant.apps.maths import reasoning_gym, verifiers
from operant.apps.maths.answers import after_thought, marked
from operant.types import describe_error, require

NONSENSE = ("banana", "0", "I do not know.")
"""Replies that no set should pay."""
PATIENCE = 20.0
"""Seconds after which no more of them are tried."""


def verifier(packages: Sequence[str]) -> Callable[[dict[str, Any]], Mapping[str, object]]:
    """The function that answers the requests of a worker. What a verifier raises, it raises.

    packages: are loaded now, so that the time limit of the first reply is not spent on them.
    """
    if "math_verify" in packages:
        equivalent("", "1", "1")
    for package in {"reasoning_gym", "verifiers.v1"} & {*packages}:
        import_module(package)

    def judge(request: dict[str, Any]) -> Mapping[str, object]:
        suite, name = suite_of(request.get("set", ""))
        if "tested" in request:
            return tested(suite, name, request["options"])
        reply = request["reply"]
        if suite is verifiers:
            return judged(verifiers.paid(name, request["options"], request["index"], reply))
        text, found = after_thought(reply) or "", marked(reply)
        if found is None and (request.get("marked") or not text.strip()):
            return judged(None)
        if "set" not in request:
            return judged(equivalent(text, found, request["answer"]))
        answer = text.strip() if found is None else found
        return judged(reasoning_gym.paid(name, request["options"], request["index"], answer, request.get("entry")))

    return judge


def judged(score: float | None) -> dict[str, float | str]:
    """The score and the outcome of a reply; None: it has no answer. Raises: OperantError for one that is no number."""
    if score is None:
        return {"score": 0.0, "outcome": "no answer"}
    require(math.isfinite(score), f"pays {score}")
    return {"score": float(score), "outcome": "right" if score >= 1 else "partly" if score > 0 else "wrong"}


def tested(suite: ModuleType, name: str, options: str) -> dict[str, object]:
    """What the first problems of a set pay: `known`, those of their own answers, `nonsense` by reply, and `asked`.

    `known` has None for a problem without an answer. An exception is its text in place of a number.
    """

    def paid(index: int, reply: str) -> float | str:
        try:
            return judged(suite.paid(name, options, index, reply))["score"]
        except Exception as error:
            return describe_error(error)

    first = suite.first(name, options)
    known = [paid(i, answer) if isinstance(answer, str) and answer else None for i, (_, answer) in enumerate(first)]
    until = time.monotonic() + PATIENCE  # a reward may ask a judge
    nonsense = {reply: [paid(i, reply) for i in range(len(first)) if time.monotonic() < until] for reply in NONSENSE}
    return {"known": known, "nonsense": nonsense, "asked": first}


def suite_of(name: str) -> tuple[ModuleType, str]:
    """The module of a set in a task's target, and what the set is called there."""
    prefix = "verifiers:"
    return (verifiers if name.startswith(prefix) else reasoning_gym), name.removeprefix(prefix)


def equivalent(text: str, found: str | None, answer: str) -> bool | None:
    """Whether math-verify finds the marked answer, or else what it extracts from the text, equal to the right one.

    None: it extracts nothing.
    """
    from math_verify import parse, verify

    # Its own time limits are signals, which stop no power of large integers: the pool ends this process instead.
    parsed, boxed = partial(parse, parsing_timeout=None), "\\boxed{{{}}}".format  # as math-verify looks for answers
    given = parsed(text if found is None else boxed(found.strip().strip("$")))
    return verify(parsed(boxed(answer.strip().strip("$"))), given, timeout_seconds=None) if given else None
