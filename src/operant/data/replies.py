"""Rows with demonstrations for supervised training: (prompt, completion), chat messages, or plain text.

{"prompt": "2 + 2 =", "completion": " 4"}                        # text, or messages in both
{"prompt": "2 + 2 =", "replies": [" 4", " four"]}
{"messages": [{"role": "user", ...}, {"role": "assistant", ...}]}
{"text": "Once upon a time"}                                     # no prompt: the whole text is the reply
"""

from collections.abc import Mapping, Sequence
from typing import Any

from operant.types import OperantError, Task, shown

FORMS = "`prompt` and `completion`, or `messages`, or text in `data.text_field`"


def task_with_reply(row: Any, task_id: str, text_field: str, reply_field: str | None, where: str) -> Task:
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
        fields = shown(", ".join(map(str, row)) or "none", 300)[1:-1]
        raise OperantError(f"{where}: no reply to learn from (fields: {fields}); a row needs {FORMS}")
    prompt, reply = part("" if prompt is None else prompt, "prompt", where), part(reply, "reply", where)
    if reply and isinstance(reply[0], dict) and all(message["role"] != "assistant" for message in reply):
        raise OperantError(f"{where}: the reply has no message with role 'assistant', so there is nothing to learn")
    return Task(task_id, prompt, replies=(reply,))


def _text(value: Any, name: str, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise OperantError(f"{where}: {name} is a {type(value).__name__}, and a row without a prompt must be text")
    return value


def part(value: Any, what: str, where: str) -> Any:
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
