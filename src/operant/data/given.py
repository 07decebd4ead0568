"""Rows that hold a reply beside its prompt: (prompt, completion), chat messages, or plain text.

{"prompt": "2 + 2 =", "completion": " 4"}                        # text, or messages in both
{"messages": [{"role": "user", ...}, {"role": "assistant", ...}]}
{"text": "Once upon a time"}                                     # no prompt: every token is a reply's
"""

from collections.abc import Mapping, Sequence
from typing import Any

from operant.types import OperantError, Task, shown

FORMS = "`prompt` and `completion`, or `messages`, or text in `data.text_field`"


_SAYS = ("role", "content")


def given_task(row: Any, task_id: str, text_field: str, reply_field: str | None, where: str) -> Task:
    """The task of one row, its reply in `replies`. Raises: OperantError for a row without one.

    `reply_field`: where the replies stand, the prompts being in `text_field` (or made from a template, which then
    replaces them); None: the row's own form decides.
    """
    if not isinstance(row, Mapping):
        return Task(task_id, "", replies=(_text(row, text_field, where),))
    if reply_field is not None:
        prompt, reply = row.get(text_field, ""), _named(row, reply_field, where)
    elif "messages" in row:
        prompt, reply = _split(row["messages"], where)
    elif "prompt" in row and "completion" in row:
        prompt, reply = row["prompt"], row["completion"]
    elif text_field in row:
        return Task(task_id, "", replies=(_text(row[text_field], text_field, where),))
    else:
        fields = shown(", ".join(map(str, row)) or "none", 300)[1:-1]
        raise OperantError(f"{where}: no reply to learn from (fields: {fields}); a row holds {FORMS}")
    prompt, reply = _part(prompt, "prompt", where), _part(reply, "reply", where)
    if reply and isinstance(reply[0], dict) and all(message["role"] != "assistant" for message in reply):
        raise OperantError(f"{where}: the reply holds no message with role 'assistant', so there is nothing to learn")
    return Task(task_id, prompt, replies=(reply,))


def _named(row: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in row:
        raise OperantError(f"{where}: there is no field {shown(name)} (fields: {', '.join(map(str, row)) or 'none'})")
    return row[name]


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str):
        raise OperantError(f"{where}: {name} is a {type(value).__name__}, and a row without a prompt is a text")
    return value


def _split(messages: Any, where: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """What comes before the first answer, and the rest."""
    listed = _part(messages, "messages", where)
    first = next((i for i, m in enumerate(listed) if isinstance(m, dict) and m.get("role") == "assistant"), None)
    if first is None or isinstance(listed, str):
        raise OperantError(f"{where}: messages hold none with role 'assistant', so there is nothing to learn")
    return listed[:first], listed[first:]


def _part(value: Any, what: str, where: str) -> Any:
    """A text, a list of ids or a list of messages."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        kinds = {type(part) for part in value}
        if kinds <= {int} or (kinds <= {dict} and all(isinstance(m.get(k), str) for m in value for k in _SAYS)):
            return list(value)
    raise OperantError(
        f"{where}: the {what} is {shown(value)}; it must be text, token ids, or messages with role and content as text"
    )
