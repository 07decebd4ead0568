"""Adapters: their initial values, the frozen weights, the reference, saving and export."""

import json
import shutil
import sys

import pytest
import torch
from cases import cases
from page_commands import snippets
from rigs import alike, scores, state_of
from safetensors.torch import load_file, save_file
from toys import letters, lm, on_disk
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, MixtralConfig, MixtralForCausalLM

import operant
from operant import Batch, Learner, OperantError, Policy, ValueOptions, export, load_policy
from operant.models import lora as adapters
from operant.models.adapters import LoraOptions, adapted, is_adapter
from operant.models.options import ModelOptions
from operant.models.reference import digest, fingerprint

REPLIES = ([[3, 4, 5], [6, 7]], [[8, 9, 10], [11, 12, 13, 14]], [1.0, -1.0])
FAST = {"optimizer.lr": 3e-2}
LORA = FAST | {"lora.rank": 4}


def base_of(model):
    """Copies of the weights without the adapter's, under their names in a model without an adapter."""
    return {n.replace(".base_layer", ""): p.detach().clone() for n, p in model.named_parameters() if ".lora_" not in n}


def shaken(model, rank=4, **more):
    """The model with an adapter that is far from 0."""
    adapters.adapt(model, LoraOptions(rank=rank, **more))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.2)
    return model


@pytest.fixture
def folders(tmp_path):
    """The folder of a model, and the folder of a trained adapter for it."""
    base, model = on_disk(tmp_path / "base", lm("gpt2", vocab=40)), shaken(lm("gpt2", vocab=40))
    model.peft_config["default"].base_model_name_or_path = base
    model.peft_config["default"].lora_dropout = 0.1
    adapters.save(model, tmp_path / "adapter")
    return base, str(tmp_path / "adapter")


def test_experts_with_one_adapter_around_another_merge_to_what_they_compute():
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 40, "pad_token_id": 0}
    model = shaken(MixtralForCausalLM(MixtralConfig(**shape)).eval())
    assert any("experts" in name for name, _ in model.named_parameters() if ".lora_" in name)
    ids, before = torch.tensor([[3, 4, 5, 6]]), base_of(model)
    merged = adapters.merged(model)
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, model(ids).logits, atol=1e-5)
    assert {*merged.state_dict()} == {*before} and alike(base_of(model), before)


# --- what starts, and what stays --------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5"])
def test_a_new_adapter_starts_at_nothing_and_alone_is_trained(kind):
    plain, learner = Policy(lm(kind, vocab=40)), Learner(lm(kind, vocab=40), **LORA)
    policy, before = learner.policy, base_of(learner.policy.model)
    assert torch.equal(scores(plain), scores(policy))
    beside = {n for n, p in policy.named_parameters() if p.requires_grad and ".lora_" not in n}
    assert {n.split(".")[0] for n in beside} == {"value_head"} and learner.step(*REPLIES)["kl/per_reply"] == 0.0
    learner.step(*REPLIES)
    assert float((scores(policy) - scores(plain)).abs().max()) > 0.05
    assert alike(base_of(policy.model), before) and alike(before, base_of(plain.model))
    assert learner.reference.fingerprint == fingerprint(learner.reference.policy)


@pytest.mark.parametrize("rslora", [False, True])
def test_what_an_adapted_layer_computes(rslora):
    """The output equals the formula x W + s (x A') B'."""
    layer = next(m for m in shaken(lm("gpt2"), alpha=6.0, rslora=rslora).modules() if hasattr(m, "lora_A"))
    a, b, base = layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.base_layer
    x = torch.randn(3, a.shape[1])
    wanted = x @ base.weight + base.bias + (6.0 / (2 if rslora else 4)) * (x @ a.T) @ b.T
    assert torch.allclose(layer(x), wanted, atol=1e-5)


def test_its_random_numbers_are_those_of_the_seed():
    def drawn(seed, noise):
        torch.manual_seed(noise)
        learner = Learner(lm("gpt2"), **LORA, seed=seed)
        return digest({n: p for n, p in learner.policy.model.named_parameters() if "lora_A" in n})

    assert drawn(0, 1) == drawn(0, 2) != drawn(1, 1)


