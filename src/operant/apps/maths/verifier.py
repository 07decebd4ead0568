"""What compares answers in a process of its own, because replies can make it hang or end: math-verify, and the
`score_answer` of reasoning-gym's sets.

judge = verifier(None)                   # in a worker of `sandbox.pool`
judge({"reply": "$\\\\frac{1}{2}$", "answer": "0.5"})          # {"score": 1.0, "outcome": "right"}
judge({"reply": "94*4-61-6", "set": "countdown", "index": 0, "options": "{}"})
"""

import json
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, get_origin, get_type_hints

from operant.apps.maths.answers import after_thought, marked
from operant.types import OperantError, describe_error

NONSENSE = ("banana", "0", "I do not know.")
"""Replies that no set should pay."""
TESTED = 8
"""Problems of a set that are tested before a run."""


def need(package: str, extra: str, what: str) -> None:
    """Raises: OperantError that names the extra, if a package is missing."""
    if find_spec(package) is None:
        raise OperantError(f"{what} needs a package: pip install 'operant[{extra}]'")


def verifier(_: object) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The function that answers the requests of a worker. What a verifier raises, it raises."""

    def judge(request: dict[str, Any]) -> dict[str, Any]:
        if "tested" in request:
            return tested(request["set"], request["options"])
        reply = request["reply"]
        found = marked(reply)
        if found is None and (request.get("marked") or not (after_thought(reply) or "").strip()):
            return {"score": 0.0, "outcome": "no answer"}
        if "set" in request:
            data = data_set(request["set"], request["options"])
            text = (after_thought(reply) or "").strip() if found is None else found
            score = float(data.score_answer(text, data[request["index"]]))
        else:
            same = equivalent(after_thought(reply) or "", found, request["answer"])
            if same is None:
                return {"score": 0.0, "outcome": "no answer"}
            score = float(same)
        return {"score": score, "outcome": "right" if score >= 1 else "partly" if score > 0 else "wrong"}

    return judge


def equivalent(text: str, found: str | None, answer: str) -> bool | None:
    """Whether math-verify finds the marked answer, or else what it extracts from the text, equal to the right one.

    None: it extracts nothing.
    """
    from math_verify import parse, verify

    # Its own time limits are signals, which stop no power of large integers: the pool ends this process instead.
    def parsed(latex: str) -> list[Any]:
        return parse(latex, parsing_timeout=None)

    given = parsed(text if found is None else boxed(found))
    return verify(parsed(boxed(answer)), given, timeout_seconds=None) if given else None


def boxed(answer: str) -> str:
    """An answer as math-verify looks for it."""
    return f"\\boxed{{{answer.strip().strip('$')}}}"


# --- reasoning-gym ----------------------------------------------------------------------------------------------------


@cache
def data_set(name: str, options: str) -> Any:
    """A set of reasoning-gym, whose problems are made again from seed and index when they are asked for.

    options: of the set, as JSON.
    """
    from reasoning_gym import create_dataset
    from reasoning_gym.factory import DATASETS

    kinds = get_type_hints(DATASETS[name][1])
    lists = {key: value for key, value in json.loads(options).items() if isinstance(value, list)}
    tuples = {key: tuple(value) for key, value in lists.items() if get_origin(kinds.get(key)) is not list}
    return create_dataset(name, **json.loads(options) | tuples)


def tested(name: str, options: str) -> dict[str, Any]:
    """What the first problems of a set pay: `known`, those of their own answers, `nonsense` by reply, and `asked`.

    `known` has None for a problem without an answer. An exception is its text in place of a number.
    """
    data = data_set(name, options)
    entries = [data[index] for index in range(min(TESTED, len(data)))]

    def paid(answer: str, entry: Any) -> float | str:
        try:
            return float(data.score_answer(answer, entry))
        except Exception as error:
            return describe_error(error)

    known = [paid(e["answer"], e) if isinstance(e["answer"], str) and e["answer"] else None for e in entries]
    nonsense = {text: [paid(text, entry) for entry in entries] for text in NONSENSE}
    return {"known": known, "nonsense": nonsense, "asked": [[e["question"], e["answer"]] for e in entries]}
