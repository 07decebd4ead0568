"""How many threads compute: by sizes alone, so that equal runs have equal bits."""

import subprocess
import sys
import threading
import time

import pytest
import torch
from cases import cases, slow_but
from toys import letters, lm
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

from operant import Learner, OperantError, Policy, Sampling, Step, machine, train
from operant.engines.native.engine import NativeEngine
from operant.models import twins


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def halves(monkeypatch):
    """Small products are halved, too."""
    monkeypatch.setattr(twins, "LEAST", 0)


@pytest.fixture
def seen(monkeypatch):
    """The numbers of threads that were set."""
    counts, usual = [], torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda n: (counts.append(n), usual(n)))
    return counts


def wide(width):
    shape = {"n_embd": width, "n_layer": 1, "n_head": 2, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
    return lm(vocab=32) if width == 32 else type(lm())(GPT2Config(vocab_size=32, **shape))


def step(learner, count=16):
    replies = learner.generate([[3, 4]] * count)
    learner.step(replies, [float(r.ids[0]) for r in replies])


@pytest.mark.parametrize(("given", "threads"), [({}, {1}), ({"threads": 2}, set()), ({"threads": 1}, {1})])
def test_a_small_model_computes_with_one_thread_or_as_it_is_told(given, threads, seen):
    step(Learner(lm(vocab=32), max_tokens=4, **given))
    assert set(seen) - {2} == threads and torch.get_num_threads() == 2


@pytest.mark.slow
def test_a_large_batch_of_a_large_model_computes_with_all(seen, monkeypatch):
    """Rows of 2 and 24 tokens: 256 of them are 6,656 tokens, times 65,536 numbers of the largest matrix. Decoding has
    256 rows at a time, which is little."""
    model = wide(128)
    assert twins.in_halves(model, 6656) and not twins.in_halves(model, 256)
    monkeypatch.setattr(twins, "MOST", 0)
    assert machine.largest(model) == 4 * 128 * 128
    learner = Learner(model, max_tokens=24, fixed_length=True, epochs=1, watch_every=0)
    replies = learner.generate([[3, 4]] * 256)
    assert set(seen) == {1, 2}
    seen.clear()
    learner.step(replies, [float(r.ids[0]) for r in replies])
    assert not seen


# --- halves -----------------------------------------------------------------------------------------------------------
PROMPTS = [[3, 4], [5], [6, 7, 8, 9], [3, 4], [11, 12], [13], [14, 15, 16], [5]]
HALVED = {
    "ppo": {"algorithm": "ppo", "kl.coef": 0.1, "update.minibatch": 4},
    "exact": {"algorithm": "ppo", "kl.coef": 0.1, "kl.kind": "reverse", "kl.loss_coef": 0.1, "kl.loss_kind": "forward"},
    "grpo": {"algorithm": "grpo"},
    "critic": {"algorithm": "ppo", "value.critic": "copy"},
    "nlpo": {"algorithm": "nlpo", "top_p": 0.9},
    "lora": {"algorithm": "ppo", "lora.rank": 2},
    "trunk": {"algorithm": "ppo", "model.train_layers": 1},
}


DAILY = (("ppo", "gpt2"), ("lora", "gpt2"), ("nlpo", "t5"))
SIDES = [*((case, "gpt2") for case in HALVED), ("ppo", "llama"), ("ppo", "t5"), ("nlpo", "t5")]


@cases(*slow_but(DAILY, SIDES))
def test_halves_side_by_side_are_the_whole(case, kind, halves, monkeypatch):
    """Replies to the bit of their tokens, and in float64 weights, metrics and their order to rounding."""
    both, found, calls = twins.both, {}, []
    monkeypatch.setattr("operant.training.objective.both", lambda a, b: (calls.append("update"), both(a, b))[1])
    monkeypatch.setattr("operant.engines.native.engine.both", lambda a, b: (calls.append("generate"), both(a, b))[1])
    for threads in ("auto", 1):
        learner = Learner(lm(kind).double(), max_tokens=6, epochs=2, lr=1e-3, threads=threads, **HALVED[case])
        steps = []
        for _ in range(2):
            replies = learner.generate(PROMPTS * 2)
            steps.append(learner.step(replies, [float(len(set(r.ids))) for r in replies]))
        found[threads] = ([r.ids for r in replies], steps, [p.detach().clone() for p in learner.policy.parameters()])
    assert {"update", "generate"} == set(calls)
    assert found["auto"][0] == found[1][0]
    for mine, theirs in zip(found["auto"][1], found[1][1], strict=True):
        assert mine.keys() == theirs.keys()
        untimed = [k for k in mine if not k.startswith(("time/", "memory/", "tokens/"))]
        assert [mine[k] for k in untimed] == pytest.approx([theirs[k] for k in untimed], rel=1e-8, abs=1e-10)
    for mine, theirs in zip(found["auto"][2], found[1][2], strict=True):
        assert torch.allclose(mine, theirs, atol=1e-11)


def run_twice(env=None):
    found, options = [], {"update.minibatch": 4} | ({"env": env()} if env else {})
    for interval in (5e-3, 1e-6):  # how often the two threads take turns decides nothing
        before = sys.getswitchinterval()
        sys.setswitchinterval(interval)
        try:
            learner = Learner(lm(vocab=len(letters())), tokenizer=letters(), max_tokens=6, lr=1e-2, **options)
            for _ in range(3):
                replies = learner.generate(PROMPTS * 2)
                metrics = learner.step(replies, [0.0 if env else float(r.ids[0]) for r in replies])
        finally:
            sys.setswitchinterval(before)
        bits = [p.detach().clone() for p in learner.policy.parameters()]
        found.append(([r.ids for r in replies], metrics["loss/total"], bits))
    assert found[0][:2] == found[1][:2]
    assert all(torch.equal(a, b) for a, b in zip(found[0][2], found[1][2], strict=True))


def test_the_same_halves_twice_are_bit_identical(halves):
    run_twice()


class Echo:
    """Three turns, each of which goes on from the reply before; pays by its length."""

    def reset(self, tasks):
        self.turns = dict.fromkeys(tasks, 0)
        return {slot: Step() for slot in tasks}

    def step(self, replies):
        for slot in replies:
            self.turns[slot] += 1
        return {s: Step("ab", reward=float(len(x)), terminated=self.turns[s] == 3) for s, x in replies.items()}


@pytest.mark.slow
def test_turns_that_keep_their_beginnings_are_bit_identical(halves):
    run_twice(Echo)


def test_each_half_keeps_its_own_beginnings_and_goes_on_from_them(halves):
    """Else what one half finds would depend on how far the other has come."""
    policy, sampling = Policy(lm()), Sampling(max_tokens=4)
    engine, prompts = NativeEngine(policy), [[n, n + 1] for n in range(3, 11)]
    with twins.side_by_side(policy.model, len(prompts)), engine.remembering():
        assert torch.get_num_threads() == 1, "threads that share a product would wait between the halves"
        made = engine.generate(prompts, sampling, range(8))
        before = [set(kept._rows) for kept in (engine.kept, engine.kept_by_twin)]
        assert all(before) and not before[0] & before[1]
        engine.generate([[*p, *c.action, 12] for p, c in zip(prompts, made, strict=True)], sampling, range(8))
        for rows, kept in zip(before, (engine.kept, engine.kept_by_twin), strict=True):
            assert len(kept) == len(rows) and all(any(r[: len(b)] == b for b in rows) for r in kept._rows)


def test_a_parameter_with_a_hook_and_a_single_row_have_no_halves(halves, monkeypatch):
    monkeypatch.setattr("operant.training.objective.both", lambda a, b: pytest.fail("halves"))
    learner = Learner(lm(), max_tokens=4)
    learner.policy.model.transformer.wte.weight.register_hook(lambda gradient: gradient)
    step(learner)
    step(Learner(lm(), max_tokens=4), count=1)


@cases(0, 1)
def test_an_error_of_either_half_is_raised_when_both_have_ended(which):
    ended = []

    def work(number):
        time.sleep(0.05 * (number != which))
        ended.append(number)
        if number == which:
            raise OperantError("one half")

    with pytest.raises(OperantError, match="one half"):
        twins.both(lambda: work(0), lambda: work(1))
    assert sorted(ended) == [0, 1]


def test_memory_that_runs_out_in_one_half_halves_both(halves, monkeypatch):
    usual, failed = GPT2LMHeadModel.forward, []

    def short(self, *args, **kwargs):
        if torch.is_grad_enabled() and threading.current_thread() is not threading.main_thread() and not failed:
            failed.append(True)
            raise RuntimeError("can't allocate memory")
        return usual(self, *args, **kwargs)

    weights = []
    for change in (False, True):
        if change:
            monkeypatch.setattr(GPT2LMHeadModel, "forward", short)
        learner = Learner(lm().double(), max_tokens=4, epochs=1, lr=1e-3)
        step(learner)
        weights.append([p.detach().clone() for p in learner.policy.parameters()])
    assert failed and learner.budget.tokens == 4096
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize("wrong", [0, -1, "many", 1.5])
def test_what_is_no_number_of_threads_is_refused(wrong):
    with pytest.raises(OperantError, match="threads"):
        Learner(lm(), threads=wrong)


def test_embeddings_count_where_they_are_the_output_head():
    shape = {"vocab_size": 5000, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16, "pad_token_id": 0}
    assert machine.largest(GPT2ForSequenceClassification(GPT2Config(**shape))) == 32 * 128
    assert machine.largest(lm(vocab=5000)) >= 5000 * 16


def test_a_run_computes_with_the_number_that_was_asked_for(tmp_path):
    tokenizer, seen = letters(), []
    model = lm(vocab=len(tokenizer))

    def reward(rollouts):
        seen.append(torch.get_num_threads())
        return [float(len(r.ids)) for r in rollouts]

    run = train(model, ["ab", "c"], reward, tokenizer=tokenizer, steps=1, batch=4, threads=1, out=tmp_path / "run")
    assert set(seen) == {1} and torch.get_num_threads() == 2 and run.metrics


def test_others_that_compute_are_counted():
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        assert any(machine.others() >= 2 for _ in range(100))
    finally:
        for process in running:
            process.kill()
            process.wait()


@pytest.mark.parametrize(("others", "threads", "sentence"), [(0, 2, None), (1, 1, None), (9, 2, "9 other processes")])
def test_a_busy_machine_is_noticed(others, threads, sentence, monkeypatch):
    monkeypatch.setattr(machine, "others", lambda: others)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {0, 1})
    torch.set_num_threads(threads)
    found = machine.crowded()
    assert found is None if sentence is None else sentence in found and "2 cores" in found


@cases((0.0, 0, {}, True), (0.0, 1 << 26, {}, False), (1e18, 0, {}, False), (0.0, 0, {"threads": 2}, False))
def test_a_run_says_so_where_it_would_wait(worth, most, given, tells, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "WORTH", worth)
    monkeypatch.setattr(twins, "MOST", most)
    monkeypatch.setattr(twins, "LEAST", 0)
    monkeypatch.setattr(machine, "crowded", lambda: "9 other processes compute")
    tokenizer, log = letters(), tmp_path / "run/log.txt"
    options = {"tokenizer": tokenizer, "steps": 1, "batch": 4, "max_tokens": 2, "probes": 0, "out": log.parent}
    train(lm(vocab=len(tokenizer)), ["ab"], "letters:a", **options, **given)
    assert ("--threads 1" in (log.read_text(encoding="utf-8") if log.exists() else "")) == tells


def test_halves_have_as_many_tokens():
    """Of 1, 9, 11 and 19: by the longest row of each group in turn, the halves would have 10 and 30."""
    assert twins.dealt([[0], [1], [2, 3], [4]], [1, 9, 4, 7, 19]) == [[[0], [4]], [[1], [2, 3]]]
