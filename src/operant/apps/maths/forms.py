"""Rows about maths, as data sets publish them: GSM8K, SVAMP, MATH, Countdown, and generated problems.

operant train maths --tasks gsm8k_train.jsonl --policy MODEL
operant train sft --tasks gsm8k_train.jsonl --form maths --policy MODEL
"""

import re
from collections.abc import Mapping
from typing import Literal

from operant.apps.maths.answers import marked
from operant.data.forms import Row, found_in, text_of
from operant.types import require, shown

ASKS = {
    "answer": "",
    "boxed": "\nReason step by step, and put the final answer within \\boxed{}.",
    "think": "\nReason between <think> and </think>, then give the final answer between <answer> and </answer>.",
}
"""What a prompt says about the form of a reply."""


def maths(row: Row, *, ask: Literal["answer", "boxed", "think"] = "answer", prefix: str = "", cue: str = "\n") -> Row:
    """A problem by its fields: GSM8K (question, answer), SVAMP (Body, Question, Answer), MATH (problem, solution),
    Countdown (nums, target), or one's own: a question or problem with an answer, or prompt and target.

    ask: what the prompt says about the reply, nothing (`answer`), to mark the answer with \\boxed{} (`boxed`), or tags
    for the thought and the answer (`think`). prefix, cue: text before and behind. Own prompts with a target, such as
    the generated ones, stay as they are. The reference is the published solution, or else the answer.
    """
    if isinstance(target := row.get("target"), Mapping):
        return {"prompt": found_in(row, ("prompt",)), "references": row.get("completion") or (), "target": target}
    require(ask in ASKS, f"form.ask={shown(ask)}: it must be {', '.join(ASKS)}")
    asked = {"before": prefix, "behind": ASKS[ask], "cue": cue}
    if "nums" in row or {"numbers", "target"} <= row.keys():
        numbers, target = row.get("nums", row.get("numbers")), whole(row.get("target"))
        listed = [*map(whole, numbers)] if isinstance(numbers, (list, tuple)) else []
        what = f"Countdown with the numbers {shown(numbers)} and target {shown(row.get('target'))}"
        require(listed and None not in (target, *listed), f"{what}: both must be whole numbers")
        numbers = " ".join(map(str, listed))
        prompt = f"Make {target} from the numbers {numbers} with + - * / and brackets. Use each number once."
        return asked | {"prompt": prompt, "target": {"numbers": listed, "target": target}}
    if "Body" in row:
        body, asks = text_of(row["Body"], "Body").strip(), text_of(found_in(row, ("Question",)), "Question")
        question = f"{body}{'' if body.endswith(('.', '?', '!')) else '.'} {asks}"
    else:
        question = text_of(found_in(row, ("question", "problem", "prompt")), "the question")
    given = found_in(row, ("answer", "Answer", "solution", "target"))
    require(isinstance(given, (str, int, float)), f"the answer is {shown(given)}; it must be a text or a number")
    found = marked(str(given))
    answer = (str(given) if found is None else found).strip()
    good = answer and (found is not None or len(answer) <= 200)
    marks = "marks no final answer, as GSM8K does with #### and MATH with \\boxed{}"
    require(good, f"the answer {shown(answer, 60)} {marks}")
    target = {"answer": re.sub(r"^(-?\d+)\.0+$", r"\1", answer)}  # SVAMP writes 145.0
    return asked | {"prompt": question, "references": str(row.get("solution") or given), "target": target}


def whole(value: object) -> int | None:
    """A whole number, as a text too; None for anything else."""
    found = re.fullmatch(r"\s*(\d{1,18})\s*", str(value))
    return int(found[1]) if found else None
