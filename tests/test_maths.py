"""Maths with answers that can be checked: answers in replies, verdicts, generated problems, published rows, rewards."""

import inspect
import json
import re
from fractions import Fraction
from itertools import product

import pytest
from cases import cases
from scored import rollout_of

from operant import OperantError, Rollout, Task, Turn, rewards
from operant.apps.maths import answers, reasoning_gym, verifier
from operant.apps.maths.forms import maths
from operant.apps.maths.generated import arithmetic, arithmetic_held_out, countdown, countdown_held_out, is_held_out
from operant.apps.maths.rewards import Maths, findings, target_of
from operant.data import load_tasks
from operant.data.sources import SOURCES
from operant.rewards import judge
from operant.tools.cli import main


# --- answers and exact verdicts ---------------------------------------------------------------------------------------
@cases(
    ("<think>1</think><answer> 42 </answer>", "42"),
    ("<answer>1</answer> no, <answer>2</answer>", "2"),
    ("<answer>so \\boxed{x^{2}}</answer>", "x^{2}"),
    ("\\boxed{\\frac{1}{2}} or $\\boxed{3}$.", "3"),
    ("12 apples\n#### 1,234\n", "1,234"),
    ("\\boxed{4", None),
    ("so $\\boxed 7$.", "7"),
    ("it is 42", None),
    ("<think> \\boxed{42}", None),
    ("<think>\\boxed{1}</think> it is 2", None),
)
def test_the_marked_answer(reply, found):
    assert answers.marked(reply) == found


@cases(
        ("$1,234.50", "2469/2"), ("\\$42", "42"), ("42.", "42"), ("x = -5", "-5"), ("\u22123", "-3"), ("50\\%", "50"),
        ("-\\frac{1}{2}", "-1/2"), ("\\frac12", "1/2"), ("3/4", "3/4"), (".5", "1/2"), ("10 \\text{ cm}", "10"),
        ("90^\\circ", "90"), ("7 apples", "7"), ("5 million", None), ("2^{10}", None), ("3 or 4", None), ("5x", None),
        ("1,2", None), ("1/0", None), ("", None), ("1" * 5000, None), ("1e5", None), ("1{,}000", "1000"),
        ("1\\frac{1}{2}", "3/2"), ("-2 \\tfrac12", "-5/2"), ("1.5\\frac{1}{2}", None), ("5 and a half", None),
        ("5 halves", None), ("3 squared", None), ("2 millions", None), ("8 ms", "8"), ("1" * 5000 + "\\frac12", None),
        ("4*2", None), ("**42**", "42"), ("3$4", None),
)  # fmt: skip
def test_a_plain_number(text, value):
    assert answers.number(text) == (None if value is None else Fraction(value))


@cases(
    ("16 - 3 = 13, so 13 * 2 = $26.", "26", {}, True),
    ("It is 26, or 27", "26", {}, False),
    ("#### 26.0", "26", {}, True),
    ("\\boxed{0.3333}", "1/3", {}, False),
    ("\\boxed{2^{5}}", "5", {}, False),
    ("2,600", "2600", {}, True),
    ("She earns 1,234, which is it", "1234", {}, True),
    ("so 16-3", "3", {}, True),
    ("it is 2 1/2.", "5/2", {}, True),
    *((f"it is {part}", "3", {}, None) for part in ("10^3", "10^{3}", "2e3", "2e-3", "4/5/3", "12:3", "1.5.3")),
    ("it is \\frac{1}{2}.", "0.5", {}, True),
    ("1" * 5000 + " 1/2", "2", {}, None),
    ("no idea", "26", {}, None),
    ("it is 26", "26", {"only_marked": True}, None),
    ("<think>26", "26", {}, None),
    ("231", "132", {"order": "units"}, True),
    ("021", "120", {"order": "units"}, True),
    ("21", "120", {"order": "units"}, False),
    ("2 3 1", "132", {"order": "units"}, None),
    ("231", "132", {"order": "units", "only_marked": True}, None),
    ("<think>carry</think>231", "132", {"order": "units"}, True),
)
def test_numbers_are_compared_exactly(reply, answer, more, right):
    assert answers.is_equal(reply, answer, **more) is right


@cases(
    ("(2+5)*3", ""),
    ("(5 + 2) \u00d7 3 = 21", ""),
    ("2\u22123*5", "makes -13"),
    ("3*5+2*3", "uses 3 once more than given"),
    ("21", "uses 21 once more than given"),
    ("2*5", "leaves out 3"),
    ("2+5+3", "makes 10"),
    ("5/2*3", "makes 15/2"),
    ("2/(5-5)", "divides by 0"),
    ("(2+5)*3=22", "no expression"),
    ("2**3", "no expression"),
    ("5//2", "no expression"),
    ("__import__('os')", "no expression"),
    ("(" * 150, "no expression"),
    ("9" * 5000, "no expression"),
    ("", "no expression"),
)
def test_an_expression_of_given_numbers(expression, odd):
    assert answers.makes(expression, [2, 3, 5], 21) == odd
    assert bool(answers.makes(expression, [2, 3, 5, 9], 21, every=False)) == bool(odd), "9 may be left out"


