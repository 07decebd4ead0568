"""Muon: held to torch's own two optimizers, which matrices it takes, and what it refuses."""

from copy import deepcopy

import pytest
import torch
from cases import cases
from torch import nn
from toys import lm

from operant import Learner, OperantError
from operant.training.muon import Muon, hidden_matrices
from operant.training.optimizer import OptimizerOptions

QUERIES, REPLIES, SCORES = [[3, 4], [5]], [[6, 7, 8], [9, 10]], [1.0, -1.0]
OPTIONS = {"optimizer.kind": "muon", "optimizer.lr": 1e-2, "optimizer.max_grad_norm": None}
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
GPT2 = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
LLAMA = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
LLAMA += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@cases(
    ("gpt2", {}, [f"h.{i}.{name}" for i in range(2) for name in GPT2]),
    ("llama", {"tie_word_embeddings": False}, [f"layers.{i}.{name}" for i in range(2) for name in LLAMA]),
)
def test_a_step_is_that_of_torchs_two_optimizers(kind, more, names):
    """Without embeddings, an output head (tied or not), norms and the value head, which AdamW moves."""
    once = {"update.epochs": 1, "optimizer.weight_decay": 0.1}
    learner = Learner(lm(kind, **more), keep_gradients=True, **OPTIONS, **once)
    before = deepcopy(learner.policy)
    learner.step(QUERIES, REPLIES, SCORES)
    rest, vectors, hidden = [], [], []
    for (name, p), moved in zip(before.named_parameters(), learner.policy.parameters(), strict=True):
        p.grad = moved.grad
        inner = name.endswith(".weight") and any(name.endswith(f"{inside}.weight") for inside in names)
        (hidden if inner else rest if p.ndim > 1 else vectors).append(p)
    assert len(hidden) == len(names)
    torch.optim.Muon(hidden, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw").step()
    torch.optim.AdamW([{"params": rest}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2, weight_decay=0.1).step()
    for p, moved in zip(before.parameters(), learner.policy.parameters(), strict=True):
        torch.testing.assert_close(moved, p, rtol=1e-5, atol=1e-7)


@cases(("t5", {}, 2 * 6 + 2 * 10), ("gpt2", {"lora.rank": 2}, 2 * 4 * 2), ("gpt2", {"model.train_layers": 1}, 4))
def test_which_matrices_are_hidden(kind, options, count):
    hidden = hidden_matrices(Learner(lm(kind), **OPTIONS, **options).policy)
    assert len(hidden) == count and all(p.ndim == 2 and p.requires_grad for p in hidden)


def test_a_loaded_state_is_where_the_weights_are():
    """As torch's fused AdamW has it; its kernel on a GPU takes no number of steps from the CPU."""
    net, there = nn.Linear(4, 4), nn.Linear(4, 4, device="meta")
    for kind in (
        lambda module: Muon([{"params": [*module.parameters()]}], module, weight_decay=0.0, **SETTINGS),
        lambda module: torch.optim.AdamW(module.parameters(), fused=True, **SETTINGS),
    ):
        made, other = kind(net), kind(there)
        net(torch.ones(1, 4)).sum().backward()
        made.step()
        other.load_state_dict(made.state_dict())
        assert {x.device.type for state in other.state.values() for x in state.values()} == {"meta"}


def test_what_its_state_takes_is_what_the_plan_says():
    learner = Learner(lm("gpt2"), **OPTIONS, **{"model.precision": "bfloat16"})
    learner.step(QUERIES, REPLIES, SCORES)
    assert isinstance(learner.optimizer, Muon)
    moments = [x for state in learner.optimizer.state.values() for x in state.values() if x.ndim]
    masters = [x for pair in learner.optimizer.pairs for x in (pair[1], pair[1].grad)]
    assert OptimizerOptions(kind="muon").state_bytes(learner.policy) == sum(x.nbytes for x in (*moments, *masters))


@cases(
    ({"algorithm": "trpo"}, "no matrix of a hidden layer is trained"),  # but a value head
    ({"optimizer.momentum": 0.9}, "momentum=0.9 with kind=muon"),
    ({"optimizer.states": "8bit"}, "states=8bit with kind=muon"),
)
def test_what_it_refuses(options, sentence, monkeypatch):
    with pytest.raises(OperantError, match=sentence):
        Learner(lm("gpt2"), **OPTIONS, **options)
    monkeypatch.delattr(torch.optim, "Muon")  # of an older torch
    with pytest.raises(OperantError, match=r"needs torch 2\.9"):
        Learner(lm("gpt2"), **OPTIONS)
