"""Rows with replies: demonstrations for supervised training, and labelled replies.

{"prompt": "2 + 2 =", "completion": " 4"}                        # demonstrations: text, or messages in both
{"prompt": "2 + 2 =", "replies": [" 4", " four"]}
{"messages": [{"role": "user", ...}, {"role": "assistant", ...}]}
{"text": "Once upon a time"}                                     # no prompt: the whole text is the reply

Labels, for reward models and preference optimisation, become a score for each reply:

{"prompt": "...", "chosen": "...", "rejected": "..."}                    # scores 1 and 0; "margin": 0.5: 0.5 and 0
{"prompt": "...", "replies": ["...", "...", "..."], "ranks": [2, 1, 2]}  # 1 is best, equal: a tie, null: left out
{"prompt": "...", "replies": [...], "best": 1}                           # the index of the best
{"prompt": "...", "replies": [...], "ratings": [4, 2.5, null]}
{"prompt": "...", "replies": [...], "good": [true, false, null]}
{"prompt": "...", "completion": "...", "label": true}                    # good or bad, one reply
{"prompt": "...", "completions": ["...", "..."], "labels": [true, false]}  # good or bad, each step of one reply
{"prompt": "...", "completion": "...", "outcome": "passed"}              # what became of a program, or its number
{"prompt": "...", "completions": ["...", "..."], "outcomes": ["failed test", 3]}

Prompts and replies are texts, token ids or messages. Without `prompt`, it is what `chosen` and `rejected` begin with;
`data.text_field` names another field of it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from operant.data.forms import names_in
from operant.types import OUTCOMES, OperantError, Reply, Task, is_real, require, shown

TIMID = 1e-12
"""The score of a chosen reply with a margin of 0: above that of the rejected one, and no demand on the difference."""
DEMONSTRATIONS = "`prompt` and `completion`, or `messages`, or text in `data.text_field`"


def task_with_reply(row: object, task_id: str, text_field: str, reply_field: str | None, where: str) -> Task:
    """The task of one row, with its reply in `replies`. Raises: OperantError for a row without one.

    `reply_field`: the field of the replies, with the prompts in `text_field` (or from a template, which the caller
    fills in); None: the form of the row decides. `where` names the row in errors.
    """
    if not isinstance(row, Mapping):
        return Task(task_id, "", replies=(_text(row, text_field, where),))
    if reply_field is not None:
        if reply_field not in row:
            fields = ", ".join(map(str, row)) or "none"
            raise OperantError(f"{where}: there is no field {shown(reply_field)} (fields: {fields})")
        prompt, reply = row.get(text_field), row[reply_field]
    elif "messages" in row:
        messages = part(row["messages"], "messages", where)
        roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
        if isinstance(messages, str) or "assistant" not in roles:
            raise OperantError(f"{where}: no message has the role 'assistant', so there is nothing to learn")
        if "assistant" not in roles[1:]:  # a greeting that opens a conversation belongs to its prompt
            raise OperantError(f"{where}: no message stands before the answer, so there is nothing to reply to")
        begin = roles.index("assistant", 1)
        prompt, reply = messages[:begin], messages[begin:]
    elif "prompt" in row and isinstance(row.get("replies"), list) and row["replies"]:
        prompt = part(row["prompt"], "prompt", where)
        return Task(task_id, prompt, replies=tuple(part(reply, "reply", where) for reply in row["replies"]))
    elif "prompt" in row and "completion" in row:
        prompt, reply = row["prompt"], row["completion"]
    elif text_field in row:
        return Task(task_id, "", replies=(_text(row[text_field], text_field, where),))
    else:
        raise OperantError(f"{where}: no reply to learn from (fields: {names_in(row)}); a row needs {DEMONSTRATIONS}")
    prompt, reply = part("" if prompt is None else prompt, "prompt", where), part(reply, "reply", where)
    if (roles := [message["role"] for message in reply if isinstance(message, dict)]) and "assistant" not in roles:
        raise OperantError(f"{where}: the reply has no message with role 'assistant', so there is nothing to learn")
    return Task(task_id, prompt, replies=(reply,))


def _text(value: object, name: str, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise OperantError(f"{where}: {name} is a {type(value).__name__}, and a row without a prompt must be text")
    return value


def part(value: object, what: str, where: str) -> Reply:
    """`value`, if it is text, token ids or messages. Raises: OperantError otherwise; `what` names the part."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        kinds = {type(part) for part in value}
        keys = ("role", "content")
        if kinds <= {int} or (kinds <= {dict} and all(isinstance(m.get(k), str) for m in value for k in keys)):
            return list(value)
    raise OperantError(
        f"{where}: the {what} is {shown(value)}; it must be text, token ids, or messages with role and content as text"
    )


