"""Losses by hand, and when an optimizer step is refused."""

from dataclasses import replace

import pytest
import torch
from cases import cases
from rigs import said
from toys import lm

from operant import Batch, Learner, OperantError, Outputs, Policy
from operant.objectives import losses
from operant.tally import Tally
from operant.training.optimizer import OptimizerOptions, apply, make_optimizer, rate
from operant.training.update import NormRecorder

QUERIES, REPLIES = [[3, 4, 5], [6, 7]] * 4, [[8, 9, 10], [11, 12, 13, 14]] * 4
SCORES = [1.0, -1.0, 0.5, -0.2, 0.9, -0.7, 0.3, 0.1]


def test_the_clipped_surrogate_by_hand():
    old, ratio = torch.tensor([[-1.0, -2.0]]), torch.tensor([[1.5, 4.0]])
    given = Batch.given([[]], [[1, 2]]).with_(logprobs=old, advantages=torch.tensor([[2.0, -1.0]]))
    out = Outputs(old + ratio.log(), old + ratio.log())
    told = losses.clipped(out, given, low=0.2, high=0.3)
    # max(-2 * 1.5, -2 * 1.3) and max(1 * 4, 1 * 1.3)
    torch.testing.assert_close(told["loss"], torch.tensor([[-2.6, 4.0]]))
    assert told["policy/clip_fraction"].tolist() == [[1.0, 0.0]]
    torch.testing.assert_close(losses.clipped(out, given, dual_clip=3.0)["loss"], torch.tensor([[-2.4, 3.0]]))


def learner(**more):
    return Learner(lm("gpt2", vocab=20), **{"optimizer.lr": 5e-2, "update.epochs": 3, "minibatch": 4, **more})


def test_an_update_stops_before_the_step_that_would_go_too_far():
    free = learner().step(QUERIES, REPLIES, SCORES)
    assert free["update/steps"] == 6 and free["update/early_stopped"] == 0
    held = learner(target_kl=1e-3).step(QUERIES, REPLIES, SCORES)
    # The first minibatch has moved nothing; the second sees what the first step did, and is not applied.
    assert held["update/steps"] == 1 and held["update/early_stopped"] == 1


@cases({"loss.value_coef": 0.0}, {"algorithm": "reinforce", "update.epochs": 1, "minibatch": 1})
def test_a_step_whose_ratio_ran_away_is_refused(options):
    told = learner(ratio_threshold=1.0 + 1e-4, **options).step(QUERIES, REPLIES, SCORES)
    assert told["policy/skipped_steps"] > 0 and told["update/steps"] < 6


@cases(
    ("constant", 0.0, 70, 100, 1.0),
    ("constant", 0.0, 70, None, 1.0),
    ("linear", 0.0, 0, 4, 1.0),
    ("linear", 0.0, 3, 4, 0.25),
    ("linear", 0.0, 4, 4, 0.0),
    ("cosine", 0.0, 50, 100, 0.5),
    # Two of ten steps warm up: a third, two thirds, the peak; eight steps are left from there.
    ("constant", 0.2, 0, 10, 1 / 3),
    ("linear", 0.2, 1, 10, 2 / 3),
    ("linear", 0.2, 2, 10, 1.0),
    ("linear", 0.2, 6, 10, 0.5),
    ("linear", 0.2, 9, 10, 1 / 8),
    ("cosine", 0.2, 6, 10, 0.5),
)
def test_schedules(schedule, warmup, step, total, expected):
    options = OptimizerOptions(lr=2.0, schedule=schedule, warmup=warmup)
    assert rate(options, step, total) == pytest.approx(2.0 * expected, abs=1e-12)


@cases({"optimizer.warmup": 0.1}, {"optimizer.schedule": "cosine"}, {"preset": "openai"}, {"kl.control": "linear"})
def test_what_follows_the_length_of_the_run_asks_for_it(options):
    with pytest.raises(OperantError, match=r"total_steps"):
        Learner(lm(), **options)
    Learner(lm(), total_steps=5, **options)


def test_every_step_of_a_schedule_moves_the_weights():
    options = {"optimizer.lr": 1e-2, "optimizer.warmup": 0.5, "optimizer.schedule": "linear"}
    student = Learner(lm(), total_steps=4, **options)
    rates = []
    for _ in range(4):
        before = [p.detach().clone() for p in student.policy.trainable()]
        rates.append(student.step(QUERIES, REPLIES, SCORES)["update/lr"])
        assert any(not torch.equal(a, b) for a, b in zip(before, student.policy.trainable(), strict=True))
    assert rates == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2, 0.5e-2])
    with pytest.raises(OperantError, match=r"total_steps=4 steps are done.*more total_steps"):
        student.step(QUERIES, REPLIES, SCORES)


