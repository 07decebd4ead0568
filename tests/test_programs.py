"""Programming problems, published and generated; the reward of their tests; the world that repeats; the recipe."""

import gzip
import json
import random
import re
from itertools import islice
from pathlib import Path

import pytest
from cases import cases, slow
from page_commands import commands, snippets
from texts import write_rows
from toys import letters, lm, on_disk

from operant.apps.code.generated import held_out, programs
from operant.apps.code.problems import problem_of, program_in
from operant.apps.code.unit_tests import UnitTests
from operant.apps.code.verdicts import Verdicts
from operant.data import load_tasks
from operant.data.forms import ROW_FORMS
from operant.envs import ENVS
from operant.options import Factory, arguments
from operant.rewards import judge, prepare, resolve
from operant.runs import named_parts
from operant.runs.folder import Journal
from operant.sandbox.jail import Jail, JailOptions, Program, Verdict
from operant.tools.cli import main
from operant.types import OperantError, Rollout, Task, Turn

SHARED = Path(__file__).parents[2] / "shared" / "data"
DOUBLE = {"tests": ["assert f(2) == 4", "assert f(3) == 6"], "examples": ["assert f(0) == 0"]}
OF_OUTCOME = {
    "compile error": "def f(x) return x",
    "runtime error": "def f(x): return x[0]",
    "failed test": "def f(x): return 4",
    "passed": "def f(x): return 2 * x",
}


def tasks_of(rows, form="code", **options):
    return load_tasks(rows, form=named_parts.form(form, arguments(Factory(ROW_FORMS.find(form), 1), options, form)))


def rollout(reply, target=DOUBLE, name="t/0", references=()):
    task = Task(name, "Return twice x.", target, references=references)
    return Rollout(task, 0, [Turn([1], [2], end="stop")], [reply], end="stop", query="Return twice x.")


# --- published rows ---------------------------------------------------------------------------------------------------
MBPP = {"text": "Write a function to double.", "code": "def f(x):\r\n  return 2 * x", "task_id": 1}
MBPP |= {"test_setup_code": "N = 2", "test_list": ["assert f(1) == N", "assert f(2) == 4", "assert f(0) == 0"]}
MBPP |= {"challenge_test_list": ["assert f(9) == 18"]}
SANITISED = {"prompt": "Double.", "code": "c", "test_imports": ["import math"], "test_list": ["assert f(1) == 2"]}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def f(x):\n    """Double."""\n',
    "entry_point": "f",
    "canonical_solution": "    return 2 * x\n",
    "test": "METADATA = {}\n\n\ndef check(c):\n    assert c(1) == 2\n    assert c(3) == 6, 'x'\n",
}
LOOPED = "def check(candidate):\n    for n in range(3):\n        assert candidate(n) == 2 * n\n"
STDIN = {"question": "Double it.", "input_output": '{"inputs": ["2\\n"], "outputs": ["4\\n"]}'}
STDIN |= {"solutions": '["s\\r\\n"]'}
CALLED = {
    "question": "Double.",
    "input_output": {"fn_name": "f", "inputs": [[1], [[2]]], "outputs": [[2], [[2, 2]]]},
    "starter_code": "class Solution:\n    def f(self, x):",
}


