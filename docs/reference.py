"""The API reference, made from the docstrings of the public names.

python docs/reference.py [FOLDER]   write it to build/reference, or to FOLDER (`make docs`)
python docs/reference.py check      name what the docstrings leave out (`make check`)

The pages, the check and the tests take the public names from `public`.
"""

import ast
import importlib
import inspect
import os
import re
import runpy
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType

import pdoc.render
from pdoc.doc import Class, Doc, Function, Module, Variable
from pdoc.render_helpers import markdown_extensions, to_html
from pygments.formatters import HtmlFormatter

from operant.algorithms import METHODS

DOCS = Path(__file__).parent
# pdoc reads annotations, whose keywords are in no module of the package.
sys.modules["operant.keywords"] = ModuleType("operant.keywords")
exec(runpy.run_path(str(DOCS / "keywords.py"))["keywords"](), vars(sys.modules["operant.keywords"]))
MODULES = (
    "operant",
    "operant.types",
    "operant.objectives",
    "operant.objectives.losses",
    "operant.objectives.advantages",
    "operant.objectives.kl",
    "operant.rewards",
    "operant.rewards.feedback",
    "operant.rewards.failure_policy",
    "operant.rewards.isolated",
    "operant.text_scores.classifier",
    "operant.apps.text.rewards",
    "operant.apps.rlhf.reward_model_score",
    "operant.apps.code.unit_tests",
    "operant.apps.code.critic_reward",
    "operant.apps.prompts.prompt_reward",
    "operant.apps.prompts.style_transfer",
    "operant.apps.prompts.baselines",
    "operant.apps.prompts.examples",
    "operant.apps.prompts.measures",
    "operant.engines.completions",
    "operant.apps.prompts.task_models",
    "operant.apps.prompts.templates",
    "operant.sandbox.jail",
    "operant.apps.code.critic_score",
    "operant.envs.games",
    "operant.envs.http",
    "operant.envs.isolated",
    "operant.algorithms",
    "operant.engines.native.engine",
    "operant.engines.ray",
    "operant.training.update_rules",
    "operant.tools.diagnosis",
)
"""Public are the names of `__all__`; in a module without it, what the module defines without a leading underscore."""
METHOD_PAGES = tuple(METHODS.values())
"""The file of a method: its page is its docstring alone."""
SHAPE = re.compile(r"\[[^\[\]`]*\b[A-Z]\b[^\[\]]*\]|\[len\(|\bscalar\b|\b(any|same|in the) shape\b")
"""What counts as a shape in a docstring: `[B, T]`, `[N]`, `[len(action)]`, or words."""


def public(names: Sequence[str] = MODULES) -> dict[str, Module]:
    """The modules with their public names. What several of them export is described in the first of them."""
    modules, homes = {}, {}
    for name in names:
        modules[name] = module = _load(name)
        for doc in module.members.values():
            if isinstance(doc, Class):
                _leave_public(doc, names)
            home = homes.setdefault(id(doc.obj), name) if isinstance(doc, Class | Function) else name
            if home != name:
                link = os.path.relpath(_page(home), _page(name).parent)
                doc.docstring = doc.docstring.split("\n\n")[0] + f"\n\nDescribed under [{home}]({link}#{doc.name})."
                doc.members, doc.own_members, doc.inherited_members = {}, [], {}
    return modules


def _leave_public(doc: Class, names: Sequence[str]) -> None:
    """Leave the public members of a class, and count those of a base without a page as its own."""
    with_page = {base: found for base, found in doc.inherited_members.items() if base[0] in names}
    hidden = [member for base, found in doc.inherited_members.items() if base not in with_page for member in found]
    doc.own_members = [member for member in (*doc.own_members, *hidden) if _shown(doc.obj, member)]
    doc.inherited_members = with_page
    doc.members = {member.name: member for found in (*with_page.values(), doc.own_members) for member in found}
    if "__init__" in doc.members:
        made = doc.members["__init__"]
        made.docstring = inspect.cleandoc(made.obj.__doc__ or "")  # and not that of a base such as torch's Module


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


def _shown(owner: type, member: Doc) -> bool:
    """Whether a class shows a member of it. An attribute that only `__init__` sets is public if it has a docstring."""
    bases = [base for base in owner.__mro__ if base.__module__.startswith("operant")]
    declared = any(member.name in vars(base) or member.name in vars(base).get("__annotations__", {}) for base in bases)
    if member.name.startswith("_"):
        return member.name == "__init__" and declared and not getattr(owner, "_is_protocol", False)
    return bool(member.docstring and member.taken_from[0].startswith("operant")) or declared


def _page(module: str) -> Path:
    return Path(module.replace(".", "/") + ".html")


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
    pdoc.render.configure(docformat="markdown", show_source=False, template_directory=DOCS / "theme")
    pdoc.render.env.globals["dark"] = HtmlFormatter(style="github-dark").get_style_defs(".pdoc-code")
    markdown_extensions["latex"] = None  # to MathML, which browsers show without a script
    pdoc.render.env.filters["to_html"] = lambda text: to_html(re.sub(r"\n(?=Raises: )", "\n\n", text))
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
                if member.name != "__init__":
                    yield from _left_out(member, doc.docstring if is_dataclass(doc.obj) else "")


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
        making = [part for part in body.body if getattr(part, "name", "") in ("__init__", "__post_init__")]
        body = ast.Module(making, [])
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
