"""The rules that the code keeps as a whole: the order of its packages, and habits that prevent families of faults.

A rule is a function from source to complaints. Each is held to a sample that breaks it, so that it can fail.
"""

import ast
import re
from pathlib import Path

import architecture
import pytest
from cases import cases
from processes import HIDE, run_python

PACKAGE = Path(__file__).parents[1] / "src" / "operant"
FILES = sorted(PACKAGE.rglob("*.py"))
ROOT = PACKAGE.parents[1]
TESTS = sorted((ROOT / "tests").rglob("*.py"))
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
LEVELS = DESIGN.split("<!-- packages -->")[1].split("<!-- /packages -->")[0].strip().strip("`").strip().splitlines()
APPS, TOOLS = ({name for name in " ".join(LEVELS).split() if name.startswith(group)} for group in ("apps.", "tools."))
TOOLS |= {"api", "compat", "__main__"}
LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages.split()}
GRAPH = architecture.module_graph()
EXTRAS = """vaderSentiment datasets peft accelerate wandb tensorboard trackio mlflow vllm ray deepspeed textworld
jericho gymnasium sacrebleu rouge_score evaluate nltk bitsandbytes scipy sklearn pandas matplotlib plotly fastapi
uvicorn starlette tyro textarena gem reasoning_gym scienceworld openenv verifiers libcst"""


def climbs(module: str, source: str, inside: tuple[str, ...] = ()) -> list[str]:
    """Imports of other packages that do not go down."""
    own, complaints = architecture.package_of(module), []
    for line, target in architecture.imports(source, inside, GRAPH):
        package = architecture.package_of(target)
        if package == own or target == "keywords":  # the types of options, which no run has
            continue
        if package not in LEVEL:
            complaints.append(f"line {line}: imports {package or 'the package itself'!r}, which has no level")
        elif LEVEL[package] >= LEVEL[own]:
            complaints.append(f"line {line}: {own} (level {LEVEL[own]}) imports {package} (level {LEVEL[package]})")
    return complaints


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_package_imports_only_packages_below_it(path: Path) -> None:
    module = architecture.module_name(path)
    if module == "__init__":  # the public names, from anywhere
        return
    package = architecture.package_of(module)
    assert package != "builtin", "builtin/ holds data, no code"
    assert package in LEVEL, f"{package} is new: give it a level in docs/design.md"
    assert climbs(module, path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).parts[:-1]) == []


def test_every_package_of_the_page_is_there() -> None:
    packages = {architecture.package_of(module) for module in GRAPH}
    assert LEVEL.keys() - packages == {"---", "apps", "tools"} and packages <= LEVEL.keys()


def test_the_core_imports_no_app_and_no_tool() -> None:
    graph = architecture.package_graph(GRAPH)
    above = {name: graph[name] & (APPS | TOOLS) for name in graph.keys() - APPS - TOOLS}
    assert {name: found for name, found in above.items() if found} == {}


def test_an_app_sees_the_core_alone() -> None:
    """And neither another app nor the runs that use it: a room is added or taken away without the others."""
    graph = architecture.package_graph(GRAPH)
    beside = {name: graph[name] & (APPS | TOOLS | {"runs"}) for name in APPS}
    assert {name: found for name, found in beside.items() if found} == {}


def test_no_files_import_each_other() -> None:
    assert architecture.circles(GRAPH) == []


@cases(
    ({"a": {"b"}, "b": {"c"}, "c": set()}, []), ({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}, [["a", "b", "c"]])
)
def test_circles_are_seen(graph: dict[str, set[str]], found: list[list[str]]) -> None:
    assert architecture.circles(graph) == found


def test_the_house_keeps_its_budget() -> None:
    """Over it fails; far below it fails too, so that the budget is lowered and never given back."""
    measured: dict[str, dict] = {"house": architecture.measure(), "rooms": architecture.rooms()}
    budget = architecture.budget()
    assert measured["rooms"].keys() == budget["rooms"].keys()
    limits = {(table, name): limit for table, of in budget.items() for name, limit in of.items()}
    found = {place: measured[place[0]][place[1]] for place in limits}
    assert {place: (found[place], limit) for place, limit in limits.items() if found[place] > limit} == {}
    wasted = {place: (found[place], limit) for place, limit in limits.items() if found[place] < 0.97 * limit - 10}
    assert wasted == {}, "lower them: python -m benchmarks.architecture --budget"


