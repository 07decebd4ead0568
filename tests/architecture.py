"""The measures of the architecture of `src/operant`: its modules, what they import, and how long they are.

A *package* here is a folder directly under `operant/`, `apps/` or `tools/`; the modules in the root, on which all
others stand, are one, the base. Every import counts, also one inside a function or under `TYPE_CHECKING`; those of
`operant/__init__.py`, which only hands names on, do not.
"""

import ast
import re
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from texts import parts

ROOT = Path(__file__).parents[1]
PACKAGE = Path(find_spec("operant").origin or "").parent  # pyright: ignore[reportOptionalMemberAccess]


GROUPS = ("apps", "tools")
"""Folders of packages."""
ALONE = ("api", "__main__", "__init__")
"""Modules in the root that are no part of the base."""


parsed = cache(ast.parse)


@cache
def walked(tree: ast.AST) -> list[ast.AST]:
    """All nodes of a file, which each count goes through."""
    return list(ast.walk(tree))


def files(package: Path = PACKAGE) -> list[Path]:
    """Every Python file, without the data of `builtin/` and the page's scripts."""
    return [path for path in sorted(package.rglob("*.py")) if path.relative_to(package).parts[0] != "builtin"]


def module_name(path: Path, package: Path = PACKAGE) -> str:
    """`training.update` for `training/update.py`, `training` for `training/__init__.py`."""
    return ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__")


def imports(source: str, inside: tuple[str, ...], modules: Collection[str]) -> Iterator[tuple[int, str]]:
    """(line, module) of each of the package's own modules that a source imports; "" is the package itself.

    inside: the folders between `operant/` and the file, for relative imports. modules: the names of all modules.
    """
    for node in walked(parsed(source)):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            yield from ((node.lineno, ".".join(name[1:])) for name in names if name[0] == "operant")
        elif isinstance(node, ast.ImportFrom):
            own = ["operant", *inside][: len(inside) + 2 - node.level] if node.level else []
            base = [*own, *(node.module or "").split(".")] if node.module else own
            if base[:1] != ["operant"]:
                continue
            for alias in node.names:
                inner = ".".join([*base[1:], alias.name])
                if inner in modules:
                    yield node.lineno, inner
                elif base != ["operant"] or alias.name != "__version__":
                    yield node.lineno, ".".join(base[1:])


def module_graph(package: Path = PACKAGE) -> dict[str, set[str]]:
    sources = {module_name(path, package): path for path in files(package)}
    graph = {}
    for name, path in sources.items():
        if name not in ("__init__", *GROUPS):
            found = imports(path.read_text(encoding="utf-8"), path.relative_to(package).parts[:-1], sources)
            graph[name] = {target for _, target in found} & sources.keys() - {name, "__init__"}
    return graph


TABLES = ("Table", "Lazy", "BuiltIn")
"""Calls whose texts name what is imported only when somebody asks for it by name."""


