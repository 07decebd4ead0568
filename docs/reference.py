"""The API reference, made from the docstrings of the public names.

python docs/reference.py            write it to docs/reference, as sources of the site (`make site`)
python docs/reference.py check      name what the docstrings leave out (`make check`)

The pages, the check and the tests take the public names from `public`.
"""

import ast
import importlib
import inspect
import re
import runpy
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType

from pdoc.doc import Class, Doc, Function, Module, Variable

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
    "operant.objectives.groups",
    "operant.objectives.kl",
    "operant.rewards",
    "operant.rewards.feedback",
    "operant.rewards.failure_policy",
    "operant.rewards.isolated",
    "operant.rewards.classifier",
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
    "operant.training.update",
    "operant.tools.report.diagnosis",
)
"""Public are the names of `__all__`; in a module without it, what the module defines without a leading underscore."""
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
                doc.docstring = doc.docstring.split("\n\n")[0] + f"\n\nDescribed under {{py:obj}}`{home}.{doc.name}`."
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


# --- the pages ----------------------------------------------------------------------------------------------------


def build(folder: Path) -> list[Path]:
    """Write a page of MyST for each module to a folder of docs/, and an index; returns them. Sphinx makes them HTML."""
    modules = public()
    folder.mkdir(parents=True, exist_ok=True)
    known = _known(modules)
    index = "# API reference\n\nThe public names of each module, from their docstrings.\n\n"
    pages = []
    for name, module in modules.items():
        docstring = _linked(module.docstring, known)
        members = [_described(doc, name, known) for doc in module.members.values()]
        head = f"# {name}\n\n```{{py:module}} {name}\n```\n\n{docstring}\n\n"
        pages.append(folder / f"{name}.md")
        pages[-1].write_text(head + "\n".join(members), encoding="utf-8")
        index += f"- [{name}]({name}.md): {_linked(module.docstring, known).partition(chr(10) * 2)[0]}\n"
    listed = "\n".join(modules)
    pages.append(folder / "index.md")
    pages[-1].write_text(f"{index}\n```{{toctree}}\n:hidden:\n\n{listed}\n```\n", encoding="utf-8")
    return pages


def _known(modules: dict[str, Module]) -> dict[str, str]:
    """What a docstring may call a public name -> its full name: `Learner.step`, `operant.Learner`."""
    known: dict[str, str] = {}
    for name, module in modules.items():
        for doc in module.members.values():
            for member in (doc, *getattr(doc, "own_members", ())):
                known.setdefault(member.qualname, f"{name}.{member.qualname}")
                known.setdefault(f"{name}.{member.qualname}", f"{name}.{member.qualname}")
    return known


def _described(doc: Doc, module: str, known: dict[str, str], depth: int = 8) -> str:
    """A name with its signature and docstring, as a directive of Sphinx; a class with those of its members."""
    kind = "function" if isinstance(doc, Function) else "class" if isinstance(doc, Class) else "data"
    if depth < 8:
        kind = "method" if isinstance(doc, Function) else "attribute"
    docstring = doc.docstring
    shown = doc.name + (_signature(doc.signature) if isinstance(doc, Function) else "")
    members = list(doc.own_members) if isinstance(doc, Class) else []
    for made in [member for member in members if member.name == "__init__"]:
        members.remove(made)
        shown += _signature(made.signature)
        docstring += f"\n\n{made.docstring}" if made.docstring not in docstring else ""
    annotation = _short(doc.annotation_str).removeprefix(": ") if isinstance(doc, Variable) else ""
    options = [f":type: {annotation}"] * bool(annotation)
    options += [":no-index:"] * ("Described under {py:obj}" in docstring)
    inner = "\n".join(_described(member, module, known, depth - 1) for member in members)
    lead = "\n".join([f"{'`' * depth}{{py:{kind}}} {shown}", *options])
    return f"{lead}\n\n{_linked(docstring, known)}\n\n{inner}\n{'`' * depth}\n"


def _signature(signature: inspect.Signature) -> str:
    """On one line, without `self`, modules of types and long defaults."""
    given = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    given = [p.replace(default=_Shown("...")) if len(repr(p.default)) > 60 else p for p in given]
    return _short(str(signature.replace(parameters=given)))


class _Shown(str):
    """A default that is shown as it is."""

    __slots__ = ()
    __repr__ = str.__str__


def _short(annotation: str) -> str:
    text = " ".join(annotation.split()).replace("( ", "(").replace(" )", ")")
    text = text.replace(REWARD, "RewardFn")
    return re.sub(r"<[^>]+>", "...", re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", text))


REWARD = (
    "Callable[[list[operant.types.Rollout]], "
    "Sequence[float | Mapping[str, float] | Sequence[float] | operant.types.Judgement | None]]"
)


def _linked(docstring: str, known: dict[str, str]) -> str:
    """The docstring with links to public names, `Raises:` as a paragraph, and links that start in docs/."""

    def link(found: re.Match) -> str:
        full = known.get(found[1])
        return f"{{py:obj}}`{found[1]} <{full}>`" if full else found[0]

    parts = re.split(r"(^ *```.*?^ *```)", docstring, flags=re.DOTALL | re.MULTILINE)
    for i in range(0, len(parts), 2):
        text = re.sub(r"\n(?=Raises: )", "\n\n", parts[i])
        text = re.sub(r"(?<![`}\w])`([A-Za-z_][\w.]*)`(?!`)", link, text)
        parts[i] = re.sub(r"\]\((?!https?:|#)", "](../", text)
    return "".join(parts)


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
    build(DOCS / "reference")


if __name__ == "__main__":
    main()
