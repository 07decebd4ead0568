"""Labelled replies: the forms of rows, the weights of groups, and the losses of reward models, by hand calculations."""

import math

import pytest
import torch
from cases import cases

from operant import Batch, OperantError, Outputs
from operant.data import DataOptions, load_tasks
from operant.objectives.labelled import reward_model
from operant.rollouts.collate import token_weights

A, B = {"role": "user", "content": "a"}, {"role": "user", "content": "b"}
YES, NO = {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}


@cases(
    ({"prompt": "p", "chosen": " a", "rejected": " b"}, "p", (" a", " b"), (1, 0)),
    ({"prompt": "p", "chosen": " a", "rejected": " b", "margin": 0.5}, "p", (" a", " b"), (0.5, 0)),
    ({"prompt": "p", "chosen": " a", "rejected": " b", "margin": 0}, "p", (" a", " b"), (1e-12, 0)),
    ({"chosen": "Q: x\nA: it is", "rejected": "Q: x\nA: it was"}, "Q: x\nA: it", (" is", " was"), (1, 0)),
    ({"chosen": [A, YES], "rejected": [A, NO]}, [A], ([YES], [NO]), (1, 0)),
    ({"prompt": "p", "replies": ["a", "b", "c"], "ranks": [2, 1, None]}, "p", ("a", "b"), (-2, -1)),
    ({"prompt": "p", "replies": ["a", "b", "c"], "best": 2}, "p", ("a", "b", "c"), (0, 0, 1)),
    ({"prompt": "p", "replies": ["a", "b"], "ratings": [4, 2.5]}, "p", ("a", "b"), (4, 2.5)),
    ({"prompt": "p", "replies": ["a", "b"], "good": [True, None]}, "p", ("a",), (1,)),
    ({"prompt": "p", "completion": "a", "label": False}, "p", ("a",), (0,)),
    ({"prompt": "p", "completions": ["a", "b", "c"], "labels": [1, 1, 0]}, "p", ("a", "a\nb", "a\nb\nc"), (1, 1, 0)),
    ({"prompt": "p", "completions": ["a", "b"], "labels": [True, None]}, "p", ("a",), (1,)),
    ({"prompt": "p", "replies": ["a", ""], "ranks": [1, 2]}, "p", ("a", ""), (-1, -2)),  # it ended at once
)
def test_every_form_becomes_scores(row, prompt, replies, scores):
    (task,) = load_tasks([row], with_replies=True, labelled=True)
    assert (task.prompt, task.replies, task.scores) == (prompt, replies, scores)
    if "prompt" in row:
        row, named = {"question": row["prompt"], **row, "prompt": "another"}, DataOptions(text_field="question")
        assert load_tasks([row], options=named, with_replies=True, labelled=True) == [task]


def test_rows_that_say_nothing_are_left_out():
    silent = [{"prompt": "p", "replies": ["a", "b"], "ranks": [None, None], "all_bad": True}]
    silent += [{"prompt": "p", "replies": ["a", "b"], "all_bad": True}, {"prompt": "p", "replies": ["a"], "skip": True}]
    (task,) = load_tasks([*silent, {"prompt": "p", "replies": ["a", "b"], "best": 1}], with_replies=True, labelled=True)
    assert task.scores == (0, 1)
    with pytest.raises(OperantError, match="none of 3 rows has a label"):
        load_tasks(silent, with_replies=True, labelled=True)


def batch_of(labels, groups, lengths=None):
    lengths = lengths or [1 + i % 3 for i in range(len(labels))]
    batch = Batch.given([[1, 2]] * len(labels), [[3] * n for n in lengths])
    last = torch.arange(batch.tokens.shape[1]) == batch.mask.sum(1, keepdim=True) - 1
    rewards = torch.where(last, torch.tensor(labels, dtype=torch.float64)[:, None], 0.0)
    return batch.with_(rewards=rewards, groups=torch.tensor(groups))


def loss_of(scores, batch, **options):
    last = torch.arange(batch.tokens.shape[1]) == batch.mask.sum(1, keepdim=True) - 1
    values = torch.where(last, torch.tensor(scores, dtype=torch.float64)[:, None], 99.0)  # other values do not count
    zeros = torch.zeros_like(values)
    terms = reward_model(Outputs(zeros, zeros, zeros, zeros, values), batch, **options)
    return float((terms["loss"] * batch.with_(weights=token_weights(batch, "group")).weights.sum(1)).sum()), terms


def test_groups_have_equal_weight_whatever_their_size_and_length():
    weights = token_weights(batch_of([0] * 5, [7, 7, 7, 4, 4]), "group")
    assert weights.sum(1).tolist() == pytest.approx([1 / 6] * 3 + [1 / 4] * 2)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


S = [0.3, -1.2, 0.9, 0.1]


