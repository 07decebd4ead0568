"""What compares answers in a process of its own, because replies can make it hang or end: math-verify, and the
`score_answer` of reasoning-gym's sets.

judge = verifier(["math_verify"])        # in a worker of `sandbox.pool`
judge({"reply": "$\\\\frac{1}{2}$", "answer": "0.5"})          # {"score": 1.0, "outcome": "right"}
judge({"reply": "94*4-61-6", "set": "countdown", "index": 0, "options": "{}"})
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from operant.apps.maths.answers import after_thought, marked
from operant.apps.maths.reasoning_gym import data_set, tested, unpacked


def verifier(packages: Sequence[str]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The function that answers the requests of a worker. What a verifier raises, it raises.

    packages: are loaded now, so that the time limit of the first reply is not spent on them.
    """
    if "math_verify" in packages:
        equivalent("", "1", "1")
    if "reasoning_gym" in packages:
        import_module("reasoning_gym")

    def judge(request: dict[str, object]) -> dict[str, Any]:
        if "tested" in request:
            return tested(request["set"], request["options"])
        reply = request["reply"]
        found = marked(reply)
        if found is None and (request.get("marked") or not (after_thought(reply) or "").strip()):
            return {"score": 0.0, "outcome": "no answer"}
        if "set" in request:
            data = data_set(request["set"], request["options"])
            text = (after_thought(reply) or "").strip() if found is None else found
            entry = unpacked(request["entry"]) if request.get("entry") else data[request["index"]]
            score = float(data.score_answer(text, entry))
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