@cases(
    ("<think>a\nb</think>\n<answer>1</answer>", True),
    ("<think>a</think><answer>1</answer> so", False),
    ("<think> </think><answer>1</answer>", False),
    ("<think>a</think><think>b</think><answer>1</answer>", False),
    ("<answer>1</answer>", False),
)
def test_the_form_of_thought_and_answer(text, right):
    reward = rewards.resolve("think_answer")
    assert judge(reward, [rollout_of(text)]).scores == [right]
    assert judge(reward, [rollout_of(text.removeprefix("<think>"), query="2+2?\n<think>\n")]).scores == [right]


# --- generated problems -----------------------------------------------------------------------------------------------
def test_no_pair_of_numbers_is_in_both_parts():
    """All of two digits: a held-out pair is in training in neither order, and about a fifth are held out."""
    pairs = list(product(range(10, 100), repeat=2))
    held = {pair for pair in pairs if is_held_out(pair)}
    assert all((b, a) in held for a, b in held) and 0.15 < len(held) / len(pairs) < 0.25

    def drawn(rows):
        return {tuple(map(int, row["prompt"][:-1].split("+"))) for row in rows}

    assert drawn(arithmetic_held_out(count=3000)) <= held and not drawn(arithmetic(count=3000)) & held


def test_no_set_of_numbers_is_in_both_parts():
    options = {"count": 2000, "numbers": "2-4", "largest": 12}
    one, other = (
        {tuple(sorted(row["target"]["numbers"])) for row in make(**options)} for make in (countdown, countdown_held_out)
    )
    assert one and other and not one & other


def test_references_are_right_by_pythons_arithmetic():
    for row in arithmetic(count=300, operations="+-*", digits=3):
        assert int(row["completion"][::-1]) == eval(row["prompt"][:-1]) == int(row["target"]["answer"]) >= 0
    for row in countdown(count=500, numbers="2-6", largest=30, most=200):
        assert eval(row["completion"]) == row["target"]["target"]
        assert answers.makes(row["completion"], **row["target"]) == ""


def test_problems_depend_on_the_seed_alone():
    for make in (arithmetic, countdown):
        assert list(make(count=9))[:5] == list(make(count=5)) != list(make(count=5, seed=1))


# --- published rows ---------------------------------------------------------------------------------------------------
GSM8K = {"question": "How many?", "answer": "He has 2*3=<<2*3=6>>6.\n#### 1,006"}
SVAMP = {"Body": "He has 6 apples", "Question": "How many?", "Answer": 145.0, "Equation": "( 6 )"}
MATH = {"problem": "Half?", "solution": "So $\\boxed{\\frac{1}{2}}$.", "level": "Level 1"}


@cases(
        (GSM8K, "How many?", {"answer": "1,006"}),
        (SVAMP, "He has 6 apples. How many?", {"answer": "145"}),
        (MATH, "Half?", {"answer": "\\frac{1}{2}"}),
        (MATH | {"answer": "1/2"}, "Half?", {"answer": "1/2"}),
        ({"nums": [3, 7], "target": 21}, maths({"numbers": ["3", 7], "target": "21"})["prompt"],
         {"numbers": [3, 7], "target": 21}),
        *(({"prompt": "a", name: 4}, "a", {"answer": "4"}) for name in ("answer", "target")),
        ({"prompt": "1+1=", "target": {"answer": "2"}}, "1+1=", {"answer": "2"}),
)  # fmt: skip
def test_rows_as_they_are_published(row, prompt, target):
    made = maths(row)
    assert (made["prompt"], made["target"]) == (prompt, target)


def test_the_reference_is_the_published_solution():
    assert maths(GSM8K)["references"] == GSM8K["answer"]
    assert maths(MATH | {"answer": "1/2"})["references"] == MATH["solution"]
    assert maths(GSM8K, ask="boxed")["behind"].endswith("\\boxed{}."), "an encoder-decoder reads no cue"