@cases(
        ("mbpp", MBPP, {}, "Write a function to double.\nassert f(1) == N\n", ("def f(x):\n  return 2 * x",),
         {"tests": MBPP["test_list"][1:], "examples": MBPP["test_list"][:1], "setup": "N = 2"}),
        ("mbpp", MBPP, {"shown": "none", "challenge": True, "cue": " [BEGIN]", "prefix": "Task: "},
         "Task: Write a function to double. [BEGIN]", ("def f(x):\n  return 2 * x",),
         {"tests": [*MBPP["test_list"], "assert f(9) == 18"], "examples": [], "setup": "N = 2"}),
        ("mbpp", MBPP, {"shown": "one", "decide": "all"}, "Write a function to double.\nassert f(1) == N\n",
         ("def f(x):\n  return 2 * x",),
         {"tests": MBPP["test_list"], "examples": MBPP["test_list"][:1], "setup": "N = 2"}),
        ("code", SANITISED, {}, "Double.\nassert f(1) == 2\n", ("c",),
         {"tests": ["assert f(1) == 2"], "examples": ["assert f(1) == 2"], "setup": "import math"}),
        ("code", {"prompt": "Write f.", "target": DOUBLE, "completion": "x"}, {}, "Write f.", ("x",), DOUBLE),
        ("code", {"prompt": "Write f.", **DOUBLE, "completion": "x"}, {}, "Write f.", ("x",), DOUBLE),
        ("code", HUMANEVAL, {}, HUMANEVAL["prompt"], ("    return 2 * x\n",),
         {"tests": ["assert f(1) == 2", "assert f(3) == 6, 'x'"], "examples": [], "setup": "METADATA = {}",
          "before": HUMANEVAL["prompt"]}),
        ("humaneval", HUMANEVAL | {"test": LOOPED}, {}, HUMANEVAL["prompt"], ("    return 2 * x\n",),
         {"tests": ["check(f)"], "examples": [], "setup": LOOPED, "before": HUMANEVAL["prompt"]}),
        ("apps", STDIN, {"imports": False}, "QUESTION:\nDouble it.\nUse Standard Input format\nANSWER:\n", ("s\n",),
         {"tests": [{"stdin": "2\n", "stdout": "4\n"}], "examples": [], "before": "", "judge": "apps"}),
        ("apps", CALLED, {"imports": False, "examples": 1, "between": "", "cue": ""},
         f"QUESTION:\nDouble.\n{CALLED['starter_code']}", (),
         {"tests": ["assert same(Solution().f([2]), [[2, 2]])"],
          "examples": ["assert same(Solution().f(1), [2])"], "before": "", "judge": "apps"}),
)  # fmt: skip
def test_a_published_row_becomes_a_problem(form, row, options, prompt, references, target):
    [task] = tasks_of([row], form, **options)
    assert (task.prompt, task.references, task.target) == (prompt, references, target)
    assert len(problem_of(task).tests) == len(target["tests"])
    assert task.id.endswith(f"/{row.get('task_id', 0)}")


@cases("```{python}\nx\n```\n", '```py title="a"\nx\n```\nso',
       "```python3\nx\n``` and", "```Python\r\nx\n```\n```\ny\n```", "``` py \nx\n", "x\n",
       "`a` is ```b``` c:\n```\nx")  # fmt: skip
def test_the_program_is_the_first_fenced_block(reply):
    assert program_in(reply).strip() == "x"


@cases(  # as the docstrings of HumanEval write them
        (">>> f(1)\n2\n>>> f('a=>b')\n'c'", ["assert f(1) == 2", "assert f('a=>b') == 'c'"]),
        (">>> f([1, 2]) == None\n>>> f([])\nTrue", ["assert f([1, 2]) == None", "assert f([]) == True"]),
        ("f(1, 4) => true\n* f(2) ==> [3, 4].\nf(3) \u279e 'x' # why", ["assert f(1, 4) == True",
         "assert f(2) == [3, 4]", "assert f(3) == 'x'"]),
        ("for f('=') == 'a'\nf(2)   # returns \"b\"\nf(3) should return 4.\nf(4) = 5", ["assert f('=') == 'a'",
         "assert f(2) == 'b'", "assert f(3) == 4", "assert f(4) == 5"]),
        ("f(a) => 1\nf(n) = f(n - 1) + 1\nIt is 3, and g(2) == 4\nf(1) == no value\nhalf(4) == 2", []),
)  # fmt: skip
def test_the_examples_of_a_docstring_are_read(lines, examples):
    indented = lines.replace("\n", "\n    ")
    prompt = f'def g(x):\n    """f(9) == 9"""\n    return x\n\ndef f(*x):\n    """Do it.\n    {indented}\n    """\n'
    [task] = tasks_of([HUMANEVAL | {"prompt": prompt}], "humaneval")
    assert task.target["examples"] == examples