def test_the_reading_list_is_of_the_step() -> None:
    listed = set(architecture.reading_list())
    assert listed >= {"tools/cli/commands.py", "runs/run.py", "training/learner.py", "objectives/losses.py"}
    assert "sandbox/jail.py" not in listed and "tools/report/run_report.py" not in listed


def test_imports_in_texts_are_seen() -> None:
    source = 'x = find("a b", "operant.engines.vllm", "Own")\ny = Table("t", "g", {"own": "operant.engines.vllm2:Own"})'
    assert architecture.hidden_imports(source) == {"engines.vllm"}


def test_no_two_classes_have_one_name() -> None:
    sources = [path.read_text(encoding="utf-8") for path in FILES]
    names = [node.name for source in sources for node in nodes(source) if isinstance(node, ast.ClassDef)]
    assert sorted({name for name in names if names.count(name) > 1}) == []


@cases(
    ("objectives.kl", "from operant.training.learner import Learner", ()),
    ("types", "import operant.storage", ()),
    ("sampling", "def f():\n    from operant import objectives", ()),
    ("engines.native", "from ..learner import Learner", ("engines",)),
    ("types", "from .training.learner import Learner", ()),
    ("apps.code.problems", "from operant.runs.run import Run", ()),
    ("data.tasks", "from operant import Task", ("data",)),
    ("runs.run", "from operant.mystery import x", ()),
    ("runs.run", "from operant.tools.report.run_report import write_report", ()),
)
def test_climbing_imports_are_seen(module: str, source: str, inside: tuple[str, ...]) -> None:
    assert len(climbs(module, source, inside)) == 1


# --- habits -----------------------------------------------------------------------------------------------------
def nodes(source: str) -> list[ast.AST]:
    return architecture.walked(architecture.parsed(source))


def calls(source: str) -> list[ast.Call]:
    return [node for node in nodes(source) if isinstance(node, ast.Call)]


def called(call: ast.Call) -> str:
    """The name of what is called: `open`, `torch.load`; `.mean` where the owner is an expression."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    if isinstance(call.func, ast.Attribute):
        owner = call.func.value.id if isinstance(call.func.value, ast.Name) else ""
        return f"{owner}.{call.func.attr}"
    return ""


def masks_from_ids(source: str) -> list[str]:
    """Masks come from lengths: comparing ids with the padding id loses a genuine end of text."""
    lines = [
        ast.unparse(node)
        for node in nodes(source)
        if isinstance(node, ast.Compare) and re.search(r"\bpad(ding)?_(token_)?id\b", ast.unparse(node))
    ]
    return [line for line in lines if re.search(r"!=|==", line)]


def averages(source: str) -> list[str]:
    """Losses average nothing: `total` does, with weights that know the whole optimizer step."""
    means = {"mean", "nanmean", "average"}
    return [ast.unparse(call) for call in calls(source) if called(call).split(".")[-1] in means]


def opens_without_encoding(source: str) -> list[str]:
    """The platform's encoding is nobody's choice."""
    found = []
    for call in calls(source):
        name, owner = called(call).split(".")[-1], called(call).split(".")[0]
        other = owner in {"os", "webbrowser", "tarfile", "zipfile"} or (owner[:1].isupper() and owner != "Path")
        if name not in {"open", "read_text", "write_text"} or other:
            continue
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        modes = [arg.value for arg in given if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        binary = name == "open" and any(re.fullmatch(r"[rwax+]*b[rwax+]*", mode) for mode in modes)
        if not binary and all(keyword.arg not in {"encoding", None} for keyword in call.keywords):
            found.append(ast.unparse(call))
    return found


def unpickles(source: str) -> list[str]:
    """Nothing from disk or network is unpickled."""
    picklers, loaders = {"torch", "pickle", "dill", "cloudpickle", "joblib"}, {"load", "loads", "Unpickler"}
    named = [(called(call).split("."), call) for call in calls(source)]
    return [ast.unparse(call) for (owner, *name), call in named if owner in picklers and set(name) & loaders]


def salted_hashes(source: str) -> list[str]:
    """Python's `hash` of a text differs from process to process."""
    return [ast.unparse(call) for call in calls(source) if called(call) == "hash"]


