"""Numbers that must not change unless somebody means it, and the digits of float64 that make such numbers possible.

`tests/golden/` holds twenty steps of every algorithm, made once by `python -m tests.golden`; a run is held to them at
1e-8. How far other machines are from them was measured with torch's kernels for other instruction sets, which stand in
for other machines: 2e-12 at most; weights off by 1e-12 lead 8e-11 astray.
"""

from dataclasses import fields

import pytest
import torch
from cases import cases, slow_but
from golden_runs import ALGORITHMS, ISLANDS, METRICS, RUNS, farthest, made, prompts, read, run, score, settle
from toys import bare_logprobs, lm

from operant import Batch, Policy, Sampling, Task
from operant.models.value_head import ValueHead, ValueOptions
from operant.objectives import advantages, losses
from operant.rollouts import collate
from operant.training import scoring, update, update_rules
from operant.training.optimizer import MasterAdamW


def test_there_is_a_golden_run_of_every_algorithm():
    from operant.algorithms import ALGORITHMS as TABLE

    # The policies of the first two are no language models, and the last refuses the negative scores of these runs.
    table = set(TABLE) - {"reward-model", "outcome-critic", "maxrl"}
    assert set(ALGORITHMS) == table and {algorithm for _, algorithm in RUNS.values()} == table


WHOLE = ("ppo", "grpo", "nlpo", "sft", "dpo")
"""Of the others, three steps are compared every day, and twenty in CI."""
BRIEF = [name for name in ALGORITHMS if name not in WHOLE]


@pytest.mark.parametrize("name", slow_but(WHOLE, ALGORITHMS))
def test_twenty_steps_are_what_they_were(name):
    mine, right = run(name), read(name)
    assert mine["replies"] == right["replies"]
    gap, where = farthest(mine, right)
    assert gap < 1e-8, where


@pytest.mark.slow
@pytest.mark.parametrize("kind", ISLANDS)
def test_where_norms_are_float32_they_are_to_the_fourth_digit(kind):
    mine, right = run(f"ppo-{kind}"), read(f"ppo-{kind}")
    assert mine["replies"] == right["replies"]
    gap, where = farthest(mine, right)
    assert gap < 1e-4, where


@cases(("grpo", 2), *((name, 1) for name in BRIEF))
def test_the_first_steps_are_what_they_were(name, threads):
    """Also with two threads, which wait for each other where they share a core."""
    try:
        torch.set_num_threads(threads)
        mine = run(name, steps=3)
    finally:
        torch.set_num_threads(1)
    told = {name: x[:3] for name, x in read(name).items() if name in METRICS}
    assert farthest({name: mine[name] for name in told}, told)[0] < 1e-8


# --- they can fail ----------------------------------------------------------------------------------------------------
EARLY = 3


@pytest.fixture(scope="module")
def early():
    """The first steps of PPO's run."""
    return run("ppo", steps=EARLY)


def forgetful(original):
    def move(self, shrink):
        for group in self.param_groups:
            group["betas"] = (0.9, 0.99899)
        original(self, shrink)

    return move


def changing(change):
    return lambda original: lambda *given, **named: change(original(*given, **named))


rounded = changing(lambda x: x.float().double())
FAULTS = {
    "loss": (losses, "total", changing(lambda x: x * (1 + 1e-6))),
    "advantage": (advantages, "gae", changing(lambda x: x * 1.001 + 1e-6)),
    "kl": (scoring, "estimate", changing(lambda x: x * (1 + 1e-6))),
    "rate": (update_rules, "rate", changing(lambda x: x * (1 + 1e-6))),
    "moments": (MasterAdamW, "move", forgetful),
    "digits of values": (ValueHead, "forward", rounded),
    "digits of weights": (update, "token_weights", rounded),
    "digits of the loss": (losses, "total", rounded),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_small_fault_anywhere_is_seen(name, early, monkeypatch):
    """A part in a million of a loss, a float32 in the way, a second moment that forgets a little faster."""
    room, function, fault = FAULTS[name]
    monkeypatch.setattr(room, function, fault(getattr(room, function)))
    spoilt = run("ppo", steps=EARLY)
    assert spoilt["replies"] != early["replies"] or farthest(spoilt, early)[0] > 1e-8


# --- float64 from end to end ------------------------------------------------------------------------------------------
def widths(thing) -> dict[str, torch.dtype]:
    """Of every field that holds numbers with a point."""
    found = {}
    for f in fields(thing):
        value = getattr(thing, f.name)
        for name, x in value.items() if isinstance(value, dict) else [(f.name, value)]:
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                found[name] = x.dtype
    return found


@pytest.mark.parametrize("kind", ["gpt2", *ISLANDS])
@pytest.mark.parametrize("value", [ValueOptions(), ValueOptions(layers=2, init="torch")])
@pytest.mark.parametrize("budget", [48_000_000, 20])
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


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_field_of_a_batch_is_float64_up_to_the_weights(algorithm):
    student = made("gpt2", algorithm)
    asked = prompts(0) * 2
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


def test_decoding_keeps_the_digits_of_what_it_said():
    """Against the model's own forward pass, a reply at a time: float32 anywhere would be off by 1e-7."""
    student = made("gpt2", "ppo")
    for reply in student.play([Task("a", [3, 4, 5]), Task("b", [6])]):
        (turn,) = reply.turns
        right = bare_logprobs(student.policy.model, turn.prompt, turn.action, temperature=0.9)
        assert float((torch.tensor(turn.logprobs, dtype=torch.float64) - right).abs().max()) < 1e-13
        alone = student.policy.values(Batch.given([turn.prompt], [turn.action]))[0, len(turn.prompt) :]
        assert float((torch.tensor(turn.values, dtype=torch.float64) - alone.detach()).abs().max()) < 1e-13


def test_rates_of_decay_keep_their_digits():
    """By hand, in Python's numbers: 0.95 is not what float32 holds of it."""
    x = torch.tensor([[1.0, 0.25, -0.5]], dtype=torch.float64)
    turns = torch.zeros(1, 3, dtype=torch.long)
    rates = advantages.by_turn(turns, 0.97, 0.9, torch.float64)
    made_here = advantages.gae(x, torch.zeros_like(x), torch.zeros_like(x), rates, torch.full_like(x, 0.95))
    last = -0.5
    middle = 0.25 + 0.97 * 0.95 * last
    assert made_here[0].tolist() == pytest.approx([1.0 + 0.97 * 0.95 * middle, middle, last], rel=1e-15)


def test_the_golden_weights_are_those_of_whole_numbers():
    """PCG64's stream is part of numpy's promise; the first numbers of one name stand here."""
    layer = torch.nn.Linear(2, 1, dtype=torch.float64)
    settle(layer)
    assert layer.weight.flatten().tolist() == pytest.approx([-0.31730050537829, -0.08062663875581295], rel=1e-12)
