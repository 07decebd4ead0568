"""Optimizers of each kind against torch's, the user's own, kept gradients, and a rule in a file of its own."""

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
from operant.training.update_rules import GradientUpdate

sys.path.append(str(Path(__file__).parent / "../docs/extending/src"))
import operant_example.update_rule as natural_gradient
from cases import cases, slow

QUERIES, REPLIES = [[3, 4, 5], [6, 7]] * 4, [[8, 9, 10], [11, 12, 13, 14]] * 4
SCORES = [1.0, -1.0, 0.5, -0.2, 0.9, -0.7, 0.3, 0.1]
SMALL = {"tasks": [[3, 4, 5], [6, 7, 8]] * 4, "reward": lambda rollouts: [float(len(r.ids)) for r in rollouts]}
SMALL |= {"batch": 8, "sampling.max_tokens": 5, "minibatch": 4, "update.epochs": 2, "probes": 0, "watch_every": 0}
TINY = {"samples_every": 0}


def weights(policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.trainable()])


# --- kinds of optimizer -----------------------------------------------------------------------------------------------
KINDS = {
    "rmsprop": (torch.optim.RMSprop, {"alpha": 0.95, "eps": 1e-5, "momentum": 0.5, "weight_decay": 0.02}),
    "rmsprop alone": (torch.optim.RMSprop, {}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.02}),
    "sgd alone": (torch.optim.SGD, {}),
    "adamw": (torch.optim.AdamW, {"betas": (0.8, 0.95), "weight_decay": 0.02}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", KINDS)
def test_each_kind_is_torchs_own_on_the_same_gradients(case, dtype):
    """To the bit, at a rate that changes; 16-bit weights are the rounded weights of a float32 twin."""
    theirs, options = KINDS[case]
    net, twin = nn.Linear(40, 30, dtype=dtype), nn.Linear(40, 30)
    twin.load_state_dict({name: p.float() for name, p in net.state_dict().items()})
    options = OptimizerOptions(kind=case.split()[0], lr=1e-2, **options)
    optimizer = make_optimizer(net, options)
    decay = [{"params": [twin.weight]}, {"params": [twin.bias], "weight_decay": 0.0}]
    own = {k: v for k, v in KINDS[case][1].items()} | ({"fused": True} if case == "adamw" else {})
    other = theirs(decay, lr=1.0, **({"weight_decay": 0.0} | own))
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


def test_a_presets_options_for_another_kind_are_left_out():
    chosen = {"optimizer.kind": "sgd", "optimizer.momentum": 0.5}
    made = Learner(lm(), preset="openai", total_steps=3, **chosen).options["optimizer"]
    assert (made.eps, made.eps_placement, made.schedule) == (1e-8, "torch", "linear")
    assert configure({"tasks": [[3]], "reward": len, "preset": "openai"} | chosen).learner["optimizer"] == made


@pytest.mark.parametrize("kind", [slow("rmsprop"), "sgd"])
def test_a_run_with_another_kind_resumes_to_the_bit(kind, tmp_path):
    def run(name, **more):
        options = {**SMALL, **TINY, "model.precision": "bfloat16", "optimizer.kind": kind, "optimizer.momentum": 0.9}
        return train(lm(), out=tmp_path / name, **options, **{"optimizer.lr": 1e-2}, **more)

    whole = run("whole", steps=4)
    run("cut", steps=2)
    assert torch.equal(weights(run("cut", steps=4, resume=True).policy), weights(whole.policy))
    with pytest.raises(OperantError, match=r"optimizer.kind='adamw' with --resume.*fresh-optimizer"):
        train(lm(), out=tmp_path / "cut", resume=True, steps=5, **SMALL, **{"optimizer.kind": "adamw"})


# --- the user's own ---------------------------------------------------------------------------------------------------
def halved(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def own_run(out, **more):
    made = {"optimizer": lambda params: torch.optim.Adagrad(params, lr=0.05), "lr_scheduler": halved}
    return train(lm(), out=out, **SMALL, **TINY, **made, **more)


def test_an_own_optimizer_and_schedule_are_resumed(tmp_path):
    whole = own_run(
        tmp_path / "whole", steps=4, preset="trl", **{"update.minibatch": 4, "optimizer.max_grad_norm": 0.1}
    )
    assert [m["update/lr"] for m in whole.metrics] == [0.05, 0.025, 0.0125, 0.00625]
    assert whole.metrics[0]["update/grad_norm_clipped"] == pytest.approx(0.1)
    assert type(whole.learner.optimizer) is torch.optim.Adagrad
    own_run(tmp_path / "cut", steps=2, preset="trl", **{"update.minibatch": 4, "optimizer.max_grad_norm": 0.1})
    resumed = own_run(tmp_path / "cut", steps=4, resume=True)
    assert torch.equal(weights(resumed.policy), weights(whole.policy))
    assert resumed.metrics[-1]["update/lr"] == 0.00625
    with pytest.raises(OperantError, match=r"optimizer.kind=own: the optimizer is a Python object"):
        train(lm(), out=tmp_path / "cut", resume=True, steps=5, **{k: SMALL[k] for k in ("tasks", "reward")})


def test_an_own_step_is_torchs_step_on_the_kept_gradients():
    policy = Policy(lm(), value=ValueOptions())
    own = torch.optim.Adadelta(policy.trainable(), lr=0.5, weight_decay=0.1)
    learner = Learner(
        policy, optimizer=own, keep_gradients=True, **{"update.epochs": 1, "optimizer.max_grad_norm": 0.2}
    )
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
    (
        lambda p: {"optimizer": of, "optimizer.lr": 1e-5},
        "optimizer.lr=1e-05 beside an optimizer: the optimizer is your own.*leave it out",
    ),
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


# --- kept gradients ---------------------------------------------------------------------------------------------------
@cases(
    {},
    {"optimizer.kind": "sgd"},
    {"optimizer.kind": "muon"},
    {"optimizer.states": "8bit"},
    {"model.precision": "bfloat16"},
    {"model.precision": "bfloat16", "critic_steps": 1},
)
def test_kept_gradients_are_the_clipped_ones(options):
    learners = [Learner(lm(), keep_gradients=keep, **options) for keep in (False, True)]
    for _ in range(2):
        plain, kept = (learner.step(QUERIES, REPLIES, SCORES) for learner in learners)
    timeless = [{k: v for k, v in told.items() if "time/" not in k} for told in (kept, plain)]
    assert timeless[0] == timeless[1]
    assert all(p.grad is None for p in learners[0].policy.parameters())
    norm = torch.cat([p.grad.float().flatten() for p in learners[1].policy.trainable()]).norm()
    assert float(norm) == pytest.approx(1.0, rel=1e-2) and kept["update/grad_norm"] > 1.1


def test_no_gradients_are_kept_of_a_step_that_was_not_made():
    learner = Learner(lm(), keep_gradients=True, **{"optimizer.lr": 5e-2, "minibatch": 4, "target_kl": 1e-3})
    assert learner.step(QUERIES, REPLIES, SCORES)["update/early_stopped"] == 1
    assert all(p.grad is None for p in learner.policy.parameters())


# --- a rule of one's own ----------------------------------------------------------------------------------------------
NATURAL = {"algorithm": "operant_example.update_rule:ALGORITHM", "optimizer.max_grad_norm": None}


def test_the_example_goes_along_the_natural_gradient():
    """The direction solves (F + damping I) x = g, with F written out from one gradient a token."""
    policy = Policy(lm(), value=ValueOptions())
    options = {"update.epochs": 1, "update.damping": 0.3, "update.solver_steps": 60, "optimizer.lr": 1e-3}
    learner = Learner(policy, keep_gradients=True, **NATURAL, **options)
    before = weights(policy)
    rows = []
    for query, reply in zip(QUERIES, REPLIES, strict=True):
        logits = policy.model(torch.tensor([query + reply])).logits[0, len(query) - 1 : -1]
        for logprob in logits.log_softmax(-1).gather(-1, torch.tensor(reply)[:, None]):
            found = torch.autograd.grad(logprob, policy.trainable(), retain_graph=True, materialize_grads=True)
            rows.append(torch.cat([g.flatten() for g in found]).double())
    jacobian = torch.stack(rows)
    metrics = learner.step(QUERIES, REPLIES, SCORES)
    g = torch.cat([p.grad.flatten() for p in policy.trainable()]).double()
    x = ((before - weights(policy)) / 1e-3).double()
    product = jacobian.T @ (jacobian @ x) / len(rows) + 0.3 * x
    assert float((product - g).norm() / g.norm()) < 0.02
    assert float((x - g / 0.3).norm() / x.norm()) > 0.5, "the Fisher matrix matters"
    assert metrics["update/steps"] == 1 and metrics["update/grad_norm"] == pytest.approx(float(g.norm()), rel=1e-5)


def test_the_examples_state_is_its_own_and_is_resumed(tmp_path):
    def run(name, **more):
        return train(lm(), out=tmp_path / name, **SMALL, **TINY, **NATURAL, **{"optimizer.lr": 1e-2}, **more)

    whole = run("whole", steps=4)
    run("cut", steps=2)
    resumed = run("cut", steps=4, resume=True)
    assert "update/rule" in resumed.state.parts and "optimizer" not in resumed.state.parts
    assert torch.equal(weights(resumed.policy), weights(whole.policy))
    assert torch.equal(resumed.learner.rule.state["direction"], whole.learner.rule.state["direction"])
    with pytest.raises(OperantError, match=r"'update.dampning' is unknown.*did you mean 'update.damping'"):
        run("wrong", **{"update.dampning": 0.2})
    with pytest.raises(OperantError, match=r"'optimizer.betas' is unknown"):
        run("wrong", **{"optimizer.betas": (0.5, 0.9)})
    with pytest.raises(OperantError, match=r"the update rule of algorithm \S+ makes its own steps"):
        Learner(lm(), optimizer=of, **NATURAL)


@cases(
    ("gradinet", "update rule 'gradinet' is unknown; did you mean 'gradient'"),
    ("operant_example.update_rule:Natural", "'operant_example.update_rule' has no 'Natural'; did you mean"),
    (len, "has no update_options: derive it from GradientUpdate"),
    (type("Bare", (GradientUpdate,), {"update_options": OptimizerOptions}), "derived from MicroBatchOptions"),
)
def test_a_rule_that_cannot_be_used_is_a_sentence(rule, says, monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "odd", replace(ALGORITHMS["ppo"], update=rule))
    with pytest.raises(OperantError, match=says):
        Learner("no model is loaded", algorithm="odd")


def test_a_rule_has_a_name_as_everything_else():
    monkey = replace(ALGORITHMS["ppo"], update="operant_example.update_rule:NaturalGradient")
    from operant.training.options import schema

    assert schema(monkey)["update"] is natural_gradient.NaturalOptions
