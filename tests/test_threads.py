"""How many threads compute: by sizes alone, so that equal runs have equal bits."""

import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
import torch
from cases import cases
from toys import bare_table, letters, lm
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel
from worlds import Turns

from operant import Batch, Learner, OperantError, Policy, Sampling, Step, machine, train
from operant.engines.native.engine import NativeEngine
from operant.models import twins
from operant.models.options import ModelOptions
from operant.training.scoring import forward_batch


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
    counts, usual = [], torch.set_num_threads
    monkeypatch.setattr(torch, "set_num_threads", lambda n: (counts.append(n), usual(n)))
    return counts


def step(learner, count=8):
    replies = learner.generate([[3, 4]] * count)
    learner.step(replies, [float(r.ids[0]) for r in replies])


@cases(({}, {1}), ({"threads": 2}, set()))
def test_a_small_model_computes_with_one_thread_or_as_it_is_told(given, threads, seen):
    step(Learner(lm(vocab=32), max_tokens=2, epochs=1, **given), count=4)
    assert set(seen) - {2} == threads and torch.get_num_threads() == 2


def test_a_large_batch_of_a_large_model_computes_with_all(seen, monkeypatch):
    """Rows of 2 and 24 tokens: 256 of them are 6,656 tokens, times 65,536 numbers of the largest matrix. Decoding has
    256 rows at a time, which is little."""
    shape = {"n_embd": 128, "n_layer": 1, "n_head": 2, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, **shape))
    assert twins.in_halves(model, 6656) and not twins.in_halves(model, 256)
    monkeypatch.setattr(twins, "MOST", 0)
    assert machine.largest(model) == 4 * 128 * 128
    learner = Learner(model, max_tokens=24, fixed_length=True, epochs=1, watch_every=0)
    replies = learner.generate([[3, 4]] * 256)
    assert set(seen) == {1, 2}
    seen.clear()
    learner.step(replies, [float(r.ids[0]) for r in replies])
    assert not seen


PROMPTS = [[3, 4], [5], [6, 7, 8, 9], [3, 4], [11, 12], [13], [14, 15, 16], [5]]
EXACT = {"kl.coef": 0.1, "kl.kind": "reverse", "kl.loss_coef": 0.1, "kl.loss_kind": "forward"}


@cases(
    ("llama", {"algorithm": "ppo", "kl.coef": 0.1, "update.minibatch": 4}),
    ("gpt2", {"algorithm": "ppo", "value.critic": "copy"} | EXACT),
    ("t5", {"algorithm": "nlpo", "top_p": 0.9}),
    ("gpt2", {"algorithm": "grpo", "lora.rank": 2}),
    ("gpt2", {"algorithm": "ppo", "model.train_layers": 1}),
)
def test_halves_side_by_side_are_the_whole(kind, options, halves, monkeypatch):
    """Replies to the bit of their tokens, also in float32; in float64 weights, metrics and their order to rounding."""
    both, found, calls = twins.both, {}, []
    monkeypatch.setattr("operant.training.objective.both", lambda a, b: (calls.append("update"), both(a, b))[1])
    monkeypatch.setattr("operant.engines.native.engine.both", lambda a, b: (calls.append("generate"), both(a, b))[1])
    for threads in ("auto", 1):
        learner = Learner(lm(kind).double(), max_tokens=3, lr=1e-3, threads=threads, **options)
        replies = learner.generate(PROMPTS)
        metrics = learner.step(replies, [float(len(set(r.ids))) for r in replies])
        found[threads] = ([r.ids for r in replies], metrics, [p.detach().clone() for p in learner.policy.parameters()])
    assert {"update", "generate"} == set(calls)
    (ids, mine, weights), (right_ids, theirs, right) = found.values()
    assert ids == right_ids and mine.keys() == theirs.keys()
    untimed = [k for k in mine if not k.startswith(("time/", "memory/", "tokens/"))]
    assert [mine[k] for k in untimed] == pytest.approx([theirs[k] for k in untimed], rel=1e-8, abs=1e-10)
    assert all(torch.allclose(a, b, atol=1e-11) for a, b in zip(weights, right, strict=True))
    mine, right = (Learner(lm(kind), max_tokens=12, threads=n).generate(PROMPTS * 4) for n in ("auto", 1))
    assert [r.ids for r in mine] == [r.ids for r in right]


class Echo(Turns):
    """Two turns, the second of which goes on from the reply before; pays by its length."""

    first = Step()

    def answer(self, slot, reply):
        return Step("ab", reward=float(len(reply)), terminated=self.turn[slot] == 2)