def test_pairwise_and_rating_and_good_by_hand():
    batch = batch_of([2, 1, 0, 5, 5], [0, 0, 0, 1, 1])  # the second group has no pair
    pairs = [S[0] - S[1], S[0] - S[2], S[1] - S[2]]
    found, _ = loss_of([*S, 0.0], batch)
    assert found == pytest.approx(sum(-math.log(sigmoid(d)) for d in pairs) / 3 / 2)
    with_margin = [d - 0.5 * gap for d, gap in zip(pairs, (1, 2, 1))]
    loss = sum(-math.log(sigmoid(d)) for d in with_margin) / 3 / 2
    assert loss_of([*S, 0.0], batch, margin=0.5)[0] == pytest.approx(loss)
    rows = [{"prompt": f"{m}", "chosen": " a", "rejected": " b", "margin": m} for m in (3, 0)]
    labels = [label for task in load_tasks(rows, with_replies=True, labelled=True) for label in task.scores]
    of_rows = [-math.log(sigmoid(S[0] - S[1] - 3)), -math.log(sigmoid(S[2] - S[3] - 0))]  # as TRL's RewardTrainer
    assert loss_of(S, batch_of(labels, [0, 0, 1, 1]), margin=1.0)[0] == pytest.approx(sum(of_rows) / 2)
    rated = [(s - y) ** 2 for s, y in zip([*S, 0.0], (2, 1, 0, 5, 5))]
    assert loss_of([*S, 0.0], batch, kind="rating")[0] == pytest.approx(sum(rated[:3]) / 6 + sum(rated[3:]) / 4)
    good = batch_of([1, 0, 1], [0, 1, 2])
    wanted = [-math.log(sigmoid(S[0])), -math.log(sigmoid(-S[1])), -math.log(sigmoid(S[2]))]
    found, metrics = loss_of(S[:3], good, kind="good")
    assert found == pytest.approx(sum(wanted) / 3) and metrics["preference/accuracy"].tolist() == [1.0, 1.0, 1.0]
    steps = batch_of([1, 0, 1], [0, 0, 1])  # each label counts once, whatever the length of its group
    assert loss_of(S[:3], steps, kind="good")[0] == pytest.approx(sum(wanted) / 2)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1), (3, 1, 0, 2)])
def test_ranking_is_plackett_luce(order):
    """The probability of an order, drawn one by one without putting back."""
    labels, left, probability = [0.0] * 4, [0, 1, 2, 3], 1.0
    for place, chosen in enumerate(order):
        labels[chosen] = -place
        probability *= math.exp(S[chosen]) / sum(math.exp(S[i]) for i in left)
        left.remove(chosen)
    assert loss_of(S, batch_of(labels, [0] * 4), kind="ranking")[0] * 3 == pytest.approx(-math.log(probability))


def test_best_of_k_is_a_softmax_and_of_two_pairwise():
    softmax = math.exp(S[2]) / sum(map(math.exp, S))
    assert loss_of(S, batch_of([0, 0, 1, 0], [0] * 4), kind="best")[0] == pytest.approx(-math.log(softmax))
    assert loss_of(S, batch_of([1, 2, 3, 0], [0] * 4), kind="best")[0] == pytest.approx(-math.log(softmax))
    two = batch_of([1, 0, 0, 1], [0, 0, 1, 1])
    kinds = [loss_of(S, two, kind=kind)[0] for kind in ("best", "pairwise", "ranking")]
    assert kinds == pytest.approx(kinds[:1] * 3)


@pytest.mark.parametrize("ties", ["davidson", "rao-kupper"])
def test_ties_have_the_probability_that_is_left(ties):
    def probability(labels):
        return math.exp(-loss_of(S[:2], batch_of(labels, [0, 0]), ties=ties, tie=0.7)[0])

    won, lost, tied = probability([1, 0]), probability([0, 1]), probability([3, 3])
    assert won + lost + tied == pytest.approx(1)
    d = S[0] - S[1]
    if ties == "davidson":
        assert won == pytest.approx(math.exp(d / 2) / (math.exp(d / 2) + math.exp(-d / 2) + 0.7))
    else:
        assert won == pytest.approx(math.exp(d) / (math.exp(d) + 1.7))


def test_the_gradient_of_a_group_without_pairs_is_zero():
    batch = batch_of([1, 1], [0, 0])
    values = torch.randn(batch.tokens.shape, dtype=torch.float64, requires_grad=True)
    zeros = [torch.zeros_like(values)] * 4
    for kind in ("pairwise", "ranking", "best"):
        loss = reward_model(Outputs(*zeros, values=values), batch, kind=kind)["loss"]
        (gradient,) = torch.autograd.grad(loss.sum(), values)
        assert not gradient.any()


def test_metrics_by_hand():
    _, terms = loss_of([1.0, 1.0, 0.0, 9.0, 3.0], batch_of([1, 0, 0, 4, 4], [0, 0, 0, 1, 1], lengths=[2, 1, 3, 1, 1]))
    found = {name.removeprefix("preference/"): x[~x.isnan()].tolist() for name, x in terms.items() if name != "loss"}
    assert found["accuracy"] == pytest.approx([0.75])  # one pair is even; the second group has none
    assert found["loss"] == pytest.approx([-(math.log(0.5) + math.log(sigmoid(1))) / 2])
    assert found["confidence"] == pytest.approx([(0.5 + sigmoid(1)) / 2])
    assert found["best"] == pytest.approx([0.5])  # two replies share the highest score, and one of them is the best
    assert found["longer_is_better"] == pytest.approx([0.5])
    assert found["prefers_longer"] == pytest.approx([(0.5 + 0 + 0) / 3])
    assert found["score"] == pytest.approx([2 / 3, 6.0])


@cases(
    ({"kind": "x"}, "pairwise, ranking, best, rating or good"),
    ({"ties": "x"}, "none, davidson or rao-kupper"),
    ({"tie": 0.0}, "above 0"),
    ({"kind": "best", "margin": 1.0}, "it is for pairwise"),
)
def test_wrong_options_of_the_loss_are_refused(options, words):
    with pytest.raises(OperantError, match=words):
        loss_of(S, batch_of([1, 0, 0, 0], [0] * 4), **options)
