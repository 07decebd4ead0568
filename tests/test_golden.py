"""Numbers that must not change unless somebody means it, and the digits of float64 that make such numbers possible.

`tests/golden/` holds twenty steps of every algorithm, made once by `python -m tests.golden`; a run is held to them at
1e-8. How far other machines are from them was measured with torch's kernels for other instruction sets, which stand in
for other machines: 2e-12 at most; weights off by 1e-12 lead 8e-11 astray.
"""

from dataclasses import fields

import pytest
import torch
from cases import cases, slow, slow_but
from golden_runs import ALGORITHMS, ISLANDS, METRICS, RUNS, farthest, made, prompts, read, run, score, settle
from toys import lm

from operant import Batch, Policy, Sampling, Task
from operant.models.value_head import ValueOptions
from operant.objectives import advantages
from operant.rollouts import collate
from operant.training import scoring, update


def test_there_is_a_golden_run_of_every_algorithm():
    from operant.algorithms import ALGORITHMS as TABLE

    # The policies of the first two are no language models, and the last refuses the negative scores of these runs.
    table = set(TABLE) - {"reward-model", "outcome-critic", "maxrl"}
    assert set(ALGORITHMS) == table and {algorithm for _, algorithm in RUNS.values()} == table


def held_to(name, most):
    mine, right = run(name), read(name)
    assert mine["replies"] == right["replies"]
    gap, where = farthest(mine, right)
    assert gap < most, where


@pytest.mark.parametrize("name", slow_but(["ppo"], ALGORITHMS))
def test_twenty_steps_are_what_they_were(name):
    """Of all methods but PPO, two steps are compared every day, and twenty in CI."""
    held_to(name, 1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ISLANDS)
def test_where_norms_are_float32_they_are_to_the_fourth_digit(kind):
    held_to(f"ppo-{kind}", 1e-4)


@cases(slow("grpo", 2), *((name, 1) for name in ALGORITHMS if name != "ppo"))
def test_the_first_steps_are_what_they_were(name, threads):
    """Also with two threads, which wait for each other where they share a core."""
    try:
        torch.set_num_threads(threads)
        mine = run(name, steps=2)
    finally:
        torch.set_num_threads(1)
    told = {name: x[:2] for name, x in read(name).items() if name in METRICS}
    assert farthest({name: mine[name] for name in told}, told)[0] < 1e-8


# --- they can fail ----------------------------------------------------------------------------------------------------
@cases(
    (scoring, "estimate", lambda x: x * (1 + 1e-6)),
    (update, "rate", lambda x: x * (1 + 1e-6)),
    (update, "token_weights", lambda x: x.float().double()),
    ids=["kl", "rate", "digits"],
)
def test_a_small_fault_anywhere_is_seen(room, function, fault, monkeypatch):
    """A part in a million of a loss or a rate, a float32 in the way."""
    right, original = run("ppo", steps=2), getattr(room, function)
    monkeypatch.setattr(room, function, lambda *given, **named: fault(original(*given, **named)))
    spoilt = run("ppo", steps=2)
    assert spoilt["replies"] != right["replies"] or farthest(spoilt, right)[0] > 1e-8


# --- float64 from end to end ------------------------------------------------------------------------------------------
def widths(thing) -> dict[str, torch.dtype]:
    found = {}
    for f in fields(thing):
        value = getattr(thing, f.name)
        for name, x in value.items() if isinstance(value, dict) else [(f.name, value)]:
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                found[name] = x.dtype
    return found


@cases(("gpt2", ValueOptions(), 48_000_000), *((k, ValueOptions(layers=2), 20) for k in ("gpt2", *ISLANDS)))
def test_every_field_of_outputs_is_float64(kind, value, budget, monkeypatch):
    monkeypatch.setattr("operant.models.logprobs.BUDGET", budget)
    policy, other = (Policy(lm(kind, seed=seed).double(), value=value) for seed in (0, 1))
    given = Batch.given([[3, 4], [5]], [[6, 7, 8], [9, 10]])
    with torch.set_grad_enabled(budget == 20):
        out = policy.forward(given, Sampling(temperature=0.7), against=other)
    names = {"logprobs", "raw_logprobs", "entropy", "logsumexp", "values", "reverse", "forward"}
    assert widths(out) == dict.fromkeys(names, torch.float64)


def test_a_float32_model_has_float32_and_a_bfloat16_one_too():
    for dtype in (torch.float32, torch.bfloat16):
        policy = Policy(lm().to(dtype), value=ValueOptions())
        assert set(widths(policy.forward(Batch.given([[3, 4]], [[6, 7, 8]]))).values()) == {torch.float32}


@pytest.mark.parametrize("algorithm", ["ppo", "rloo", "decision", "ilql"])
def test_every_field_of_a_batch_is_float64_up_to_the_weights(algorithm):
    student, asked = made("gpt2", algorithm), prompts(0) * 2
    replies = student.play([Task(str(p), p) for p in asked])
    seen, _ = student.preview(replies, [score(p, r.ids) for p, r in zip(asked, replies, strict=True)])
    found = widths(seen.with_(weights=collate.token_weights(seen)))
    assert found == dict.fromkeys(found, torch.float64)
    known = {"ppo": {"values", "returns", "kl", "advantages"}, "grpo": {"advantages"}, "rloo": {"kl", "advantages"}}
    behind = set() if algorithm == "decision" else {"logprobs"}  # its replies are learnt behind other prompts
    assert found.keys() >= {"rewards", "bootstrap", "weights"} | behind | known.get(algorithm, set())
    student.learn(replies, [1.0] * 8)
    state = student.optimizer.state_dict()["state"]
    assert {x.dtype for held in state.values() for name, x in held.items() if name != "step"} == {torch.float64}


def test_rates_of_decay_keep_their_digits():
    """By hand, in Python's numbers: 0.95 is not what float32 holds of it."""
    x = torch.tensor([[1.0, 0.25, -0.5]], dtype=torch.float64)
    rates = advantages.by_turn(torch.zeros(1, 3, dtype=torch.long), 0.97, 0.9, torch.float64)
    found = advantages.gae(x, torch.zeros_like(x), torch.zeros_like(x), rates, torch.full_like(x, 0.95))
    middle = 0.25 + 0.97 * 0.95 * -0.5
    assert found[0].tolist() == pytest.approx([1.0 + 0.97 * 0.95 * middle, middle, -0.5], rel=1e-15)


def test_the_golden_weights_are_those_of_whole_numbers():
    """PCG64's stream is part of numpy's promise; the first numbers of one name stand here."""
    layer = torch.nn.Linear(2, 1, dtype=torch.float64)
    settle(layer)
    assert layer.weight.flatten().tolist() == pytest.approx([-0.31730050537829, -0.08062663875581295], rel=1e-12)
