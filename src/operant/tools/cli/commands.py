"""The commands, each with its options and its help, which `commands.toml` lists.

The options of a run depend on its recipe, its method and what these name, so `train`, `sweep` and `doctor --plan` take
options that their parsers do not know, and `operant.runs.config` checks them.
"""

import difflib
import os
import tomllib
from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from operant.options import read
from operant.tools.cli import help
from operant.tools.cli.arguments import Options
from operant.tools.cli.parser import Parser
from operant.tools.cli.without_torch import OF_TABLES, without_torch
from operant.types import OperantError, require


@dataclass(frozen=True)
class Command:
    """A command of the command line."""

    run: str
    """The function `module:name` of this package: it takes the arguments and the options, and returns the exit code."""
    about: str
    examples: str
    operand: str = ""
    """Its arguments, for the line of usage."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Its own options, for `add_argument`."""
    declared: Sequence[str] = ()
    """The dataclasses `module:Name` of its options that are declared elsewhere."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values of those options that are not their defaults."""
    without: Sequence[str] = ()
    """Those options that it does not take."""
    light: bool = False
    """Whether it needs no torch, and prints at its end only, as it may have to begin again with torch."""
    more: bool = False
    """Whether it takes the options of a run, too."""
    epilog: str | None = None
    """The end of its help."""


_LISTED = tomllib.loads((Path(__file__).parent / "commands.toml").read_text(encoding="utf-8"))
MEANT: Mapping[str, str] = _LISTED.pop("meant")
"""What is meant by words that are no commands."""
_SHARED: Mapping[str, Mapping[str, Any]] = _LISTED.pop("shared")
OF_PROGRAMS = "options of programs, with --tests"
"""The title of the group of options that only apply to programs."""
PROGRAMS = ("tests", "submit", "all", *_SHARED["search"])
"""Those options."""


def _command(listed: dict[str, Any]) -> Command:
    options = listed.pop("options", {})
    for group in listed.pop("shares", ()):
        options |= _SHARED[group]
    taken = dict[str, dict[str, Any]]()
    for name, option in options.items():
        if isinstance(option, str):
            taken[name] = {"action": "store_true", "help": option}
        else:
            value, text, *several = option
            taken[name] = {"metavar": value.strip("[]"), "help": text} | ({"action": "append"} if several else {})
            taken[name] |= {"nargs": "?", "const": True} if value.startswith("[") else {}
    return Command(**listed, options=taken)


COMMANDS = {name: _command(listed) for name, listed in _LISTED.items()}


def run(name: str, words: Sequence[str]) -> int:
    """Run the command `name` on the words after it, or print its help; returns the exit code."""
    if name not in COMMANDS:
        near = [MEANT[name]] if name in MEANT else difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]!r}?" if near else "`operant --help` lists the commands"
        raise OperantError(f"unknown command {name!r}; {hint}")
    command, parser = COMMANDS[name], parsers(Parser("operant", name, ""))[name]
    for spec in command.declared:
        parser.add(about for about in help.declared(spec, command.values) if about.name not in command.without)
    operands, options, rest = parser.read(words, command.more)
    if name == "reward-model" and "resume" not in rest:  # a recipe that people look for as a command
        operands = [name, *operands]
    if valueless := next((option for option, value in rest.items() if value is True and not help.alone(option)), None):
        raise OperantError(f"option --{valueless} lacks its value: --{valueless} VALUE")
    asked, all_asked = options.pop("help", False), options.pop("help_all", False)
    if not asked and not all_asked:
        rest = rest if name == "sweep" else {option: read(text) for option, text in rest.items()}
        module, _, function = command.run.partition(":")

        def execute() -> int:
            made = vars(import_module(f"operant.tools.cli.{module}"))[function]
            return made(operands, {**command.values, **options, **rest})

        return (without_torch(execute, OF_TABLES) if command.light else execute)()
    recipe = operands[0] if operands else None
    if all_asked:
        parser.add(help.every(recipe, rest))
    elif "help-all" in command.options:
        method, common = help.common(recipe, rest)
        of = f", with the values of {recipe}" if recipe else ""
        parser.add_briefly(f"common options of {method}{of}", common)
    parser.print_help()
    return 0


