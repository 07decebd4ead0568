"""How many threads compute: by sizes alone, so that equal runs have equal bits."""

import subprocess
import sys

import pytest
import torch
from toys import letters, lm
from transformers import GPT2Config, GPT2ForSequenceClassification

from operant import Learner, machine, train
from operant.types import OperantError


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


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


def test_a_large_batch_of_a_large_model_computes_with_all(seen):
    """Rows of 2 and 24 tokens: 256 of them are 6,656 tokens, times 65,536 numbers of the largest matrix. Decoding has
    256 rows at a time, which is little."""
    model = wide(128)
    assert machine.largest(model) == 4 * 128 * 128
    learner = Learner(model, max_tokens=24, fixed_length=True, epochs=1, watch_every=0)
    replies = learner.generate([[3, 4]] * 256)
    assert set(seen) == {1, 2}
    seen.clear()
    learner.step(replies, [float(r.ids[0]) for r in replies])
    assert not seen


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


BUSY = "while True: pass"


def test_others_that_compute_are_counted():
    before = machine.others()
    running = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(3)]
    try:
        assert any(machine.others() >= 2 for _ in range(20))
        assert "compute" in (machine.crowded() or "compute")
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert before >= 0


@pytest.mark.parametrize(("others", "threads", "sentence"), [(0, 2, None), (1, 1, None), (9, 2, "9 other processes")])
def test_a_busy_machine_is_noticed(others, threads, sentence, monkeypatch):
    monkeypatch.setattr(machine, "others", lambda: others)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: {0, 1})
    torch.set_num_threads(threads)
    found = machine.crowded()
    assert found is None if sentence is None else sentence in found and "2 cores" in found


TOLD = [(0.0, {}, True), (1e18, {}, False), (0.0, {"threads": 2}, False)]


@pytest.mark.parametrize(("worth", "given", "tells"), TOLD)
def test_a_run_says_so_where_it_would_wait(worth, given, tells, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "WORTH", worth)
    monkeypatch.setattr(machine, "crowded", lambda: "9 other processes compute")
    tokenizer, log = letters(), tmp_path / "run/log.txt"
    options = {"tokenizer": tokenizer, "steps": 1, "batch": 4, "max_tokens": 2, "probes": 0, "out": log.parent}
    train(lm(vocab=len(tokenizer)), ["ab"], "letters:a", **options, **given)
    assert ("--threads 1" in (log.read_text(encoding="utf-8") if log.exists() else "")) == tells
