"""`operant generate --tests`, `operant eval --metrics pass@k`, and what is trained on the programs that they write."""

import json
import shutil
from functools import partial
from itertools import combinations
from statistics import fmean

import pytest
from cases import cases
from page_commands import commands
from texts import mistyped, write_rows
from tokenizers_of_words import spaced
from toys import lm, on_disk

from operant.apps.code.forms import repair
from operant.data import load_tasks
from operant.runs import judged_replies
from operant.sandbox.jail import Jail
from operant.tools.cli import main
from operant.tools.cli.program_files import tell_unread

PIECES = ["<pad>", "</s>", "Twice:", "Thrice:", "Same:", "x", "+", "1", "#", "failed", "test", "Q"]
FACTORS = {"Twice:": 2, "Thrice:": 3, "Same:": 1}
DRAWN = 10
SAMPLING = ["--max-tokens", "4", "--banned", "0,2,3,4,8,9,10,11"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model that writes sums of x and 1, problems that ask for multiples of x, and one without example tests."""
    folder = tmp_path_factory.mktemp("code")
    on_disk(folder / "model", lm("gpt2", len(PIECES), spread=0.02, eos_token_id=1, bos_token_id=1), spaced(PIECES))
    problems = [{"prompt": prompt, "target": target(factor)} for prompt, factor in FACTORS.items()]
    files = {"problems": problems, "plain": [{"prompt": "Same:"}]}
    files["bare"] = [{"prompt": "Twice:", "target": {"tests": ["assert f(1) == 2"]}}] * 2
    files["shown"] = [{"prompt": "Same:", "target": {"examples": ["assert f(3) == 3"], "before": BEFORE}}]
    files["humaneval"] = [published("Twice", 2, ">>> f(1)\\n    2"), published("Same", 1, "x")]
    for name, rows in files.items():
        write_rows(folder / f"{name}.jsonl", rows)
    (folder / "ones.py").write_text(CRITICS, encoding="utf-8")
    return folder


BEFORE = "def f(x): return"
CRITICS = """
class Ones:
    def prefixes(self, problem, ids, tokenizer):
        return [tokenizer.decode(ids[: n + 1]).count('1') for n in range(len(ids))]
class Nothing: pass
class Short: prefixes = lambda self, *given: []
class Odd: prefixes = lambda self, problem, ids, tokenizer: [float('nan')] * len(ids)
class Broken: prefixes = lambda self, *given: 1 / 0
"""


def published(name, factor, example):
    """A problem as HumanEval publishes it, whose prompt is not one of the model's texts."""
    prompt = f'def f(x):\n    """{name}:\n    {example}\n    """\n    return'
    test = f"def check(c):\n    assert c(2) == {2 * factor}\n    assert c(5) == {5 * factor}\n"
    return {"task_id": f"HumanEval/{name}", "prompt": prompt, "entry_point": "f", "test": test}


def target(factor):
    tests = [f"assert f({x}) == {x * factor}" for x in (2, 5)]
    return {"tests": tests, "examples": ["assert f(0) == 0"], "before": BEFORE}


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(*words):
    return main([str(word) for word in words])


def passes(text, xs, factor) -> bool:
    try:
        return all(eval(text, {"x": x}) == factor * x for x in xs)
    except (SyntaxError, TypeError):
        return False


@pytest.fixture(scope="module")
def candidates(place):
    """Samples and one round of each problem, every candidate of which is kept."""
    options = ["--tests", "--samples", DRAWN, "--refine", "--repair", "policy", "--all", *SAMPLING]
    out = place / "candidates.jsonl"
    words = ["generate", place / "model", "--tasks", place / "problems.jsonl", "--out", out, *options]
    assert run(*words, "--repair-template", "{prompt} {program} Q {outcome}") == 0
    return read(out)


def test_every_candidate_has_its_outcomes(candidates, place):
    assert {row["prompt"] for row in candidates} == set(FACTORS)
    for row in candidates:
        factor = FACTORS[row["prompt"]]
        assert (row["examples"] == "passed") == passes(row["completion"], [0], factor)
        assert (row["outcome"] == "passed") == passes(row["completion"], [2, 5], factor)
        assert row["hidden"] and (row["round"] == 0) == (row["how"] == "sampled")
        if "right" in row:
            assert not passes(row["completion"], [0], factor) and passes(row["right"], [0, 2, 5], factor)
    refined = [row for row in candidates if row["how"] == "refined"]
    for row in refined:
        parent = [one for one in candidates if one["task"] == row["task"]][row["parent"]]
        assert row["completion"].split()[: row["kept"]] == parent["completion"].split()[: row["kept"]]
        assert 1 <= row["kept"] < len(parent["completion"].split())
    passed = [row for row in candidates if row["round"] == 0 and row["examples"] == "passed"]
    assert len(refined) == DRAWN * len({row["task"] for row in passed if len(row["completion"].split()) > 1}) > 0
    assert sum(row["how"] == "repaired" for row in candidates) == DRAWN * (3 - len({row["task"] for row in passed}))
    wrong = [row for row in candidates if "right" in row]
    parts = [(r["completion"], r["examples"], " ".join(r["examples_message"].split()), r["prompt"]) for r in wrong]
    form = partial(repair, template="{program}|{outcome}|{message}|{prompt}")
    made = load_tasks(str(place / "candidates.jsonl"), None, form=form, with_replies=True)
    asked = {"|".join(some): r["right"] for some, r in zip(parts, wrong, strict=True)}
    assert {task.prompt: task.replies[0] for task in made} == asked != {}, "pairs for a repair model"


@pytest.mark.parametrize(("words", "told"), mistyped("generate programs"))
def test_wrong_options_get_a_sentence(words, told, place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    with monkeypatch.context() as no:
        no.setattr(Jail, "run", lambda self, programs: pytest.fail("a program ran"))
        words = [*words, *([] if "--tasks" in words or "--prompt" in words else ["--tasks", "problems.jsonl"])]
        assert run("generate", "model", *words) == 2
    error = capsys.readouterr().err
    assert told in error and "Traceback" not in error


def test_a_critic_of_ones_own_ranks_and_cuts(place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    words = ["--tests", "--samples", 4, "--refine", "--critic", "ones.py:Ones", *SAMPLING, "--all"]
    assert run("generate", "model", "--tasks", "problems.jsonl", *words) == 0
    for row in [json.loads(line) for line in capsys.readouterr().out.splitlines()]:
        assert row["critic"] == row["completion"].count("1")
        if row["how"] == "refined":  # passing sums at x = 0 have no 1, and the first of equal beginnings is a token
            assert row["kept"] == 1


def test_tasks_with_examples_alone_need_no_hidden_tests(place, capsys):
    words = ["--tasks", place / "shown.jsonl", "--tests", "--samples", 40, *SAMPLING]
    assert run("generate", place / "model", *words) == 0
    told = capsys.readouterr()
    row = json.loads(told.out)
    assert row["replies"] == [" x"] and row["programs"][0]["hidden"] is False
    assert "on the example tests" in told.err and "pass@" not in told.err
    tell_unread(type("Done", (), {"unread": 2}))
    assert capsys.readouterr().out == "", "rows are printed there"


def test_hidden_tests_judge_their_own_task_beside_tasks_without(place, tmp_path):
    write_rows(tmp_path / "both.jsonl", [*read(place / "shown.jsonl"), *read(place / "problems.jsonl")[:1]])
    words = ["--tasks", tmp_path / "both.jsonl", "--tests", "--samples", 6, "--all", *SAMPLING]
    assert run("generate", place / "model", *words, "--out", tmp_path / "all.jsonl") == 0
    found = read(tmp_path / "all.jsonl")
    assert [row["hidden"] for row in found] == [False] * 6 + [True] * 6
    for row in found[6:]:
        assert (row["outcome"] == "passed") == passes(row["completion"], [2, 5], FACTORS[row["prompt"]])
        assert (row["outcome"] == "compile error") == (row["examples"] == "compile error")


def test_an_interrupted_search_goes_on_from_its_file(place, capsys, monkeypatch):
    """After two of three tasks: the unfinished file has their candidates, and the rest gives what one go would."""
    words = ["generate", place / "model", "--tasks", place / "problems.jsonl", "--tests", "--samples", 4, *SAMPLING]
    assert run(*words, "--out", place / "whole.jsonl") == 0
    monkeypatch.setattr(judged_replies, "AT_ONCE", 4)
    real, calls = Jail.run, []

    def stop(self, programs):
        calls.append(len(programs))
        if len(calls) == 5:
            raise KeyboardInterrupt
        return real(self, programs)

    monkeypatch.setattr(Jail, "run", stop)
    assert run(*words, "--out", place / "parts.jsonl") == 130
    monkeypatch.undo()
    unfinished = place / ".parts.jsonl.unfinished"
    assert str(unfinished) in capsys.readouterr().err
    _, *kept = read(unfinished)
    assert [line["task"] for line in kept] == ["problems/0", "problems/1"]
    assert all(len(line["replies"]) == 4 and line["replies"][0]["outcome"] for line in kept)
    assert run(*words, "--seed", 1, "--out", place / "parts.jsonl") == 2
    assert "differs in its" in capsys.readouterr().err
    assert run(*words, "--out", place / "parts.jsonl") == 0
    assert (place / "parts.jsonl").read_text() == (place / "whole.jsonl").read_text()
    assert not unfinished.exists()


# --- pass@k and n@k in evaluations ------------------------------------------------------------------------------------
@pytest.mark.slow
def test_eval_compares_models_by_the_programs_that_they_hand_in(place, capsys):
    """A model's score for a task is that of the program that `operant generate` chooses by the same search."""
    search = ["--tasks", place / "problems.jsonl", "--tests", "--samples", 24, "--refine", "--repair", "policy"]
    other, out, found = shutil.copytree(place / "model", place / "other"), place / "handed-in.json", []
    lm("gpt2", len(PIECES), spread=0.3, eos_token_id=1, bos_token_id=1).save_pretrained(other)
    assert run("eval", place / "model", other, *search, *SAMPLING, "--out", out) == 0
    printed, told = capsys.readouterr(), json.loads(out.read_text())
    assert "of 24 programs each, then 1 x 24 refined by line or repaired by the model itself" in printed.out
    assert "jail: " in printed.err and told["search"]["options"]["refine"] == "line"
    for name in (place / "model", other):
        assert run("generate", name, *search, *SAMPLING, "--out", place / f"{name.name}-handed-in.jsonl") == 0
        chosen = {row["prompt"]: row["replies"][0] for row in read(place / f"{name.name}-handed-in.jsonl")}
        for task in told["tasks"]:
            [reply] = [reply for reply in task["replies"] if reply["source"] == str(name)]
            assert reply["reply"] == chosen[task["prompt"]]
            found.append((reply["scores"]["tests"] == 1, passes(reply["reply"], [2, 5], FACTORS[task["prompt"]])))
    assert {(True, True), (False, False)} == set(found)
    replies = [reply for task in told["tasks"] for reply in task["replies"]]
    assert all(reply["tokens"] >= len(reply["reply"].split()) for reply in replies)  # each word is a token here


def test_rows_with_tests_need_no_form(place, tmp_path, capsys):
    """And a column of that name is no program to another reward."""
    rows = [{"prompt": "Same:", "tests": ["assert f(2) == 2"], "examples": ["assert f(0) == 0"], "before": BEFORE}]
    flat = write_rows(tmp_path / "flat.jsonl", rows)
    odd, one = write_rows(tmp_path / "odd.jsonl", [{"prompt": "Q", "tests": "blood"}]), place / "shown.jsonl"
    for file, *how in ([flat, "--tests"], [flat, "--reward", "tests"], [odd, "--reward", "length:3"], [one, "--tests"]):
        assert run("eval", place / "model", "--tasks", file, *how, *SAMPLING) == 0
        assert ("1 of 1 tasks have no hidden tests" in capsys.readouterr().err) is (file == one)


@pytest.mark.slow
def test_a_search_has_the_limits_and_reward_of_the_run(place, tmp_path, capsys):
    """What pays relative to the greedy program trains; held-out programs are judged by the reward of which it is."""
    words = ["--policy", place / "model", "--tasks", place / "problems.jsonl", "--target-field", "target"]
    words += ["--evaluate", place / "problems.jsonl", "--reward.seconds", 3, "--score.centre", "false"]
    words += ["--algorithm", "reinforce", "--steps", 1, "--batch", 4, "--samples", 2]
    assert run("train", *words, "--reward", "minus_greedy:tests", *SAMPLING, "--out", tmp_path / "run") == 0
    after = json.loads((tmp_path / "run/evaluation.json").read_text())["after"]["mean"]
    assert run("eval", tmp_path / "run", "--out", tmp_path / "again.json") == 0
    [score] = json.loads((tmp_path / "again.json").read_text())["scores"]
    assert score["mean"] == pytest.approx(after)
    for more, limit in (([], 3), (["--jail", "{seconds: 5}"], 5)):
        capsys.readouterr()
        assert run("eval", tmp_path / "run", "--tests", "--samples", 2, *more) == 0
        assert f"{limit} s of processor time" in capsys.readouterr().err


def test_a_run_without_a_reward_is_judged_by_tests(place, tmp_path, capsys):
    write_rows(tmp_path / "pairs.jsonl", [{"prompt": "Same:", "completion": "x"}] * 4)
    words = ["--policy", place / "model", "--tasks", tmp_path / "pairs.jsonl", "--steps", 1, "--batch", 4]
    assert run("train", "sft", *words, "--probes", 0, "--out", tmp_path / "sft") == 0
    assert run("eval", tmp_path / "sft", "--tasks", place / "problems.jsonl", "--tests", *SAMPLING) == 0
    assert "of 1 program each" in capsys.readouterr().out


def test_a_run_evaluates_by_pass_at_k(place, tmp_path):
    """The numbers of evaluation.json are those of its replies, and `--best` takes one."""
    words = ["--policy", place / "model", "--tasks", place / "problems.jsonl", "--target-field", "target"]
    held = ["--evaluate", place / "problems.jsonl", "--evaluation.samples", 4, "--metrics", "pass@1,pass@3,1@4"]
    more = ["--reward", "length:3", "--steps", 1, "--batch", 4, "--best", "evaluate/pass@3", "--evaluate-every", 1]
    assert run("train", *words, *held, *more, *SAMPLING, "--out", tmp_path / "run") == 0
    after = json.loads((tmp_path / "run" / "evaluation.json").read_text())["after"]
    groups = [after["replies"][i : i + 4] for i in range(0, 12, 4)]
    right = [[passes(r["reply"], [2, 5], FACTORS[r["query"]]) for r in group] for group in groups]
    assert after["metrics"]["pass@1"] == pytest.approx(fmean(map(fmean, right)))
    some = [fmean(any(draw) for draw in combinations(each, 3)) for each in right]
    assert after["metrics"]["pass@3"] == pytest.approx(fmean(some))
    assert 0 <= after["metrics"]["1@4"] <= 1


@pytest.mark.parametrize(("words", "told"), mistyped("compare programs"))
def test_wrong_metrics_get_a_sentence(words, told, place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    assert run(*words, *([] if "--tasks" in words else ["--tasks", "problems.jsonl"])) == 2
    error = capsys.readouterr().err
    assert told in error and "Traceback" not in error


# --- the page ---------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_the_commands_of_the_page_run_in_their_order(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(place / "model", tmp_path / "runs" / "code")
    for name in ("problems.jsonl", "training.jsonl"):
        shutil.copy(place / "problems.jsonl", tmp_path / name)
    done = []
    for _, command, *words in commands("docs/code.md#programs-at-test-time"):
        if words[0] in ("code", "samples.jsonl"):  # tests/test_commands_of_the_pages.py, and below
            continue
        shorter = [{"32": "12"}.get(word, word) for word in words]
        more = ["--steps", 1, "--batch", 4] if command == "train" else SAMPLING
        assert run(command, *shorter, *more) == 0, capsys.readouterr().err
        done.append(command)
    assert done == ["eval", "generate", "generate", "eval", "generate", "train", "train", "generate"]
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith('{"id"')]
    assert len(printed) == len(read(tmp_path / "better.jsonl")) == 3
    assert all(0 < program["critic"] < 1 for row in printed for program in row["programs"])


def test_humaneval_is_read_by_its_fields(place, capsys):
    """One of the two problems has an example: the chosen program passes it; the other is told of."""
    out = place / "of-humaneval.jsonl"
    words = ["--tasks", place / "humaneval.jsonl", "--tests", "--samples", 8, *SAMPLING, "--out", out]
    assert run("generate", place / "model", *words) == 0
    told = capsys.readouterr()
    assert "1 of 2 tasks, first 'humaneval/HumanEval/Same', have no example tests" in told.err
    assert f"jail: {Jail().describe()}\n" in told.err and "8 samples of each of 2 tasks: pass@1 " in told.out
    twice, same = read(out)
    assert passes(twice["replies"][0], [1], 2) == (twice["programs"][0]["examples"] == "passed")
    assert same["programs"][0]["hidden"]


# --- a file of samples ------------------------------------------------------------------------------------------------
SAMPLES = {"Twice": [" 2 * x", " x + x", " x", " x +", " x[0]"], "Same": [" x", " 2 * x", " 3", " None", " 0"]}


def test_samples_of_anyone_are_scored_as_humaneval_does(place, capsys):
    """pass@k by counting all draws of k samples, and the rows again with what became of them."""
    rows = [{"task_id": f"HumanEval/{name}", "completion": x, "by": i} for name, some in SAMPLES.items()
            for i, x in enumerate(some)]  # fmt: skip
    write_rows(place / "samples.jsonl", rows)
    asked = ["--tasks", place / "humaneval.jsonl", "--metrics", "pass@1,pass@2,pass@5,1@3"]
    assert run("eval", place / "samples.jsonl", *asked) == 0
    told, factors = capsys.readouterr().out, {"Twice": 2, "Same": 1}
    right = {name: [passes(x.strip(), [2, 5], factors[name]) for x in some] for name, some in SAMPLES.items()}
    assert sorted(map(sum, right.values())) == [1, 2]
    shares = [fmean(fmean(map(any, combinations(each, k))) for each in right.values()) for k in (1, 2, 5)]
    shown = {"Twice": [True, True, False, False, False], "Same": [True] * 5}  # of Twice, f(1) == 2
    of_three = fmean(
        fmean(fmean([r for r, kept in draw if kept] or [0.0]) for draw in combinations(zip(each, shown[name]), 3))
        for name, each in right.items()
    )
    assert "pass@1 {:.4f}, pass@2 {:.4f}, pass@5 {:.4f}, 1@3 {:.4f}".format(*shares, of_three) in told
    written = read(place / "samples.jsonl_results.jsonl")
    assert [row["passed"] for row in written] == [*right["Twice"], *right["Same"]]
    assert [{name: row[name] for name in rows[0]} for row in written] == rows
    assert [row["result"] for row in written[2:5]] == ["failed test", "compile error", "runtime error"]


@cases(
    ([{"task_id": "HumanEval/Twice", "completion": " x"}], [], "1 of 2 tasks, first 'humaneval/HumanEval/Same'"),
    ([{"task_id": "HumanEval/9", "completion": " x"}], [], "there is no task 'HumanEval/9', but humaneval/Human"),
    ([{"task_id": "HumanEval/Twice", "text": " x"}], [], "'text': ' x'} is no sample; give {task_id, completion}"),
    (None, ["--metrics", "pass@6"], "pass@6 needs 6 replies to each task, and there are 5"),
    (None, ["--metrics", "bleu"], "--metrics bleu: samples are scored by pass@k and n@k"),
    (None, ["--beams", 4], "--beams is about models that write"),
    (None, ["model"], "samples.jsonl is a file of samples: score it alone"),
)
def test_what_is_no_file_of_samples_gets_a_sentence(rows, words, told, place, tmp_path, capsys):
    every = [{"task_id": f"HumanEval/{name}", "completion": x} for name, some in SAMPLES.items() for x in some]
    write_rows(tmp_path / "samples.jsonl", every if rows is None else rows)
    assert run("eval", tmp_path / "samples.jsonl", "--tasks", place / "humaneval.jsonl", *words) == 2
    assert told in capsys.readouterr().err and not list(tmp_path.glob("*results*"))