@cases(
    (MBPP | {"test_list": []}, r"tasks, row 2, form 'code': test_list is \[\]: the row has no tests"),
    (MBPP | {"language": "C++"}, "language is 'C\\+\\+': tests run in Python only"),
    (STDIN | {"input_output": {"inputs": []}}, "it has no tests"),
    (STDIN | {"input_output": {"inputs": ["1"], "outputs": []}}, "1 inputs and 0 outputs"),
    (STDIN | {"input_output": "{"}, "which is no JSON"),
    (HUMANEVAL | {"test": "assert True"}, r"must define check\(candidate\)"),
    (HUMANEVAL | {"test": "def check_all(c): assert c(1)"}, r"must define check\(candidate\)"),
    (HUMANEVAL | {"test": "def check(): assert f(1)"}, r"must define check\(candidate\)"),
    (HUMANEVAL | {"test": "def check(c):\nx"}, "test is no Python"),
    ({"text": "a"}, "it reads tests, and the row has no such field"),
)
def test_a_row_that_is_no_problem_is_refused_with_its_number(row, words):
    with pytest.raises(OperantError, match=words):
        tasks_of([MBPP, row])


@cases(("mbpp.jsonl.gz", 974), ("sanitized-mbpp.json.gz", 427))
def test_mbpp_is_read_and_its_programs_pass(file, count):
    if not (path := SHARED / "code_mbpp" / file).is_file():
        pytest.skip(f"{path} is missing")
    tasks = tasks_of(str(path), "mbpp", decide="all")
    assert len(tasks) == count and all(len(problem_of(task).tests) >= 1 for task in tasks)
    some = random.Random(0).sample(tasks, 6)
    verdicts = UnitTests().verdicts([problem_of(task).program(task.references[0]) for task in some])
    assert [(task.id, v.outcome) for task, v in zip(some, verdicts) if v.outcome != "passed"] == []


def called(inputs, outputs, name="f"):
    return {"question": "?", "input_output": {"fn_name": name, "inputs": inputs, "outputs": outputs}}


def printing(*pairs):
    inputs, outputs = zip(*pairs)
    return {"question": "?", "input_output": {"inputs": inputs, "outputs": outputs}}


BUSY = "import time\nend = time.process_time() + 0.25\nwhile time.process_time() < end: pass\nprint(input())"


@cases(  # as_own_row: the outcome of the same pair of input and output in a row of one's own
        (called([[3]], [[3, 4]]), "def f(x): return x, x + 1", "passed", None),
        (called([[3]], [[[3, 4]]]), "def f(x): return [(x, x + 1)]", "passed", None),
        (called([[3]], [[3, 4]]), "def f(x): return x", "failed test", None),
        (called([[{"1": "a"}]], [{"2": "a"}]), "def f(x): return {k + 1: v for k, v in x.items()}", "passed", None),
        (called([[{"k": 1}]], [[{"k": 1}]]), "def f(x): return x", "passed", None),
        (called([[3]], [[9]], "same"), "def same(x): return x * x", "passed", None),
        (called([[3]], [[9]], "same"), "def same(x): return x", "failed test", None),
        (printing(("4", "4")), "x = int(input())\nif x > 3:\n    print(x)\n    return\nprint(0)", "passed",
         "compile error"),
        (printing(("4", "5")), "from math import *\nx = int(input())\ndef f():\n    global x\n    x += floor(1.5)\n"
         "f()\nprint(x)\nreturn x", "passed", "compile error"),
        (printing(("4", "5")), "x: int = 1 + int(input())\ndef f(): print(x)\nf()\nreturn", "passed", "compile error"),
        (printing(("4", "5")), "if 1: x: int = int(input())\ndef f():\n    global x\n    x += 1\nf()\nprint(x)\nreturn",
         "passed", "compile error"),
        (printing(("4", "5")), "def f(:\n  return", "compile error", "compile error"),
        (printing(("4", "0.5 1\n")), "print(0.5000001, '1.0')", "passed", "failed test"),
        (printing(*[("4", "4")] * 3), BUSY, "passed", "runtime error"),
        (printing(*[("4", "4")] * 3), "while True: pass", "runtime error", "runtime error"),
)  # fmt: skip
def test_apps_is_judged_as_its_own_judge_does(row, program, outcome, as_own_row):
    given = row["input_output"]
    pairs = [{"stdin": one, "stdout": other} for one, other in zip(given["inputs"], given["outputs"])]
    verdicts = Verdicts(JailOptions(seconds=0.5))
    for task, wanted in zip(tasks_of([row, {"prompt": "?", "tests": pairs}]), (outcome, as_own_row)):
        if wanted is not None:
            [verdict] = verdicts([problem_of(task).program(program)])
            assert verdict.outcome == wanted, verdict.message


