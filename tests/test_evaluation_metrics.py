"""Metrics of held-out replies by name: their numbers, their options, and what is refused before a model loads."""

import json
from pathlib import Path
from statistics import fmean, pstdev

import pytest
import sacrebleu
import yaml
from cases import cases
from page_commands import snippets
from rigs import said
from texts import parts, write_rows
from toys import letters, lm

from operant import Learner, OperantError, Policy, Rollout, Task, ValueOptions, train
from operant.data import DataOptions, load_tasks
from operant.data.demonstrations import Demonstrations
from operant.metrics.evaluation import measure, resolve
from operant.runs.evaluate import Evaluation, EvaluationOptions, Evaluator
from operant.sandbox.serialise import rollout_from_plain, rollout_to_plain
from operant.tools.report.run_report import page_data


def held_out() -> list[Rollout]:
    given = {
        "the cat sat on the mat": ["the cat sat on a mat", "a cat is sitting on the mat"],
        " it rains a lot today ": ["it rains a lot today"],
        "Good morning to all of you": ["good morning to all of you", "hello everybody", "good morning everybody"],
    }
    tasks = [Task(str(i), "x", references=tuple(references)) for i, references in enumerate(given.values())]
    return [Rollout(task, i, [], [text]) for i, (task, text) in enumerate(zip(tasks, given, strict=True))]


def test_exact_match_and_distinct_by_hand():
    assert measure(resolve("exact_match"), held_out()).of_replies == {"exact_match": [0.0, 1.0, 0.0]}
    assert measure(resolve({"exact_match": {"ignore_case": True}}), held_out()).of_replies["exact_match"][2] == 1.0
    two = [said([1], [2]), said([1], [2])]
    two = [Rollout(r.task, 0, r.turns, [text]) for r, text in zip(two, ["a b a b", "A b c"], strict=True)]
    for n, share in ((2, 3 / 5), (1, 3 / 7)):  # ab ba ab, ab bc: three different of five
        assert [*measure(resolve({"distinct": {"n": n}}), two).of_all.values()] == [share]
    assert measure(resolve("distinct"), [Rollout(Task("0", "x"), 0, [], [""])]).of_all == {}
    demonstrated = Rollout(Task("0", "x", replies=(" yes", [5])), 0, [], ["yes"])
    assert measure(resolve("exact_match"), [demonstrated]).of_replies == {"exact_match": [1.0]}


def test_a_field_becomes_the_references():
    rows = [{"text": "a", "good": "b"}, {"text": "c", "good": ["d", "e"]}]
    tasks = load_tasks(rows, options=DataOptions(reference_field="good"))
    assert [task.references for task in tasks] == [("b",), ("d", "e")]
    assert rollout_from_plain(rollout_to_plain(held_out()[0])) == held_out()[0]
    with pytest.raises(OperantError, match=r"row 1: the reference in 'good' is 5; it must be a text or"):
        load_tasks([{"text": "a", "good": 5}], options=DataOptions(reference_field="good"))