def test_a_trunk_or_recomputed_blocks_change_no_gradient():
    def gradients(**options):
        policy = Policy(shaken(lm("llama")), options=ModelOptions(**options))
        policy.forward(Batch.given([[3, 4, 5, 6]], [[9, 10, 11]])).logprobs.sum().backward()
        return {n: p.grad for n, p in policy.model.named_parameters() if p.requires_grad}

    whole, again = gradients(), gradients(gradient_checkpointing=True)
    cut = [gradients(train_layers=1, gradient_checkpointing=twice) for twice in (False, True)]
    assert set(cut[0]) == set(cut[1]) == {n for n in whole if "layers.1." in n} and set(again) == set(whole)
    assert all(torch.allclose(whole[n], other[n], atol=1e-6) for other in (*cut, again) for n in other)
    assert all(float(g.abs().sum()) > 0 for g in whole.values())


# --- tests 6, 12 and 13 of what breaks such libraries -----------------------------------------------------------------
def test_6_dropout_of_model_and_adapter_changes_no_ratio(folders):
    base, adapter = folders
    learner = Learner(base, **FAST | {"optimizer.lr": 0.0, "lora.adapter": adapter, "update.epochs": 2})
    dropouts = [m for m in learner.policy.model.modules() if isinstance(m, torch.nn.Dropout) and m.p == 0.1]
    assert len([n for n, _ in learner.policy.model.named_modules() if "lora_dropout.default" in n]) == 8
    assert len(dropouts) >= 8 + 5
    learner.policy.model.train()
    metrics = learner.step(learner.generate([[3, 4, 5], [6, 7]] * 4, max_new_tokens=6), [1.0, 0.0] * 4)
    assert metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-4) == metrics["policy/ratio_min"]
    assert metrics["policy/clip_fraction"] == 0 and metrics["rollout/logprob_gap"] < 1e-4
    assert not any(m.training for m in learner.policy.model.modules())


def test_12_the_reference_is_the_adapter_as_it_was(folders):
    base, adapter = folders
    learner = Learner(base, **FAST | {"lora.adapter": adapter, "kl.coef": 1.0})
    held = scores(learner.policy)
    without = load_policy(base)  # what an adapter switched off would compute
    assert float((held - scores(without)).abs().max()) > 0.3
    first = learner.step(learner.generate([[3, 4, 5], [6, 7]] * 4, max_new_tokens=6), [1.0, 0.0] * 4)
    assert abs(first["kl/per_reply"]) < 1e-5 > abs(first["kl/paid"])
    assert learner.step(*REPLIES)["kl/per_reply"] != 0.0 and torch.equal(scores(learner.reference.policy), held)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_13_a_thousand_syncs_leave_the_base_to_the_bit(precision):
    learner = Learner(lm("gpt2"), **LORA, **{"model.precision": precision})
    model, before = learner.policy.model, base_of(learner.policy.model)
    for cycle in range(1000):
        with torch.no_grad():
            learner.policy.trainable()[0].add_(1e-2)
        learner.engine.sync(learner.policy, cycle)
        if cycle % 20 == 0:
            adapters.merged(model)
            learner.generate([[3, 4]], max_new_tokens=2)
    assert alike(base_of(model), before)


# --- out and in again -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_an_export_is_plain_and_its_adapter_is_pefts(kind, tmp_path):
    from peft import PeftModel

    lm(kind, vocab=40).save_pretrained(tmp_path / "base")
    learner = Learner(str(tmp_path / "base"), **LORA)
    learner.step(*REPLIES)
    policy, before = learner.policy, base_of(learner.policy.model)
    export(policy, tmp_path / "out")
    assert alike(base_of(policy.model), before)
    auto = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    bare = auto.from_pretrained(tmp_path / "out")
    assert sorted(dict(bare.named_parameters())) == sorted(dict(lm(kind, vocab=40).named_parameters()))
    assert not alike(base_of(bare), before)
    beside = PeftModel.from_pretrained(auto.from_pretrained(tmp_path / "base"), str(tmp_path / "out/adapter"))
    ids = {"input_ids": torch.tensor([[3, 4, 5, 8]])}
    ids |= {"decoder_input_ids": torch.tensor([[0, 8, 9]])} if kind == "t5" else {}
    mine = policy.model(**ids).logits
    assert torch.allclose(bare(**ids).logits, mine, atol=1e-4)
    assert torch.allclose(beside.eval()(**ids).logits, mine, atol=1e-5)
    config = json.loads((tmp_path / "out/adapter/adapter_config.json").read_text(encoding="utf-8"))
    assert config["base_model_name_or_path"] == str(tmp_path / "base") and config["r"] == 4


