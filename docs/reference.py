"""The API reference, made from the docstrings of the public names.

python docs/reference.py [FOLDER]   write it to build/reference, or to FOLDER (`make docs`)
python docs/reference.py check      name what the docstrings leave out (`make check`)

The pages, the check and the tests take the public names from `public`.
"""

import ast
import importlib
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path

import pdoc.render
import pdoc.render_helpers
from pdoc.doc import Class, Doc, Function, Module, Variable
from pygments.formatters import HtmlFormatter

from operant.algorithms import METHODS

DOCS = Path(__file__).parent
MODULES = (
    "operant",
    "operant.types",
    "operant.objectives",
    "operant.objectives.losses",
    "operant.objectives.advantages",
    "operant.objectives.kl",
    "operant.rewards",
    "operant.algorithms",
    "operant.diagnosis",
)
"""Public are the names of `__all__`; in a module without it, what the module defines without a leading underscore."""
METHOD_PAGES = tuple(f"operant.algorithms.{name}" for name in METHODS)
"""The file of a method: its page is its docstring alone."""
SHAPE = re.compile(r"\[[^\[\]`]*\b[A-Z]\b[^\[\]]*\]|\[len\(|\bscalar\b|\b(any|same|in the) shape\b")
"""What counts as a shape in a docstring: `[B, T]`, `[N]`, `[len(action)]`, or words."""


def public(names: Sequence[str] = MODULES) -> dict[str, Module]:
    """The modules with their public names. What several of them export is described in the first of them."""
    modules, homes = {}, {}
    for name in names:
        modules[name] = module = _load(name)
        for doc in module.members.values():
            home = homes.setdefault(id(doc.obj), name) if isinstance(doc, Class | Function) else name
            if isinstance(doc, Class):
                hidden = [m for (base, _), found in doc.inherited_members.items() if base not in names for m in found]
                here = [m for m in (*doc.own_members, *hidden) if m.taken_from[0].startswith("operant")]
                doc.own_members = here if home == name else []
                doc.inherited_members = doc.inherited_members if home == name else {}
            if home != name:
                link = os.path.relpath(_page(home), _page(name).parent)
                doc.docstring = f"{_first(doc.docstring)}\n\nSee [`{home}.{doc.name}`]({link}#{doc.name})."
    return modules


def _load(name: str) -> Module:
    """A module with the members that are public. Docstrings of variables are read where they are defined."""
    loaded = importlib.import_module(name)
    for exported in getattr(loaded, "__all__", ()):
        vars(loaded)[exported] = getattr(loaded, exported)  # those of `operant` are imported on the first access
    module = Module(loaded)
    module.submodules = []
    module.members = {doc.name: doc for doc in module.members.values() if not doc.name.startswith("_")}
    imports = [node for node in ast.walk(ast.parse(module.source)) if isinstance(node, ast.ImportFrom)]
    origin = {alias.name: node.module for node in imports for alias in node.names}
    for doc in module.members.values():
        if isinstance(doc, Variable) and not doc.docstring and doc.name in origin:
            doc.docstring = Module(importlib.import_module(origin[doc.name])).members[doc.name].docstring
    return module


def _page(module: str) -> Path:
    return Path(module.replace(".", "/") + ".html")


def _first(docstring: str) -> str:
    """The first paragraph."""
    return docstring.split("\n\n")[0]


# --- the pages ----------------------------------------------------------------------------------------------------


