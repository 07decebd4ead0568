"""Rows about programs: problems as data sets publish them (MBPP, HumanEval, APPS) or of one's own, programs to repair,
and the outcomes of a run's replies. The target of a problem is what `problems` reads.

operant generate runs/code --tasks problems.jsonl --tests --all --samples 16 --out candidates.jsonl
operant train sft --policy runs/code --tasks candidates.jsonl --form repair
operant train outcome-critic --tasks outcomes --tasks.run runs/code
"""

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

from operant.apps.code.problems import program_in
from operant.data.forms import Row, found_in, text_of, texts_in
from operant.types import OUTCOMES, OperantError, require, shown

LANGUAGES = ("language", "lang", "programming_language")
EXAMPLE = re.compile(r"==>|=>|==|\u279e|->|# returns|should return|\breturns?\b|(?<![=<>!])=(?!=)")
"""What stands between a call and its value in a docstring."""
APPS_IMPORTS = (
    "import bisect, collections, copy, fractions, functools, heapq, itertools, math, operator, random, re, string, "
    "sys, time; from bisect import *; from collections import *; from functools import *; from heapq import *; "
    "from itertools import *; from math import *; from typing import *\n"
)
"""What the judge of APPS puts in front of every program, as one line; without numpy."""
TEMPLATE = "{prompt}\n{program}\n\n# {outcome}: {message}\n# The program, repaired:\n"
LONGEST = 300
READS = ("prompt", "program", "outcome", "message")


def code(row: Row) -> Mapping[str, object]:
    """Any row of this file by its fields: `mbpp`, `humaneval`, `apps`, or one's own: prompt, tests (and completion).

    Own rows have `tests` and maybe `examples`, lists of code or of {"stdin", "stdout"}, and `setup` and `before`, in
    the row or in its `target`.
    """
    _check_language(row)
    if isinstance(row.get("target"), Mapping):  # as `generate --tests` reads rows
        row = {**row, **row["target"]}
    if "tests" in row:
        target = {name: row[name] for name in ("examples", "setup", "before", "judge", "verified") if row.get(name)}
        asked = {"prompt": found_in(row, ("prompt", "text")), "references": texts_in(row, ("completion", "solutions"))}
        return asked | _named(row) | {"target": {"tests": _some(row["tests"], "tests")} | target}
    for field, form in (("test_list", mbpp), ("entry_point", humaneval), ("input_output", apps)):
        if field in row:
            return form(row)
    remedy = "; or it is no programming problem as MBPP, HumanEval or APPS publish theirs"
    return cast("Row", found_in(row, ("tests",), remedy))  # which raises


def mbpp(
    row: Row,
    *,
    shown: Literal["none", "one", "all"] = "one",
    decide: Literal["others", "all"] = "others",
    challenge: bool = False,
    prefix: str = "",
    between: str = "\n",
    cue: str = "\n",
) -> Mapping[str, object]:
    """MBPP (Austin et al. 2021), the full set and the sanitised one: a sentence, and tests that show the name.

    shown: which tests the prompt has; they are the examples. decide: the tests that pay, the `others` (with shown=all
    there are none, and all do) or `all`. challenge: with the `challenge_test_list`, which decides too. prefix, between,
    cue: text before the sentence, before the tests, and behind them. The prompt of the paper is
    prefix="You are an expert Python programmer, and here is your task: ",
    between=" Your code should pass these tests:\\n\\n", cue="\\n[BEGIN]\\n" with stop string "[DONE]".
    """
    if "tests" in row:  # one's own, such as the held-out problems of the recipe
        return code(row)
    _check_language(row)
    tests = _some(found_in(row, ("test_list",)), "test_list")
    examples = tests[: {"none": 0, "one": 1, "all": len(tests)}[shown]]
    deciding = tests if decide == "all" else tests[len(examples) :] or tests
    setup = [*_some(row.get("test_imports") or [], "test_imports", least=0), row.get("test_setup_code") or ""]
    asked = text_of(found_in(row, ("text", "prompt")), "text")
    return {
        "before": prefix,
        "prompt": asked + (between + "\n".join(examples) if examples else ""),
        "cue": cue,
        "references": [_clean(reference) for reference in texts_in(row, ("code",))],
        **_named(row),
        "target": {
            "tests": deciding + (_some(row.get("challenge_test_list") or [], "", least=0) if challenge else []),
            "examples": examples,
            "setup": _clean("\n".join(filter(None, setup))),
        },
    }