def print_help() -> None:
    """Print the commands, and how to find the options of each."""
    recipes = ", ".join(sorted(path.stem for path in (Path(__file__).parents[2] / "builtin").glob("*.yaml")))
    examples = f"""\
  operant train RECIPE --kl.coef 0.1                 a recipe ({recipes}) or your own YAML file
  operant generate runs/RECIPE                       generate replies with the trained model
  operant train --resume runs/RECIPE                 resume an interrupted run"""
    about = "train transformer language models with reinforcement learning"
    end = "`operant COMMAND --help` explains a command, and `operant train --help-all` lists every option of a run."
    top = Parser("operant", about, examples, usage="operant COMMAND [--option value ...]", epilog=end)
    top.add_argument("-V", "--version", action="store_true", help="show the version")
    parsers(top)
    top.print_help()


def parsers(top: Parser) -> dict[str, Parser]:
    """Give `operant` the parsers of its commands; they are returned by name."""
    below = top.add_subparsers(title="commands", metavar="COMMAND", prog="operant")
    for name, command in COMMANDS.items():
        takes = [command.operand, "[--option value ...]" if command.options or command.more else ""]
        settings = {"usage": " ".join(filter(None, ["operant", name, *takes])), "epilog": command.epilog}
        parser = below.add_parser(name, help=command.about, about=command.about, examples=command.examples, **settings)
        parser.add_argument("operands", nargs="*", help=SUPPRESS)
        programs = parser.add_argument_group(OF_PROGRAMS) if "tests" in command.options else parser
        for option, of_option in command.options.items():
            (programs if option in PROGRAMS else parser).add_argument(f"--{option}", **of_option)
    return below.choices


def train(words: Sequence[str], options: Options) -> int:
    """`operant train RECIPE [--option value ...]`, or `operant train --resume runs/x`."""
    resume, out = options.pop("resume", None), options.pop("out", None)
    fresh = bool(options.pop("fresh_optimizer", False))
    if options.pop("resume_if_there", False) and not resume:
        there = Path(out or f"runs/{Path(words[0]).stem if words else 'run'}")
        if (there / "config.yaml").is_file():  # every rank looks before the first one makes the folder
            words, resume, out = [], str(there), None
    if len(words) > 1 or (words and resume):
        odd = next((word for word in words if word.startswith("-") or "=" in word), "").lstrip("-")
        hint = f"options begin with two dashes: --{odd}" if odd else "operant train RECIPE --option value ..."
        raise OperantError(f"unexpected argument {words[-1]!r}: {hint}")
    how = "name a recipe, as in operant train sentiment, or give options: operant train --tasks ... --reward ..."
    require(words or resume or options, f"nothing to train: {how}")
    if python := [name for name in ("recipe", "tokenizer", "show") if name in options]:
        hint = "a recipe is named without it: operant train RECIPE" if "recipe" in python else "it is for Python alone"
        raise OperantError(f"option {python[0]!r} is unknown; {hint}")
    remedy = "to leave that as it is, copy the folder and resume the copy"
    require(not (resume and out), f"--out {out} beside --resume: a run is resumed in its own folder; {remedy}")
    from operant.api import runs
    from operant.runs.resume import finished_message

    if resume and (message := finished_message(Path(resume), options, fresh_optimizer=fresh)) is not None:
        if os.environ.get("RANK", "0") == "0":
            print(message)
        return 0
    named = {"recipe": words[0] if words else None, "resume": bool(resume), "fresh_optimizer": fresh}
    try:
        for _ in runs(resume or out, **named, **options):
            pass
    except OperantError as error:
        several = [f"--{n} {x}" for n, x in options.items() if "," in str(x).split("[")[0] and repr(x) in str(error)]
        if resume or not several or not ("it must be" in str(error) or "algorithm" in options):
            raise
        raise OperantError(f"{error}; operant sweep makes a run of each value: {several[0]}") from error
    return 0
