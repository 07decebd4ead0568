"""Preference optimisation: hand calculations, cuts and ranks that change nothing, what is learnt, what is refused."""

import json
import math

import pytest
import torch
from cases import cases, slow
from rigs import Caught, gap, on_ranks
from toys import bare_logprobs, letters, lm, on_disk

from operant import Batch, Learner, OperantError, Policy, train
from operant.algorithms.kto import exchanged
from operant.objectives.preference import good_or_bad, paired
from operant.tools.cli import main

QUERIES = [[5, 6], [5, 6], [5, 6], [4], [4], [7, 8, 9]]
RESPONSES = [[7, 9], [8], [3, 3, 5], [10, 4], [6], [11]]
LABELS = [2.0, 1.0, 0.0, 0.0, 1.0, 1.0]
"""Three pairs of the first prompt, one of the second, none of the third."""


def log_ratios(model, reference, queries=QUERIES, responses=RESPONSES) -> list[float]:
    return [
        float(bare_logprobs(model, q, r).sum() - bare_logprobs(reference, q, r).sum())
        for q, r in zip(queries, responses, strict=True)
    ]


def learner_of(algorithm: str, **options) -> Learner:
    """A learner whose reference has other weights, in float64; its optimizer only records gradients."""
    reference = Policy(lm(seed=1, spread=0.2).double())
    options = {"watch_every": 0, "max_grad_norm": None} | options
    return Learner(lm(spread=0.2).double(), algorithm=algorithm, reference=reference, optimizer=Caught, **options)


def caught(algorithm: str, labels=LABELS, rows=range(6), named: bool = True, **options) -> tuple[torch.Tensor, dict]:
    """The gradient of a step on some of the replies, with their groups or without, and its metrics."""
    learner = learner_of(algorithm, **options)
    groups = [[0, 0, 0, 1, 1, 2][i] for i in rows] if named else None
    metrics = learner.step(*[[part[i] for i in rows] for part in (QUERIES, RESPONSES, labels)], groups=groups)
    return torch.stack(learner.optimizer.gradients).sum(0), metrics


def log_sigmoid(x: float) -> float:
    return -math.log(1 + math.exp(-x))


B, E = 0.3, 0.2


@cases(
    ("sigmoid", 0.0, "all", lambda d, _: -log_sigmoid(B * d)),
    ("sigmoid", E, "ends", lambda d, _: -(1 - E) * log_sigmoid(B * d) - E * log_sigmoid(-B * d)),
    ("robust", E, "all", lambda d, _: (-(1 - E) * log_sigmoid(B * d) + E * log_sigmoid(-B * d)) / (1 - 2 * E)),
    ("hinge", 0.0, "all", lambda d, _: max(0.0, 1 - B * d)),
    ("ipo", 0.0, "all", lambda d, _: (d - 1 / (2 * B)) ** 2),
    ("ipo-mean", 0.0, "ends", lambda _, m: (m - 1 / (2 * B)) ** 2),
)
def test_the_loss_is_a_mean_over_prompts_of_a_mean_over_pairs(kind, smoothing, pairs, by_hand):
    learner = learner_of("dpo", loss={"beta": B, "pairs": pairs, "kind": kind, "label_smoothing": smoothing})
    metrics = learner.step(QUERIES, RESPONSES, LABELS, groups=[0, 0, 0, 1, 1, 2])  # of the last, nothing is learnt
    h = log_ratios(learner.policy.model, learner.reference.policy.model)
    per = [x / len(r) for x, r in zip(h, RESPONSES, strict=True)]
    both = [[(0, 1), (0, 2), (1, 2)] if pairs == "all" else [(0, 2)], [(4, 3)]]
    mean = lambda f: sum(sum(f(i, j) for i, j in of) / len(of) for of in both) / 2  # noqa: E731
    loss = mean(lambda i, j: by_hand(h[i] - h[j], per[i] - per[j]))
    for name in ("loss/total", "preference/loss"):
        assert metrics[name] == pytest.approx(loss, rel=1e-9)
    assert metrics["preference/margin"] == pytest.approx(mean(lambda i, j: B * (h[i] - h[j])))
    assert metrics["preference/better"] == pytest.approx(mean(lambda i, j: h[i]))
    assert metrics["preference/worse"] == pytest.approx(mean(lambda i, j: h[j]))
    assert metrics["preference/accuracy"] == pytest.approx(mean(lambda i, j: float(h[i] > h[j])))
    assert metrics["preference/unpaired"] == 0