def humaneval(row: Row) -> Mapping[str, object]:
    """HumanEval (Chen et al. 2021): the prompt is the head of a function, which the reply continues.

    The assertions of its `check` are tests of their own where it has nothing else, or one test if it has. The examples
    of the docstring are examples.
    """
    if "tests" in row:
        return code(row)
    _check_language(row)
    prompt = text_of(found_in(row, ("prompt",)), "prompt")
    name, test = (text_of(found_in(row, (field,)), field) for field in ("entry_point", "test"))
    require(test.strip() and "def check" in test, f"test is {shown(test)}; it must define check(candidate)")
    setup, tests = split_check(test, name)
    return {
        "prompt": prompt,
        "references": texts_in(row, ("canonical_solution",)),
        **_named(row),
        "target": {"tests": tests, "examples": examples_in(prompt, name), "setup": setup, "before": prompt},
    }


def examples_in(prompt: str, name: str) -> list[str]:
    """The examples in the docstring of a function as tests: doctests, and lines such as `f(2) == 4` or `f(2) => 4`."""
    try:
        functions = [node for node in ast.parse(f"{prompt}\n    pass").body if isinstance(node, ast.FunctionDef)]
    except SyntaxError:
        return []
    text = "\n".join(ast.get_docstring(node) or "" for node in functions if node.name == name)
    lines, found = [line.strip() for line in text.splitlines()], list[str]()
    for line, after in pairwise([*lines, ""]):
        sides = [(line[: one.start()], line[one.end() :]) for one in EXAMPLE.finditer(line)]
        sides += [(line, after)] if line.startswith(">>>") else []
        pairs = ((call_in(left, name), literal(right)) for left, right in sides)
        found += [f"assert {call} == {value}" for call, value in pairs if call and value][:1]
    return list(dict.fromkeys(found))


def call_in(text: str, name: str) -> str | None:
    """The call of the function that a text ends with, if its arguments are plain values."""
    start = re.search(rf"\b{re.escape(name)}\(", text)
    try:
        call = ast.parse(text[start.start() if start else len(text) :].strip(" #"), mode="eval").body
        for one in call.args if isinstance(call, ast.Call) else ():
            ast.literal_eval(one)
    except (ValueError, SyntaxError):
        return None
    return ast.unparse(call) if isinstance(call, ast.Call) else None


def literal(text: str) -> str | None:
    """A plain value as Python writes it; None for any other text."""
    text = text.strip(" .`")
    try:
        return repr(ast.literal_eval({"true": "True", "false": "False"}.get(text, text)))
    except (ValueError, SyntaxError):
        return None


