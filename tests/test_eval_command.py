"""`operant eval`, and `operant generate --tasks FILE`: numbers, files, interruptions and errors."""

import itertools
import json
import math
import os
import shutil
import signal
from zlib import crc32

import numpy as np
import pytest
from browsing import PHONE, chromium, visit
from cases import cases
from pages import low_contrast, overflows
from pyarrow import parquet
from texts import mistyped, write_rows
from texts import read_rows as lines
from toys import letters, lm, on_disk
from worlds import Turns

from operant import Step, train
from operant.runs import judged_replies
from operant.runs.judged_replies import JudgedReply, best_of
from operant.tools.cli import main
from operant.tools.cli.reply_files import best_of_bound
from operant.tools.report.diagnosis.intervals import bootstrap, wilson
from operant.tools.report.models import Compared, wins


# --- numbers ----------------------------------------------------------------------------------------------------------
def test_the_bootstrap_is_exact_for_few_and_normal_for_many():
    values = [0.0, 1.0, 5.0, 5.5]
    exact = sorted(sum(drawn) / 4 for drawn in itertools.product(values, repeat=4))  # 256 equally likely resamples
    assert bootstrap(values, seed=1, resamples=200_000) == pytest.approx(np.quantile(exact, (0.025, 0.975)), abs=0.01)
    many = np.random.default_rng(0).normal(3.0, 2.0, 2000)
    half = 1.95996 * many.std() / math.sqrt(2000)
    assert bootstrap(list(many)) == pytest.approx((many.mean() - half, many.mean() + half), abs=0.005)
    assert bootstrap(values) != bootstrap(values, seed=2, resamples=50)


def test_wilsons_interval_is_that_of_r():
    """prop.test(8, 10, correct = FALSE) and prop.test(0, 20, correct = FALSE)."""
    assert wilson(0.8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-7)
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.1611252), abs=1e-7)


def test_the_best_of_many_replies_is_as_far_as_the_bound():
    """Equally likely replies with scores 1 to K: the best of n is at most k with probability (k / K)^n."""
    n, k = 8, np.arange(1, 20_001)
    chance = (k / 20_000) ** n - ((k - 1) / 20_000) ** n
    kl = float((chance * np.log(chance * 20_000)).sum())
    assert kl <= best_of_bound(n) and kl == pytest.approx(best_of_bound(n), abs=1e-3)


def compared(*sides):
    """Models whose replies to the tasks have these scores, by one reward."""
    replies = [[[JudgedReply(f"{s}", 1, {"r": s}) for s in scores] for scores in side] for side in sides]
    tasks = [{"id": str(i), "prompt": "p"} for i in range(len(sides[0]))]
    return Compared([f"m{i}" for i in range(len(sides))], tasks, replies, ["r"])


def test_tasks_are_paired_and_abstentions_left_out():
    first, second = compared(
        [[1.0, 3.0], [0.0, 0.0], [5.0, None], [None, None]], [[3.0, 3.0], [0.0, 1.0], [5.0, 5.0], [9.0, 9.0]]
    ).rows()
    assert (first.tasks, first.mean, first.difference, first.won) == (3, pytest.approx(7 / 3), None, None)
    assert first.error == pytest.approx(np.std([2, 0, 5], ddof=1) / math.sqrt(3))
    assert (second.tasks, second.mean) == (4, pytest.approx((3 + 0.5 + 5 + 9) / 4))
    assert second.difference.mean == pytest.approx((1 + 0.5 + 0) / 3)  # the fourth task has no score of the first
    assert second.won.mean == pytest.approx((0.75 + 0.75 + 0.5) / 3)
    assert wins([1.0, 2.0], [1.0]) == 0.75
    few, many = (compared([[0.0]] * n, [[x] for x in [1.0, 2.0, 4.0] * n][:n]).rows()[1].difference for n in (3, 30))
    assert (few.low, few.high) == pytest.approx([7 / 3 + sign * 4.30265 * (7 / 9) ** 0.5 for sign in (-1, 1)], abs=1e-4)
    assert (many.low, many.high) == bootstrap([1.0, 2.0, 4.0] * 10)  # few: t of 2 degrees of freedom, from tables
    alone = compared([[1.0]], [[2.0]]).rows()[1]
    assert (alone.difference.mean, alone.difference.low, alone.won.high, alone.error) == (1.0, None, None, None)