# --- the reward -------------------------------------------------------------------------------------------------------
def test_outcomes_and_scores_of_plain_targets_need_no_package(monkeypatch):
    monkeypatch.setattr(reasoning_gym, "find_spec", lambda name: None)
    numbers, reward = {"numbers": [2, 3, 5], "target": 21}, Maths()
    rewards.prepare(reward, [Task("t/0", [1], {"answer": "1,006"}), Task("t/1", [1], numbers)])
    given = [("#### 4", {"answer": "4"}), ("5", "4"), ("-", "4"), ("so\n(2+5)*3", numbers), ("2*5", numbers)]
    judged = judge(reward, [rollout_of(reply, target=target) for reply, target in given])
    assert judged.scores == [1, 0, 0, 1, 0]
    named = ("right", "wrong", "no answer", "right", "wrong")
    assert [remark.classes for remark in judged.remarks] == [(name,) for name in named]
    assert judged.remarks[-1].message == "leaves out 3" and not judged.notes
    opened = {"target": {"answer": "42"}, "query": "6*7?\n<think>\n"}
    cut, closed = (rollout_of(reply, **opened) for reply in ("so 42", "so 1</think> 42"))
    assert judge(reward, [cut, closed]).scores == [0, 1], "the chat template has opened the thought"


@cases(
    (None, {}, "no answer in its target"),
    ({"numbers": [1]}, {}, "no numbers in its target"),
    ({"answer": "\\sqrt{2}"}, {"verifier": "exact"}, "is no plain number"),
    ({"answer": "\\sqrt{2}"}, {}, r"needs a package: pip install 'operant\[maths\]'"),
    ({"answer": "2"}, {"verifier": "math_verify"}, r"pip install 'operant\[maths\]'"),
    ({"set": "ab", "index": 0, "options": "{}"}, {}, r"pip install 'operant\[reasoning\]'"),
    ({"set": "verifiers:ab", "index": 0, "options": "{}"}, {}, r"pip install 'operant\[verifiers\]'"),
)
def test_tasks_that_cannot_be_judged(target, options, why, monkeypatch):
    monkeypatch.setattr(reasoning_gym, "find_spec", lambda name: None)
    with pytest.raises(OperantError, match=why):
        rewards.prepare(Maths(**options), [Task("t/0", [1], target)])


def test_math_verify_in_a_process_that_hangs_or_not():
    """A tower of powers ends its process after the limit, and the replies behind it are judged."""
    given = [
        ("\\boxed{\\frac{2}{\\sqrt{2}}}", "\\sqrt{2}", 1, "right"),
        ("\\boxed{9^{9^{9^{9}}}}", "\\sqrt{2}", 0, "hang"),
        ("so $\\sqrt2$", "\\sqrt{2}", 1, "right"),
        ("\\boxed{1.41}", "\\sqrt{2}", 0, "wrong"),
        ("\\boxed{(x+1)^2}", "x^2+2x+1", 1, "right"),
        ("", "\\sqrt{2}", 0, "no answer"),
        ("\\boxed{2\\sqrt{4}}", 4, 1, "right"),
        ("\\boxed{5}", "4", 0, "wrong"),
    ]
    pytest.importorskip("math_verify")
    reward = Maths(seconds=2.0)
    rewards.read_held_out(reward, [Task("t/0", [1], {"answer": "\\sqrt{2}"})])
    judged = judge(reward, [rollout_of(reply, target={"answer": answer}) for reply, answer, _, _ in given])
    assert [remark.classes[0] for remark in judged.remarks] == [outcome for *_, outcome in given]
    assert judged.scores == [score for _, _, score, _ in given]
    assert judged.remarks[1].message == "it took more than 2 s" and not judged.notes
    reward.close()


# --- reasoning-gym ----------------------------------------------------------------------------------------------------
def tasks_of(name, **options):
    pytest.importorskip("reasoning_gym")
    return load_tasks(lambda: SOURCES.find(f"reasoning_gym:{name}")(**options), form=maths)


@pytest.fixture(scope="module")
def reward():
    """One whose workers have loaded reasoning-gym; what it notes is said of the last set that was tested."""
    reward = Maths()
    yield reward
    reward.close()


def test_sets_by_name_are_tested_and_judged(reward):
    [task] = tasks_of("chain_sum", size=1, min_terms=2, max_terms=2, min_digits=1, max_digits=1, seed=3)
    rewards.prepare(reward, [task])
    given = [Rollout(task, 0, [Turn([1], [2])], [text]) for text in (f"<answer>{task.references[0]}</answer>", "x")]
    assert judge(reward, given).scores == [1, 0]
    said = "reasoning_gym:chain_sum, 1 problems tested: its own answer pays 1 for 1 of 1; nonsense pays 0"
    assert reward.notes[-1] == said
    with pytest.raises(OperantError, match=r"makes other problems in another process .* PYTHONHASHSEED=0"):
        rewards.prepare(reward, tasks_of("list_functions", size=8))