def build(folder: Path) -> list[Path]:
    """Write a page for each module, the index and the search to a folder; returns the pages."""
    modules = public() | {name: Module(importlib.import_module(name)) for name in METHOD_PAGES}
    for name in METHOD_PAGES:
        modules[name].members = {}
    for name, module in modules.items():
        parent = modules.get(name.rpartition(".")[0])
        if parent is not None:
            parent.submodules.append(module)
    pdoc.render.configure(
        docformat="markdown", show_source=False, include_undocumented=False, template_directory=DOCS / "theme"
    )
    pdoc.render.env.globals["dark"] = HtmlFormatter(style="github-dark").get_style_defs(".pdoc-code")
    pdoc.render_helpers.markdown_extensions["latex"] = None  # to MathML, which browsers show without a script
    pages = {folder / _page(name): pdoc.render.html_module(module, modules) for name, module in modules.items()}
    pages[folder / "index.html"] = pdoc.render.html_index(modules)
    pages[folder / "search.js"] = pdoc.render.search_index(modules)
    for path, text in pages.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_from_docs(text, path.parent), encoding="utf-8")
    return [path for path in pages if path.suffix == ".html"]


def _from_docs(page: str, folder: Path) -> str:
    """The docstrings of methods are also sections of docs/algorithms.md, so their links start in docs/."""
    links = r'href="((?:\.\./)*[\w/-]+\.(?:md|py))(?=["#])'
    return re.sub(links, lambda found: f'href="{os.path.relpath(DOCS / found[1], folder)}', page)


# --- the check ----------------------------------------------------------------------------------------------------


def complaints(modules: Iterable[Module]) -> Iterator[str]:
    """What the docstrings of public names leave out: all of it, the shapes of tensors, or the errors."""
    for module in modules:
        if not module.docstring:
            yield f"{module.fullname}: it has no docstring"
        for doc in module.members.values():
            yield from _left_out(doc)
            for member in doc.own_members if isinstance(doc, Class) else ():
                if not member.name.startswith("_") and (member.docstring or _declared(doc.obj, member.name)):
                    yield from _left_out(member, doc.docstring if is_dataclass(doc.obj) else "")


def _declared(owner: type, name: str) -> bool:
    """Whether a class itself has the attribute. One that `__init__` alone sets is shown if it has a docstring."""
    return any(name in vars(base) or name in vars(base).get("__annotations__", {}) for base in owner.__mro__)


def _left_out(doc: Doc, around: str = "") -> Iterator[str]:
    """`around`: the docstring of a dataclass, where the shape of its fields may be said once for all."""
    text = " ".join(doc.docstring.split())
    types = str(doc.signature) if isinstance(doc, Function) else getattr(doc, "annotation_str", "")
    if not text:
        yield f"{doc.fullname}: it has no docstring"
    elif "Tensor" in types and not SHAPE.search(f"{text} {around}"):
        yield f"{doc.fullname}: its docstring gives no shape for a tensor"
    elif "Raises: OperantError" not in text and _raises(doc):
        yield f"{doc.fullname}: its docstring has no `Raises: OperantError`"


def _raises(doc: Doc) -> bool:
    """Whether the function, or making the class, raises OperantError: itself, or in a private function of its file."""
    if not doc.source:
        return False
    body = ast.parse(textwrap.dedent(doc.source)).body[0]
    if isinstance(body, ast.ClassDef):
        body = ast.Module(
            [part for part in body.body if getattr(part, "name", "") in ("__init__", "__post_init__")], []
        )
    functions = [part for part in ast.walk(ast.parse(doc.source_file.read_text("utf-8"))) if hasattr(part, "args")]
    private = {part.name: part for part in functions if getattr(part, "name", "").startswith("_")}
    reached, ahead = set(), [body]
    while ahead:
        for part in ast.walk(ahead.pop()):
            if isinstance(part, ast.Raise) and ast.unparse(part).startswith("raise OperantError("):
                return True
            called = ast.unparse(part.func).rpartition(".")[2] if isinstance(part, ast.Call) else ""
            if called in private and called not in reached:
                reached.add(called)
                ahead.append(private[called])
    return False


def main() -> None:
    if sys.argv[1:] == ["check"]:
        sys.exit("\n".join(complaints(public().values())) or None)
    folder = Path(sys.argv[1]) if sys.argv[1:] else DOCS.parent / "build" / "reference"
    build(folder)
    print(f"the reference: {folder / 'index.html'}")


if __name__ == "__main__":
    main()