TASKS = [Task("t/0", "ab"), Task("t/1", "ba")]


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    (tmp_path / "own_metrics.py").write_text(parts("programs.txt")["metrics"], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@cases(
    ("blue", "evaluation metric 'blue' is unknown; did you mean 'bleu'.*bertscore, bleu, chrf, cider, consistency"),
    ("bleu:2", r"'bleu:2': only a reward has its argument behind the name; .* \{bleu: \{max_n: 2\}\}"),
    ("distinct:3", r"a mapping, such as \{distinct: \{n: 3\}\}"),
    ("distinct,own_metrics:shrt", "has no 'shrt'; did you mean 'short'"),
    ("own_metrics:number", "is of type int; name a function or a class"),
    ({"distinct": {"m": 2}}, r"option 'evaluation.metrics.distinct.m' is unknown; did you mean .*distinct\.n'"),
    ({"own_metrics:short": {"words": "x"}}, "evaluation.metrics.short.words='x': it must be a whole number"),
    ({"own_metrics:Needs": {}}, "evaluation.metrics.Needs.letter is missing"),
    ({"own_metrics:Needs": {"letter": "ab"}}, "evaluation.metrics.Needs: Needs refuses.*one letter"),
    ({"distinct": {"n": 0}}, "distinct.n=0: it must be at least 1"),
    ("{bleu: {tokenize: nothing}}", "evaluation.metrics.bleu: Bleu refuses .*nothing"),
    ("own_metrics:reward", "would be logged as evaluate/reward, which exists; rename it"),
    ("bleu,operant.apps.text.sacrebleu:bleu", "would both be logged as evaluate/bleu"),
    (5, "evaluation.metrics=5: give names"),
    ("exact_match", "'exact_match' compares replies with references, and task 't/0' has none.*--data.reference-field"),
    ({"own_metrics:Needs": {"letter": "a"}}, "'Needs' compares replies with references"),
)
def test_what_is_wrong_is_a_sentence(metrics, reason, own, tmp_path, monkeypatch):
    monkeypatch.setattr("operant.runs.build.Learner", None)  # no model may load
    evaluated = {"evaluate": TASKS, "evaluation.metrics": metrics}
    with pytest.raises(OperantError, match=reason):
        train("builtin:reviews-lm", TASKS, "letters:a", out=tmp_path / "run", **evaluated)


@cases(
    ("wrong_count", "'wrong_count' returned 1 numbers for 3 replies"),
    ("raises", "'raises' failed: ZeroDivisionError"),
    ("text", "'text' failed: ValueError"),
)
def test_what_a_metric_may_not_return(name, reason, own):
    with pytest.raises(OperantError, match=reason):
        measure(resolve(f"own_metrics:{name}"), held_out())


CHOSEN = {"bleu": {"max_n": 1}, "exact_match": None, "own_metrics:short": {"words": 1}, "own_metrics:both": {}}


def test_a_run_has_them_in_every_place(own, tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": text, "good": ["a b", "b"]} for text in ("ab", "ba", "abc")])
    small = {"steps": 3, "batch": 4, "probes": 0, "samples_every": 0, "sampling.max_tokens": 4, "evaluate_every": 1}
    more = {"data.reference_field": "good", "evaluation.metrics": CHOSEN, "best": "evaluate/both/mean"}
    model = Policy(lm(vocab=len(letters())), letters(), value=ValueOptions())
    run = train(model, reward="letters:a", out=tmp_path / "run", **{"tasks": rows, "evaluate": rows}, **small, **more)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    expected = {f"evaluate/{name}" for name in ("bleu", "exact_match", "exact_match_std", "short", "short_std")}
    expected |= {"evaluate/both/mean", "evaluate/bleu_before", "evaluate/short_before", "evaluate/both/mean_before"}
    assert all(expected <= line.keys() for line in lines)
    before, plain = json.loads((tmp_path / "run/evaluation.json").read_text()).values()
    assert lines[-1]["evaluate/bleu_before"] == before["metrics"]["bleu"]
    assert set(plain["metrics"]) == {"bleu", "bleu/sentence", "exact_match", "short", "both/mean"}
    texts = [reply["reply"] for reply in plain["replies"]]
    assert plain["metrics"]["both/mean"] == sum(map(len, texts)) / 3 == lines[-1]["evaluate/both/mean"]
    truth = sacrebleu.BLEU(max_ngram_order=1).corpus_score(texts, [["a b"] * 3, ["b"] * 3]).score
    assert plain["metrics"]["bleu"] == truth == lines[-1]["evaluate/bleu"]
    short = [float(len(t.split()) <= 1) for t in texts]
    assert [reply["metrics"]["short"] for reply in plain["replies"]] == short
    told = [lines[-1][f"evaluate/{name}"] for name in ("short", "short_std", "exact_match")]
    assert told == pytest.approx([fmean(short), pstdev(short), fmean(t.strip() in ("a b", "b") for t in texts)])
    assert run.best["metric"] == "evaluate/both/mean"
    again = Evaluation.from_plain(plain)
    assert again.metrics() == run.after.metrics() and again.chosen() == plain["metrics"]
    page, names = page_data(tmp_path / "run"), set(plain["metrics"])
    assert set(page["chosen"]) == {f"evaluate/{name}" for name in names}
    assert names <= {number["label"] for number in page["numbers"]}
    assert all(row.get("meaning") for row in page["metrics"])
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["evaluation"]["metrics"] == CHOSEN


def test_supervised_training_generates_for_a_metric():
    learner = Learner(Policy(lm(vocab=len(letters())), letters()), algorithm="sft", max_tokens=3)
    tasks = [Task("0", "ab", replies=("c",)), Task("1", "ba", replies=("d",))]
    options = EvaluationOptions(metrics="chrf,exact_match")
    made = Evaluator(learner, tasks, None, options, Demonstrations(letters(), 2))()
    assert set(made.chosen()) == {"chrf", "chrf/sentence", "exact_match"}
    assert made.loss is not None and len(made.rollouts) == 2


@pytest.mark.slow
def test_the_snippet_of_the_page_runs(tmp_path, monkeypatch):
    file, code = snippets("docs/evaluation.md")
    (tmp_path / "my_metrics.py").write_text(file, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    made: dict = {}
    exec(code, made)
    assert {"bleu", "ends_well", "vocabulary"} <= made["run"].after.chosen().keys()
