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
from typing import Any, NamedTuple, NoReturn

from operant import other_names
from operant.options import Factory
from operant.tools.cli.arguments import parse_text
from operant.types import OperantError

ARGUMENTS = {
    "version": "Which consistency is learnt: v1 of one Q, v2 of a step, v3 of a path, or v2_v3 of both.",
    "forward_share": "Weight of these losses, which train A, against those that train V: policy and copy exchanged.",
    "freeze_later": "In v3, no gradient goes through the A of later actions.",
    "standardise": "Subtract the mean of rewards and divide by their deviation: step, rlprompt, group or none.",
    "shape": "Four numbers a,b,c,d: the line that maps a reward of a to c, and one of b to d.",
    "clip": "The ratio may move by this much before the gain ends.",
    "value_clip": "The value may move by this much before a smaller error stops counting; none: not clipped.",
    "value_coef": "Weight of the value loss beside the policy loss.",
    "entropy_coef": "Weight of the entropy bonus.",
    "clip_high": "The bound above, where it is another than `clip`; none: `clip`.",
    "ratio": "reply: the mean of a reply's log-ratios for all its tokens; token: with the gradient of each.",
    "high": "Largest weight of a token, or of what it may be above 1: see `bound`.",
    "bound": "weight: weights are at most `high`. excess: at most 1 + `high`.",
    "low": "Weights are at least 1 minus this; none: at least 0.",
    "temperature": "How fast the gradient of a token of a good reply fades away from a ratio of 1.",
    "temperature_negative": "The same for tokens of other replies.",
    "distance": "tv: the change of a token's probability. kl: KL of 'this token or another', before against now.",
    "max_distance": "A token that would move farther than this has no gradient; with kl the paper takes 0.05.",
    "ratio_cap": "Largest ratio of a token.",
    "k": "How many replies the best is taken of.",
    "critic_lam": "Lambda of the critic's targets.",
    "alpha": "In a reply of l tokens the lambda of the advantages is 1 - 1 / (this * l).",
    "right": "Least return of a right reply.",
    "right_coef": "Weight of the cross-entropy of right replies.",
    "scale": "Divide by the deviation of the group's returns.",
    "deviation": "population: divided by n, plus 1e-6. sample: by n - 1, plus 1e-4, as TRL.",
    "dual_clip": "Bounds the loss of a bad action that became likely, at this many times its advantage; above 1.",
    "gamma": "Discount between the tokens of a reply.",
    "lam": "Lambda of GAE between the tokens of a reply: 1 trusts returns, 0 the critic.",
    "turn_gamma": "Discount between the turns of an episode, on top of `gamma`.",
    "turn_lam": "Lambda between turns; none: `lam`.",
    "level": "token: each token is an action; turn_first, turn_mean: each turn, by its first value or their mean.",
    "omega": "Weight of the comparison of turns that begin in the same state.",
    "whiten_scope": "Where advantages get mean 0 and variance 1: rollout, minibatch (after the cut), none.",
    "unbiased": "Divide by n - 1 in that variance, as TRL and RL4LMs do.",
    "whiten_rewards": "Scale rewards to variance 1 first, the mean kept.",
    "divergence": "reverse: KL(policy || teacher). forward: KL(teacher || policy).",
    "tau": "The expectile of V: near 1, the value of the best replies of the data; 0.5: of their mean.",
    "cql_coef": "Weight of the term that keeps Q low where no reply has been.",
    "bc_coef": "Weight of the imitation of the replies.",
    "awac_beta": "The imitation's weights are exp(this * (Q - V)), at most 20; 0: all are 1.",
    "kind": "The loss; the page of the method has the formula of each.",
    "beta": "Coefficient of the log-ratio to the reference: a smaller one allows more distance from it.",
    "label_smoothing": "Share of labels that are taken to be wrong; with kind sigmoid or robust.",
    "pairs": "all: every pair of replies to a prompt; ends: only the best ones against the worst ones.",
    "given_coef": "Weight of the cross-entropy of given replies beside the loss of the policy's own.",
    "good_weight": "Weight of good replies.",
    "bad_weight": "Weight of bad replies.",
    "margin": "Scores of a pair should differ by this times the difference of their labels.",
    "ties": "Equal labels: none: left out; davidson, rao-kupper: a model of ties.",
    "tie": "How likely ties are in that model.",
}
"""The texts of options that are arguments of a pure function, whose docstring describes all of them together."""


class About(NamedTuple):
    """What the help says of an option."""

    name: str
    """The full name."""
    value: Any
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

    def __init__(self, prog: str, about: str, examples: str, **settings: Any) -> None:
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

    def add_briefly(self, title: str, options: Mapping[str, tuple[Any, str]]) -> None:
        """Add options under a title, one line each: its value, and what it is."""
        group = self.add_argument_group(title)
        for name, (value, text) in options.items():
            group.add_argument(flag(name), dest=name, metavar=escaped(as_typed(value)), help=escaped(text))

    def read(self, words: Sequence[str], more: bool) -> tuple[list[str], dict[str, Any], dict[str, Any]]:
        """The arguments, the options, and those by name that the parser does not know. more: there may be such.

        Raises: OperantError for an option that appears twice, lacks its value, or is unknown, with the nearest.
        """
        own = self.options()
        flags = [name for name, action in own.items() if action.nargs == 0]
        several = [name for name, action in own.items() if type(action).__name__ == "_AppendAction"]
        plain, options = parse_text(words, flags, several)
        of_form = {name: options.pop(name) for name in [*options] if "form" in own and name.startswith("form.")}
        rest = {name: options.pop(name) for name in [*options] if name not in own}
        if rest and not more:
            name = next(iter(rest))
            last = name.rpartition(".")[2]
            near = [n for ours in other_names.ours(last) if (n := ours.rpartition(".")[2]) in own] or [last] * (
                last in own
            )
            note = f" ({other_names.note(last)})" if near and other_names.note(last) else ""
            near = near or [n for n in MEANT.get(last, ()) if n in own] or difflib.get_close_matches(name[:100], own, 1)
            hint = f"did you mean {near[0]!r}?{note}" if near else f"`{self.prog} --help` lists all"
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


def flag(name: str) -> str:
    """An option as it is typed."""
    return f"--{name.replace('_', '-')}"


def escaped(text: str) -> str:
    """A text as argparse takes it, which fills in values at percent signs."""
    return text.replace("%", "%%")


_parsed = cache(lambda made: ast.parse(textwrap.dedent(inspect.getsource(made))))
"""The source of a class, which is slow to find: the options of all methods share few."""


def sentences(made: Any) -> dict[str, str]:
    """The text under each field of a dataclass, on one line; `ARGUMENTS` for those of a function."""
    if isinstance(made, Factory):
        return {}
    if not inspect.isclass(made):
        return ARGUMENTS
    found = {}
    for base in filter(is_dataclass, reversed(made.__mro__)):
        (node,) = _parsed(base).body
        for pair in itertools.pairwise(node.body if isinstance(node, ast.ClassDef) else []):
            match pair:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


def as_typed(value: Any) -> str:
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