def test_a_verifier_that_raises_on_every_reply_is_named(reward):
    tasks = tasks_of("prime_factorization", size=2)
    rewards.prepare(reward, tasks)
    assert "raises on some replies (ValueError" in reward.notes[-1]
    failed = [Rollout(task, 0, [Turn([1], [2])], ["banana"]) for task in tasks]
    for more, named in (([], True), (["no idea"], True), (["26"], False)):
        judged = judge(reward, [*failed, *(rollout_of(text, target={"answer": "26"}) for text in more)])
        assert [remark.classes for remark in judged.remarks[:2]] == [("crash",)] * 2
        assert ["failed on each of 2 replies: it raised ValueError" in note for note in judged.notes] == [True] * named


@cases(
    ("countdwn", {}, "did you mean 'countdown'"),
    ("countdown", {"min_numbers": 1}, "cannot be made: AssertionError: min_numbers must be greater than 1"),
    ("time_intervals", {"min_date": "2020-01-01", "max_date": "2020-01-09"}, "cannot be made: ValueError: empty"),
)
def test_an_unknown_set_or_a_wrong_option(name, options, why):
    with pytest.raises(OperantError, match=why):
        tasks_of(name, **options)


@cases(
    ("word_sorting", {"transformation": "uppercase"}, r"[A-Z, ]+"),
    ("composite", {"datasets": "[{name: chain_sum, weight: 1, config: {max_terms: 2}}]"}, ".*arithmetic problem.*"),
    ("time_intervals", {"min_date": "2020-01-01", "max_date": "2020-12-31", "task_types": ["date"]}, ".*2020.*"),
    ("arc_agi", {"board_format_opts": "{alphabet: [a, b, c, d, e, f, g, h, i, j]}"}, "[a-j ]+"),
)
def test_options_that_are_no_plain_values(name, options, asked):
    """Members of an enumeration, dates, and the parts of a dataclass as YAML."""
    for task in tasks_of(name, size=2, **options):
        assert re.search(rf"(?s)(?:^|: ?|\n){asked}\s*$", task.prompt), task.prompt


def test_the_defaults_of_a_set_may_be_given_and_a_wrong_choice_is_named():
    usual = inspect.signature(SOURCES.find("reasoning_gym:word_sorting")).parameters
    assert usual["transformation"].default == "original"
    assert len(tasks_of("word_sorting", **{name: each.default for name, each in usual.items()} | {"size": 2})) == 2
    with pytest.raises(OperantError, match=r"tasks\.size=0: it must be at least 1"):
        tasks_of("gcd", size=0)


def test_the_time_of_a_reply_is_not_spent_on_making_its_problem_again(monkeypatch):
    """The request has the problem; a problem with more than plain values is made again where it is judged."""
    [task] = tasks_of("chain_sum", size=1)
    request = Maths()._request(task.references[0], target_of(task))
    monkeypatch.setattr(type(reasoning_gym.data_set("chain_sum", task.target["options"])), "__getitem__", None)
    assert verifier.verifier([])(request) == {"score": 1.0, "outcome": "right"}
    assert reasoning_gym.packed("knights_knaves", '{"seed": 0, "size": 1}', 0) is None


@cases(
        ([1.0, 1.0], {"a": [0.0], "b": [0.0]}, ["its own answer pays 1 for 2 of 2", "nonsense pays 0"]),
        ([1.0, 0.5, None], {"a": [0.0], "b": [1.0]},
         ["its own answer pays 1 for 1 of 2", "nonsense such as 'b' pays up to 1"]),
        ([None], {"a": [0.0]}, ["it has no answers of its own", "nonsense pays 0"]),
)  # fmt: skip
def test_what_the_test_of_a_set_says(known, nonsense, said):
    assert findings({"known": known, "nonsense": nonsense}) == said


# --- a run ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["arithmetic", "countdown"])
def test_a_run_from_the_package_alone(name, tmp_path, capsys):
    short = "--steps 1 --batch 16 --update.minibatch 16 --data.limit 8 --probes 0".split()
    assert main(["train", name, *short, "--out", str(tmp_path / "run")]) == 0, capsys.readouterr()
    metrics = json.loads((tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert metrics["outcome/right"] == metrics["reward/mean"]


@cases(("reasoning_gym:countdown", "reasoning"), ("verifiers:gsm8k_v1", "verifiers"))
def test_the_extra_of_a_suite_is_named(tasks, extra, monkeypatch, capsys):
    monkeypatch.setattr(reasoning_gym, "find_spec", lambda name: None)
    assert main(["train", "maths", "--policy", "builtin:maths-lm", "--tasks", tasks]) == 2
    assert f"pip install 'operant[{extra}]'" in capsys.readouterr().err
