"""Write `src/operant/keywords.pyi`: the options of `train`, `steps` and `Learner` as keyword arguments, for editors.

A type checker takes the names of keyword arguments from a TypedDict alone, and the options are the fields of some
twenty dataclasses and the arguments of the methods' functions. So the file is made of these whenever the package is
built or installed (`build_hook.py`), and by `make docs` and `make check`; it is in no commit, and the package itself
never imports it. Without it, editors complete no options, and a wrong one is told when it is used.
"""

import collections.abc
import textwrap
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from operant.algorithms import ALGORITHMS
from operant.options import kinds
from operant.runs.config import config_schema
from operant.tools.cli.parser import sentences
from operant.training.options import schema

FILE = Path(__file__).parents[1] / "src/operant/keywords.pyi"

KEYWORDS = '''"""The options of `train`, `steps` and `Learner` as keyword arguments, for editors and type checkers.

This file is generated: edit the dataclass that holds the option. Those of a method's own loss, advantage and update
may also be in any mapping. Where one group alone has a name, the name alone will do.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict
'''
OBJECTS = {
    "tokenizer": "The tokenizer of a policy that is a model.",
    "lr_scheduler": "The scheduler of an optimizer of your own, or a function from the optimizer to one.",
    "recipe": "A recipe by name, or a YAML file; options given here replace its own.",
    "resume": "Go on with the run in `out`.",
    "fresh_optimizer": "With `resume`: load only the weights, and start with a new optimizer.",
}
"""Arguments of `train` that are no options."""


def keywords() -> str:
    """A TypedDict per group of options, and those of a learner and of a run."""
    by_group: dict[str, dict[str, tuple[str, str]]] = {}
    of_methods = {group for method in ALGORITHMS.values() for group in schema(method)}
    for algorithm in ALGORITHMS:
        for group, made in config_schema(algorithm, {}).items():
            own = by_group.setdefault(group, {})
            own |= {name: (_hint(kind), sentences(made).get(name, "")) for name, kind in kinds({"": made}).items()}
    run, of_learner = by_group.pop(""), {g: own for g, own in by_group.items() if g in of_methods}
    every = [name for own in (run, *by_group.values()) for name in own] + [*by_group]
    page, groups, bases = KEYWORDS, dict[str, dict[str, tuple[str, str]]](), dict[str, str]()
    for group, own in by_group.items():
        keywords_of_group = f"{group.title().replace('_', '')}Keywords"
        page += _typed_dict(keywords_of_group, f"The options `{group}.*`.", own)
        opened = " | Mapping[str, Any]" if group in ("loss", "advantage", "update") else ""
        groups[group] = {group: (f"{keywords_of_group}{opened}", "")}
        short = {name: kind for name, kind in own.items() if every.count(name) == 1}
        if short == own:  # all of its names may stand alone: they are inherited
            bases[group] = keywords_of_group
        else:
            groups[group] |= short
    optimizer = groups["optimizer"].pop("optimizer")
    learner = {name: kind for group in of_learner for name, kind in groups[group].items()}
    inherited = [base for group, base in bases.items() if group in of_learner]
    page += _typed_dict("LearnerArguments", "The options of a `Learner`.", learner, bases=inherited)
    explicit = ("policy", "tasks", "reward", "algorithm")
    of_run = {name: ("Any", about) for name, about in OBJECTS.items()}
    of_run |= {"recipe": ("str", OBJECTS["recipe"])} | {n: ("bool", OBJECTS[n]) for n in ("resume", "fresh_optimizer")}
    of_run |= {"optimizer": (f"{optimizer[0]} | Any", "Its options; or an optimizer of your own, or what makes one.")}
    of_run |= {name: kind for name, kind in run.items() if name not in explicit}
    of_run |= {name: kind for group in by_group if group not in of_learner for name, kind in groups[group].items()}
    inherited = ["LearnerArguments", *(base for group, base in bases.items() if group not in of_learner)]
    return page + _typed_dict("TrainArguments", "The options of a run.", of_run, bases=inherited)


def _typed_dict(name: str, about: str, entries: dict[str, tuple[str, str]], bases: Sequence[str] = ()) -> str:
    inside = f"{', '.join(bases) or 'TypedDict'}, total=False"
    inside = inside if len(f"class {name}({inside}):") <= 120 else f"\n    {inside}\n"
    text = f'\n\nclass {name}({inside}):\n    """{about}"""\n\n'
    for entry, (kind, meaning) in entries.items():
        text += f"    {entry}: {kind}\n"
        if meaning:
            wrapped = {"initial_indent": "    ", "subsequent_indent": "    ", "break_on_hyphens": False}
            docstring = textwrap.fill(f'"""{meaning}', 112, **wrapped)
            text += f'{docstring}"""\n'
    return text


def _hint(kind: Any) -> str:
    """A type as it is written in an annotation, where options also take lists for tuples."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return " | ".join(dict.fromkeys(part for inner in inside for part in _hint(inner).split(" | ")))
    if origin is tuple:
        return f"Sequence[{_hint(inside[0])}] | str"
    if origin in (dict, collections.abc.Mapping):
        return "Mapping[str, Any]"
    plain = {bool: "bool", int: "int", float: "float", str: "str", type(None): "None"}
    return plain.get(kind, "Any")


if __name__ == "__main__":
    FILE.write_text(keywords(), encoding="utf-8")
