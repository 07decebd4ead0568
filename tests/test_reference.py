"""The API reference has every public name, and the check of docstrings sees what they leave out."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from cases import cases

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def public(reference: ModuleType) -> dict:
    return reference.public()


# --- docstrings; `make check` looks at those of the library -----------------------------------------------------------
HEAD = '''"""An example."""
from dataclasses import dataclass
from torch import Tensor
from operant.types import OperantError

def _check(x):
    if x < 0:
        raise OperantError(f"{x} is below 0")
'''
NOTHING, SHAPE, ERROR = "it has no docstring", "its docstring gives no shape", "its docstring has no `Raises:"


@cases(
    ("def f(x: int) -> int:\n    return x", "f", NOTHING),
    ('LIMIT = 3\n"""Tokens."""\nOTHER = 4', "OTHER", NOTHING),
    ('class C:\n    """A thing."""\n    def m(self): ...', "C.m", NOTHING),
    ('@dataclass\nclass C:\n    """A thing."""\n    a: int = 0', "C.a", NOTHING),
    ('def f(x: Tensor) -> float:\n    """The mean of x."""', "f", SHAPE),
    ('def f(x: int) -> dict[str, Tensor]:\n    """A Policy [sic], `[b, t]`."""', "f", SHAPE),
    ('@dataclass\nclass C:\n    """A thing."""\n    a: Tensor\n    """Numbers."""', "C.a", SHAPE),
    ('def f(x):\n    """Add."""\n    raise OperantError("no")', "f", ERROR),
    ('def f(x):\n    """Add."""\n    _check(x)', "f", ERROR),
    ('@dataclass\nclass C:\n    """A thing."""\n    def __post_init__(self):\n        _check(1)', "C", ERROR),
    ('def f(x: Tensor) -> Tensor:\n    """[B, T] -> [B]. Raises: OperantError below 0."""\n    _check(x)', "", ""),
    ('@dataclass\nclass C:\n    """Each [B, T]."""\n    a: Tensor\n    """Numbers."""', "", ""),
    ('class C:\n    """A thing."""\n    def __init__(self):\n        self.a = 1\n    def _m(self): ...', "", ""),
)
def test_the_check_sees_what_is_left_out(source, name, complaint, reference, tmp_path, monkeypatch, request) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    module = f"operant_example_{request.node.callspec.indices['source']}"
    (tmp_path / f"{module}.py").write_text(HEAD + source + "\n", encoding="utf-8")
    found = list(reference.complaints(reference.public([module]).values()))
    del sys.modules[module]
    assert len(found) == bool(name), found
    assert not name or found[0].startswith(f"{module}.{name}: {complaint}")


def test_users_are_told_to_import_public_names_only(public: dict) -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/methods/*.md"), *ROOT.glob("docs/[!l]*.md")]
    told = set()
    for text in [page.read_text(encoding="utf-8") for page in pages]:
        for module, names in re.findall(r"from (operant(?:\.\w+)*) import (\w+(?:, \w+)*)", text):
            told |= {(module, name) for name in names.split(", ")}
        told |= {("operant", name) for name in re.findall(r"\boperant\.([A-Za-z_]\w*)\(", text)}
    assert {("operant", "train"), ("operant.rewards", "judge"), ("operant.objectives", "advantages")} <= told
    known = {(module, name) for module, docs in public.items() for name in docs.members}
    known |= {tuple(module.rsplit(".", 1)) for module in public}
    elsewhere = ("operant.tools.labels", "operant.compat")  # docs/rlhf.md and TRL's own pages say what these are
    told = {(module, name) for module, name in told if not module.startswith(elsewhere)}
    assert told - known == set(), "export it, or add its module to MODULES in docs/reference.py"


# --- pages --------------------------------------------------------------------------------------------------------
def test_every_public_name_is_on_its_page_and_no_private_one(
    reference: ModuleType, public: dict, tmp_path: Path
) -> None:
    """With the signature, which Sphinx reads; that it takes the pages without a warning, tests/test_site.py tries."""
    pages = {path.stem: path.read_text(encoding="utf-8") for path in reference.build(tmp_path)}
    assert pages.keys() == {*public, "index"}
    for name, module in public.items():
        shown = re.findall(r"^`+\{py:(?!module)\w+\} (\w+)", pages[name], re.MULTILINE)
        docs = [part for doc in module.members.values() for part in (doc, *getattr(doc, "own_members", ()))]
        assert sorted(shown) == sorted(doc.name for doc in docs if doc.name != "__init__")
        assert not [name for name in shown if name.startswith("_")]
    assert "{py:method} reset(" in pages["operant.types"] and "{py:class} Learner(policy" in pages["operant"]