def test_published_solutions_of_apps_pass():
    if not (path := SHARED / "code_apps_sample/apps_coderl_sample.jsonl.gz").is_file():
        pytest.skip(f"{path} is missing")
    task = tasks_of(str(path), "apps")[2]
    verdicts = Verdicts()([problem_of(task).program(solution) for solution in task.references])
    assert [verdict.outcome for verdict in verdicts] == ["passed"] * 10


# --- generated problems -----------------------------------------------------------------------------------------------
def shape(reference):
    return re.sub(r'"\w"', '"c"', re.sub(r"\d+", "0", reference))


def solved(source, tests):
    names = {}
    try:
        exec(source, names)
        for one in tests:
            exec(one, names)
    except Exception:
        return False
    return True


def test_only_references_solve_generated_problems():
    train, other = list(programs(count=400, seed=3)), list(held_out(count=100, seed=3))
    for row in [*train, *other]:
        assert solved(row["completion"], [*row["tests"], *row["examples"]]), row
        assert row["prompt"].endswith("\n".join(["", *row["examples"], ""]))
    assert list(islice(programs(count=5, seed=3), 5)) == train[:5] and next(programs(count=1, seed=4)) != train[0]
    assert {row["level"] for row in train} == {1, 2, 3} and {row["level"] for row in other} == {2, 3}
    assert len({row["prompt"] for row in train}) == 400
    assert not {shape(row["completion"]) for row in train} & {shape(row["completion"]) for row in other}
    simple = ("x", "0", "None", "[]", "''", "len(x)", "x[0]", "sorted(x)", "sum(x)", "max(x)", "x[::-1]", "str(x)")
    passing = {own: [r for r in train if solved(f"def f(x): return {own}", r["tests"])] for own in simple}
    for own in ("x", "0", "None", "[]", "''"):
        assert passing[own] == []
    hacked = [row for rows in passing.values() for row in rows]
    assert len(hacked) < 0.04 * len(train) and {row["level"] for row in hacked} <= {1}


def test_generated_problems_refuse():
    for options in ({"levels": "4"}, {"levels": "3-2"}, {"count": 0}, {"part": "test"}):
        with pytest.raises(OperantError, match="tasks"):
            programs(**options)
    with pytest.raises(OperantError, match="at least 2"):
        held_out(levels="1-2")


