"""A parsed script and the edits to it: libcst says where things are and what names mean, and the text is edited."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from operant.import_by_name import extra
from operant.tools.migrate.renaming import UNKNOWN, Renamed, literal

Node = Any
"""A node of libcst, which is imported only to read a script."""


@dataclass
class Configuration:
    """A call of `GRPOConfig` or its like."""

    renamed: Renamed
    target: str
    """What it is assigned to, as `training_args`; empty: it stands in a call."""
    stars: list[str] = field(default_factory=list)
    given: Mapping[str, str] = field(default_factory=dict)
    start: int = 0
    """Where it begins in the text."""

    def constant(self, field: str) -> str:
        """Code of a field that was given as a literal; empty: it was not."""
        code = self.given.get(field, "")
        return "" if literal(code) is UNKNOWN else code


class ScriptTree:
    """A parsed script and the edits to it."""

    def __init__(self, text: str):
        with extra("migrate reads scripts with libcst", "migrate"):
            import libcst
            from libcst import matchers, metadata
        self.cst, self.text = libcst, text
        wrapper = metadata.MetadataWrapper(libcst.parse_module(text), unsafe_skip_copy=True)
        self.module = wrapper.module
        self.places = wrapper.resolve(metadata.PositionProvider)
        self.parents: Mapping[Node, Node] = wrapper.resolve(metadata.ParentNodeProvider)
        self.names = wrapper.resolve(metadata.QualifiedNameProvider)
        lines = re.findall(r"[^\r\n]*(?:\r\n|\r|\n|$)", text)  # those of Python: `splitlines` knows more ends of lines
        self.starts = list(accumulate(map(len, lines), initial=0))
        self.edits: list[tuple[int, int, str]] = []
        self.comments: dict[int, list[str]] = {}
        find = matchers.findall
        self.calls = self._sorted(find(self.module, matchers.Call()))
        self.imports = self._sorted(find(self.module, matchers.ImportFrom() | matchers.Import()))
        self.assigns = self._sorted(find(self.module, matchers.Assign()))
        self.attributes = self._sorted(find(self.module, matchers.Attribute()))
        self.mentioned = self._sorted(find(self.module, matchers.Name() | matchers.Attribute()))
        self.classes = self._sorted(find(self.module, matchers.ClassDef()))
        self.functions = {f.name.value: f for f in self._sorted(find(self.module, matchers.FunctionDef()))}
        self.uses = [i for i in self.imports if any(m.split(".")[0] in ("trl", "trlx") for m in self._modules(i))]

    def _sorted(self, found: Iterable[Node]) -> list[Node]:
        return sorted(found, key=self._span)

    def _span(self, node: Node) -> tuple[int, int]:
        place = self.places[node]
        start, end = (self.starts[at.line - 1] + at.column for at in (place.start, place.end))
        return start, end

    def code(self, node: Node) -> str:
        return self.module.code_for_node(node).strip()

    def meaning(self, node: Node) -> str:
        """The qualified name of an expression, as `trl.GRPOTrainer`; empty: none."""
        found = self.names.get(node, ())
        found = found() if callable(found) else found  # libcst computes them when they are asked for
        return min((q.name for q in found), default="")

    def _modules(self, node: Node) -> list[str]:
        """The modules that an import statement names."""
        if isinstance(node, self.cst.ImportFrom):
            return [] if node.module is None or node.relative else [self.code(node.module)]
        return [self.code(alias.name) for alias in node.names]

    def around(self, node: Node, *kinds: type) -> Node:
        """The nearest node of these kinds around a node, which may be itself; None: there is none."""
        while node is not None and not isinstance(node, kinds):
            node = self.parents.get(node)
        return node

    def statement(self, node: Node) -> Node:
        """The statement around a node: the line that comments stand above."""
        return self.around(node, self.cst.SimpleStatementLine, self.cst.BaseCompoundStatement)

    def above(self, node: Node, *lines: str) -> None:
        """Put comments above the statement around a node."""
        listed = self.comments.setdefault(self.places[self.statement(node)].start.line, [])
        listed.extend(line for line in lines if line not in listed)

    def replace(self, node: Node, new: str) -> None:
        self.edits.append((*self._span(node), new))

    def indent(self, node: Node) -> str:
        return self._indent_of(self.places[self.statement(node)].start.line)

    def _indent_of(self, line: int) -> str:
        rest = self.text[self.starts[line - 1] :]
        return rest[: len(rest) - len(rest.lstrip(" \t"))]

    def target(self, call: Node) -> str:
        """What the value of a call is assigned to; empty: nothing."""
        parent = self.parents[call]
        if isinstance(parent, self.cst.Assign) and len(parent.targets) == 1:
            return self.code(parent.targets[0].target)
        return self.code(parent.target) if isinstance(parent, self.cst.AnnAssign) else ""

    def arguments(self, call: Node, *positions: str) -> tuple[dict[str, Node], list[str]]:
        """The arguments of a call by name, and the code of those that are unpacked."""
        found, stars = {}, []
        for number, argument in enumerate(call.args):
            if argument.star:
                stars.append(f"{argument.star}{self.code(argument.value)}")
            elif argument.keyword is not None:
                found[argument.keyword.value] = argument.value
            elif number < len(positions):
                found[positions[number]] = argument.value
        return found, stars

    def assigned(self, node: Node) -> Node:
        """The expression that a name was last given above it; the node itself where it is no such name."""
        if not isinstance(node, self.cst.Name):
            return node
        above = [a for a in self.assigns if self._span(a) < self._span(node)]
        return next((a.value for a in reversed(above) if self.code(a.targets[0].target) == node.value), node)

    def as_mapping(self, call: Node, made: Configuration) -> None:
        self.above(call, *made.renamed.comments)
        for star in made.stars:
            self.above(call, f"{star}: its options need operant's names too")
        self.replace(call, mapping(made.renamed.values, [s for s in made.stars if s[:2] == "**"], self.indent(call)))

    def configured(self, known: Mapping[str, list[Configuration]], text: str, node: Node) -> Configuration | None:
        """The last configuration of this name before the end of a node."""
        end = self._span(node)[1]
        return next((made for made in reversed(known.get(text, [])) if made.start < end), None)

    def edited(self) -> str:
        """The text with its edits; one inside another is made in what replaces that one."""
        inserts = []
        for line, comments in self.comments.items():
            start, indent = self.starts[line - 1], self._indent_of(line)
            inserts.append((start, start, "".join(f"{indent}# operant: {' '.join(c.split())}\n" for c in comments)))
        outer: list[tuple[int, int, str]] = []
        for edit in sorted(self.edits, key=lambda e: (e[0], -e[1])):
            if not outer or edit[0] >= outer[-1][1]:
                outer.append(edit)
            elif edit[0] < edit[1]:
                start, end, new = outer[-1]
                outer[-1] = (start, end, new.replace(self.text[edit[0] : edit[1]], edit[2]))
        text = self.text
        for start, end, new in sorted([*inserts, *outer], key=lambda e: (e[0], e[1]), reverse=True):
            text = text[:start] + new + text[end:]
        return re.sub(r"^([ \t]*import operant[ \t\r]*\n)\1+", r"\1", text, flags=re.MULTILINE)  # one of several alike


def mapping(values: Mapping[str, str], stars: list[str], indent: str) -> str:
    """Code of a mapping, on one line if it is short."""
    parts = [*(f'"{name}": {code}' for name, code in values.items()), *stars]  # defaults first: they give way
    one = "{" + ", ".join(parts) + "}"
    if len(one) <= 60 and "\n" not in one:
        return one
    return "{\n" + "".join(f"{indent}    {part},\n" for part in parts) + indent + "}"


def call_of(arguments: list[str], indent: str) -> str:
    """Code of a call of `operant.train`, one argument a line."""
    return "operant.train(\n" + "".join(f"{indent}    {argument},\n" for argument in arguments) + f"{indent})"
