"""Tasks without a data set: one prompt, many times, for rewards that judge the reply alone (RL4LMs' synthetic tasks).

operant train numbers --tasks.prompt "1 2 3" --tasks.count 64
"""

from operant.types import OperantError


def numbers(*, prompt: str = "Let us generate some numbers: 1 2 3", count: int = 64) -> list[dict[str, str]]:
    """`count` tasks with one prompt; the reward `increasing_numbers` wants numbers that grow."""
    if count < 1 or not prompt.strip():
        raise OperantError(f"tasks.count={count}, tasks.prompt={prompt!r}: give at least one task and a text")
    return [{"prompt": prompt}] * count


def dates(*, prompt: str = "Let us name a date:", count: int = 64) -> list[dict[str, str]]:
    """As `numbers`; the reward `dates` wants a date such as 2024-02-29 in the reply."""
    return numbers(prompt=prompt, count=count)
