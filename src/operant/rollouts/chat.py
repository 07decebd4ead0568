"""Encodes prompts to token ids. No other file uses chat templates."""

from typing import Any

from operant.types import OperantError, shown


def encode_prompt(tokenizer: Any, prompt: str | list[dict[str, str]] | list[int]) -> list[int]:
    """Token ids of a prompt: ids unchanged, text with the tokenizer's special tokens, messages by its chat template.

    Raises: OperantError if the tokenizer or its template is missing.
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
    """The text that the chat template makes of messages. `prompting`: end it where an answer begins.

    Raises: OperantError if there is no template, or if it fails.
    """
    return _templated(tokenizer, messages, prompting, tokenize=False)


def _templated(tokenizer: Any, messages: Any, prompting: bool, **kwargs: Any) -> Any:
    if not getattr(tokenizer, "chat_template", None):
        raise OperantError(
            "the task is a list of messages, and the tokenizer has no chat template: "
            "give text, or a template (--model.chat-template, docs/recipes.md)"
        )
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=prompting, **kwargs)
    except Exception as error:  # a template is code, and may raise anything
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise OperantError(
            f"the chat template fails on the messages {shown(messages)} ({why}): correct one of them"
        ) from error


def _ids(tokenizer: Any, text: str, **kwargs: Any) -> list[int]:
    try:
        return list(tokenizer(text, **kwargs)["input_ids"])
    except (TypeError, UnicodeError) as error:
        raise OperantError(f"{shown(text)} cannot be encoded (half a surrogate pair?): correct the text") from error


def encode_more(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that continues a conversation, without special tokens."""
    return _ids(tokenizer, text, add_special_tokens=False) if text else []
