"""The prompt of a model that repairs programs, and the row form `repair`, by which one is trained.

operant generate runs/code --tasks problems.jsonl --tests --all --samples 16 --out candidates.jsonl
operant train sft --policy runs/code --tasks candidates.jsonl --form repair
"""

import re
from collections.abc import Mapping
from typing import Any

from operant.apps.code.problems import program_in
from operant.types import OUTCOMES, OperantError, shown

TEMPLATE = "{prompt}\n{program}\n\n# {outcome}: {message}\n# The program, repaired:\n"
"""What a repair model reads."""
LONGEST = 300
"""Characters of a message that it reads."""
FIELDS = ("prompt", "program", "outcome", "message")


def check_template(template: str) -> str:
    """Return the template. Raises: OperantError for one that shows the model no problem or no program."""
    if missing := next((name for name in FIELDS[:2] if f"{{{name}}}" not in template), None):
        known = ", ".join(f"{{{name}}}" for name in FIELDS)
        raise OperantError(f"the repair template {shown(template)} has no {{{missing}}}: it may hold {known}")
    return template


def repair_prompt(prompt: Any, reply: str, outcome: str, message: str, template: str = TEMPLATE) -> Any:
    """What a repair model reads of a problem, a text or messages, and a reply that fails. Of messages, the last one
    becomes what the template makes of it.
    """
    chat = isinstance(prompt, list)
    known = {
        "prompt": prompt[-1]["content"] if chat else prompt,
        "program": program_in(reply),
        "outcome": outcome,
        "message": " ".join(message.split())[:LONGEST],
    }
    text = re.sub(rf"\{{({'|'.join(FIELDS)})\}}", lambda found: known[found[1]], template)
    return [*prompt[:-1], {**prompt[-1], "content": text}] if chat else text


def repair(row: Mapping[str, Any], *, template: str = TEMPLATE) -> Any:
    """Candidates of `operant generate --tests --all`: a program that fails its examples, and a right one as reference.

    Rows that pass their examples, or whose problem has no right program, are left out. template: with {prompt},
    {program}, {outcome} and {message}; the same as the option --repair-template of `operant generate`.
    """
    if missing := [name for name in ("prompt", "completion", "examples") if name not in row]:
        raise OperantError(f"it reads rows of `operant generate --tests --all`, and this one has no {missing[0]}")
    outcome = row["examples"]
    if outcome not in OUTCOMES:
        raise OperantError(f"examples is {shown(outcome)}; it is one of {', '.join(OUTCOMES)}")
    if outcome == "passed" or row.get("right") is None:
        return []
    check_template(template)
    given = (row["prompt"], row["completion"], outcome, row.get("examples_message") or "")
    return {"prompt": repair_prompt(*given, template), "references": row["right"]}