def test_an_adapters_folder_goes_on_as_a_policy(tmp_path, folders):
    base, _ = folders
    learner = Learner(base, **LORA)
    learner.step(*REPLIES)
    export(learner.policy, tmp_path / "out")
    again = Learner(str(tmp_path / "out/adapter"), **FAST)
    assert torch.equal(scores(again.policy), scores(learner.policy)) and again.policy.tokenizer is not None
    for name, p in learner.policy.value_head.state_dict().items():  # the critic stands beside it
        assert torch.equal(p, again.policy.value_head.state_dict()[name])
    beside = load_policy(base, lora=LoraOptions(adapter=str(tmp_path / "out/adapter")))
    assert torch.equal(scores(beside), scores(learner.policy)) and again.step(*REPLIES)["kl/per_reply"] == 0.0
    merged = load_policy(str(tmp_path / "out"), value=ValueOptions())
    assert torch.allclose(scores(merged), scores(learner.policy), atol=1e-4) and not adapted(merged.model)


def test_a_model_of_pefts_own_is_taken_as_it_is():
    from peft import IA3Config, LoraConfig, get_peft_model

    small = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
    given = get_peft_model(lm("gpt2"), LoraConfig(r=2, **small))
    with pytest.raises(OperantError, match="PeftModel is a wrapper of peft's: load_policy"):
        Policy(given)
    learner = Learner(given, **FAST)
    before = base_of(learner.policy.model)
    learner.step(*REPLIES)
    trained = {n for n, p in learner.policy.model.named_parameters() if p.requires_grad}
    assert trained == {f"transformer.h.{i}.attn.c_attn.lora_{x}.default.weight" for i in range(2) for x in "AB"}
    assert alike(base_of(learner.policy.model), before)
    given.add_adapter("second", LoraConfig(r=2, **small))
    with pytest.raises(OperantError, match="adapters default, second: keep one"):
        Learner(given, **FAST)
    with pytest.raises(OperantError, match="of kind IA3"):
        Learner(get_peft_model(lm("gpt2"), IA3Config(feedforward_modules=[], **small)), **FAST)


def test_the_reference_and_a_copied_critic_cost_only_an_adapter(tmp_path, folders):
    """The critic trains an adapter of its own, which an export merges."""
    with pytest.warns(UserWarning, match="value.critic: no effect, the policy has a critic of its own"):
        Learner(Policy(lm("gpt2"), value=ValueOptions()), preset="rl4lms")
    learner = Learner(folders[0], **LORA, **{"value.critic": "copy", "model.gradient_checkpointing": True})
    policy, before = learner.policy, base_of(learner.policy.model)
    assert policy.critic.options == policy.options

    def places(policy):
        return {n: p.data_ptr() for n, p in policy.model.named_parameters()}

    own = places(policy)
    for other in (learner.reference.policy, policy.critic):
        assert {n for n, at in places(other).items() if at != own[n]} == {n for n in own if ".lora_" in n}
    learner.step(*REPLIES)
    assert alike(base_of(policy.model), before)
    critic = {n: p for n, p in policy.critic.model.named_parameters() if ".lora_" in n}
    assert any(not torch.equal(p, policy.model.get_parameter(n)) for n, p in critic.items())
    export(policy, tmp_path / "out")
    again = load_policy(str(tmp_path / "out"), value=ValueOptions())
    rows = Batch.given([[3, 4, 5, 6]], [[9, 10]])
    assert torch.allclose(again.values(rows), policy.values(rows), atol=1e-5)


# --- checkpoints ------------------------------------------------------------------------------------------------------
def test_a_checkpoint_of_other_frozen_weights_is_refused(tmp_path, folders):
    path = state_of(Learner(folders[0], **LORA, reference=None)).save(tmp_path / "checkpoints", 1).path
    for model, options, why in (
        (lm("gpt2", vocab=40, seed=1), LORA, "frozen weights have the hash"),
        (folders[0], FAST, "trains other weights"),
        (folders[0], LORA | {"lora.targets": "c_attn"}, "trains other weights"),
    ):
        with pytest.raises(OperantError, match=why):
            state_of(Learner(model, **options, reference=None)).load(path)


def test_writing_into_the_base_is_noticed_at_the_next_save(tmp_path, folders):
    """A checkpoint holds the trained weights and Adam's two moments of them; test_saved_learner.py resumes from one."""
    learner = Learner(folders[0], **LORA)
    state = state_of(learner)
    learner.step(*REPLIES)
    path = state.save(tmp_path / "checkpoints", 1).path
    trained = sum(p.numel() * 4 for p in learner.policy.trainable())
    assert (path / "tensors.safetensors").stat().st_size < 3 * trained + 20_000
    with torch.no_grad():
        learner.policy.model.transformer.h[0].mlp.c_fc.base_layer.weight[0, 0] += 1e-6
    with pytest.raises(OperantError, match="frozen weights have changed"):
        state.save(tmp_path / "checkpoints", 2)


