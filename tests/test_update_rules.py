"""Optimizers of each kind against torch's, the user's own, kept gradients, and a rule in a file of its own."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from toys import lm

from operant import Learner, OperantError, Policy, ValueOptions, train
from operant.algorithms import ALGORITHMS
from operant.runs.config import configure
from operant.training.optimizer import OptimizerOptions, apply, make_optimizer
from operant.training.update import GradientUpdate

sys.path.append(str(Path(__file__).parent / "../docs/extending/src"))
from cases import cases, slow

QUERIES, REPLIES = [[3, 4, 5], [6, 7]] * 4, [[8, 9, 10], [11, 12, 13, 14]] * 4
SCORES = [1.0, -1.0, 0.5, -0.2, 0.9, -0.7, 0.3, 0.1]
SMALL = {"tasks": [[3, 4, 5], [6, 7, 8]] * 4, "reward": lambda rollouts: [float(len(r.ids)) for r in rollouts]}
SMALL |= {"batch": 8, "sampling.max_tokens": 5, "minibatch": 4, "update.epochs": 2, "probes": 0, "watch_every": 0}
SMALL |= {"samples_every": 0}


def weights(policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.trainable()])


def stopped_and_whole(folder, **options):
    """A run of a step that goes on with a second one, and a run of two: they end with the same weights."""
    whole = train(lm(), out=folder / "whole", steps=2, **SMALL, **options)
    train(lm(), out=folder / "cut", steps=1, **SMALL, **options)
    resumed = train(lm(), out=folder / "cut", steps=2, resume=True, **SMALL, **options)
    assert torch.equal(weights(resumed.policy), weights(whole.policy))
    return resumed, whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@cases(
    ("rmsprop", torch.optim.RMSprop, {"alpha": 0.95, "eps": 1e-5, "momentum": 0.5, "weight_decay": 0.02}),
    ("rmsprop", torch.optim.RMSprop, {}),
    ("sgd", torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.02}),
    ("sgd", torch.optim.SGD, {}),
    ("adamw", torch.optim.AdamW, {"betas": (0.8, 0.95), "weight_decay": 0.02}),
)
def test_each_kind_is_torchs_own_on_the_same_gradients(kind, theirs, given, dtype):
    """To the bit, at a rate that changes; 16-bit weights are the rounded weights of a float32 twin."""
    net, twin = nn.Linear(40, 30, dtype=dtype), nn.Linear(40, 30)
    twin.load_state_dict({name: p.float() for name, p in net.state_dict().items()})
    options = OptimizerOptions(kind=kind, lr=1e-2, **given)
    optimizer = make_optimizer(net, options)
    decay = [{"params": [twin.weight]}, {"params": [twin.bias], "weight_decay": 0.0}]
    other = theirs(decay, lr=1.0, **{"weight_decay": 0.0} | given | ({"fused": True} if kind == "adamw" else {}))
    for i in range(6):
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            p.grad = torch.randn(p.shape).to(dtype)
            q.grad = p.grad.float()
        for group in other.param_groups:
            group["lr"] = 1e-2 / (i + 1)
        apply(optimizer, replace(options, lr=1e-2 / (i + 1)))
        other.step()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q.to(dtype))


def test_epsilon_stands_where_tensorflow_has_it():
    """Five steps written out in float64: lr_t = lr sqrt(1 - b2^t) / (1 - b1^t); w -= lr_t m / (sqrt(v) + eps)."""
    gradients = [[0.5, -1e-3], [0.4, 2e-3], [-0.3, 1e-3], [0.2, -1e-3], [0.1, 3e-3]]
    lr, eps, b1, b2 = 0.1, 1e-2, 0.9, 0.999
    weights, m, v = [1.0, 2.0], [0.0, 0.0], [0.0, 0.0]
    for t, gradient in enumerate(gradients, 1):
        for i, g in enumerate(gradient):
            m[i], v[i] = b1 * m[i] + (1 - b1) * g, b2 * v[i] + (1 - b2) * g * g
            weights[i] -= lr * math.sqrt(1 - b2**t) / (1 - b1**t) * m[i] / (math.sqrt(v[i]) + eps)
    module = nn.Sequential(*(nn.Linear(2, 1, bias=False) for _ in range(2))).double()
    idle, moved = module.parameters()
    moved.data = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    options = OptimizerOptions(lr=lr, eps=eps, eps_placement="tensorflow", max_grad_norm=None)
    optimizer = make_optimizer(module, options)
    for t, gradient in enumerate(gradients):
        moved.grad = torch.tensor([gradient], dtype=torch.float64)
        idle.grad = torch.ones_like(idle) if t else None  # of another age, as where a critic begins alone
        apply(optimizer, options)
    assert moved.detach()[0].tolist() == pytest.approx(weights, abs=1e-9)


def test_a_presets_options_for_another_kind_are_left_out():
    chosen = {"optimizer.kind": "sgd", "optimizer.momentum": 0.5}
    made = Learner(lm(), preset="openai", total_steps=3, **chosen).options["optimizer"]
    assert (made.eps, made.eps_placement, made.schedule) == (1e-8, "torch", "linear")
    usual = Learner(lm(), preset="openai", total_steps=3).options["optimizer"]
    assert (usual.kind, usual.eps_placement) == ("adamw", "tensorflow")
    assert configure({"tasks": [[3]], "reward": len, "preset": "openai"} | chosen).learner["optimizer"] == made


@pytest.mark.parametrize("kind", [slow("rmsprop"), "sgd"])
def test_a_run_with_another_kind_resumes_to_the_bit(kind, tmp_path):
    options = {"model.precision": "bfloat16", "optimizer.kind": kind, "optimizer.momentum": 0.9, "optimizer.lr": 1e-2}
    stopped_and_whole(tmp_path, **options)
    with pytest.raises(OperantError, match=r"optimizer.kind='adamw' with --resume.*fresh-optimizer"):
        train(lm(), out=tmp_path / "cut", resume=True, steps=5, **SMALL, **{"optimizer.kind": "adamw"})


def halved(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def test_an_own_optimizer_and_schedule_are_resumed(tmp_path):
    made = {"optimizer": lambda params: torch.optim.Adagrad(params, lr=0.05), "lr_scheduler": halved}
    resumed, whole = stopped_and_whole(tmp_path, preset="trl", **made, **{"optimizer.max_grad_norm": 0.1})
    assert [m["update/lr"] for m in whole.metrics] == [0.05, 0.025]
    assert whole.metrics[0]["update/grad_norm_clipped"] == pytest.approx(0.1)
    assert type(whole.learner.optimizer) is torch.optim.Adagrad and resumed.metrics[-1]["update/lr"] == 0.025
    with pytest.raises(OperantError, match=r"optimizer.kind=own: the optimizer is a Python object"):
        train(lm(), out=tmp_path / "cut", resume=True, steps=5, **{k: SMALL[k] for k in ("tasks", "reward")})


def test_an_own_step_is_torchs_step_on_the_kept_gradients():
    policy = Policy(lm(), value=ValueOptions())
    own = torch.optim.Adadelta(policy.trainable(), lr=0.5, weight_decay=0.1)
    how = {"update.epochs": 1, "optimizer.max_grad_norm": 0.2}
    learner = Learner(policy, optimizer=own, keep_gradients=True, **how)
    twins = [p.detach().clone().requires_grad_() for p in policy.trainable()]
    other = torch.optim.Adadelta(twins, lr=0.5, weight_decay=0.1)
    for _ in range(2):
        learner.step(QUERIES, REPLIES, SCORES)
        for twin, p in zip(twins, policy.trainable(), strict=True):
            twin.grad = p.grad.clone()
        assert float(torch.cat([t.grad.flatten() for t in twins]).norm()) == pytest.approx(0.2, rel=1e-4)
        other.step()
        assert all(torch.equal(a, b) for a, b in zip(twins, policy.trainable(), strict=True))


def of(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@cases(
    (lambda p: {"optimizer": of, "optimizer.lr": 1e-5}, "optimizer.lr=1e-05 beside an optimizer: the optimizer is"),
    (lambda p: {"optimizer": of, "optimizer.kind": "sgd"}, "kind=sgd beside an optimizer of your own"),
    (lambda p: {"lr_scheduler": halved}, "lr_scheduler without optimizer"),
    (lambda p: {"optimizer": 3}, "optimizer=3 is of type int: pass a torch.optim.Optimizer, or a function"),
    (lambda p: {"optimizer": len}, "the function returned"),
    (lambda p: {"optimizer": of(p.model.parameters())}, "lacks 2 of the .* such as value_head"),
    (lambda p: {"optimizer": of([*p.parameters(), nn.Parameter(torch.ones(1))])}, "has 1 parameters that this"),
    (lambda p: {"optimizer": torch.optim.LBFGS}, r"step\(\) of LBFGS needs closure"),
    (lambda p: {"optimizer": of, "lr_scheduler": halved(of(p.parameters()))}, "schedules another optimizer"),
    (lambda p: {"optimizer": of, "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, "takes no metric"),
)
def test_what_does_not_fit_an_own_optimizer_is_a_sentence(given, says):
    policy = Policy(lm(), value=ValueOptions())
    with pytest.raises(OperantError, match=says):
        Learner(policy, **given(policy))


@cases({}, {"optimizer.kind": "muon"}, {"optimizer.states": "8bit"}, {"model.precision": "bfloat16", "critic_steps": 1})
def test_kept_gradients_are_the_clipped_ones(options):
    learners = [Learner(lm(), keep_gradients=keep, **options) for keep in (False, True)]
    for _ in range(2):
        plain, kept = (learner.step(QUERIES, REPLIES, SCORES) for learner in learners)
    timeless = [{k: v for k, v in told.items() if "time/" not in k} for told in (kept, plain)]
    assert timeless[0] == timeless[1] and all(p.grad is None for p in learners[0].policy.parameters())
    norm = torch.cat([p.grad.float().flatten() for p in learners[1].policy.trainable()]).norm()
    assert float(norm) == pytest.approx(1.0, rel=1e-2) and kept["update/grad_norm"] > 1.1


def test_no_gradients_are_kept_of_a_step_that_was_not_made():
    learner = Learner(lm(), keep_gradients=True, **{"optimizer.lr": 5e-2, "minibatch": 4, "target_kl": 1e-3})
    assert learner.step(QUERIES, REPLIES, SCORES)["update/early_stopped"] == 1
    assert all(p.grad is None for p in learner.policy.parameters())


NATURAL = {"algorithm": "operant_example.update_rule:ALGORITHM", "optimizer.max_grad_norm": None}


def test_the_example_goes_along_the_natural_gradient():
    """The direction solves (F + damping I) x = g, with F written out from one gradient a token."""
    policy = Policy(lm(), value=ValueOptions())
    options = {"update.epochs": 1, "update.damping": 0.3, "update.solver_steps": 60, "optimizer.lr": 1e-3}
    learner = Learner(policy, keep_gradients=True, **NATURAL, **options)
    before, rows = weights(policy), []
    for query, reply in zip(QUERIES, REPLIES, strict=True):
        logits = policy.model(torch.tensor([query + reply])).logits[0, len(query) - 1 : -1]
        for logprob in logits.log_softmax(-1).gather(-1, torch.tensor(reply)[:, None]):
            found = torch.autograd.grad(logprob, policy.trainable(), retain_graph=True, materialize_grads=True)
            rows.append(torch.cat([g.flatten() for g in found]).double())
    jacobian, metrics = torch.stack(rows), learner.step(QUERIES, REPLIES, SCORES)
    g = torch.cat([p.grad.flatten() for p in policy.trainable()]).double()
    x = ((before - weights(policy)) / 1e-3).double()
    assert float((jacobian.T @ (jacobian @ x) / len(rows) + 0.3 * x - g).norm() / g.norm()) < 0.02
    assert float((x - g / 0.3).norm() / x.norm()) > 0.5, "the Fisher matrix matters"
    assert metrics["update/steps"] == 1 and metrics["update/grad_norm"] == pytest.approx(float(g.norm()), rel=1e-5)


def test_the_examples_state_is_its_own_and_is_resumed(tmp_path):
    resumed, whole = stopped_and_whole(tmp_path, **NATURAL, **{"optimizer.lr": 1e-2, "update.solver_steps": 3})
    assert "update/rule" in resumed.state.parts and "optimizer" not in resumed.state.parts
    assert torch.equal(resumed.learner.rule.state["direction"], whole.learner.rule.state["direction"])
    for wrong in ("update.dampning", "optimizer.betas"):
        with pytest.raises(OperantError, match=f"'{wrong}' is unknown"):
            train(lm(), out=tmp_path / "wrong", **SMALL, **NATURAL, **{wrong: 0.2})
    with pytest.raises(OperantError, match=r"the update rule of algorithm \S+ makes its own steps"):
        Learner(lm(), optimizer=of, **NATURAL)


@cases(
    ("gradinet", "update rule 'gradinet' is unknown; did you mean 'gradient'"),
    ("operant_example.update_rule:Natural", "'operant_example.update_rule' has no 'Natural'; did you mean"),
    (len, "has no update_options: derive it from GradientUpdate"),
    (type("Bare", (GradientUpdate,), {"update_options": OptimizerOptions}), "derived from MicroBatchOptions"),
    (type("Free", (GradientUpdate,), {"optimizer_options": None}), "no model is loaded"),  # the rule itself is fine
)
def test_a_rule_that_cannot_be_used_is_a_sentence(rule, says, monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "odd", replace(ALGORITHMS["ppo"], update=rule))
    with pytest.raises(OperantError, match=says):
        Learner("no model is loaded", algorithm="odd")
