"""Loading and exporting policies with their critic; folders that are refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from toys import letters, lm
from transformers import AutoModelForCausalLM, AutoTokenizer, T5Config, T5ForConditionalGeneration

from operant import Learner, OperantError, ValueOptions, export, load_policy
from operant.models.adapters import SoftPromptOptions
from operant.models.reference import fingerprint
from operant.models.safe_loading import load_tokenizer
from operant.models.value_head import ValueHead

REPLIES = ([[3, 4, 5], [6, 7]], [[8, 9, 10], [11, 12, 13, 14]], [1.0, -1.0])


def trained(**value):
    """A learner that took one step, so that its value head is not zero."""
    learner = Learner(lm("gpt2", vocab=40), tokenizer=letters(), **{"optimizer.lr": 1e-2}, value=value)
    learner.step(*REPLIES)
    return learner.policy


@pytest.mark.parametrize("value", [{}, {"layers": 2, "init": "torch"}, {"critic": "copy", "init": "normal"}])
def test_the_critic_is_saved_beside_a_plain_folder(value, tmp_path):
    policy = trained(**value)
    export(policy, tmp_path / "out")
    bare, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), torch.tensor([[3, 4, 5, 8]])
    torch.testing.assert_close(bare(ids).logits, policy.model(ids).logits)  # of a fused activation
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == letters().get_vocab()
    again = load_policy(str(tmp_path / "out"), value=ValueOptions())
    assert (again.critic is None) == ("critic" not in value)
    for name, weight in policy.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    export(load_policy(str(tmp_path / "out")), tmp_path / "out")
    assert not (tmp_path / "out/critic").exists()
    with pytest.raises(OperantError, match="out holds a model: choose another folder for the soft prompt"):
        export(load_policy(lm(), soft=SoftPromptOptions(2)), tmp_path / "out")


def test_missing_weights_of_the_critic_are_an_error(tmp_path):
    export(trained(), tmp_path / "out")
    with pytest.warns(UserWarning, match=r"value.layers=2 has no effect: .* delete it to train"):
        load_policy(str(tmp_path / "out"), value=ValueOptions(layers=2))
    path = tmp_path / "out/critic/head.safetensors"
    save_file({k: v for k, v in load_file(path).items() if not k.endswith("bias")}, path)
    with pytest.raises(OperantError, match="bias"):
        load_policy(str(tmp_path / "out"), value=ValueOptions())
    path.unlink()
    with pytest.raises(OperantError, match="is missing"):
        load_policy(str(tmp_path / "out"), value=ValueOptions())


def test_a_model_without_its_head_is_an_error(tmp_path):
    lm("llama", vocab=20, tie_word_embeddings=False).save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    held.pop("lm_head.weight")
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OperantError, match=r"lacks weights.*lm_head"):
        load_policy(str(tmp_path))


def test_bfloat16_on_disk_is_trained_from_float32(tmp_path):
    lm("gpt2").to(torch.bfloat16).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["dtype"] == "bfloat16"
    assert {p.dtype for p in load_policy(str(tmp_path)).parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_value_head_starts_at_zero_and_the_reference_stays(kind):
    learner = Learner(lm(kind), **{"optimizer.lr": 1e-2, "kl.coef": 0.1})
    before, first = learner.reference.fingerprint, learner.step(*REPLIES)
    assert first["value/mean"] == 0.0 and abs(first["kl/per_reply"]) < 1e-5
    # Replies from elsewhere: the estimate may have either sign, but the policy has moved and the reference has not.
    assert abs(learner.step(*REPLIES)["kl/per_reply"]) > 1e-3
    assert before == fingerprint(learner.reference.policy) != fingerprint(learner.policy)
    other = Learner(learner.policy.model, reference=learner.policy)
    assert fingerprint(other.reference.policy) == fingerprint(learner.policy), "a copy"


def test_an_object_that_is_a_reference_can_be_trained():
    """Of a learner whose policy is another one's reference, and afterwards as a policy of its own."""
    first = Learner(lm(), **{"optimizer.lr": 1e-2})
    second = Learner(lm(seed=1), reference=first.policy)
    before = fingerprint(first.policy), second.reference.fingerprint
    assert before[0] == before[1] and first.step(*REPLIES)["update/grad_norm"] > 0
    assert fingerprint(first.policy) != before[0] == fingerprint(second.reference.policy)
    frozen = lm(seed=2).requires_grad_(False)
    assert Learner(lm(), reference=frozen).reference.policy.model is frozen, "costs no memory"
    with pytest.warns(UserWarning, match="tensors of the model are frozen"):
        Learner(frozen)


@pytest.mark.parametrize("detach", [True, False])
def test_a_detached_value_head_sends_no_gradient_to_the_model(detach):
    states = torch.randn(3, 8, requires_grad=True)
    head = ValueHead(8, ValueOptions(init="normal", detach=detach))
    head(states).sum().backward()
    assert (states.grad is None) == detach and float(head.net[0].weight.grad.abs().sum()) > 0


def test_a_folder_without_a_tokenizer_has_none(tmp_path):
    """transformers makes one of 104 special tokens for a T5 of any vocabulary, from its config alone."""
    size = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    T5ForConditionalGeneration(T5Config(vocab_size=29, **size)).save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path) is None