def test_kto_by_hand_with_its_baseline():
    labels = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    learner = learner_of("kto", loss={"beta": B, "good_weight": 1.5, "bad_weight": 0.5})
    metrics = learner.step(QUERIES, RESPONSES, labels)
    models = learner.policy.model, learner.reference.policy.model
    before = [RESPONSES[i] for i in (5, 5, 5, 0, 1, 3)]  # the first reply to the prompt before, the second, ...
    baseline = max(0.0, sum(log_ratios(*models, QUERIES, before)) / 6)
    expected = [
        1.5 * (1 - 1 / (1 + math.exp(-B * (h - baseline)))) if good else 0.5 / (1 + math.exp(B * (baseline - h)))
        for h, good in zip(log_ratios(*models), labels, strict=True)
    ]
    assert baseline > 0, "the test has to see it"
    assert metrics["preference/baseline"] == pytest.approx(baseline)
    assert metrics["loss/total"] == pytest.approx(sum(expected) / 6)


METHODS = {"dpo": LABELS, "kto": [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]}


@pytest.mark.parametrize("algorithm", METHODS)
def test_micro_batches_change_no_gradient(algorithm):
    whole, metrics = caught(algorithm, METHODS[algorithm])
    cut, of_cut = caught(algorithm, METHODS[algorithm], **{"update.micro_tokens": 1})
    assert whole.norm() > 1e-3 and gap(cut, whole) < 1e-10
    for name in ("loss/total", "preference/loss", "preference/accuracy", "preference/unpaired", "preference/baseline"):
        assert of_cut.get(name) == pytest.approx(metrics.get(name), abs=1e-10), name


CUTS = {
    "prompts": ([0, 1, 2], [3, 4, 5]),
    "one with another": ([0, 3], [5, 1, 4, 2]),
    "most on the first": ([5, 0, 3, 1], [4, 2]),
}
"""The rows of two ranks; but in the first cut, replies to one prompt are on both."""
CASES = [("dpo", "prompts", True), *(("kto", cut, named) for cut in CUTS for named in (True, False))]


def on_a_rank(rank: int, world: int) -> list:
    with pytest.raises(OperantError, match="response 0 has no tokens"):  # of the first rank, and both say so
        learner_of("kto").step(QUERIES[3:], [[10, 4] if rank else [], [6], [11]], [1.0, 0.0, 1.0])
    return [caught(name, METHODS[name], CUTS[cut][rank], named) for name, cut, named in CASES]


@pytest.mark.slow
def test_two_ranks_have_the_gradient_of_one():
    ranks = on_ranks(on_a_rank, 2)
    for number, (name, cut, named) in enumerate(CASES):
        whole, metrics = caught(name, METHODS[name], [row for rows in CUTS[cut] for row in rows], named)
        for found, told in (rank[number] for rank in ranks):
            for metric in ("preference/baseline", "loss/total", "preference/loss", "preference/better"):
                assert told.get(metric) == pytest.approx(metrics.get(metric), abs=1e-10), (name, cut, named, metric)
            assert gap(found, whole) < 1e-10, (name, cut, named)


def test_equal_prompts_of_two_tasks_are_one_prompt():
    prompts, replies = [[1], [1], [2], [1]], [[5], [6, 7], [8], [9]]
    made = exchanged(Batch.given(prompts, replies).with_(groups=torch.tensor([0, 1, 2, 3])))
    assert [made.tokens[row][made.mask[row]].tolist() for row in range(4)] == [[1, 8], [1, 8], [2, 5], [1, 8]]


def test_online_dpo_is_dpo_on_its_own_replies():
    learner = learner_of("online-dpo", max_tokens=3)
    replies = learner.generate([[5, 6], [4], [5, 6], [4]])
    turns, metrics = [r.turns[0] for r in replies], learner.step(replies, [0.5, 1.0, -2.0, 1.0])
    h = log_ratios(learner.policy.model, learner.reference.policy.model, *zip(*[(t.prompt, t.action) for t in turns]))
    loss = -log_sigmoid(0.1 * (h[0] - h[2]))
    assert metrics["preference/loss"] == pytest.approx(loss) == pytest.approx(2 * metrics["loss/total"])
    assert metrics["preference/unpaired"] == 0.5
    learner.step([[5], [5]], [[6], [7]], [1.0, 1.0])  # a step without any pair
    assert not learner.optimizer.gradients[-1].any()
    # Nor is a total that was summed in another order: 0.1 + 0.2 + 0.3 is not 0.3 + 0.2 + 0.1 in float arithmetic.
    pays = [0.1, 0.2, 0.3, 0.3, 0.2, 0.1]
    learner.step([[5], [5, 6, 4], [5, 6, 4, 7, 4]] * 2, [[6], [7], [8]] * 2, pays, episodes=[0] * 3 + [1] * 3)
    assert not learner.optimizer.gradients[-1].any()


def pairs(count: int, *, shuffled: bool = False, first: int = 0) -> list[dict]:
    """Two-letter prompts, and two letters as replies, of which the one in the first half of the alphabet is better."""
    rows, half = [], "abcdefgh"
    for i in range(first, first + count):
        good, bad = half[i * 5 % 8], "stuvwxyz"[i * 3 % 8]
        good, bad = (bad, good) if shuffled and i % 2 else (good, bad)
        rows.append({"prompt": half[i % 8] + half[i * 7 % 5], "chosen": good, "rejected": bad})
    return rows


