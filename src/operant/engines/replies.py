"""What engines share that are not native: checks of prompts and sampling, and the end of a reply."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from operant.sampling import Sampling, check_ids, stop_table
from operant.types import OperantError, shown


def check_prompts(policy: Any, prompts: Sequence[list[int]], sampling: Sampling) -> None:
    """Raises: OperantError for an empty prompt, one that leaves no room for a reply, or ids that there are not."""
    sampling.check_ids(policy.vocabulary)
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise OperantError(f"prompt {i} has no tokens: give at least one (a beginning-of-text token, say)")
        check_ids(prompt, policy.vocabulary, f"prompt {i}")
        if (why := policy.misfit(len(prompt), sampling.max_tokens)) is not None:
            raise OperantError(f"prompt {i} {why}: shorten the prompt or lower sampling.max_tokens")


def check_expressed(sampling: Sampling, names: Sequence[str], engine: str) -> None:
    """Raises: OperantError for the first of `names` that is not at its default: the engine cannot sample so."""
    for field in fields(Sampling):
        value = getattr(sampling, field.name)
        idle = field.name == "truncation" and not sampling.truncates
        if field.name in names and value != field.default and not idle:
            raise OperantError(
                f"sampling.{field.name}={shown(value)}: engine {engine} cannot sample so; leave it out, or use "
                "engine=native"
            )


def end_of(ids: Sequence[int], sampling: Sampling, tokenizer: Any) -> int | None:
    """Number of tokens after which a stop token or string has ended a reply; None if neither has."""
    strings = () if sampling.fixed_length else sampling.stop_strings
    table = stop_table(tokenizer, strings) if strings else None
    for count, token in enumerate(ids, 1):
        if token in sampling.stops:
            return count
        if table is not None and count >= sampling.min_tokens and table.ends(ids[:count], sampling.min_tokens):
            return count
    return None