# --- what is refused --------------------------------------------------------------------------------------------------
def test_a_missing_package_is_named(monkeypatch, folders):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(OperantError, match=r"pip install 'operant\[lora\]'"):
        Learner(folders[0], **LORA)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for bits, device, why in (("4bit", "cuda", r"'operant\[quantise\]'"), ("8bit", "cpu", "needs a GPU, this is cpu")):
        with pytest.raises(OperantError, match=why):
            adapters.check(LoraOptions(quantise=bits), torch.device(device))
    monkeypatch.setattr(adapters, "check", lambda *arguments: None)
    with pytest.raises(OperantError, match=r"are not trained; set lora.rank"):
        load_policy(folders[0], lora=LoraOptions(quantise="4bit"))


@cases(
    (LORA | {"lora.targets": "q_projj"}, None, "its linear layers are c_attn, c_fc, c_proj"),
    (LORA | {"lora.targets": "c_attn,lm_head"}, None, "output head"),
    (LORA | {"lora.targets": "wte"}, None, "the adapter changes the"),
    (LORA | {"lora.targets": "c_attn,nothing"}, None, "lora.targets: no layer here is called nothing"),
    (LORA, lambda: Policy(lm("gpt2"), value=ValueOptions()), "an existing Policy"),
    ({"model.train_layers": 1}, lambda: Policy(lm("gpt2"), value=ValueOptions()), "an existing Policy"),
    ({"tokenizer": letters()}, lambda: Policy(lm("gpt2"), value=ValueOptions()), "tokenizer with an existing Policy"),
    ({"algorithm": "grpo"}, lambda: lm("gpt2").requires_grad_(False), "none of its weights is trained"),
    (LORA, lambda: shaken(lm("gpt2")), "already has an adapter"),
)
def test_what_cannot_be_adapted_is_refused(options, make, message, folders):
    with pytest.raises(OperantError, match=message):
        Learner(make() if make else folders[0], **options)


@cases(
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"lora_bias": True}, "lora_bias"),
    ({"bias": "all"}, "bias=all"),
    ({"init_lora_weights": "pissa"}, "changes the base weights"),
    ({"peft_type": "IA3"}, "IA3 adapter"),
    ({"r": 8}, "does not fit this GPT2LMHeadModel"),
    ({"target_modules": ["c_attn"]}, "does not fit this GPT2LMHeadModel"),
    ids=str,
)
def test_an_adapter_of_another_kind_is_refused(fields, message, folders, tmp_path):
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8")
    with pytest.raises(OperantError, match=message):
        Learner(folders[0], **{"lora.adapter": folders[1]})


def test_a_damaged_or_foreign_adapter_is_refused(folders, tmp_path):
    base, adapter = folders

    def refused(message, model=base, **options):
        with pytest.raises(OperantError, match=message):
            Learner(model, **options)

    refused("is itself an adapter", adapter, **LORA)
    refused("does not fit this LlamaForCausalLM", lm("llama", vocab=40), **{"lora.adapter": adapter})
    path = tmp_path / "adapter/adapter_model.safetensors"
    save_file({k: v for k, v in list(load_file(path).items())[1:]}, path)
    refused("does not fit", **{"lora.adapter": adapter})
    path.unlink()
    refused("has no adapter_model", **{"lora.adapter": adapter})
    shutil.rmtree(base)
    refused(r"is an adapter of .*give the model, and lora.adapter=", adapter)


def test_an_adapter_is_transplanted_onto_plain_weights():
    model = shaken(lm("gpt2"))
    other = adapters.transplant(model, lm("gpt2"))
    assert alike(adapters.tensors(model), adapters.tensors(other)) and alike(base_of(other), base_of(model))


# --- the page ---------------------------------------------------------------------------------------------------------
def test_the_snippets_of_the_page_run(tmp_path, monkeypatch, folders):
    monkeypatch.chdir(tmp_path)
    space = {"operant": operant, "model_name": folders[0], "judge": lambda text: float(text.count("e"))}
    for snippet in snippets("docs/adapters.md#adapters-lora"):
        exec(snippet, space)
    policies = [space[name].policy for name in ("learner", "same", "also", "anew")]
    for policy in policies[1:]:
        assert torch.allclose(scores(policy), scores(policies[0]), atol=1e-4)
    assert policies[3].model.peft_config["default"].r == 4
    assert is_adapter(tmp_path / "out/adapter") and not is_adapter(tmp_path / "out")
