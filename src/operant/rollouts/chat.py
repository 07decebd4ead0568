"""Prompts to ids, once, on the way in; the only user of chat templates."""

from typing import Any

from operant.types import OperantError, shown


def encode_prompt(tokenizer: Any, prompt: str | list[dict[str, str]] | list[int]) -> list[int]:
    """Ids as they are; text with the tokenizer's own special tokens; messages through its chat template.

    Raises: OperantError where a template or a tokenizer is missing.
    """
    ids = [token for token in prompt if isinstance(token, int)] if isinstance(prompt, list) else []
    if isinstance(prompt, list) and len(ids) == len(prompt):
        return ids
    if tokenizer is None:
        raise OperantError("the policy has no tokenizer: give prompts as token ids, or Policy(model, tokenizer)")
    if isinstance(prompt, str):
        ids = _ids(tokenizer, prompt)
        if not ids and tokenizer.bos_token_id is not None:
            ids = [tokenizer.bos_token_id]
        return ids
    return list(_templated(tokenizer, prompt, True, tokenize=True, return_dict=True)["input_ids"])


def render(tokenizer: Any, messages: list[dict[str, str]], *, prompting: bool) -> str:
    """Messages as the text that the chat template makes of them; `prompting`: up to where an answer begins.

    Raises: OperantError where there is no template, or it fails.
    """
    return _templated(tokenizer, messages, prompting, tokenize=False)


def _templated(tokenizer: Any, messages: Any, prompting: bool, **how: Any) -> Any:
    if not getattr(tokenizer, "chat_template", None):
        raise OperantError("the task is a list of messages, and the tokenizer has no chat template: give text")
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=prompting, **how)
    except Exception as error:  # a template is somebody's program
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise OperantError(
            f"the chat template fails on the messages {shown(messages)} ({why}): mend one of them"
        ) from error


def _ids(tokenizer: Any, text: str, **how: Any) -> list[int]:
    try:
        return list(tokenizer(text, **how)["input_ids"])
    except (TypeError, UnicodeError) as error:
        raise OperantError(f"{shown(text)} is no text that can be encoded (half a surrogate pair?): mend it") from error


def encode_more(tokenizer: Any, text: str) -> list[int]:
    """Text that a world appends after a reply: no special tokens."""
    return _ids(tokenizer, text, add_special_tokens=False) if text else []
