"""The replies that a report embeds: which, how many, how large, and its sentence about the rest."""

import json

import pytest
import run_folders
from cases import cases
from toys import letters, lm

from operant import train
from operant.runs.folder import RunFolder
from operant.tools.report import parquet, replies
from operant.tools.report.html import as_json
from operant.types import OperantError


def row(i, *, words=3, **more):
    """With the KL that was charged, by any estimator, which is not the one that is shown."""
    logprobs, theirs = ([first - j for j in range(words)] for first in (-1.23456, -1.0))
    known = {"query": f"query {i}", "reward": i / 7, "logprobs": logprobs, "ref_logprobs": theirs, "kl": [99.0] * words}
    known |= {"values": [0.00001] * words, "advantages": [float("nan")] + [1.0] * (words - 1)}
    return run_folders.row(i, words, **known | more)


@pytest.fixture
def run(tmp_path):
    with RunFolder.create(tmp_path / "run", {}) as folder:
        yield folder


def many(run, steps, each, **more):
    for step in range(1, steps + 1):
        run.rollouts(step, [row(i, **more) for i in range(each)])


def write_probes(run, step, rows):
    name = "reference" if step is None else f"step-{step:05d}"
    run.rollouts(999, rows)
    (run.path / "probes").mkdir(exist_ok=True)
    (run.path / "rollouts" / "step-00999.parquet").rename(run.path / "probes" / f"{name}.parquet")


# --- selection -------------------------------------------------------------------------------------------------------
def test_few_replies_are_all_embedded(run):
    many(run, 2, 3)
    data = replies.embedded(run.path)
    rows = data["replies"]["rows"]
    assert rows["step"] == [1, 1, 1, 2, 2, 2] and rows["row"] == [0, 1, 2] * 2
    assert rows["query"][:2] == ["query 0", "query 1"] and rows["end"] == ["stop"] * 6
    assert data["available"] == {"steps": 2, "replies": 6} and data["notes"] == []
    assert data["summary"] == "All 6 replies are embedded."
    assert [chunk["first"] for chunk in data["replies"]["token_chunks"]] == [0, 3] and data["probes"] is None


