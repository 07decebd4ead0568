"""Prompts to ids, once, on the way in; the only user of chat templates."""

from typing import Any

from operant.types import OperantError


def encode_prompt(tokenizer: Any, prompt: str | list[dict[str, str]] | list[int]) -> list[int]:
    """Ids as they are; text with the tokenizer's own special tokens; messages through its chat template.

    Raises: OperantError where a template or a tokenizer is missing.
    """
    if isinstance(prompt, list) and (not prompt or isinstance(prompt[0], int)):
        return [token for token in prompt if isinstance(token, int)]
    if tokenizer is None:
        raise OperantError("the policy has no tokenizer: give prompts as token ids, or Policy(model, tokenizer)")
    if isinstance(prompt, str):
        ids = list(tokenizer(prompt)["input_ids"])
        if not ids and tokenizer.bos_token_id is not None:
            ids = [tokenizer.bos_token_id]
        return ids
    if not getattr(tokenizer, "chat_template", None):
        raise OperantError("the task's prompt is a list of messages, and the tokenizer has no chat template: give text")
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)
    return list(ids["input_ids"])


def encode_more(tokenizer: Any, text: str) -> list[int]:
    """Text that a world appends after a reply: no special tokens."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
