"""The content of light checkpoints, and checkpoints of the first schema."""

from pathlib import Path

import pytest
import torch
from cases import cases
from disks import quiet
from rigs import alike, state_of
from safetensors import safe_open
from toys import lm
from transformers import GPT2Config, GPT2LMHeadModel

from operant.data.order import Order
from operant.storage.checkpoint import about, newest_whole
from operant.training.learner import Learner

FIXTURE = Path(__file__).parent / "checkpoints" / "schema-1"
SMALL = {"optimizer.lr": 1e-2, "max_tokens": 4, "fixed_length": True, "minibatch": 8, "learner.seed": 3}


def step(learner):
    replies = learner.generate([[1, 2, 3], [4, 5], [6], [8, 9, 10, 11]] * 2)
    return learner.step(replies, [r.ids.count(7) / len(r.ids) for r in replies])


def inside(path):
    with safe_open(path / "tensors.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def weights(learner):
    return {name: p.detach().clone() for name, p in learner.policy.named_parameters()}


def trained(*, steps=1, **options):
    learner = Learner(lm("gpt2", 12), **SMALL | options)
    for _ in range(steps):
        step(learner)
    return learner


# --- what it holds ----------------------------------------------------------------------------------------------------
def test_light_of_a_whole_model_is_its_weights_and_its_head_once(tmp_path):
    learner = trained()
    state = state_of(learner)
    light, resume = (state.save(tmp_path, 1, kind=kind) for kind in ("light", "resume"))
    held = inside(light.path)
    assert {name.removeprefix("policy.") for name in held} == set(weights(learner))  # tied weights have one name
    size = sum(p.numel() * p.element_size() for p in learner.policy.parameters())
    assert size < light.bytes < size + 20_000
    assert any("optimizer" in name for name in inside(resume.path)) and resume.bytes > 2.9 * size


def test_light_of_a_trunk_is_the_layers_that_are_trained_and_the_head(tmp_path):
    learner = trained(**{"model.train_layers": 1})
    moved = {name for name, p in learner.policy.named_parameters() if p.requires_grad}
    path = state_of(learner).save(tmp_path, 1, kind="light").path
    held = {name.removeprefix("policy.trained.") for name in inside(path)}
    assert held == moved and "value_head.net.0.weight" in held
    assert not any(".h.0." in name or "wte" in name for name in held) and any(".h.1." in name for name in held)


def test_light_of_an_adapter_is_the_adapter_and_the_head(tmp_path):
    pytest.importorskip("peft")
    held = inside(state_of(trained(**{"lora.rank": 2})).save(tmp_path, 1, kind="light").path)
    assert all(".lora_" in name or "value_head" in name for name in held) and any("value_head" in name for name in held)


def test_light_of_a_separate_critic_holds_it(tmp_path):
    held = inside(state_of(trained(**{"value.critic": "copy"})).save(tmp_path, 1, kind="light").path)
    for part in ("model", "value_head"):
        assert any(name.startswith(f"policy.critic.{part}") for name in held)


# --- going on from one ------------------------------------------------------------------------------------------------
@cases({"model.train_layers": 1}, {"model.precision": "bfloat16"})
def test_weights_of_a_light_one_are_what_the_next_step_begins_from(options, tmp_path):
    """For bfloat16 weights the optimizer has float32 masters, which must not restore the old weights."""
    learner = trained(steps=2, **options)
    path, other = state_of(learner).save(tmp_path, 2, kind="light").path, trained(steps=0, **options)
    assert not alike(weights(other), weights(learner))
    state_of(other).load(path, quiet, fresh_optimizer=True)
    assert alike(weights(other), weights(learner))
    for group in other.optimizer.param_groups:
        group["lr"] = 0.0
    for p in other.policy.trainable():
        p.grad = torch.zeros_like(p)
    other.optimizer.step()
    assert alike(weights(other), weights(learner))


# --- the first schema -------------------------------------------------------------------------------------------------
def test_a_checkpoint_of_the_first_schema_can_be_resumed():
    """Written before the second schema, after two steps; the third step of that version had a mean of 0.15625."""
    torch.manual_seed(0)
    shape = {"vocab_size": 12, "n_positions": 16, "n_embd": 4, "n_layer": 1, "n_head": 1, "initializer_range": 0.2}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=1, eos_token_id=2, pad_token_id=0)).eval()
    learner, order = Learner(model, **SMALL), Order(8, 3)
    state = state_of(learner)
    state.register("tasks", order)
    heard = []
    path = newest_whole(FIXTURE, heard.append)
    assert path is not None and heard == []
    assert about(path)["kind"] == "resume" and about(path)["lengths"] == {} and about(path)["made_by"]["threads"] == 1
    number, extra = state.load(path, quiet)
    assert number == 2 and extra["best"] == {"metric": "reward/mean", "value": 0.25, "step": 1}
    assert (learner.progress.step, order.position) == (2, 8)
    with safe_open(path / "tensors.safetensors", "pt") as file:
        for name, weight in learner.policy.state_dict().items():
            if name not in ("model.lm_head.weight", "head.weight"):  # tied to the embedding
                assert torch.equal(file.get_tensor(f"policy.{name}"), weight), name
        first = learner.optimizer.state_dict()["state"][0]["exp_avg"]
        assert torch.equal(file.get_tensor("optimizer.state.0.exp_avg"), first)
    metrics = step(learner)
    assert metrics["step"] == 3 and metrics["reward/mean"] == pytest.approx(0.15625)
    assert metrics["kl/per_reply"] == pytest.approx(0.15347, abs=1e-4)