def hidden_imports(source: str) -> set[str]:
    """Modules that texts name, as in `find("engine", "operant.engines.vllm", "VLLMEngine")`; those of tables apart."""
    tree = parsed(source)
    tables = [node for node in walked(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") in TABLES]
    lazy = {id(node) for table in tables for node in ast.walk(table)}
    texts = [node.value for node in walked(tree) if isinstance(node, ast.Constant) and id(node) not in lazy]
    found = [re.fullmatch(r"operant\.([\w.]+)(:\w+)?", text) for text in texts if isinstance(text, str)]
    return {match[1] for match in found if match}


def closure(start: str, package: Path = PACKAGE) -> list[str]:
    """The modules that importing one leads to, each with the packages around it; texts that name one count."""
    graph = module_graph(package)
    for path in files(package):
        if (name := module_name(path, package)) in graph:
            graph[name] |= hidden_imports(path.read_text(encoding="utf-8")) & graph.keys()
    for name, targets in graph.items():
        graph[name] = (targets | {module.rpartition(".")[0] for module in (name, *targets)}) & graph.keys() - {name}
    return sorted({start} | reached(graph, start))


def lines(modules: Collection[str], package: Path = PACKAGE) -> int:
    paths = {module_name(path, package): path for path in files(package)}
    return sum(paths[name].read_text(encoding="utf-8").count("\n") for name in modules)


def package_of(module: str) -> str:
    parts = module.split(".")
    if module not in ALONE and (PACKAGE / f"{module}.py").is_file() and len(parts) == 1:
        return "base"
    return ".".join(parts[: 2 if parts[0] in GROUPS else 1])


def package_graph(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    packages: dict[str, set[str]] = {}
    for module, targets in graph.items():
        here = packages.setdefault(package_of(module), set())
        here |= {package_of(target) for target in targets} - {package_of(module)}
    return packages


def reached(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph.get(start, ()))
    while waiting:
        if (node := waiting.pop()) not in seen:
            seen.add(node)
            waiting += graph.get(node, ())
    return seen


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that reach each other, each sorted."""

    reach = {node: reached(graph, node) for node in graph}
    both = {node: {other for other in reach[node] if node in reach.get(other, ())} for node in graph}
    groups = {tuple(sorted({node, *others})) for node, others in both.items()}
    return [list(group) for group in sorted(groups) if len(group) > 1]


def layers(graph: dict[str, set[str]]) -> list[list[str]]:
    """Packages by the longest chain of imports below them: the first layer imports nothing."""
    depth: dict[str, int] = {}

    def layer(node: str, above: tuple[str, ...] = ()) -> int:
        if node not in depth:
            below = [layer(target, (*above, node)) for target in graph[node] if target not in above and target in graph]
            depth[node] = 1 + max(below, default=0)
        return depth[node]

    for node in graph:
        layer(node)
    return [sorted(n for n in graph if depth[n] == level) for level in range(1, max(depth.values()) + 1)]


def statements(tree: ast.AST) -> int:
    """Statements, without docstrings and other lone strings."""
    lone = (ast.Expr, ast.Constant)
    return sum(
        isinstance(node, ast.stmt)
        and not (isinstance(node, lone[0]) and isinstance(node.value, lone[1]) and isinstance(node.value.value, str))
        for node in walked(tree)
    )


def functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in walked(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def used_once(sources: dict[Path, str]) -> list[str]:
    """Functions whose name stands exactly once in the package outside their own definition."""
    counts = Counter(word for source in sources.values() for word in re.findall(r"\b[A-Za-z_]\w*\b", source))
    found = []
    for path, source in sources.items():
        lines = source.splitlines()
        for function in functions(parsed(source)):
            name = function.name
            if name.startswith("__"):
                continue
            own = "\n".join(lines[function.lineno - 1 : function.end_lineno])
            if counts[name] - len(re.findall(rf"\b{name}\b", own)) == 1:
                found.append(f"{path.relative_to(PACKAGE)}:{function.lineno}: {name}")
    return found


def loose_types(tree: ast.AST) -> int:
    """Arguments and returned values of functions whose type is, or holds, `Any`."""
    found = 0
    for function in functions(tree):
        given = function.args
        arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        types = [function.returns, *(argument.annotation for argument in arguments if argument is not None)]
        found += sum(type_ is not None and "Any" in re.findall(r"\w+", ast.unparse(type_)) for type_ in types)
    return found


def looked_up(tree: ast.AST) -> int:
    """Calls of `getattr` with the name written out, which is a contract that no type states."""
    calls = [node for node in walked(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr"]
    return sum(isinstance(call.args[1], ast.Constant) for call in calls)


STEP = "train sentiment --steps 1 --batch 8 --evaluate none --probes 2 --max-tokens 3 --min-tokens 2".split()
"""The command whose step is read: few tokens, which change none of the functions that run."""
WATCHED = parts("programs.txt")["files of one step"]


@cache
def reading_list() -> list[str]:
    """The files of one PPO step of `operant train sentiment`: a function of each runs in it, or has called it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", WATCHED, *STEP, "--out", f"{folder}/run"]
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", cwd=folder, check=True)
    return [line for line in done.stderr.splitlines() if line.endswith(".py")]


def rooms() -> dict[str, int]:
    """The lines of each package; those of the few other modules are with `api`."""
    found: Counter[str] = Counter()
    for path in files():
        room = package_of(module_name(path))
        found["api" if room in (*ALONE, *GROUPS) else room] += path.read_text(encoding="utf-8").count("\n")
    return dict(sorted(found.items()))


def measure() -> dict[str, int | float]:
    sources = {path: path.read_text(encoding="utf-8") for path in files()}
    trees = {path: parsed(source) for path, source in sources.items()}
    graph = module_graph()
    packages = package_graph(graph)
    found = [function for tree in trees.values() for function in functions(tree)]
    lengths = sorted((function.end_lineno or function.lineno) - function.lineno + 1 for function in found)
    once, step = used_once(sources), reading_list()
    return {
        "modules in the root": sum(path.parent == PACKAGE and not path.stem.startswith("__") for path in sources),
        "packages": len(packages),
        "imports between packages": sum(map(len, packages.values())),
        "layers": len(layers(packages)),
        "circles between files": len(circles(graph)),
        "files": len(sources),
        "lines": sum(source.count("\n") for source in sources.values()),
        "statements": sum(map(statements, trees.values())),
        "functions": len(lengths),
        "90 % of functions have at most this many lines": round(statistics.quantiles(lengths, n=10)[-1]),
        "lines of the longest function": lengths[-1],
        "functions used once": len(once),
        "files under 60 lines": sum(source.count("\n") < 60 for source in sources.values()),
        "types with Any in signatures": sum(map(loose_types, trees.values())),
        "names looked up by getattr": sum(map(looked_up, trees.values())),
        "lines that Learner imports": lines(closure("training.learner")),
        "files of one PPO step": len(step),
        "lines of one PPO step": sum(sources[PACKAGE / name].count("\n") for name in step),
        "lines of tests": sum(
            path.read_text(encoding="utf-8").count("\n")
            for path in [*ROOT.glob("tests/**/*.py"), *ROOT.glob("benchmarks/tests/*.py")]
        ),
    }


BUDGET = ROOT / "tests" / "budget.toml"


def budget() -> dict[str, dict[str, int]]:
    return tomllib.loads(BUDGET.read_text(encoding="utf-8"))
