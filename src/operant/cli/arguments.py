"""Split the words after a command into plain arguments and options by name."""

from collections.abc import Sequence
from typing import Any

from operant.options import read
from operant.types import OperantError


def parse(arguments: Sequence[str], flags: Sequence[str] = ()) -> tuple[list[str], dict[str, Any]]:
    """Return the plain arguments and the options: `--name value`, `--name=value`, or `--name` alone for true.

    flags: options that take no value, so that the word after one of them is a plain argument.
    Raises: OperantError for an option that appears twice, or a mapping that is not valid YAML.
    """
    words, options = parse_text(arguments, flags)
    return words, {name: read(text) for name, text in options.items()}


def parse_text(arguments: Sequence[str], flags: Sequence[str] = ()) -> tuple[list[str], dict[str, Any]]:
    """Do the same as `parse`, but leave the values of the options as text."""
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
                raise OperantError(f"option --{name} appears twice: remove one of the two")
            options[name] = True if alone else value if equals else rest.pop(0)
        else:
            words.append(word)
    return words, options