def apps(
    row: Row,
    *,
    prefix: str = "QUESTION:\n",
    between: str = "\nUse {format} format\n",
    cue: str = "\nANSWER:\n",
    examples: int = 0,
    imports: bool = True,
) -> Mapping[str, object]:
    """APPS (Hendrycks et al. 2021): a question, programs that solve it, and pairs of inputs and outputs.

    A row with `fn_name` in its input_output calls that function (of `Solution`, where the starter code has that class);
    others read a standard input. prefix, between, cue: CodeRL's prompt by default; {format} in `between` becomes
    "Standard Input" or "Call-Based". examples: this many of the first pairs are examples, and the others decide.
    imports: with a line of imports in front of each program, as the published judge has it. Programs are judged as
    that judge does: tuples are lists, numbers that JSON made texts are keys again, printed output is compared with
    tolerance, each test has its own seconds, and a program that reads a standard input may return at its top level.
    """
    if "tests" in row:
        return code(row)
    _check_language(row)
    given = _parsed(found_in(row, ("input_output",)), "input_output")
    if not isinstance(given, Mapping) or not given.get("inputs"):
        why = "it has no tests, so no program can be judged; leave it out"
        raise OperantError(f"input_output is {shown(given)}: {why}")
    inputs, outputs, name = given["inputs"], given.get("outputs") or (), given.get("fn_name")
    if len(inputs) != len(outputs):
        raise OperantError(f"input_output has {len(inputs)} inputs and {len(outputs)} outputs; give as many of both")
    starter = row.get("starter_code") or ""
    called = f"Solution().{name}" if "class Solution" in starter else name
    pairs = zip(inputs, outputs, strict=True)
    tests: list[Any] = (
        [test_of_call(called, arguments, output) for arguments, output in pairs]
        if name
        else [{"stdin": whole_text(one), "stdout": whole_text(other)} for one, other in pairs]
    )
    if not 0 <= examples < len(tests):
        raise OperantError(f"form.examples={examples}: it must leave at least one of {len(tests)} tests to decide")
    question = text_of(found_in(row, ("question",)), "question")
    form = between.replace("{format}", "Call-Based" if name else "Standard Input")
    solutions = _parsed(row.get("solutions") or [], "solutions")
    before = APPS_IMPORTS if imports else ""
    return {
        "before": prefix,
        "prompt": question + (f"\n{starter}" if starter else "") + form.removesuffix("\n" if cue[:1] == "\n" else ""),
        "cue": cue,
        "references": [_clean(solution) for solution in solutions],
        **_named(row),
        "target": {"tests": tests[examples:], "examples": tests[:examples], "before": before, "judge": "apps"},
    }


def test_of_call(called: str, arguments: object, output: object) -> str:
    """A test of a call. The harness's `same` takes tuples for lists, and a result that the set has put into a list."""
    values = arguments if isinstance(arguments, Sequence) and not isinstance(arguments, str) else [arguments]
    call = f"{called}({', '.join(repr(numbered(value)) for value in values)})"
    output = [numbered(one) for one in output] if isinstance(output, list) else numbered(output)
    if called == "same":  # then the name is the program's
        others = f", {output[0]!r}" if isinstance(output, list) and output else ""
        return f"assert {call} in ({output!r}{others},)"
    return f"assert same({call}, {output!r})"


def numbered(value: object) -> object:
    """A value with the whole numbers that JSON made texts as the keys of a mapping, as APPS' judge undoes it."""
    try:
        return {int(key): one for key, one in value.items()} if isinstance(value, dict) else value
    except ValueError:
        return value