# --- the commands -----------------------------------------------------------------------------------------------------
RUN = {"steps": 4, "batch": 4, "minibatch": 4, "max_tokens": 6, "probes": 0, "watch_every": 0, "epochs": 1, "lr": 3e-2}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, tasks, and a run with held-out tasks and checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("eval")
    for name, seed in (("model", 0), ("other", 1), ("critic", 0)):
        on_disk(folder / name, lm("gpt2", len(letters()), seed=seed))
    rows = [{"prompt": a + b} for a in "abcd" for b in "efg"]
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    kept = {"checkpoint": "both", "checkpoint_every": 2, "keep": 9, "data.text_field": "prompt"}
    tasks, run, kept["value.critic"] = (str(folder / name) for name in ("tasks.jsonl", "run", "critic"))
    train(str(folder / "model"), tasks, "letters:a", evaluate=tasks, out=run, temperature=0.8, **kept, **RUN)
    shutil.rmtree(folder / "critic")  # the run has a copy
    return folder


@pytest.fixture
def inside(place, tmp_path, monkeypatch):
    monkeypatch.chdir(place)
    return tmp_path


def stop_after(most, at_once, stop, monkeypatch):
    """Call `stop` once more than `most` replies were asked for, `at_once` in a call."""
    made, calls = judged_replies.play, []

    def stopped(tasks, **more):
        if calls.append(len(tasks)) or sum(calls) > most:
            stop()
        return made(tasks, **more)

    monkeypatch.setattr(judged_replies, "AT_ONCE", at_once)
    monkeypatch.setattr(judged_replies, "play", stopped)


def interrupt():
    raise KeyboardInterrupt


def test_a_run_scores_what_its_own_evaluation_found(inside, place, capsys):
    """Its tasks, reward, sampling and random numbers; a checkpoint of the last step is the exported model."""
    out = inside / "e.json"
    assert main(["eval", "run", "run@4", "run@2", "model", "--out", str(out)]) == 0
    own, found = (json.loads(path.read_text(encoding="utf-8")) for path in (place / "run/evaluation.json", out))
    means = [row["mean"] for row in found["scores"]]
    assert means[0] == means[1] == own["after"]["mean"] and means[3] == own["before"]["mean"]
    assert any(task["replies"][0]["reply"] != task["replies"][2]["reply"] for task in found["tasks"])
    out = capsys.readouterr().out
    assert "temperature 0.8, max_tokens 6" in out and "mask" not in out


def in_trl(completions, word):
    return [float(len({*reply} & {*said})) for reply, said in zip(completions, word, strict=True)]


def guesses(texts):
    """A task model, whose answer is another one for each text."""
    return [{"bad": -1.0, "good": -(crc32(text.encode()) % 97) / 48} for text in texts]


class Again(Turns):
    """A world that pays for length, whose conversations outgrow the model's context."""

    def answer(self, slot, reply):
        return Step(" and what else", reward=len(reply) / 8, terminated=self.turn[slot] == 9)


ROWS = [{"prompt": a + b, "word": a + b, "said": [a, a + a, b], "completion": a} for a in "abcd" for b in "opr"]
SETS = [{"prompt": a, "target": {"name": "x", "examples": [[a * n, n % 2] for n in range(1, 9)]}} for a in "abcd"]
OF_RUN = {"steps": 1, "batch": 4, "max_tokens": 6, "probes": 0, "watch_every": 0, "algorithm": "reinforce"}
LESS = ["--reward", "letters:a", "--seed", "9", "--limit", "2", "--shuffle", "false", "--max-tokens", "5"]
OF_RUN |= {"temperature": 0.8, "evaluate": "25%", "reward": "letters:a"}
PROMPTS = {"reward": "prompt", "reward.model": "test_eval_command:guesses", "reward.words": ["bad", "good"]}
CIDER = {"reward": "cider", "reward.tokenizer": "builtins:list", "reward.n": 1, "data.reference_field": "word"}


