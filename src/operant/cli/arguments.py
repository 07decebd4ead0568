"""What stands behind a command: words, and options by name."""

from collections.abc import Sequence
from typing import Any

from operant.options import read
from operant.types import OperantError


def parse(arguments: Sequence[str], flags: Sequence[str] = ()) -> tuple[list[str], dict[str, Any]]:
    """Words and options: `--name value`, `--name=value`, or `--name` alone for true.

    flags: options that never take the word behind them as their value.
    """
    words, options = typed(arguments, flags)
    return words, {name: read(text) for name, text in options.items()}


def typed(arguments: Sequence[str], flags: Sequence[str] = ()) -> tuple[list[str], dict[str, Any]]:
    """As `parse`, with the options' values as they were typed."""
    words: list[str] = []
    options: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            options["help"] = True
        elif word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            alone = not equals and (name in flags or not rest or rest[0].startswith("--"))
            if name in options:
                raise OperantError(f"option --{name} is given twice")
            options[name] = True if alone else value if equals else rest.pop(0)
        else:
            words.append(word)
    return words, options