LABELLED = (
    "`chosen` and `rejected`; `replies` with `ranks`, `best`, `ratings` or `good`; `prompt`, `completion` and `label`; "
    "or steps in `completions` with `labels`; or programs: `completion` and `outcome`, `completions` and `outcomes`"
)
KINDS = ("ranks", "best", "ratings", "good")


def labelled_task(row: object, task_id: str, where: str) -> Task:
    """The task of one row, with `replies` and `scores`; replies without a label are left out, maybe all of them.

    `where` names the row in errors. Raises: OperantError for a row without labels, or with labels that cannot be read.
    """
    fields: Mapping[str, Any] = row if isinstance(row, Mapping) else {}
    if "chosen" in fields and "rejected" in fields:
        prompt, replies = pair_of(fields, where)
        given = _numbers([fields.get("margin", 1.0), 0.0], "margin", where)
        if given[0] is None or given[0] < 0:
            raise OperantError(f"{where}: margin={shown(fields['margin'])}; it must be a number that is at least 0")
        given[0] = max(given[0], TIMID)
    elif "replies" in fields:
        prompt, replies = fields.get("prompt", ""), fields["replies"]
        if isinstance(replies, str) or not isinstance(replies, Sequence) or not replies:
            raise OperantError(f"{where}: replies is {shown(replies)}; it must be a list of at least one reply")
        given = scores_of(fields, len(replies), where)
    elif "completion" in fields and "label" in fields:
        prompt, replies = fields.get("prompt", ""), [fields["completion"]]
        given = scores_of({"good": [fields["label"]]}, 1, where)
    elif "outcomes" in fields or "outcome" in fields:
        prompt, replies, given = _with_outcomes(fields, where)
    elif "completions" in fields and "labels" in fields:
        steps, labels = fields["completions"], fields["labels"]
        listed = isinstance(steps, Sequence) and not isinstance(steps, str) and steps
        require(listed, f"{where}: completions is {shown(steps)}; it must be a list of at least one step")
        odd = [step for step in steps if not isinstance(step, str) or "\n" in step]
        require(not odd, f"{where}: the step {odd and shown(odd[0])} must be one line of text; a step is a line")
        # The reply until the end of each step, which is a line: ["a", "b"] becomes ["a", "a" + newline + "b"].
        prompt, replies = fields.get("prompt", ""), ["\n".join(steps[: i + 1]) for i in range(len(steps))]
        good = isinstance(labels, Sequence) and not isinstance(labels, str) and len(labels) == len(replies)
        require(good, f"{where}: labels={shown(labels)}; it must be a list, one for each of {len(replies)} steps")
        given = scores_of({"good": labels}, len(replies), where)
    else:
        raise OperantError(
            f"{where}: no labelled replies (fields: {names_in(fields)}); a row of tasks, as of held-out ones "
            f"(evaluate), needs {LABELLED}"
        )
    prompt, replies = part(prompt, "prompt", where), [part(reply, "reply", where) for reply in replies]
    kept = [(reply, score) for reply, score in zip(replies, given, strict=True) if score is not None]
    target = fields.get("labeller")
    return Task(task_id, prompt, target, tuple(r for r, _ in kept), tuple(s for _, s in kept))