@cases(
    (ROWS, {"tasks": "countdown", "tasks.numbers": "2", "evaluate": "countdown/held-out", "data.limit": 8}),
    (ROWS, {"tasks": ROWS, "data.text_field": "prompt"}),
    (ROWS, {"reward": "test_eval_command:in_trl"}),
    (ROWS, CIDER),
    (SETS, PROMPTS | {"data.target_field": "target", "reward.examples": 2, "reward.compare": []}),
    (ROWS, {"env": "extract", "data.target_field": "said"}),
    (ROWS, {"env": "test_eval_command:Again"}),
    (ROWS, {"env": "test_eval_command:Again", "reward": None}),
    (ROWS, {"algorithm": "decision", "condition.evaluated": 1.0}),
    (ROWS, {"algorithm": "decision", "checkpoint": "light"}),
    (ROWS, {"evaluation.seeds": [7], "evaluation.sampling": {"max_new_tokens": 2}}),
    (ROWS, {"algorithm": "sft", "data.shuffle": True, "data.limit": 8}),
    ([{"text": a + "bcdefghijkl"} for a in "abcdefgh"], {"algorithm": "sft"}),
)
def test_the_own_evaluation_of_a_run_is_repeated(rows, options, inside, capsys):
    """What is typed outdoes it; with another seed and fewer tasks, they are some of those that it has held out."""
    given = OF_RUN | {"tasks": write_rows(inside / "rows.jsonl", rows)} | options
    run, asked, found = train("model", out=inside / "run", **given), ["eval", str(inside / "run"), "--out"], []
    named = ["--tasks", given["evaluate"]] * (given["evaluate"] != "25%")
    for name, *more in ("whole.json",), ("less.json", *LESS, *named):
        assert main([*asked, str(inside / name), *more]) == 0
        found.append(json.loads((inside / name).read_text(encoding="utf-8")))
    own, (whole, less) = [(r.task.id, r.reply) for r in run.after.rollouts], found
    assert [(task["id"], task["replies"][0]["reply"]) for task in whole["tasks"]] == own
    assert whole["scores"][0]["mean"] == pytest.approx(run.after.mean) and given["evaluate"] in whole["tasks_of"]
    prompts, few = ({task["id"]: task["prompt"] for task in one["tasks"]} for one in found)
    assert few.items() <= prompts.items() and len(few) == len(own[:2]) and "{" not in whole["tasks_of"]
    assert less["sampling"] == whole["sampling"] | {"max_tokens": 5} and less["seed"] == 9
    letters = [task["replies"][0]["reply"].count("a") for task in less["tasks"]]  # and nothing that the world pays
    assert less["scores"][0]["mean"] == pytest.approx(sum(letters) / len(letters))
    if named and capsys.readouterr():
        assert main(["generate", str(inside / "run"), *named, "--data.limit", "2", "--max-tokens", "2"]) == 0
        assert [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()] == [*few.values()]


def test_an_interrupted_evaluation_shows_what_it_has_finished(inside, monkeypatch, capsys):
    """SIGTERM is Ctrl-C. The table of the first model is that of an evaluation of it alone."""
    assert main(["eval", "run", "--tasks", "tasks.jsonl"]) == 0
    alone = capsys.readouterr().out.splitlines()[-1]
    stop_after(20, 4, lambda: os.kill(os.getpid(), signal.SIGTERM), monkeypatch)
    assert main(["eval", "run", "model", "--tasks", "tasks.jsonl", "--out", str(inside / "e.json")]) == 130
    out, error = capsys.readouterr()
    assert alone.split() in [line.split() for line in out.splitlines()] and not (inside / "e.json").exists()
    assert "of all 12 tasks:" in out and "of the first 8 of 12 tasks:" in out
    assert "interrupted; above is what was finished, and no file is written" in error
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_evaluation_says_that_a_mask_is_not_exported(inside, capsys):
    masked = {"algorithm": "nlpo", "top_p_least": 2, "out": str(inside / "nlpo"), "data.text_field": "prompt"}
    train("model", "tasks.jsonl", "letters:a", evaluate="tasks.jsonl", **masked, **RUN | {"steps": 1})
    assert main(["eval", str(inside / "nlpo")]) == 0
    assert "masked by each model itself, because an export has no mask policy" in capsys.readouterr().out


@pytest.mark.slow
def test_rewards_a_page_and_rows_to_judge(inside, tmp_path, capsys):
    (tmp_path / "odd.jsonl").write_text('{"prompt": "<b>ab</b>"}\n{"prompt": "cd"}\n', encoding="utf-8")
    asked = ["--tasks", str(tmp_path / "odd.jsonl"), "--samples", "2", "--max-tokens", "5"]
    files = ["--report", str(inside / "page.html"), "--label", str(inside / "judge.jsonl")]
    assert main(["eval", "model", "other", *asked, "--reward", "letters:a", "--reward", "length:3", *files]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("letters:a", "length"))]
    assert [row[:2] for row in table] == [[r, m] for r in ("letters:a", "length:3") for m in ("model", "other")]
    rows = lines(inside / "judge.jsonl")
    assert [row["prompt"] for row in rows] == ["<b>ab</b>", "cd"]
    assert all(len(set(row["replies"])) == len(row["replies"]) == len(row["sources"]) for row in rows)
    assert "<b>" not in (inside / "page.html").read_text(encoding="utf-8")
    with chromium() as browser, visit(browser, (inside / "page.html").as_uri(), PHONE) as page:
        assert "<b>ab</b>" in page.inner_text(".query-block >> nth=0")
        assert page.locator(".answer").count() == 8 and not overflows(page) and not low_contrast(page)
        top, above = "getBoundingClientRect().top", "previousElementSibling.getBoundingClientRect().bottom"
        assert page.locator("#replies").evaluate(f"(e) => e.{top} - e.{above}") > 30  # not glued to a table