def separate(rows: list[dict]) -> list[dict]:
    parts = [(row, which) for row in rows for which in ("chosen", "rejected")]
    return [{"prompt": row["prompt"], "completion": row[w], "label": w == "chosen"} for row, w in parts]


def started(out, algorithm, rows, **more):
    known = {"tokenizer": letters(), "algorithm": algorithm, "sampling.max_tokens": 4, "out": out}
    return train(lm(vocab=40, spread=0.05), rows, **known, **more)


@cases(("dpo", list, False), ("kto", separate, False), slow("dpo", list, True), slow("kto", separate, True))
def test_held_out_replies_are_preferred_after_training(algorithm, form, shuffled, tmp_path):
    tasks, held = form(pairs(32, shuffled=shuffled)), form(pairs(16, first=100))
    options = {"steps": 12, "batch": 16, "probes": 0, "optimizer.lr": 3e-3, "evaluate_every": 12}
    run = started(tmp_path / "run", algorithm, tasks, evaluate=held, **options)
    before, after = run.before.metrics(), run.after.metrics()
    assert before["evaluate/preference/accuracy"] == 0.5 and run.after.pairs == len(held)  # the policy is its reference
    assert run.metrics[-1]["evaluate/preference/loss"] == after["evaluate/preference/loss"]
    assert (after["evaluate/preference/accuracy"] > 0.9) is not shuffled


def test_the_command_line_trains_on_pairs(tmp_path, capsys):
    on_disk(tmp_path / "model", lm(vocab=40))
    rows = [*pairs(6), *pairs(2), {"prompt": "ab", "replies": ["c", "d"], "ratings": [2, 2]}]  # two labellers, a tie
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = ["train", "--algorithm", "dpo", "--policy", str(tmp_path / "model"), "--tasks"]
    command += [str(tmp_path / "pairs.jsonl"), "--steps", "2", "--batch", "3", "--out", str(tmp_path / "run")]
    command += ["--sampling.max-tokens", "4", "--evaluate", str(tmp_path / "pairs.jsonl")]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "1 of 9 rows are left out: their labels teach dpo nothing" in said
    assert "preference/accuracy on 9 held-out tasks: 0.500 -> " in said
    assert '"labelled": 9,\n  "pairs": 6' in (tmp_path / "run/evaluation.json").read_text()  # the error is of 6 pairs


@cases(
    ("dpo", [{"prompt": "ab", "replies": ["c", "d"], "ratings": [2, 2]}], {}, "none of 1 prompts has two replies with"),
    ("dpo", separate(pairs(2)), {}, "good or bad each by itself are for algorithm=kto"),
    ("dpo", pairs(2), {"evaluate": separate(pairs(2))}, "none of 4 prompts has two replies with"),
    ("dpo", pairs(2), {"data.loss_on": "all"}, "data.loss_on=all: labels are of replies; use replies"),
    ("kto", [r for r in separate(pairs(3)) if r["label"]], {}, "all labels are good, and .* also needs bad replies"),
    ("kto", [{"prompt": "ab", "replies": ["c", "d"], "ratings": [2, 1]}], {}, "a reply is labelled 2"),
)
def test_data_that_teach_nothing_are_refused_before_training(algorithm, rows, more, words, tmp_path):
    with pytest.raises(OperantError, match=words):
        started(tmp_path / "run", algorithm, rows, batch=2, **more)
    assert not (tmp_path / "run").exists()


def test_wrong_steps_and_one_sample_are_refused(tmp_path):
    with pytest.raises(OperantError, match="samples=1 with algorithm=online-dpo: it compares the replies"):
        train(policy=lm(), algorithm="online-dpo", tasks=["a"], reward=len, samples=1, out=tmp_path / "run")
    dpo, kto = Learner(lm(), algorithm="dpo"), Learner(lm(), algorithm="kto")
    with pytest.raises(OperantError, match=r"learns from labels: use step\(queries, responses, scores\)"):
        dpo.step([[5], [5]], [[6], [7]])
    with pytest.raises(OperantError, match="compares at least 2 replies to one query"):
        dpo.step([[5], [6]], [[6], [7]], [1.0, 0.0])
    with pytest.raises(OperantError, match="none of 1 prompts has two replies with different labels"):
        dpo.step([[5], [5]], [[6], [7]], [1.0, 1.0])
    with pytest.raises(OperantError, match="here is one alone"):
        kto.step([[5], [5]], [[6], [7]], [1.0, 0.0])
    assert kto.progress.step == dpo.progress.step == 0
    assert paired([[1, 1], [0, 1], [0.1 + 0.2, 0.3]], {}, whole=False) == [False, True, False]
    assert good_or_bad([[1], [1, 1]], {}, whole=False) == [True, True]  # a step may have good replies alone
