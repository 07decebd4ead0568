"""The words after a command: plain arguments, and options by name, of which a command takes its own."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from operant.options import convert, read
from operant.types import OperantError, require

Options = dict[str, Any]
"""The options of a command by name, with underscores."""


def parse(arguments: Sequence[str], **how: Sequence[str]) -> tuple[list[str], Options]:
    """As `parse_text`, with the mappings that stand in braces. Raises: OperantError for one that is not valid YAML."""
    words, options = parse_text(arguments, **how)
    return words, {name: read(text) for name, text in options.items()}


def parse_text(
    arguments: Sequence[str], flags: Sequence[str] = (), several: Sequence[str] = ()
) -> tuple[list[str], Options]:
    """Return the plain arguments and the options: `--name value`, `--name=value`, or `--name` alone for true.

    flags: options that take no value, so that the word after one of them is a plain argument. several: options that may
    appear several times; the value of each is a list. Raises: OperantError for an option that appears twice.
    """
    words, options, rest = list[str](), Options(), list(arguments)
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            options["help"] = True
        elif word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            alone = not equals and (name in flags or not rest or rest[0].startswith("--"))
            require(name not in options or name in several, f"option --{name} appears twice: remove one of the two")
            found = True if alone else value if equals else rest.pop(0)
            options[name] = [*options.get(name, []), found] if name in several else found
        else:
            words.append(word)
    return words, options


def flag(name: str) -> str:
    """An option as it is typed."""
    return f"--{name.replace('_', '-')}"


def refuse(options: Options, names: Iterable[str], why: str) -> None:
    """Raises: OperantError for the first of these options that is given; `why` is what stands behind its name."""
    if odd := next((name for name in names if name in options), None):
        raise OperantError(f"{flag(odd)}{why}")


def taken(options: Options, name: str, default: int) -> int:
    """Take a whole number out of the options."""
    return convert(options.pop(name, default), int, name)


def counted(options: Options, name: str, default: int) -> int:
    """Take a number of at least 1 out of the options."""
    number = taken(options, name, default)
    require(number >= 1, f"{flag(name)} {number}: it must be at least 1")
    return number


def new_file(option: str, name: object, endings: Sequence[str] = ()) -> Path | None:
    """The file that an option names, which a command will write; None without a name."""
    if name is None:
        return None
    asked, path = f"--{option} {name}", Path(str(name))
    require(not endings or path.suffix in endings, f"{asked}: the name of the file must end in {' or '.join(endings)}")
    require(not path.exists(), f"{asked}: the file exists; choose another name")
    require(path.absolute().parent.is_dir(), f"{asked}: the folder of that file does not exist; make it first")
    return path


def as_spec(value: object) -> object:
    """The value of an option that is true, false, or a reward as `train --reward` takes it."""
    try:
        return convert(value, bool, "reward")
    except OperantError:
        return read(value)
