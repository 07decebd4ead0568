"""What a method refuses, before any model loads: an option that is wrong, unused, or contradicts another."""

import pytest

from operant import Learner, OperantError

REFUSED = [
    ("decision", {"condition.template": "no number {prompt}"}, r"it must contain {return} and {prompt}"),
    ("decision", {"condition.top": 0.0}, r"condition.top=0.0: it must be in \(0, 1\]"),
    ("decision", {"condition.turn_gamma": 1.5}, "condition.turn_gamma=1.5"),
    ("decision", {"condition.digits": -1}, "condition.digits=-1"),
    ("decision", {"importance": "token"}, r"learner\.importance with algorithm=decision"),
    ("distill", {"teacher.hint": "targte"}, r"hint 'targte' is unknown; did you mean 'target'\?"),
    ("distill", {"teacher.hint": "no_such:thing"}, "there is no hint and no module 'no_such'"),
    ("distill", {"teacher.template": "{hint}"}, r"teacher.template='{hint}': it must contain {hint} and {prompt}"),
    ("distill", {"teacher.rate": 1.5}, r"teacher.rate=1.5: it must be in \[0, 1\]"),
    ("distill", {"teacher.rate": 0.5, "reference": 3}, "only a copy follows the policy"),
    ("distill", {"reference": None}, "it is the teacher"),
    ("distill", {"loss.divergence": "sideways"}, "it must be reverse, forward or jensen_shannon"),
    ("distill", {"kl.coef": 0.1}, "algorithm distill has no reference to measure KL to"),
    ("ilql", {"loss.tau": 1.0}, "loss.tau=1.0: it must lie between 0 and 1"),
    ("ilql", {"advantage.gamma": 1.5}, "advantage.gamma=1.5: it must lie in 0..1"),
    ("ilql", {"value.actions": False}, "value.actions=False: algorithm ilql decides it"),
    ("ilql", {"value.critic": "copy"}, "Q values are heads of the policy itself"),
    ("ilql", {"importance": "token"}, "learner.importance with algorithm=ilql"),
    ("ppo", {"sampling.guidance": 2.0}, "algorithm ppo has no Q values"),
    ("ppo", {"value.actions": True}, "value.actions=True: algorithm ppo decides it"),
    ("ppo", {"importance": "tokens"}, "none, token or sequence"),
    ("ppo", {"importance": "token", "importance_cap": 0}, "above 0"),
    ("ppo", {"importance_floor": 0.5}, "importance_floor with learner.importance=none: no weight is bounded"),
    ("ppo", {"importance_mask": True}, "with learner.importance=none: no weight is bounded"),
    (
        "ppo",
        {"importance": "token", "importance_cap": None, "importance_mask": True},
        "with learner.importance_cap=none",
    ),
    ("ppo", {"importance": "token", "rescore": False}, "leave rescore out"),
    ("ppo", {"max_staleness": -1}, "at least 0"),
    ("sft", {"importance": "token"}, "no sampler"),
    ("sft", {"max_staleness": 3}, "no sampler"),
    ("dpo", {"reference": None}, "reference=none with algorithm=dpo: its loss compares the policy with it"),
    ("kto", {"reference": None}, "reference=none with algorithm=kto"),
    ("dpo", {"loss.kind": "slic"}, "sigmoid, robust, hinge, ipo or ipo-mean"),
    ("dpo", {"loss.beta": 0.0}, "loss.beta=0: it must be above 0"),
    ("dpo", {"loss.label_smoothing": 0.5}, "at least 0 and below 0.5"),
    ("dpo", {"loss.kind": "ipo", "loss.label_smoothing": 0.1}, "it is for sigmoid and robust"),
    ("dpo", {"loss.pairs": "some"}, "it must be all or ends"),
    ("dpo", {"kl.coef": 0.1}, "algorithm dpo has no reference to measure KL to"),
    ("kto", {"loss.bad_weight": -1.0}, "none may be negative"),
    ("nlpo", {"top_p": 1.0}, r"sampling.top_p=1 with algorithm=nlpo.*mask does nothing"),
    ("nlpo", {"mask.by": "reference"}, "mask.by='reference': it must be copy, policy or model"),
    ("nlpo", {"mask.every": -1}, "mask.every=-1: it must be a number of steps"),
    ("nlpo", {"top_p_least": 0}, "sampling.top_p_least=0: it must be at least 1 token"),
    ("ppo", {"mask.every": 3}, r"'?mask.every'?.*algorithm=ppo: it belongs to nlpo"),
    ("ppo", {"advantage.level": "step"}, r"advantage\.level='step': it must be token, turn_first or turn_mean"),
    ("gigpo", {"advantage.omega": -1.0}, "advantage.omega=-1.0: it must be at least 0"),
    ("gigpo", {"advantage.turn_gamma": 1.5}, "advantage.turn_gamma=1.5: it must lie in 0..1"),
    ("gigpo", {"advantage.deviation": "both"}, "advantage.deviation='both'"),
    (
        "ppo",
        {"optimizer.kind": "sgd", "optimizer.betas": (0.5, 0.9)},
        r"betas=\(0.5, 0.9\).*with kind=sgd: it uses .*momentum",
    ),
    ("ppo", {"optimizer.kind": "rmsprop", "optimizer.states": "8bit"}, "states=8bit.*kind=rmsprop"),
    (
        "ppo",
        {"optimizer.kind": "rmsprop", "optimizer.eps_placement": "tensorflow"},
        "eps_placement=tensorflow.*kind=rmsprop",
    ),
    ("ppo", {"optimizer.momentum": 0.9}, "momentum=0.9.*kind=adamw"),
    ("ppo", {"optimizer.kind": "adam"}, "kind='adam': it must be adamw, rmsprop, sgd or own"),
    ("ppo", {"optimizer.kind": "sgd", "optimizer.momentum": 1.0}, r"momentum=1.0: it must be in \[0, 1\)"),
    ("ppo", {"optimizer.kind": "own"}, "Python object.*optimizer=..."),
    ("trpo", {"update.kl": "exactly"}, r"update.kl='exactly': it must be exact or sampled"),
    ("trpo", {"update.shrink": 1.0}, r"update.shrink=1.0: it must be in \(0, 1\)"),
    ("trpo", {"update.epochs": 2}, r"'update.epochs' is unknown|update.epochs.*belongs to"),
    ("a2c", {"update.epochs": 4}, r"update.epochs=4: the gradient.*used once.*algorithm=ppo"),
    ("reinforce", {"update.epochs": 4}, r"update.epochs=4: the gradient.*used once.*algorithm=ppo"),
]


@pytest.mark.parametrize(("algorithm", "options", "message"), REFUSED)
def test_an_option_is_refused_before_a_model_loads(algorithm, options, message):
    with pytest.raises(OperantError, match=message):
        Learner("no such model", algorithm=algorithm, **options)