# --- the reward -------------------------------------------------------------------------------------------------------
def test_four_outcomes_and_their_scores(monkeypatch):
    replies = [rollout(program) for program in OF_OUTCOME.values()]
    judged = judge(resolve("tests"), replies)
    assert judged.scores == [-1.0, -0.6, -0.3, 1.0]
    assert [judged.remark(i).classes for i in range(4)] == [(name,) for name in OF_OUTCOME]
    assert judged.parts["passed"] == [0, 0, 0, 1] and judged.parts["share"] == [0, 0, 0.5, 1]
    assert "SyntaxError" in judged.remark(0).message and "TypeError" in judged.remark(1).message
    assert judged.remark(3).message == ""
    known = Jail(JailOptions()).run([problem_of(reply.task).program(reply.reply) for reply in replies])
    monkeypatch.setattr(Jail, "run", lambda self, programs: [*known])
    for options, expected in (
        ({"outcomes": "-2,-1,0,3"}, [-2.0, -1.0, 0.0, 3.0]),
        ({"outcomes": {"compile error": -0.5}}, [-0.5, -0.6, -0.3, 1.0]),
        ({"kind": "passed"}, [0.0, 0.0, 0.0, 1.0]),
        ({"kind": "fraction"}, [0.0, 0.0, 0.5, 1.0]),
    ):
        assert judge(resolve("tests", options), replies).scores == expected


THREAD = "import threading\ndef run(): assert f(2) == 5\nrun()\n"
WAITS = "import asyncio\nasync def main():\n    try: await asyncio.wait_for(f(), 1)\n"
UNITTEST = "import unittest\nclass TestF(unittest.TestCase):\n    def test_f(self): self.assertEqual(f(2), 4)\n"


@cases(
    ("", "assert eval('f(2)') == 4 and evaluate(f(1)) == 2"),
    ("", UNITTEST + "r = unittest.TestResult()\nTestF('test_f').run(r)\nassert r.wasSuccessful()"),
    ("", WAITS + "    except ValueError: pass"),
    ("", THREAD + "assert threading.Thread(target=f)"),
    ("def test_f(): assert f(2) == 4", "test_f()"),
    ("class A: pass", "class B(A): pass\nassert f(B())"),
    ("", "class B(dict): pass\nclass C(collections.OrderedDict, B): pass\nclass D(TheirError): pass"),
    ("", "def patch(np): return np.real\nassert patch(f(1)) == 1 and getsource(2) == 1 and np(2) == 1"),
    ("", "import io, sys\nsys.stdout = io.StringIO()\nf()\nassert sys.stdout.getvalue() == '1'"),
)
def test_a_test_that_does_not_need_the_programs_process_is_taken(setup, test):
    """Those that do are in `refusals.txt`."""
    assert problem_of(Task("a", "Write f.", {"tests": ["assert f(2) == 1", test], "setup": setup})).setup == setup


@cases([1, 0.5, 0, -1], [1, 2, 3], {"pass": 1.0}, "a,b,c,d")
def test_wrong_scores_of_outcomes_are_refused(outcomes):
    words = "give four finite numbers, from the worst outcome to the best, or a mapping"
    with pytest.raises(OperantError, match=words):
        UnitTests(outcomes=outcomes)


def test_kept_verdicts_make_a_replay_exact(tmp_path, monkeypatch):
    """Each of 16 programs passes with probability 1/2; the same reward in another process, as it were, agrees."""
    target = {"tests": ["assert f() == 1"]}
    thrown = [rollout(f"import os\ndef f(): return os.urandom(1)[0] % 2  # {i}", target) for i in range(16)]
    first, again = UnitTests(), UnitTests()
    first.keep_in(Journal(tmp_path / "verdicts.jsonl"))
    scores = [one.score for one in first(thrown)]
    assert set(scores) == {1.0, -0.3}
    with (tmp_path / "verdicts.jsonl").open("a", encoding="utf-8") as file:
        file.write('["half a li')
    monkeypatch.setattr(Jail, "run", lambda self, programs: pytest.fail("a known program ran again"))
    again.keep_in(Journal(tmp_path / "verdicts.jsonl"))
    assert [one.score for one in again(thrown)] == scores == [one.score for one in first(thrown)]
    lines = (tmp_path / "verdicts.jsonl").read_text(encoding="utf-8").splitlines()
    assert lines[-1] == '["half a li' and len(lines) == 17  # what comes next begins a line of its own
    with pytest.raises(BaseException, match="ran again"):  # under other limits it would be another verdict
        other = UnitTests(seconds=1)
        other.keep_in(Journal(tmp_path / "verdicts.jsonl"))
        other(thrown)