def whole_text(text: object) -> str:
    """An input or output, which some rows publish as a list of lines."""
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def split_check(test: str, name: str) -> tuple[str, list[str]]:
    """The setup and the tests of a published `test` with its `check`."""
    try:
        module = ast.parse(_clean(test))
    except SyntaxError as error:
        raise OperantError(f"test is no Python ({error.msg}, line {error.lineno})") from error
    check = next((node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "check"), None)
    require(check and check.args.args, "test must define check(candidate), which gets the program's function")
    plain = [node for node in check.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    if not plain or not all(isinstance(node, ast.Assert) for node in plain):
        return _clean(test), [f"check({name})"]

    class Named(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            return ast.copy_location(ast.Name(name, node.ctx), node) if node.id == check.args.args[0].arg else node

    module.body.remove(check)
    return ast.unparse(module), [ast.unparse(Named().visit(node)) for node in plain]


def _named(row: Row) -> dict[str, str]:
    """What the data set calls the row, if it does: `task_id`, or APPS's `problem_id`."""
    name = row.get("task_id", row.get("problem_id"))
    return {} if name is None else {"id": str(name)}


def _some(given: object, what: str, least: int = 1) -> list[Any]:
    if not isinstance(given, (list, tuple)) or len(given) < least:
        raise OperantError(f"{what} is {shown(given)}: the row has no tests, so no program can be judged; leave it out")
    return [_clean(test) if isinstance(test, str) else test for test in given]


def _clean(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _parsed(value: object, what: str) -> Any:
    """A value that some copies of a data set hold as JSON in a text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise OperantError(f"{what} is {shown(value)}, which is no JSON") from error


def _check_language(row: Row) -> None:
    """Raises: OperantError for a row that names a language other than Python."""
    for field in LANGUAGES:
        named = row.get(field) or "python"
        python = str(named).lower().startswith("py")
        require(python, f"{field} is {shown(named)}: tests run in Python only; leave out rows of other languages")


def check_template(template: str) -> str:
    """Return the template."""
    if missing := next((name for name in READS[:2] if f"{{{name}}}" not in template), None):
        known = ", ".join(f"{{{name}}}" for name in READS)
        raise OperantError(f"the repair template {shown(template)} has no {{{missing}}}: it may hold {known}")
    return template


def repair_prompt(prompt: object, reply: str, outcome: str, message: str, template: str = TEMPLATE) -> object:
    """What a repair model reads of a problem, a text or messages, and a reply that fails. Of messages, the last one
    becomes what the template makes of it."""
    chat = isinstance(prompt, list)
    known = {
        "prompt": prompt[-1]["content"] if chat else prompt,
        "program": program_in(reply),
        "outcome": outcome,
        "message": " ".join(message.split())[:LONGEST],
    }
    text = re.sub(rf"\{{({'|'.join(READS)})\}}", lambda found: known[found[1]], template)
    return [*prompt[:-1], {**prompt[-1], "content": text}] if chat else text


def repair(row: Row, *, template: str = TEMPLATE) -> dict[str, object] | list[object]:
    """Candidates of `operant generate --tests --all`: a program that fails its examples, and a right one as reference.

    Rows that pass their examples, or whose problem has no right program, are left out. template: with {prompt},
    {program}, {outcome} and {message}; the same as the option --repair-template of `operant generate`.
    """
    if missing := [name for name in ("prompt", "completion", "examples") if name not in row]:
        raise OperantError(f"it reads rows of `operant generate --tests --all`, and this one has no {missing[0]}")
    outcome = row["examples"]
    require(outcome in OUTCOMES, f"examples is {shown(outcome)}; it is one of {', '.join(OUTCOMES)}")
    if outcome == "passed" or row.get("right") is None:
        return []
    check_template(template)
    given = (row["prompt"], row["completion"], outcome, row.get("examples_message") or "")
    return {"prompt": repair_prompt(*given, template), "references": row["right"]}


def outcomes(*, run: str, first: int = 1, last: int | None = None) -> Iterator[dict[str, object]]:
    """Rows {"prompt", "completion", "outcome"} of all replies that a run has stored, steps `first` to `last`, whose
    reward named the outcome of a program."""
    from operant.data.sources import read

    files = sorted((Path(run).expanduser() / "rollouts").glob("step-*.parquet"))
    chosen = [file for file in files if first <= int(file.stem.partition("-")[2]) <= (last or 1 << 60)]
    require(chosen, f"tasks.run={run!r}: {run}/rollouts has no replies of steps {first} to {last or 'the end'}")
    found = False
    for file in chosen:
        for _, row in read(file)[1]:
            # A sum calls it tests/passed, and a reward with several parts names one of each.
            named = [name.rpartition("/")[2] for name in (row.get("outcome") or "").split(", ")]
            if len(own := list(dict.fromkeys(name for name in named if name in OUTCOMES))) == 1:
                found = True
                yield {"prompt": row["query"], "completion": row["reply"], "outcome": own[0]}
    require(found, f"tasks.run={run!r}: no reply has one outcome; their reward names it, as `tests` does")
