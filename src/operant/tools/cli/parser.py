"""The parser of a command: argparse with options from schemas, one-sentence errors, and help by rich-argparse."""

import argparse
import ast
import difflib
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, NoReturn

from operant.options import Factory, note, ours
from operant.tools.cli.arguments import flag, parse_text
from operant.types import OperantError


class About(NamedTuple):
    """What the help says of an option."""

    name: str
    """The full name."""
    value: object
    text: str = ""
    rule: str = ""
    """Its bounds or choices, as in "at least 1"."""
    alone: bool = False
    """Whether it may stand without a value, for true."""


MEANT = {"evaluate": ("tasks",), "file": ("tasks",), "data": ("tasks",), "dataset": ("tasks",), "prompts": ("tasks",)}
"""Options of a command that are meant by other words for them."""


class Parser(argparse.ArgumentParser):
    """It knows no abbreviations. Values stay text: `operant.options` converts and checks them, wherever they are from.

    examples: lines below the first sentence of the help.
    """

    def __init__(self, prog: str, about: str, examples: str, **settings: object) -> None:
        super().__init__(
            prog,
            description=f"{about[0].upper()}{about[1:]}.\n\n{examples}",
            formatter_class=_formatter,  # pyright: ignore[reportArgumentType] - so that rich is imported for help only
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
            add_help=False,
            **settings,
        )
        self.add_argument("-h", "--help", action="store_true", help="show this help")

    def error(self, message: str) -> NoReturn:
        raise OperantError(f"{message.removeprefix('argument ')}; `{self.prog} --help` shows examples")

    def options(self) -> dict[str, argparse.Action]:
        """The options by name, with underscores."""
        return {action.dest: action for action in self._actions if action.option_strings}

    def add(self, options: Iterable[About]) -> None:
        """Add options by group, each with its text, bounds and value, except those that the parser has."""
        known, places = self.options(), {"": self}
        for about in options:
            group = about.name.rpartition(".")[0]
            if about.name not in known:
                place = places.get(group) or places.setdefault(group, self.add_argument_group(group))
                bounds = f"({about.rule})" if about.rule else ""
                text = " ".join(filter(None, [about.text, bounds, f"[{as_typed(about.value)}]"]))
                alone = {"nargs": "?", "const": True} if about.alone else {}
                place.add_argument(flag(about.name), dest=about.name, metavar="VALUE", help=escaped(text), **alone)

    def add_briefly(self, title: str, options: Mapping[str, tuple[object, str]]) -> None:
        """Add options under a title, one line each: its value, and what it is."""
        group = self.add_argument_group(title)
        for name, (value, text) in options.items():
            group.add_argument(flag(name), dest=name, metavar=escaped(as_typed(value)), help=escaped(text))

    def read(self, words: Sequence[str], more: bool) -> tuple[list[str], dict[str, object], dict[str, object]]:
        """The arguments, the options, and those by name that the parser does not know. more: there may be such."""
        own = self.options()
        flags = [name for name, action in own.items() if action.nargs == 0]
        several = [name for name, action in own.items() if type(action).__name__ == "_AppendAction"]
        plain, options = parse_text(words, flags, several)
        if "text_field" in own and any(name.startswith("data.") for name in options):  # as a run and errors call it
            from operant.data import DataOptions

            of_data = {f"data.{name}": name for name in DataOptions.__dataclass_fields__ if name not in options}
            options = {of_data.get(name, name): x for name, x in options.items()}
        of_form = {name: options.pop(name) for name in [*options] if "form" in own and name.startswith("form.")}
        rest = {name: options.pop(name) for name in [*options] if name not in own}
        if rest and not more:
            name = next(iter(rest))
            last = name.rpartition(".")[2]
            here = [option for full in ours(last) if (option := full.rpartition(".")[2]) in own]
            here = here or ([last] if last in own else [])
            aside = f" ({note(last)})" if here and note(last) else ""
            near = here or [n for n in MEANT.get(last, ()) if n in own] or difflib.get_close_matches(name[:100], own, 1)
            hint = f"did you mean {near[0]!r}?{aside}" if near else f"`{self.prog} --help` lists all"
            if name in ("model", "policy") and re.search(r"MODEL|runs/x", str(self.usage)):
                hint = f"a model is named without an option: {self.prog} {rest[name]}"
            raise OperantError(f"option {name[:100]!r} is unknown; {hint}")
        given = [(own[n].option_strings[-1], x) for n, o in options.items() for x in (o if n in several else [o])]
        typed = [name + ("" if value is True else f"={value}") for name, value in given]
        found = vars(self.parse_args([*typed, "--", *plain]))
        return found.pop("operands", []), found | of_form, rest


def _formatter(prog: str) -> argparse.HelpFormatter:
    from rich_argparse import RawDescriptionRichHelpFormatter

    class Plain(RawDescriptionRichHelpFormatter):
        text_markup = help_markup = False  # brackets are brackets
        group_name_formatter = str

    return Plain(prog, max_help_position=32)


def escaped(text: str) -> str:
    """A text as argparse takes it, which fills in values at percent signs."""
    return text.replace("%", "%%")


_parsed = cache(lambda made: ast.parse(textwrap.dedent(inspect.getsource(made))))
"""The source of a class, which is slow to find: the options of all methods share few."""


def sentences(made: object) -> dict[str, str]:
    """The text under each field of a dataclass, on one line; for the arguments of a function, which its docstring
    describes all together, those of arguments.txt."""
    if isinstance(made, Factory):
        return {}
    if not inspect.isclass(made):
        lines = (Path(__file__).parent / "arguments.txt").read_text(encoding="utf-8").splitlines()
        return {name: text for name, _, text in (line.partition(": ") for line in lines)}
    found = {}
    for base in filter(is_dataclass, reversed(made.__mro__)):
        (node,) = _parsed(base).body
        for pair in itertools.pairwise(node.body if isinstance(node, ast.ClassDef) else []):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


def as_typed(value: object) -> str:
    """A value as one would type it."""
    if value is None:
        return "none"
    if value is inspect.Parameter.empty:
        return "no default"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float | int):
        return f"{value:g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, tuple | list):
        return ", ".join(map(as_typed, value)) or "none"
    return str(value)