def test_at_most_fifty_per_step_evenly(run):
    many(run, 3, 128)
    data = replies.embedded(run.path)
    rows = data["replies"]["rows"]
    assert rows["step"] == [1] * 50 + [2] * 50 + [3] * 50
    assert rows["row"][:50] == [i * 128 // 50 for i in range(50)] and rows["row"][49] == 125
    assert rows["reply"][1] == " reply 2", "the second row of the table is the third of the file"
    assert data["summary"] == f"50 of 128 replies per step are embedded; `operant report {run.path} --serve` shows all."


def test_at_most_five_thousand_in_all_over_all_steps(run, monkeypatch):
    monkeypatch.setattr(replies, "MOST_IN_ALL", 60)
    many(run, 4, 20)
    assert replies.embedded(run.path)["replies"]["rows"]["step"] == [s for s in (1, 2, 3, 4) for _ in range(15)]
    many(run, 12, 20)  # rather than embed fewer than ten per step, steps are left out
    data = replies.embedded(run.path)
    assert sorted(set(data["replies"]["rows"]["step"])) == [1, 3, 5, 8, 10, 12]
    assert "60 of 240 replies are embedded, from 6 of 12 steps;" in data["summary"]


@cases((9, "abcde"), (5, "abcde"), (3, "ace"), (2, "ae"), (1, "e"), (0, ""), ids=str)
def test_spread(most, selected):
    assert "".join(replies.spread("abcde", most)) == selected


def test_parts_of_the_reward_are_embedded_if_there_are_several(run):
    run.rollouts(1, [row(1, **{"reward/taste": 0.12345, "reward/length": None})])
    rows = replies.embedded(run.path)["replies"]["rows"]
    assert rows["reward/taste"] == [0.12345] and rows["reward/length"] == [None]
    run.rollouts(1, [row(1, **{"reward/taste": 0.1})])
    assert "reward/taste" not in replies.embedded(run.path)["replies"]["rows"], "a single part equals the reward"


# --- numbers ---------------------------------------------------------------------------------------------------------
def test_numbers_are_rounded_and_kl_is_log_prob_minus_reference(run):
    run.rollouts(1, [row(3), row(4, ref_logprobs=None), row(5, reward=float("inf")), row(6, words=1)])
    data = replies.embedded(run.path)
    rows, tokens = data["replies"]["rows"], data["replies"]["token_chunks"][0]["token_columns"]
    assert rows["reward"] == [0.42857, 0.57143, None, 0.85714]
    assert rows["kl"] == [-0.70368, None, -0.70368, -0.23456]  # 3 * (1 - 1.23456), and of one token
    assert tokens["logprobs"][0] == [-1.235, -2.235, -3.235] and tokens["ref_logprobs"][1] is None
    assert tokens["values"][0] == [0.0, 0.0, 0.0] and tokens["advantages"][0] == [None, 1.0, 1.0]
    assert tokens["tokens"][3] == [" w0"] and "kl" not in tokens and "returns" not in tokens
    json.loads(as_json(data), parse_constant=lambda name: pytest.fail(name))


def test_a_run_of_an_earlier_version_has_no_pieces(run):
    run.rollouts(1, [{"query": "a", "reply": "b", "logprobs": [-1.0]}])
    data = replies.embedded(run.path)
    assert data["replies"]["token_chunks"] == [] and data["summary"] == "The only reply is embedded."
    rows = data["replies"]["rows"]
    assert rows["kl"] == rows["reward"] == rows["end"] == rows["reply_tokens"] == [None]


# --- the budget ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("budget", [300_000, 100_000, 30_000, 10_000])
def test_the_budget_is_respected(run, budget):
    many(run, 6, 30, words=64, query="<" * 50, reply="ü" * 300)
    for step in (0, 5, 6, None):
        write_probes(run, step, [row(i, words=64) for i in range(8)])
    data = replies.embedded(run.path, budget)
    html = as_json(data).replace("<", "\\u003c").encode()
    assert replies.size(data) == len(html) <= budget
    assert {1, 6} <= set(data["replies"]["rows"]["step"])
    if budget > 10_000:
        assert len(html) > 0.6 * budget, "the budget is used"


def test_of_long_replies_only_the_newest_have_tokens(run):
    many(run, 6, 20, words=200)
    data = replies.embedded(run.path, 200_000)
    steps = data["replies"]["rows"]["step"]
    having = [steps[chunk["first"]] for chunk in data["replies"]["token_chunks"]]
    assert len(steps) == 120 and 6 in having and 0 < len(having) < 6
    assert f"{20 * len(having)} of them with the numbers of every token; `operant" in data["summary"]


def test_of_the_longest_replies_fewer_are_embedded_evenly(run):
    many(run, 4, 50, reply="x" * 1000)
    data = replies.embedded(run.path, 200_000)
    steps = data["replies"]["rows"]["step"]
    counts = {step: steps.count(step) for step in set(steps)}
    assert set(counts) == {1, 2, 3, 4} and len(set(counts.values())) == 1 and 5 < counts[1] < 20
    assert f"{counts[1]} of 50 replies per step are embedded" in data["summary"]


# --- probes ----------------------------------------------------------------------------------------------------------
def test_probes_are_side_by_side(run):
    write_probes(run, 0, [row(i) for i in (1, 0)])
    write_probes(run, 5, [row(i, reply=f" later {i}") for i in (0, 1)])
    write_probes(run, None, [row(i, reply=f" reference {i}") for i in (0, 1, 2)])
    probes = replies.embedded(run.path)["probes"]
    assert probes["steps"] == [0, 5]
    assert probes["queries"] == [{"task": f"t{i}", "query": f"query {i}"} for i in (1, 0, 2)]
    first, later = [side["reply"] for side in probes["policy"]]
    assert first == [" reply 1", " reply 0", None] and later == [" later 1", " later 0", None]
    assert probes["policy"][1]["row"] == [1, 0, None] and probes["reference"]["reply"][2] == " reference 2"
    seen = probes["policy"][0]["token_columns"]
    assert seen["tokens"][0] == [" w0", " w1", " w2"] and seen["logprobs"][2] is None


def test_the_last_turn_of_the_first_attempt_is_the_answer(run):
    turns = [row(0, turn=0, reward=None), row(0, turn=1, reply=" end"), row(0, rollout=1, reply=" second attempt")]
    write_probes(run, 0, turns)
    probes = replies.embedded(run.path)["probes"]
    before, reference = probes["policy"][0], probes["reference"]
    assert before["reply"] == [" end"] and before["row"] == [1] and reference is None


def test_tokens_of_probes_come_before_those_of_old_replies(run):
    many(run, 6, 20, words=200)
    write_probes(run, 6, [row(i, words=200) for i in range(4)])
    write_probes(run, None, [row(i, words=200) for i in range(4)])
    probes = replies.embedded(run.path, 120_000)["probes"]
    assert "token_columns" in probes["policy"][0] and "token_columns" in probes["reference"]


# --- unreadable files ------------------------------------------------------------------------------------------------
def test_damaged_files_are_noted(run):
    many(run, 3, 2)
    write_probes(run, 0, [row(0)])
    write_probes(run, 5, [row(0)])
    for path in ("rollouts/step-00002.parquet", "probes/step-00005.parquet"):
        file = run.path / path
        file.write_bytes(file.read_bytes()[:-30])
    (run.path / "probes" / "reference.parquet").write_bytes(b"")
    (run.path / "rollouts" / "step-00004.parquet").mkdir()
    data = replies.embedded(run.path)
    assert data["replies"]["rows"]["step"] == [1, 1, 3, 3]
    assert data["probes"]["steps"] == [0] and data["probes"]["reference"] is None
    assert len(data["notes"]) == 4 and all("cannot be read and is left out" in note for note in data["notes"])


def test_nothing_yet(tmp_path):
    data = replies.embedded(tmp_path / "nowhere")
    assert data["summary"] == "No replies have been recorded yet." and data["probes"] is None and data["notes"] == []
    assert data["replies"]["rows"]["step"] == []


def test_the_kl_of_truncated_replies_is_that_of_the_metrics(tmp_path):
    """Of the log-probs before truncation: those that were sampled are of fewer tokens than the reference's."""
    out, options = tmp_path / "run", {"sampling.top_k": 3, "sampling.truncation": "stored", "optimizer.lr": 3e-3}
    options |= {"steps": 2, "batch": 4, "max_tokens": 5, "probes": 0, "quiet": True}
    count = lambda rollouts: [float(len(set(r.ids))) for r in rollouts]  # noqa: E731
    train(lm(vocab=len(letters())), ["ab", "cde", "fg", "h"], count, tokenizer=letters(), out=out, **options)
    for line in map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
        shown = parquet.lines(parquet.steps(out / "rollouts")[line["step"]])["kl"].to_pylist()
        assert sum(shown) / len(shown) == pytest.approx(line["kl/per_reply"], abs=1e-5)
        assert parquet.tokens(parquet.steps(out / "rollouts")[line["step"]], [0])[0]["raw_logprobs"]


def test_tokens_of_single_replies(run):
    many(run, 1, 2)
    path = run.path / "rollouts" / "step-00001.parquet"
    assert [reply["tokens"] for reply in parquet.tokens(path, [1, 0])] == [[" w0", " w1", " w2"]] * 2
    with pytest.raises(IndexError):
        parquet.tokens(path, [2])
    path.write_bytes(b"PAR1")
    with pytest.raises(OperantError, match=r"rollouts/step-00001\.parquet cannot be read"):
        parquet.lines(path)