def test_equal_programs_run_once_and_old_verdicts_go(monkeypatch):
    ran = []

    def run(self, programs):
        ran.extend(program.source for program in programs)
        return [Verdict("passed", ("passed",))] * len(programs)

    monkeypatch.setattr(Jail, "run", run)
    verdicts = Verdicts(most=2)
    for sources in ("aab", "c", "bc", "a"):
        assert len(verdicts([Program(source, ()) for source in sources])) == len(sources)
    assert "".join(ran) == "abca"


def test_bad_references_are_named_dropped_or_refused():
    made = [Task(f"t/{i}", "x", DOUBLE, references=(code,)) for i, code in enumerate(OF_OUTCOME.values())]
    made.append(Task("sure", "x", DOUBLE | {"verified": True}, references=("nonsense(",)))
    warned = UnitTests()
    assert prepare(warned, made) == made
    text = warned.notes[0]
    assert "3 of 4 reference solutions" in text and "1 compile error, 1 runtime error, 1 failed test" in text
    assert "'t/0': compile error: SyntaxError" in text and "t/3" not in text
    prepare(warned := UnitTests(), [Task(f"m/{i}", "x", DOUBLE, references=("x = 1",)) for i in range(107)])
    assert "'m/4': runtime error" in warned.notes[0] and "; and the tasks 'm/5', 'm/6'" in warned.notes[0]
    assert warned.notes[0].endswith("'m/104' and 2 more")
    assert [task.id for task in prepare(UnitTests(references="drop"), made)] == ["t/3", "sure"]
    with pytest.raises(OperantError, match="3 of 4 reference solutions"):
        prepare(UnitTests(references="refuse"), made)
    skipping = UnitTests(references="skip")
    prepare(skipping, made)
    assert skipping.notes == []
    with pytest.raises(OperantError, match="task 'a' has no tests: its target is None"):
        prepare(UnitTests(), [Task("b", "x", DOUBLE), Task("a", "x")])


def test_the_world_shows_examples_and_pays_by_hidden_tests():
    world = ENVS.find("programs")(turns=2)
    world.reset({slot: Task(f"t/{slot}", "Return twice x.", DOUBLE) for slot in range(3)})
    steps = world.step({0: "def f(x): return x + 1", 1: "def f(x): return 3 * x", 2: "def f(x): return 2 * x"})
    assert re.fullmatch(r"\n# failed test: .*\n", steps[0].text, re.S) and not steps[0].terminated
    # Slot 1 passes its example, so it has seen all that it may see, and is paid by the tests that decide.
    assert [(steps[slot].terminated, steps[slot].reward) for slot in (1, 2)] == [(True, -0.3), (True, 1.0)]
    ended = world.step({0: "def f(x): return x +"})[0]
    assert (ended.terminated, ended.reward, ended.text) == (True, -1.0, "")
    assert ended.info["judgement"].outcome == "compile error"


# --- runs -------------------------------------------------------------------------------------------------------------
def tiny(kind, folder):
    more = {"max_position_embeddings": 512} if kind == "llama" else {}
    on_disk(folder, lm(kind, vocab=len(letters()), spread=0.02, **more))