def test_the_linear_price_of_kl_goes_with_the_learning_rate():
    """At step s of 4 both stand at 1 - s / 4 of their way; a price that begins at 0 is charged as soon as it is not."""
    more = {"optimizer.lr": 1e-3, "optimizer.schedule": "linear", "kl.control": "linear", "kl.kind": "reverse"}
    student = Learner(lm(), reference=Policy(lm(seed=1)), total_steps=4, **more, **{"kl.coef": 0.0, "kl.end_coef": 1.0})
    steps = [student.step(QUERIES, REPLIES, SCORES) for _ in range(4)]
    assert [m["update/lr"] for m in steps] == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    assert [m["kl/coef"] for m in steps] == pytest.approx([0.0, 0.25, 0.5, 0.75])
    assert steps[0]["reward/kl_penalty"] == 0.0
    assert steps[3]["reward/kl_penalty"] == pytest.approx(0.75 * steps[3]["kl/paid"]) and steps[3]["kl/paid"] > 0


def test_without_a_reference_no_kl_is_told_or_taken():
    assert not [name for name in learner(reference=None).step(QUERIES, REPLIES, SCORES) if name.startswith("kl/")]


@cases(
    (lambda: learner().step([said([3], [4], logprobs=[-1.0])], [1.0, 2.0]), "2 rewards for 1 replies"),
    (lambda: learner(device="cuda:99"), "operant doctor"),
    (lambda: learner(engine="native"), "engine='native': give an engine, or a function"),
    (lambda: learner(env="rooms"), "env='rooms': give a world, an object with"),
)
def test_what_cannot_work_is_a_sentence(make, why):
    with pytest.raises(OperantError, match=why):
        make()


def test_a_step_that_cannot_be_scored_leaves_the_running_moments():
    student = learner(**{"score.normalise": True})
    student.step(QUERIES, REPLIES, SCORES)
    before = student.moments.state_dict()
    with pytest.raises(OperantError, match="context"):
        student.step([[3] * 60], [[4] * 60], [5.0])
    assert student.moments.state_dict() == before

    def interrupted(*arguments, **named):
        raise KeyboardInterrupt

    student.algorithm = replace(student.algorithm, advantage=interrupted)
    for _ in range(2):  # while advantages are computed, and while replies are scored
        with pytest.raises(KeyboardInterrupt):
            student.step(QUERIES, REPLIES, SCORES)
        assert student.moments.state_dict() == before
        student.policy.model.forward = interrupted


def test_norms_of_large_tensors_are_estimated():
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.wide = torch.nn.Parameter(torch.randn(700, 768))
    model.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8)])
    model.shards, tally = None, Tally()
    recorder = NormRecorder(model, tally, detailed=True)
    moves = {"wide": torch.randn(700, 768) * torch.arange(1, 769), "layers.0.weight": torch.ones(8, 8)}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(moves.get(name, torch.zeros(())))
    recorder.weights()
    told = {name.split("/", 1)[1]: x for name, x in tally.result().items()}
    assert told["update/embedding"] == pytest.approx(float(moves["wide"].norm()), rel=0.02)
    assert told["weight/embedding"] == pytest.approx(float(model.wide.detach().norm()), rel=0.02)
    assert told["update/block 0"] == pytest.approx(8.0)
    assert sum(x.numel() for x in recorder.before.values()) < 70_000


@cases(({}, torch.float32), ({"states": "8bit"}, torch.bfloat16), ({"kind": "muon"}, torch.bfloat16))
def test_a_shrunk_step_is_the_step_of_the_shrunk_gradient(kind, dtype):
    """Gradients a hundred and a thousand times too long by turns: Adam forgets a constant factor, and not this one."""
    torch.manual_seed(0)
    twins = [torch.nn.Linear(40, 30, dtype=dtype) for _ in range(2)]
    twins[1].load_state_dict(twins[0].state_dict())
    options = OptimizerOptions(lr=1e-2, **kind)
    optimizers = [make_optimizer(twin, options) for twin in twins]
    for i in range(6):
        shrink = 0.01 if i % 2 else 0.001
        for p, q in zip(*(twin.parameters() for twin in twins), strict=True):
            p.grad = torch.randn(p.shape, dtype=dtype)
            q.grad = p.grad * shrink
        apply(optimizers[0], options, shrink=shrink)
        apply(optimizers[1], options)
    for p, q in zip(*(twin.parameters() for twin in twins), strict=True):
        assert float((p - q).abs().max()) < (1e-5 if dtype == torch.float32 and not kind.get("kind") else 0.01)


def test_the_whole_loss_by_hand():
    old = torch.tensor([[-1.0, -2.0]])
    given = Batch.given([[]], [[1, 2]]).with_(logprobs=old, advantages=torch.tensor([[1.0, -1.0]]))
    given = given.with_(values=torch.zeros(1, 2), returns=torch.tensor([[1.0, 0.1]]))
    out = Outputs(old, old, values=torch.tensor([[0.5, 0.1]]), entropy=torch.tensor([[2.0, 3.0]]))
    told = losses.ppo(out, given, value_clip=0.2, value_coef=0.1, entropy_coef=0.01)
    # values: 0.5 -> clipped to 0.2: max(0.25, 0.64) / 2; 0.1: max(0, 0) / 2
    torch.testing.assert_close(told["loss"], torch.tensor([[-1 + 0.1 * 0.32 - 0.02, 1 + 0.0 - 0.03]]))
    plain = losses.ppo(out, given, value_clip=None, value_coef=1.0)
    torch.testing.assert_close(plain["loss"], torch.tensor([[-1 + 0.125, 1.0]]))