@contextmanager
def computing(count):
    with ExitStack() as stack:
        for _ in range(count):
            stack.callback(stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"])).kill)
        yield


def test_the_same_halves_are_bit_identical(halves, monkeypatch):
    """Nothing depends on how often threads take turns, the parts in which weights move, or on a busy machine."""
    found, before = [], sys.getswitchinterval()
    for interval, long, others in ((5e-3, 1 << 20, 0), (1e-6, 0, 0), (5e-3, 1 << 20, 3)):
        sys.setswitchinterval(interval)
        monkeypatch.setattr(twins, "LONG", long)
        learner = Learner(lm(vocab=len(letters())), tokenizer=letters(), max_tokens=4, lr=1e-2, epochs=1, env=Echo())
        with computing(others):
            for _ in range(2):
                replies = learner.generate(PROMPTS)
                metrics = learner.step(replies, [0.0] * len(PROMPTS))
        found.append(([r.ids for r in replies], metrics["loss/total"], [*learner.policy.parameters()]))
    sys.setswitchinterval(before)
    for other in found[1:]:
        assert found[0][:2] == other[:2]
        assert all(torch.equal(a, b) for a, b in zip(found[0][2], other[2], strict=True))


def test_each_half_goes_on_from_its_own_beginnings(halves):
    """A later turn may be of one half alone; the likeliest tokens, by the model itself."""
    policy, sampling = Policy(lm()), Sampling(max_tokens=4, top_k=1, stop_tokens=-1)
    engine, prompts = NativeEngine(policy), [[n, n + 1] for n in range(3, 11)]
    with twins.side_by_side(policy, len(prompts)), engine.remembering():
        assert torch.get_num_threads() == 1, "threads that share a product would wait between the halves"
        made = engine.generate(prompts, sampling, range(8))
        kept = (engine.kept, engine.kept_by_twin)
        assert all(one._rows for one in kept) and not {*kept[0]._rows} & {*kept[1]._rows}
        longer = [[*p, *c.action, 12] for p, c in zip(prompts, made, strict=True)]
        for own, other in (kept, kept[::-1]):
            some = [p for p in longer if own.find(p)[1] > other.find(p)[1]]
            for prompt, reply in zip(some, engine.generate(some, sampling, range(len(some))), strict=True):
                assert reply.action == bare_table(policy.model, prompt, reply.action).argmax(-1).tolist()


def test_bfloat16_leaves_the_kernels_of_attention_as_they_were(halves, monkeypatch):
    """They are one setting of the process: a half that ended last once took it back to that of the other half."""
    policy, usual = Policy(lm(), options=ModelOptions(precision="bfloat16")), GPT2LMHeadModel.forward
    meeting, seen = threading.Barrier(2), []

    def met(self, *args, **kwargs):
        meeting.wait(60)
        out = usual(self, *args, **kwargs)
        seen.append(torch.backends.cuda.flash_sdp_enabled())
        return out

    monkeypatch.setattr(GPT2LMHeadModel, "forward", met)
    for _ in range(5):
        with twins.side_by_side(policy, 8):
            forward_batch(Batch.given([[3, 4], [5, 6]], [[7, 8], [9, 10]]), policy, Sampling(), 64)
        assert torch.backends.cuda.flash_sdp_enabled()
    assert seen == [False] * 10


def test_a_parameter_with_a_hook_and_a_single_row_have_no_halves(halves, monkeypatch):
    monkeypatch.setattr("operant.training.objective.both", lambda a, b: pytest.fail("halves"))
    learner = Learner(lm(), max_tokens=2, epochs=1, keep_gradients=True)
    table = learner.policy.model.transformer.wte.weight
    table.register_hook(torch.zeros_like)
    step(learner)
    assert not table.grad.any(), "the hook sees the part of the embeddings, and that of the tied head"
    step(Learner(lm(), max_tokens=2, epochs=1), count=1)
    monkeypatch.setattr(machine, "worth", lambda *sizes: 2)
    with twins.side_by_side(SimpleNamespace(model=lm()), 8):
        assert torch.get_num_threads() == 2, "a policy of another kind has no twin"


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
    for forward in (usual, short):
        monkeypatch.setattr(GPT2LMHeadModel, "forward", forward)
        learner = Learner(lm().double(), max_tokens=2, epochs=1, lr=1e-3)
        step(learner)
        weights.append([p.detach().clone() for p in learner.policy.parameters()])
    assert failed and learner.budget.tokens == 4096
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*weights, strict=True))


def test_embeddings_count_where_they_are_the_output_head():
    shape = {"vocab_size": 5000, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16, "pad_token_id": 0}
    assert machine.largest(GPT2ForSequenceClassification(GPT2Config(**shape))) == 32 * 128
    assert machine.largest(lm(vocab=5000)) >= 5000 * 16


def test_others_that_compute_are_counted():
    with computing(3):
        assert any(machine.others() >= 2 for _ in range(100))


@pytest.mark.parametrize(("others", "threads", "sentence"), [(0, 2, None), (1, 1, None), (9, 2, "9 other processes")])
def test_a_busy_machine_is_noticed(others, threads, sentence, monkeypatch):
    monkeypatch.setattr(machine, "others", lambda: others)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {0, 1})
    torch.set_num_threads(threads)
    found = machine.crowded()
    assert found is None if sentence is None else sentence in found and "2 cores" in found


@cases((0, 0, {}, 1), (0, 1 << 26, {}, 0), (1e18, 0, {}, 0), (0, 0, {"threads": 2}, 0))
def test_a_run_says_so_where_it_would_wait(worth, most, given, tells, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    for where, name, value in ((machine, "WORTH", worth), (twins, "MOST", most), (twins, "LEAST", 0)):
        monkeypatch.setattr(where, name, value)
    monkeypatch.setattr(machine, "crowded", lambda: "threads would wait")
    options = {"tokenizer": letters(), "steps": 1, "batch": 2, "max_tokens": 1, "epochs": 1, "probes": 0}
    train(lm(vocab=40), ["ab"], "letters:a", out=tmp_path / "run", **options, **given)
    said = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8")
    assert said.count("wait; --threads 1") == tells and "many times faster" not in said
    train(lm(vocab=40), ["ab"], "letters:a", out=tmp_path / "slow", **options, **{"model.precision": "bfloat16"})
    assert "many times faster" in (tmp_path / "slow" / "log.txt").read_text(encoding="utf-8")


def test_halves_have_as_many_tokens():
    """Of 1, 9, 11 and 19: by the longest row of each group in turn, the halves would have 10 and 30."""
    assert twins.dealt([[0], [1], [2, 3], [4]], [1, 9, 4, 7, 19]) == [[[0], [4]], [[1], [2, 3]]]