@cases(slow("llama"), slow("t5"))
def test_the_recipe_trains_on_a_file_and_names_the_bad_rows(kind, tmp_path, monkeypatch, capsys):
    """Of this test's tokenizer every program is a compile error or worse; what is counted are the gold programs."""
    monkeypatch.chdir(tmp_path)
    (canary := tmp_path / "canary").write_text("sings", encoding="utf-8")
    bad = ["def f(x):\n    while True: pass", f"import os\ndef f(x):\n    os.remove({str(canary)!r})\n    return 2 * x"]
    gold = [*bad, "def f(x) return 2 * x", "def f(x):\n    return 3 * x", *["def f(x):\n    return 2 * x"] * 4]
    rows = [MBPP | {"text": f"Double {i}.", "code": code, "task_id": 11 + i} for i, code in enumerate(gold)]
    write_rows("mbpp.jsonl", rows)
    tiny(kind, Path("tiny"))
    short = "--steps 2 --batch 16 --samples 4 --max-tokens 6 --update.minibatch 16 --probes 0 --reward.seconds 1"
    given = f"train code --tasks mbpp.jsonl --evaluate mbpp.jsonl --policy ./tiny {short} --out run".split()
    assert main(given) == 0, capsys.readouterr()
    log = Path("run/log.txt").read_text(encoding="utf-8")
    assert f"programs run at level {Jail().level}" in log
    assert "4 of 8 reference solutions do not pass their own tests" in log
    assert "(1 compile error, 2 runtime error, 1 failed test)" in log
    for number, outcome in enumerate(["runtime error", "runtime error", "compile error", "failed test"]):
        assert f"task 'mbpp/{11 + number}': {outcome}" in log
    for step in [json.loads(line) for line in Path("run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]:
        assert sum(share for name, share in step.items() if name.startswith("outcome/")) == pytest.approx(1)
    assert "What became of the replies" in Path("run/report.html").read_text(encoding="utf-8")
    assert len(Path("run/verdicts-0.jsonl").read_text(encoding="utf-8").splitlines()) >= 8
    if Jail().level != "process":
        assert canary.read_text(encoding="utf-8") == "sings"


# --- the page ---------------------------------------------------------------------------------------------------------
PAGE = "docs/code.md#programs-that-pass-their-tests"


def test_the_rows_and_the_snippet_of_the_page(capsys):
    [shown], [snippet] = snippets(PAGE, "json"), snippets(PAGE)
    doubled, printed = tasks_of([json.loads(line) for line in shown.splitlines()])
    solutions = {doubled.references[0]: doubled, "print(2 * int(input()))": printed}
    verdicts = Jail().run([problem_of(task).program(one) for one, task in solutions.items()])
    assert [verdict.outcome for verdict in verdicts] == ["passed", "passed"]
    exec(snippet, {})
    assert re.fullmatch(r"\n# failed test: .*\n\n1\.0\n", capsys.readouterr().out, re.S)


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_rows("mbpp.jsonl", [MBPP | {"text": f"Double {i}.", "task_id": i} for i in range(8)])
    tiny("llama", Path("my-code-model"))
    for _, name, *words in commands(PAGE):
        if name == "train":
            short = "--steps 1 --batch 8 --max-tokens 6 --update.minibatch 8 --probes 0 --data.limit 4"
            words += [*short.split(), *([] if "sft" in words else ["--samples", "4"])]
            words += [] if "--policy" in words else ["--policy", "./my-code-model"]
        assert main([name, *words]) == 0, (words, capsys.readouterr())


@pytest.mark.slow
def test_verdicts_on_samples_of_coderl_are_its_own():
    """Its labels came from a judge that stops at other places, so errors may be named otherwise; passes may not."""
    if not (path := SHARED / "code_apps_sample/apps_coderl_sample.jsonl.gz").is_file():
        pytest.skip(f"{path} is missing")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    found = []
    for row, task in zip(rows, tasks_of(rows, "apps"), strict=True):
        samples = row["gen_solutions"][::3]
        verdicts = Jail(JailOptions()).run([problem_of(task).program(one["code"]) for one in samples])
        found += [(one["result"], verdict.outcome) for one, verdict in zip(samples, verdicts, strict=True)]
    names = {-2: "compile error", -1: "runtime error", False: "failed test", True: "passed"}
    assert len(found) == 30 and all((outcome == "passed") == (result is True) for result, outcome in found)
    assert sum(outcome == names[result] for result, outcome in found) >= 28