def imports_torch_distributed(source: str) -> list[str]:
    """`distributed.py` and `training/sharding.py` alone know ranks."""
    forms = r"^\s*(?:import|from) torch\.distributed.*|^\s*from torch import .*\bdistributed\b.*"
    return re.findall(forms, source, re.M)


def renders_chat(source: str) -> list[str]:
    """`sampling.py` alone renders messages."""
    return [ast.unparse(call) for call in calls(source) if called(call).endswith(".apply_chat_template")]


def stands_on_a_test(source: str) -> list[str]:
    """What several tests share stands in a module without tests: nobody reads one test to understand another."""
    return re.findall(r"^\s*(?:from|import) (?:test_\w+|benchmarks)\b.*", source, re.M)


KNOW_RANKS = ("distributed.py", "sharding.py")
RULES = {
    masks_from_ids: (FILES, "mask = ids != tokenizer.pad_token_id"),
    averages: ([PACKAGE / "objectives/losses.py"], "loss = (ratio * advantages).mean()"),
    opens_without_encoding: (FILES, "open('b.txt')\nPath('x').open('w')"),
    unpickles: (FILES, "torch.load('weights.pt')"),
    salted_hashes: (FILES, "seed = hash((seed, task.id))"),
    imports_torch_distributed: ([f for f in FILES if f.name not in KNOW_RANKS], "import torch.distributed as dist"),
    stands_on_a_test: (TESTS, "from test_trainer import SMALL\nimport benchmarks.kept"),
    renders_chat: ([f for f in FILES if f.name != "sampling.py"], "tokenizer.apply_chat_template(messages)"),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_habit(rule) -> None:
    files, _ = RULES[rule]
    complaints = {str(f.relative_to(ROOT)): rule(f.read_text(encoding="utf-8")) for f in files if f.exists()}
    assert {name: found for name, found in complaints.items() if found} == {}, rule.__doc__


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_habit_sees_its_fault(rule) -> None:
    _, fault = RULES[rule]
    assert len(rule(fault)) == len(fault.splitlines())


# --- the package from outside -----------------------------------------------------------------------------------
def test_import_without_any_extra() -> None:
    every_module = """
import importlib, pkgutil, operant
for name in getattr(operant, "__all__", []):
    getattr(operant, name)
for module in pkgutil.walk_packages(operant.__path__, "operant."):
    if not module.name.endswith("__main__") and not module.name.startswith("operant.builtin"):
        importlib.import_module(module.name)
print("fine")
"""
    assert run_python(HIDE.format(names=EXTRAS) + every_module) == "fine"


def test_hidden_packages_are_hidden() -> None:
    code = "import importlib.util\nprint(importlib.util.find_spec('rich'))"
    assert run_python(HIDE.format(names="rich") + code) == "None"


OLD = Path(__file__).parent / "old"


@cases(
    (["--help"], "operant train RECIPE", ""),
    (["runs", str(OLD)], "ppo", "numpy pyarrow"),
    (["diagnose", str(OLD / "ppo/run")], "step", "numpy pyarrow"),
)
def test_the_command_line_answers_without_torch(words: list[str], said: str, paid: str) -> None:
    code = f"""
import contextlib, io, sys
from operant.tools.cli import main
with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
    main({words})
assert {said!r} in printed.getvalue(), printed.getvalue()
print(*sorted({{name.split(".")[0] for name in sys.modules}} & {{"torch", "transformers", "pyarrow", "numpy"}}))
"""
    assert run_python(code) == paid, f"`operant {words[0]}` must not pay for other imports"


def test_a_function_that_uses_torch_has_torch() -> None:
    code = """
from operant.tools.cli.without_torch import without_torch
def double():
    import torch
    from operant.objectives.advantages import whiten
    return whiten(torch.tensor([[1.0, 3.0]]), torch.tensor([[True, True]]), unbiased=False).tolist()
print([[round(x) for x in row] for row in without_torch(double)()])
"""
    assert run_python(code) == "[[-1, 1]]"
