"""Counts tokens of texts, here and in the worker processes of a world."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from operant.sampling import encode_more


@dataclass(frozen=True)
class TokenCount:
    """Counts the tokens that a text adds to a prompt."""

    tokenizer: Any

    def __call__(self, text: str) -> int:
        return len(encode_more(self.tokenizer, text))

    def plain(self) -> str | None:
        """The tokenizer as JSON, which `count_with` reads in another process; None for one in Python."""
        fast = getattr(self.tokenizer, "backend_tokenizer", None)
        return fast.to_str() if fast is not None else None


def count_with(plain: str) -> Callable[[str], int]:
    """What counts tokens as the `TokenCount` whose `plain` this is, without transformers."""
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_str(plain)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)