def test_replies_to_a_file_go_on_after_an_interrupt(inside, monkeypatch, capsys):
    whole, again, table = inside / "a.jsonl", inside / "b.jsonl", inside / "c.parquet"

    def files(target="a", score=0):
        own.write_text(f"def f(rollouts): return [{score}.0 for _ in rollouts]", encoding="utf-8")
        return write_rows(inside / "tasks.jsonl", [{"prompt": a + b, "target": target} for a in "abcd" for b in "efg"])

    own = inside / "own.py"
    asked = ["generate", "model", "run@2", "--tasks", files(), "--samples", "2", "--temperatures", "0.7,1.0"]
    asked += ["--max-tokens", "5", "--target-field", "target", "--reward", f"{{letters:a: 1, {own}:f: 1}}", "--out"]
    assert main([*asked, str(whole)]) == 0
    rows = lines(whole)
    assert list(rows[0]) == ["id", "prompt", "replies", "sources", "rewards"] and len(rows) == 12
    sources = [f"{m}, temperature {t}" for m in ("model", "run@2") for t in ("0.7", "1") for _ in "ab"]
    assert rows[0]["sources"] == sources
    assert all(row["rewards"] == [reply.count("a") for reply in row["replies"]] for row in rows)
    with monkeypatch.context() as patch:
        stop_after(40, 8, interrupt, patch)
        assert main([*asked, str(again)]) == 130
    assert "the same command goes on from 20 answers" in capsys.readouterr().err and not again.exists()
    unfinished = inside / ".b.jsonl.unfinished"
    with open(unfinished, "a", encoding="utf-8") as file:
        file.write('{"source": 1, "ta')  # a kill in the middle of a line
    for changed, weight, *other in ("seed (0)", 1), ("reward", 2), ("tasks", 1, "b"), ("reward", 1, "a", 2):
        judge = [f"{{letters:a: {weight}, {own}:f: 1}}", *(["--seed", "3"] if changed == "seed (0)" else [])]
        assert files(*other) and main([*asked[:-2], *judge, "--out", str(again)]) == 2
        assert f"differs in its {changed}: give" in capsys.readouterr().err
    assert files() and main([*asked, str(again)]) == 0
    assert again.read_bytes() == whole.read_bytes() and not unfinished.exists()
    assert main([*asked, str(table)]) == 0 and parquet.read_table(table).to_pylist() == rows


def test_of_replies_one_without_a_score_is_the_worst():
    replies = [JudgedReply(str(score), 1, {"r": score}) for score in (None, -2.0, -1.0, None, None, -1.0, -1.0, 0.0)]
    assert [reply.text for reply in best_of(replies, 2, "r")] == ["-2.0", "-1.0", "-1.0", "0.0"]
    assert best_of(replies[3:5], 2, "r")[0] is replies[3] and best_of(replies[5:7], 2, "r")[0] is replies[5]


def test_the_best_of_n_is_the_best_of_the_samples(inside, capsys):
    asked = ["generate", "model", "--tasks", "tasks.jsonl", "--max-tokens", "5", "--reward", "letters:a", "--seed", "2"]
    assert main([*asked, "--samples", "6", "--out", str(inside / "all.jsonl")]) == 0
    assert main([*asked, "--best-of", "3", "--samples", "2", "--out", str(inside / "best.jsonl")]) == 0
    assert "at most 0.432 nats a reply (upper bound" in capsys.readouterr().err  # log 3 - 2/3
    for drawn, best in zip(lines(inside / "all.jsonl"), lines(inside / "best.jsonl"), strict=True):
        assert best["rewards"] == [max(drawn["rewards"][:3]), max(drawn["rewards"][3:])]
        assert all(reply in drawn["replies"] for reply in best["replies"])
    assert best["sources"] == ["model, best of 3"] * 2
    prompted = ["generate", "model", "--prompt", "ab", "--max-tokens", "5", "--reward", "letters:a"]
    assert main([*prompted, "--best-of", "64"]) == 0
    reply, score = capsys.readouterr().out.rstrip("\n").split("\t")
    assert float(score) == reply[2:].count("a") >= 1


@pytest.mark.parametrize(("words", "message"), mistyped("eval"))
def test_wrong_input_is_a_sentence(words, message, inside, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("operant: ") and error.count("\n") == 1
