"""A frozen trunk: for every architecture, starting from cached states equals the whole model, forward and backward."""

import pytest
import torch
import transformers as t
from cases import cases, slow, slow_but
from toys import lm

from operant import Batch, OperantError, Policy, ValueOptions
from operant.models.options import ModelOptions

S = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "initializer_range": 0.2}
KV = S | {"intermediate_size": 48, "num_key_value_heads": 2}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 2, "initializer_range": 0.2}
OPT = {k: v for k, v in S.items() if k != "initializer_range"} | {"ffn_dim": 48, "word_embed_proj_dim": 32}
_HALF = {"layers": 4, "attention_heads": 2, "ffn_dim": 48}
BART = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in _HALF.items()}
BART |= {"vocab_size": 64, "d_model": 32, "max_position_embeddings": 64}
MODELS = {
    "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(**GPT2)),
    "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**KV)),
    "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(tie_word_embeddings=True, **KV)),
    "gemma2": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(head_dim=16, **KV)),
    "opt": lambda: t.OPTForCausalLM(t.OPTConfig(**OPT)),
    "neox": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(intermediate_size=48, **S)),
    "bloom": lambda: t.BloomForCausalLM(t.BloomConfig(vocab_size=64, hidden_size=32, n_layer=4, n_head=2)),
    "t5": lambda: t.T5ForConditionalGeneration(
        t.T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=48, num_layers=4, num_heads=2, decoder_start_token_id=0)
    ),
    "bart": lambda: t.BartForConditionalGeneration(t.BartConfig(**BART)),
}
DAILY = ("gpt2", "gemma2", "opt", "bloom", "t5")


def policy(name: str, **options) -> Policy:
    torch.manual_seed(0)
    return Policy(MODELS[name]().double(), value=ValueOptions(init="normal"), options=ModelOptions(**options))


def batch() -> Batch:
    return Batch.given([[3, 4, 5], [6, 7, 8, 9, 10], [11]], [[1, 2, 3, 4], [5, 6], [7, 8, 9, 10, 11, 12]])


@cases(*slow_but(DAILY, MODELS))
def test_starting_from_cached_states_is_the_whole_model(name):
    """And neither blocks below, embeddings nor the head are trained."""
    made, rows = policy(name, train_layers=2), batch()
    cached = rows.with_(states=made.trunk_states(rows))
    results = []
    for shown in (rows, cached):
        made.zero_grad()
        out = made(shown)
        (out.logprobs.sum() + out.values.square().sum()).backward()
        results.append((out, {n: p.grad.clone() for n, p in made.named_parameters() if p.grad is not None}))
    (whole, slow), (part, fast) = results
    torch.testing.assert_close(part.logprobs, whole.logprobs, atol=1e-6, rtol=0)
    torch.testing.assert_close(part.values, whole.values, atol=1e-6, rtol=0)
    below = {id(p) for block in made.trunk.stack[:2] for p in block.parameters()}
    below |= {id(made.model.get_input_embeddings().weight), id(made.head.weight)}
    assert set(slow) == set(fast) and len(fast) > 10 and not below & {*map(id, made.trainable())}
    for n in slow:
        torch.testing.assert_close(fast[n], slow[n], atol=1e-6, rtol=1e-5)


def test_the_lower_blocks_do_not_run():
    made, rows = policy("llama", train_layers=1), batch()
    cached = rows.with_(states=made.trunk_states(rows))
    ran = []
    for i, block in enumerate(made.trunk.stack):
        block.register_forward_hook(lambda *_, i=i: ran.append(i))
    made(cached)
    assert ran == [3]


def test_auto_is_a_sixth_and_at_least_two():
    auto = ModelOptions(train_layers="auto")
    assert (auto.blocks(12), auto.blocks(36)) == (2, 6)
    with pytest.raises(OperantError, match="2 of 2 blocks"):
        auto.blocks(2)


def test_a_tied_head_cannot_be_trained_with_a_trunk():
    with pytest.raises(OperantError, match="also the input embedding"):
        policy("gpt2", train_layers=2, train_head=True)
    assert policy("llama", train_layers=2, train_head=True).head.weight.requires_grad


def test_a_model_whose_blocks_share_more_is_refused():
    class Leaky(t.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            first, last = self.model.layers[0], self.model.layers[3]
            first.register_forward_hook(lambda m, a, out: setattr(self, "aside", out))
            last.register_forward_pre_hook(lambda m, a: (a[0] + self.aside, *a[1:]))

    with pytest.raises(OperantError, match="cannot begin from cached states of the lower ones"):
        torch.manual_seed(0)
        Policy(Leaky(t.LlamaConfig(**KV)), options=ModelOptions(train_layers=2))


@cases(("gpt2", 2), ("t5", None), ("bart", 2), slow("opt", 2), slow("opt", None), slow("t5", 2))
def test_gradient_checkpointing_changes_no_gradient(name, trunk):
    """With a trunk, the first block that is computed again once more begins at the cached states."""
    results = []
    for on in (False, True):
        made, rows = policy(name, gradient_checkpointing=on, train_layers=trunk), batch()
        made(rows.with_(states=made.trunk_states(rows)) if trunk else rows).logprobs.sum().backward()
        results.append({n: p.grad.clone() for n, p in made.named_parameters() if p.grad is not None})
    assert set(results[0]) == set(results[1])
    for n in results[0]:
        torch.testing.assert_close(results[1][n], results[0][n], atol=1e-9, rtol=1e-7)


def test_blocks_are_no_lists_inside_of_blocks():
    """A block of T5 has a list of three layers: of two blocks, one is trained."""
    made = Policy(lm("t5"), options=ModelOptions(train_layers=1))
    trained = {name for name, p in made.named_parameters() if p.requires_grad}
    assert trained and all(name.startswith(("model.decoder.block.1.", "model.decoder.final")) for name in trained)
