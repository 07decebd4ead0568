"""The estimated memory of a run is the memory that real tensors take."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from cases import cases
from plans import SMALL, four_layers
from toys import letters, lm
from transformers import BartConfig, MegatronBertConfig

from operant import Learner, OperantError, machine
from operant.runs.config import configure
from operant.tools.cli import main
from operant.tools.cli.doctor import EXTRAS
from operant.tools.memory_plan import plan
from operant.tools.memory_plan.fake_tensors import Memory, fake_tensors


@pytest.fixture
def folder(tmp_path):
    four_layers().config.save_pretrained(tmp_path)
    letters().save_pretrained(tmp_path)
    return tmp_path


def planned(policy, **options):
    return plan(configure({"policy": str(policy), **SMALL, **options}))


@cases(
    {"model.train_layers": 2},
    {"model.train_layers": 1, "model.train_head": False, "optimizer.kind": "rmsprop"},
    {"optimizer.kind": "sgd", "optimizer.momentum": 0.9, "model.precision": "bfloat16", "keep_gradients": True},
    {"lora.rank": 4},
    ids=["trunk", "top", "whole", "adapter"],
)
def test_permanent_memory_is_that_of_a_real_learner(options, folder):
    if "lora.rank" in options:
        pytest.importorskip("peft")
    learner = Learner(four_layers(), max_tokens=6, device="cpu", watch_every=0, **options)
    learner.step(learner.generate([[3, 4, 5, 6]] * 4), [0.0, 1.0, 2.0, 3.0])
    mine = {p.data_ptr(): p for p in learner.policy.parameters()}
    theirs = {p.data_ptr(): p for p in learner.reference.policy.parameters() if p.data_ptr() not in mine}
    states = {t.data_ptr(): t for s in learner.optimizer.state.values() for t in s.values() if t.ndim}
    masters = [t for _, master in learner.optimizer.pairs for t in (master, master.grad)]
    tensors_of = {"weights": mine.values(), "reference": theirs.values(), "optimizer": [*states.values(), *masters]}
    tensors_of["kept gradients"] = [p.grad for p in mine.values() if p.grad is not None]
    estimated = planned(folder, device="cpu", **options).permanent
    for name, tensors in tensors_of.items():
        size = sum(t.numel() * t.element_size() for t in tensors)
        assert estimated.get(name, 0.0) == pytest.approx(size, rel=0.02, abs=200), name


@pytest.mark.parametrize("by", ["copy", "policy"])
def test_a_mask_policy_is_planned_as_it_is_kept(folder, by):
    options = {"algorithm": "nlpo", "mask.by": by, "top_p_least": 2, "model.train_layers": 2}
    learner = Learner(four_layers(), max_tokens=6, device="cpu", watch_every=0, **options)
    shared = {p.data_ptr() for p in learner.policy.parameters()}
    kept = {p.data_ptr(): p for copy in learner.copies.values() for p in copy.policy.parameters()}
    size = sum(p.numel() * p.element_size() for place, p in kept.items() if place not in shared)
    assert (size > 0) is (by == "copy")
    estimated = planned(folder, device="cpu", **options).permanent
    assert estimated.get("other copies", 0.0) == pytest.approx(size, rel=0.02, abs=200)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_fake_tensors_count_as_much_as_real_ones(kind):
    """Forward and backward pass of the same model, counted in the same way with fake and with real tensors."""

    def most(memory: Memory) -> int:
        model, ids = lm(kind), torch.zeros(3, 7, dtype=torch.long)
        extra = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        before = memory.peak().now
        model(input_ids=ids, use_cache=False, **extra).logits.float().logsumexp(-1).sum().backward()
        return memory.most - before

    with fake_tensors() as memory:
        counted = most(memory)
    with Memory() as memory:
        assert counted == pytest.approx(most(memory), rel=0.02) and counted > 10_000


@cases(
    (MegatronBertConfig, {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}),
    (BartConfig, {"decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}),
)
def test_a_causal_model_with_a_cache_of_two_sides_is_planned(config, shape, tmp_path):
    known = {"hidden_size": 16, "vocab_size": 64, "is_decoder": True, "is_encoder_decoder": False}
    known["architectures"] = [config.__name__.replace("Config", "ForCausalLM")]
    config(**shape, **known).save_pretrained(tmp_path)
    letters().save_pretrained(tmp_path)
    keys_and_values = 2 * 2 * 16  # of two layers, for each of 4 + 6 tokens of 8 replies, in 4 bytes
    assert planned(tmp_path, device="cpu").phases["generation and scoring"]["cache"] == 8 * 10 * keys_and_values * 4


def test_memory_is_counted_once_and_until_it_is_freed():
    with Memory() as memory:
        a = torch.empty(1000, dtype=torch.float32)
        b = a.view(10, 100)[2:].t()
        assert memory.now == 4000
        b.add_(1)
        assert memory.now == 4000
        del a
        assert memory.now == 4000  # a view still refers to it
        del b
        assert memory.now == 0 and memory.most == 4000 and memory.peak().most == 0


def test_activations_grow_with_the_tokens_that_are_computed_at_once(folder):
    more = {"batch": 64, "minibatch": 64}
    few = planned(folder, **more, micro_tokens=10 * 10).phases["update"]["activations"]
    many = planned(folder, **more, micro_tokens=10 * 40).phases["update"]["activations"]
    checkpointed = planned(folder, **more, micro_tokens=10 * 40, **{"model.gradient_checkpointing": True})
    assert 3 < many / few < 4.2 and checkpointed.phases["update"]["activations"] < 0.75 * many
    decoded = planned(folder, **more, engine="native", **{"engine.batch": 16}).phases["generation and scoring"]["cache"]
    assert decoded == planned(folder, batch=16).phases["generation and scoring"]["cache"]


def test_a_run_that_does_not_fit_gets_a_remedy(folder, monkeypatch, capsys):
    recipe, tasks = folder / "mine.yaml", folder / "tasks.txt"
    tasks.write_text("abc\nde\n", encoding="utf-8")
    recipe.write_text(f"policy: {folder}\ntasks: {tasks}\nreward: letters:a\ndevice: cpu\n", encoding="utf-8")
    assert main(["doctor", "--plan", str(recipe)]) == 0
    printed = capsys.readouterr().out
    assert "prompts of up to 3 tokens, replies of 32" in printed
    assert "at the peak" in printed and "not fit" not in printed
    for alone in (["--states", "8bit"], ["--optimizer.kind", "muon"], ["--algorithm", "trpo"]):  # no rank could divide
        assert main(["doctor", "--plan", str(recipe), *alone, "--parallel", "fsdp"]) == 2
    monkeypatch.setattr(machine, "size_gb", lambda: 0.101)
    assert main(["doctor", "--plan", str(recipe), "--batch", "64"]) == 1
    assert "this does not fit: compute fewer tokens at once: --update.micro-tokens" in capsys.readouterr().out


def test_the_extras_are_those_of_the_project():
    with (Path(__file__).parents[1] / "pyproject.toml").open("rb") as file:
        assert {*EXTRAS} == {*tomllib.load(file)["project"]["optional-dependencies"]} - {"dev", "trackers"}


def test_errors_are_those_of_a_run(folder, tmp_path):
    with pytest.raises(OperantError, match="no such folder"):
        planned(tmp_path / "none")
    with pytest.raises(OperantError, match="nothing would be left"):
        planned(folder, **{"model.train_layers": 4})


@pytest.mark.slow
@cases(
    ("memory_plan", ["--only", "demo;sft"], [1, 1]),
    ("rank_memory", ["--only", "30M, full", "--ranks", "2", "--kinds", "ddp"], [2]),  # over gloo; DDP divides nothing
)
def test_the_plan_is_within_a_fifth_of_what_the_kernel_shows(benchmark, words, processes, tmp_path):
    """The benchmark plans and runs commands in processes of their own, and reads the peak of each from the kernel."""
    results = tmp_path / "results.json"
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", *words, "--results", str(results)]
    subprocess.run(command, cwd=Path(__file__).parents[1], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    rows = json.loads(results.read_text(encoding="utf-8"))["rows"]
    measured = [len(row["measured_gb"]) if benchmark == "rank_memory" else 1 for row in rows.values()]
    assert all(abs(row["error"]) <= 0.2 for row in rows.values()) and measured == processes, rows