def _with_outcomes(fields: Mapping[str, Any], where: str) -> tuple[object, list[object], list[float | None]]:
    """The prompt, the programs and the number of the outcome of each; null leaves a program out."""
    if "outcomes" in fields:
        replies, found = fields.get("completions", fields.get("replies")), fields["outcomes"]
        lists = [isinstance(x, Sequence) and not isinstance(x, str) for x in (replies, found)]
        if not all(lists) or len(replies) != len(found):
            raise OperantError(f"{where}: outcomes={shown(found)}; it must be a list, one for each of `completions`")
    else:
        replies, found = [fields.get("completion", fields.get("reply"))], [fields["outcome"]]
    known = {name: float(i) for i, name in enumerate(OUTCOMES)} | {i: float(i) for i in range(len(OUTCOMES))}
    for one in found:
        if one is not None and (isinstance(one, bool) or not isinstance(one, (str, int)) or one not in known):
            raise OperantError(
                f"{where}: the outcome {shown(one)} must be one of {', '.join(OUTCOMES)}, or its number from 0 to "
                f"{len(OUTCOMES) - 1}"
            )
    return fields.get("prompt", ""), list(replies), [None if one is None else known[one] for one in found]


def scores_of(fields: Mapping[str, object], count: int, where: str = "the answer") -> list[float | None]:
    """The score of each of `count` replies, from the one kind of label that the row has."""
    found = [kind for kind in KINDS if fields.get(kind) is not None]
    if not found and (fields.get("all_bad") or fields.get("skip")):  # as `operant label` exports it
        return [None] * count
    require(len(found) == 1, f"{where}: labels are {' and '.join(found) or 'missing'}; give one of {', '.join(KINDS)}")
    kind, labels = found[0], fields[found[0]]
    if kind == "best":
        if isinstance(labels, bool) or not isinstance(labels, int) or not 0 <= labels < count:
            raise OperantError(f"{where}: best={shown(labels)}; it must be the index of a reply, 0 to {count - 1}")
        return [float(i == labels) for i in range(count)]
    good = isinstance(labels, Sequence) and not isinstance(labels, str) and len(labels) == count
    require(good, f"{where}: {kind}={shown(labels)}; it must be a list with one entry for each of {count} replies")
    numbers = _numbers(labels, kind, where)
    if kind == "good" and any(x not in (None, 0, 1) for x in numbers):
        raise OperantError(f"{where}: good={shown(labels)}; each entry must be true, false or null")
    return [-x if x is not None and kind == "ranks" else x for x in numbers]


def _numbers(labels: Sequence[object], kind: str, where: str) -> list[float | None]:
    for label in labels:
        if label is not None and not is_real(label):
            raise OperantError(f"{where}: {kind} has {shown(label)}; each label must be a finite number, or null")
    return [None if label is None else float(label) for label in labels]


def pair_of(fields: Mapping[str, object], where: str) -> tuple[object, list[Reply]]:
    """Prompt, and the chosen and the rejected reply; what both begin with is the prompt of a row without one."""
    chosen, rejected = (part(fields[name], name, where) for name in ("chosen", "rejected"))
    require(chosen != rejected, f"{where}: chosen and rejected are equal; leave the row out")
    if "prompt" in fields:
        return fields["prompt"], [chosen, rejected]
    same = next((i for i, (a, b) in enumerate(zip(chosen, rejected)) if a != b), min(len(chosen), len(rejected)))
    if isinstance(chosen, str):  # the prompt ends where a word ends, and the replies begin with the space after it
        same = max(chosen.rfind(" ", 0, same), chosen.rfind("\n", 0, same) + 1, 0)
    if len(chosen) == same or len(rejected) == same:
        raise OperantError(f"{where}: without a prompt, one of chosen and rejected begins with the whole other one")
    return chosen[:same], [chosen[same:], rejected[same:]]
