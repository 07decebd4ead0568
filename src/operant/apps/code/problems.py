"""The tests of a programming problem, which are the `target` of its task, and the program in a reply to it.

{"prompt": "Return twice x.", "target": {"tests": ["assert f(2) == 4"], "examples": ["assert f(0) == 0"]}}
{"prompt": "Print twice the input.", "target": {"tests": [{"stdin": "2\\n", "stdout": "4\\n"}]}}
"""

import ast
import builtins
import re
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from operant.sandbox.jail import Code, Program, Stdin, Test
from operant.types import OperantError, Task, require, said_of, shown

FENCED = re.compile(r"(?:(?:^|\n)[ \t]*```[^\n`]*|```[ \t]*[\w+#.-]*[ \t]*\r?)\n(.*?)(?:```|\Z)", re.DOTALL)
PATCHES = re.compile(
    r"(sys\.(stdin|argv|modules\S*)|builtins\.\w+|__builtins__\S*|os\.environ\S*|(random|time|datetime)\.\w+) = .*"
    r"|(unittest\.)?mock\.patch(\.\w+)?\(.*|inspect\.getsource(lines)?\(.*"
)
"""What a test changes or looks into in its own process alone."""
RUNS = re.compile(r"(builtins\.)?(eval|exec)\(|(pickle|marshal|shelve|cloudpickle|dill)\.(loads?|open)\(")
"""What turns text or bytes into code that runs in the process of the tests."""
WAITS = re.compile(r"(asyncio\.)?(wait_for|timeout)\(")
FOREIGN = set("np numpy pd pandas plt matplotlib scipy sklearn sympy nx networkx torch tf tensorflow pytest".split())
"""Names of modules that no program can import, but may define: one of the standard library is the module itself."""
THREAD = re.compile(r"(\w+\.)?(Thread|Timer|start_new_thread)\(")


@dataclass(frozen=True)
class Problem:
    tests: tuple[Test, ...]
    """Those that decide. The policy never reads them."""
    examples: tuple[Test, ...] = ()
    """Those that the statement gives away: candidates are filtered by them, and repaired after their message."""
    setup: str = ""
    before: str = ""
    """What stands in front of the reply in the program, such as the head of a function that the prompt ends with."""
    judge: str = ""

    def program(self, reply: str, *, examples: bool = False) -> Program:
        """The program of a reply, with all tests or the examples alone."""
        tests = self.examples if examples else self.tests
        return Program(self.before + program_in(reply), tests, self.setup, self.judge)


def program_in(reply: str) -> str:
    """The program in a reply: its first fenced block of code, or the whole reply if there is none."""
    return fenced.group(1) if (fenced := FENCED.search(reply)) else reply


def problem_of(task: Task) -> Problem:
    target = task.target
    if isinstance(target, Mapping) and target.get("tests"):
        with said_of(f"task {task.id!r}"):
            tests, examples = (tuple(map(test, target.get(name) or ())) for name in ("tests", "examples"))
        setup, judge = target.get("setup") or "", target.get("judge") or ""
        require(judge in ("", "apps"), f"task {task.id!r}: its judge is {shown(judge)}; give apps, or leave it out")
        if fault := unkept(setup, *(one.code for one in tests + examples if isinstance(one, Code))):
            raise OperantError(f"task {task.id!r}: {fault}")
        return Problem(tests, examples, setup, target.get("before") or "", judge)
    how = "give {'tests': ['assert f(2) == 4']}, or name the form that reads the rows, as in --form code"
    raise OperantError(f"task {task.id!r} has no tests: its target is {shown(target)}; {how}")


@cache
def syntax_error(code: str) -> str | None:
    """Why Python cannot compile a test; None if it can."""
    with warnings.catch_warnings(action="ignore"):  # of odd escapes in strings
        try:
            compile(code, "test", "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:  # ValueError: it has a null byte
            return str(error)
    return None


@cache
def unkept(*codes: str) -> str | None:
    """What one of these asks for that does not reach a program in a process of its own; None if there is nothing."""
    with warnings.catch_warnings(action="ignore"):
        nodes: list[Any] = [node for code in codes if syntax_error(code) is None for node in ast.walk(ast.parse(code))]
    imported = {(one.asname or one.name).split(".")[0] for one in nodes if isinstance(one, ast.alias)}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)} | imported
    bound |= {node.name for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    bound |= vars(builtins).keys() | sys.stdlib_module_names
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    looked = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    if foreign := sorted(looked & FOREIGN - bound - {node.arg for node in nodes if isinstance(node, ast.arg)}):
        return f"a test looks into {foreign[0]} without an import, which a program may then define; leave the row out"
    for node in [one for module in nodes if isinstance(module, ast.Module) for one in module.body]:
        name = node.name if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) else ""
        asserts = name and any(isinstance(inner, ast.Assert) for inner in ast.walk(node))
        if (asserts or name[:4] in ("test", "Test")) and name not in used:
            return f"a test defines {name} and never runs it, so that any program passes; call it, or leave the row out"
    timed = "TimeoutError" in used | {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    asserting = {one.name for one in nodes if isinstance(one, ast.FunctionDef) and "assert" in ast.unparse(one)}
    for node in nodes:
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            name = ast.unparse(base)
            if re.split(r"\W", name)[0] not in bound and not name.endswith(("Error", "Exception", "Warning")):
                return (
                    f"a test derives {node.name} from {name}, a class of the program, whose methods would not see what "
                    f"{node.name} overrides; call {name} itself, or leave the row out"
                )
        text = ast.unparse(node) if isinstance(node, (ast.Assign, ast.Call)) else ""
        if isinstance(node, ast.Call) and RUNS.match(text) and not isinstance([*node.args, node][0], ast.Constant):
            return (
                f"a test says {shown(text)}, which would run what the program returns beside the tests, outside the "
                "sandbox's filter; compare the text, use ast.literal_eval, or leave the row out"
            )
        if timed and isinstance(node, ast.Call) and WAITS.match(text):
            return (
                f"a test says {shown(text)} and awaits a TimeoutError, and a coroutine of the program is not ended "
                "before its own end; test what it returns, or leave the row out"
            )
        if isinstance(node, ast.Call) and THREAD.match(text) and asserting.intersection(re.split(r"\W", text)):
            return (
                f"a test says {shown(text)}, and Python loses the assertions of a thread, so that any program passes; "
                "let the thread keep what it finds, assert after its join, or leave the row out"
            )
        called = isinstance(node, ast.Call) and re.split(r"\W", text)[0]
        if PATCHES.match(text) or called in {"patch", "getsource"} & imported:
            return (
                f"a test says {shown(text)}, which does not reach the program: it runs in a process of its "
                "own; give what it reads as {'stdin', 'stdout'} or as an argument, or leave the row out"
            )
    return None


def test(given: object) -> Test:
    """A test as a row has it: code, or {"stdin", "stdout"}."""
    if isinstance(given, str):
        if (fault := syntax_error(given)) is not None:
            raise OperantError(f"test {shown(given)} is not Python ({fault}): repair it, or leave the row out")
        return Code(given)
    if isinstance(given, Mapping) and set(given) == {"stdin", "stdout"}:
        return Stdin(str(given["stdin"]), str(given["stdout"]))
    raise OperantError(f"test {shown(given)} is neither code nor {{'stdin', 'stdout'}}")
