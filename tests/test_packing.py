"""Packed rows: the same numbers and gradients as rows side by side, and no row attends to another."""

import inspect
import warnings
from functools import partial
from itertools import pairwise

import pytest
import torch
import transformers as t
from cases import cases
from gradients import batch_of, caught
from rigs import pushed_right
from torch.nn.functional import pad
from toys import SPECIAL, lm

from operant import Batch, OperantError, Policy, Sampling, ValueOptions, load_policy
from operant.models import capabilities, kernels
from operant.models.adapters import LoraOptions
from operant.models.options import ModelOptions
from operant.models.reference import PolicyCopy
from operant.training.scoring import forward_batch

WIDE = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4} | SPECIAL
GATED = WIDE | {"intermediate_size": 48, "num_key_value_heads": 2, "initializer_range": 0.3}
OPT = WIDE | {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3, "max_position_embeddings": 64}
MADE = {
    "gpt2": lambda: lm("gpt2", 40),
    "gpt_neox": lambda: lm("gpt_neox", 40),
    "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**GATED)),  # two heads share one of keys and values
    "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(tie_word_embeddings=True, **GATED)),
    "opt": lambda: t.OPTForCausalLM(t.OPTConfig(**OPT)),
    "gemma2": lambda: t.Gemma2ForCausalLM(t.Gemma2Config(head_dim=8, **GATED)),
    "bloom": lambda: t.BloomForCausalLM(t.BloomConfig(vocab_size=40, hidden_size=32, n_layer=2, n_head=2, **SPECIAL)),
    "t5": lambda: lm("t5", 40),
}
PACKED = ("gpt2", "gpt_neox", "llama", "qwen2", "opt")


def policy(name: str = "gpt2", on: str = "on", **options) -> Policy:
    """A model in float64, so that a difference is a fault and not rounding."""
    torch.manual_seed(0)
    return Policy(MADE[name]().double(), value=ValueOptions(init="normal"), options=ModelOptions(packing=on, **options))


def ragged() -> Batch:
    """Rows of 4, 7, 15, 2 and 6 tokens. The last token of each row is never computed."""
    prompts = [[3, 4, 5], [6, 7, 8, 9, 10], [11], [5], [20, 21, 22]]
    return Batch.given(prompts, [[1], [5, 6], [*range(7, 21)], [3], [9, 30, 8]])


def outputs_of(made: Policy, rows: Batch) -> tuple[dict, dict]:
    """All outputs of a forward pass, and the gradients of a loss that depends on all of them."""
    made.zero_grad()
    out = made(rows, entropy_gradient=True)
    (out.logprobs.sum() + out.entropy.sum() + out.logsumexp.sum() + out.values.square().sum()).backward()
    numbers = {name: getattr(out, name).detach() for name in ("logprobs", "entropy", "logsumexp", "values")}
    return numbers, {n: p.grad.clone() for n, p in made.named_parameters() if p.grad is not None}


def same(a: dict, b: dict, limit: float = 1e-8) -> None:
    assert set(a) == set(b) and a
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=limit, rtol=limit, msg=lambda m, n=name: f"{n}: {m}")


def shapes(made: Policy, run) -> list[tuple[int, ...]]:
    """Record the arguments of the model's calls."""
    seen = []
    noted = lambda m, a, k: seen.append(tuple(k["input_ids"].shape))  # noqa: E731
    hook = made.model.register_forward_pre_hook(noted, with_kwargs=True)
    run()
    hook.remove()
    return seen


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", PACKED)
def test_rows_end_to_end_are_rows_side_by_side(name, again):
    """Also where blocks are computed again in the backward pass."""
    made, rows = policy(name, gradient_checkpointing=again), ragged()
    assert made.modes.packed and shapes(made, lambda: made(rows)) == [(1, 3 + 6 + 14 + 1 + 5)]
    for mine, right in zip(outputs_of(made, rows), outputs_of(policy(name, "off"), rows), strict=True):
        same(mine, right)


@cases(
    t.GPT2Config(n_positions=8, n_embd=32, n_layer=2, n_head=2, vocab_size=40),
    t.OPTConfig(**OPT | {"max_position_embeddings": 8}),
)
def test_positions_begin_anew_with_each_row(config):
    """Rows of up to 7 tokens in a context of 8 make 27 tokens, so positions must begin at 0 in each row."""
    model = t.AutoModelForCausalLM.from_config(config).eval()
    made, plain = (Policy(model, options=ModelOptions(packing=on)) for on in ("on", "off"))
    rows = Batch.given([[i, i + 1] for i in range(6)], [[5, 6, 7, 8, 9][i % 5 :] for i in range(6)])
    assert made.modes.packed and shapes(made, lambda: made(rows)) == [(1, 26)]
    torch.testing.assert_close(made(rows).logprobs, plain(rows).logprobs, atol=1e-5, rtol=0)


def silent(rows: Batch) -> Batch:
    """Row 1 has no action, and row 2 has actions only in its middle."""
    actions = rows.actions.clone()
    actions[1], actions[2, 9:] = False, False
    return rows.with_(actions=actions)


@cases(partial(pushed_right, junk=17), silent, lambda b: b.with_(actions=b.actions & False))
def test_odd_rows(change):
    """Batches with padding on the left, rows without actions, text after a reply, or no action at all."""
    rows = change(ragged())
    with torch.no_grad():
        mine, right = policy()(rows), policy(on="off")(rows)
    torch.testing.assert_close(mine.logprobs, right.logprobs, atol=1e-8, rtol=0)
    torch.testing.assert_close(mine.values, right.values, atol=1e-8, rtol=0)


# --- what stands around it --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_trunks_states_are_kept_and_taken(name):
    rows = ragged()
    made, plain = policy(name, train_layers=1), policy(name, "off", train_layers=1)
    cached, right = made.trunk_states(rows), plain.trunk_states(rows)
    reads = rows.mask.clone()
    reads[torch.arange(5), rows.mask.sum(1) - 1] = False
    torch.testing.assert_close(cached[reads], right[reads], atol=1e-8, rtol=0)
    for states in (cached, right):  # decoding has made some of its own
        for mine, slow in zip(outputs_of(made, rows.with_(states=states)), outputs_of(plain, rows), strict=True):
            same(mine, slow)


def test_blocks_are_computed_again_in_bfloat16_on_a_processor():
    """The forward pass uses unfused attention, so the recomputation in the backward pass must use it, too."""
    gradients_of = []
    for again in (False, True):
        torch.manual_seed(0)
        options = ModelOptions(precision="bfloat16", packing="off", gradient_checkpointing=again)
        made = Policy(lm("gpt2", 40), value=ValueOptions(init="normal"), options=options)
        gradients_of.append(outputs_of(made, ragged())[1])
    same(*gradients_of, 1e-6)


def test_beside_an_adapter_and_against_a_reference():
    """The exact KL to the reference and its gradient, with and without packing."""
    pytest.importorskip("peft")
    found = []
    for on in ("on", "off"):
        torch.manual_seed(0)
        made = load_policy(MADE["llama"](), options=ModelOptions(packing=on), lora=LoraOptions(rank=2)).double()
        reference = PolicyCopy(made).policy
        assert made.modes.packed == reference.modes.packed == (on == "on")
        moved = torch.Generator().manual_seed(1)
        for p in made.trainable():
            p.data += 0.3 * torch.randn(p.shape, generator=moved)
        out = made(ragged(), against=reference)
        out.kl["reverse"].sum().backward()
        gradients = {n: p.grad for n, p in made.named_parameters() if p.requires_grad}
        found.append({"kl": out.kl["reverse"].detach()} | gradients)
    assert found[0]["kl"].sum() > 0.1
    same(*found)


@cases(("on", 1), ("off", 2))
def test_ragged_batches_take_fewer_passes(on, passes):
    """One of 79 tokens, or two of 8 rows of 18; test_gradient.py has the gradient."""
    torch.manual_seed(3)
    made = Policy(lm("gpt2"), value=ValueOptions(init="normal"), options=ModelOptions(packing=on))
    batch = batch_of(list(range(8)), made)
    assert caught(made, batch, micro=80)[1] == passes
    with torch.no_grad():
        apart = forward_batch(batch, made, Sampling(), 60).logprobs
    torch.testing.assert_close(apart, made(batch).logprobs.detach(), atol=1e-5, rtol=0)


# --- what is not packed -----------------------------------------------------------------------------------------------
class Counting(t.GPT2LMHeadModel):
    """A model that counts positions over all packed tokens."""

    def forward(self, *args, position_ids=None, **kwargs):
        return super().forward(*args, **kwargs)


class Mixing(t.LlamaForCausalLM):
    """A token is mixed with the one before it, also across the edge of a row."""

    def __init__(self, config):
        super().__init__(config)
        self.model.embed_tokens.register_forward_hook(lambda m, a, out: out + 0.2 * pad(out, (0, 0, 1, -1)))


class Own(t.LlamaForCausalLM):
    """A model that does not look its attention up by name."""

    _supports_attention_backend = False


def made_of(kind: type, **more) -> t.PreTrainedModel:
    torch.manual_seed(0)
    if kind is Counting:
        return kind(t.GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3, **SPECIAL))
    return kind(t.LlamaConfig(**GATED | more))


@cases(
    (lambda: made_of(Counting), "its states differ"),
    (lambda: made_of(Mixing), "its states differ"),
    (lambda: made_of(Own), "no function by name"),
    (MADE["gemma2"], "knows no softcap"),
    (MADE["bloom"], "no function by name"),
)
def test_what_does_not_pack_exactly_is_padded_with_one_warning(make, why):
    capabilities._warn_once.cache_clear()
    with pytest.warns(UserWarning, match=f"are padded, not packed: .*{why}"):
        made = Policy(make().eval(), options=ModelOptions(packing="on"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = Policy(make().eval(), options=ModelOptions(packing="on"))
    assert not made.modes.packed and not again.modes.packed and shapes(made, lambda: made(ragged())) == [(5, 14)]


def test_small_logits_of_fresh_weights_are_capped_as_large_ones():
    model = t.Gemma2ForCausalLM(t.Gemma2Config(head_dim=8, **GATED | {"initializer_range": 0.02}))
    assert float(Policy(model.eval()).modes.finish(torch.tensor(100.0))) == pytest.approx(30.0, abs=0.1)


def test_rows_of_one_length_and_encoders_and_decoders_are_padded():
    """Packing would save nothing, and cost a little."""
    made, even = policy(), Batch.given([[3, 4]] * 6, [[5, 6, 7]] * 6)
    assert not made.packs(even) and shapes(made, lambda: made(even)) == [(6, 4)]
    assert made.packs(Batch.given([[3, 4]] * 6, [[5, 6, 7]] * 5 + [[5] * 9]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not policy("t5").modes.packed


def test_rows_longer_than_a_window_are_padded():
    """The kernels are asked for whole rows only; a window that none of them reaches changes nothing."""
    model = t.MistralForCausalLM(t.MistralConfig(**GATED, sliding_window=9)).double()
    made, plain = (Policy(model, options=ModelOptions(packing=on)) for on in ("on", "off"))
    long, short = ragged(), ragged().rows(torch.tensor([0, 1, 3, 4]))
    assert shapes(made, lambda: made(long)) == [(5, 14)] and shapes(made, lambda: made(short)) == [(1, 15)]
    assert made.packs(short) and not made.packs(long)
    for rows in (long, short):
        torch.testing.assert_close(made(rows).logprobs, plain(rows).logprobs, atol=1e-8, rtol=0)


def test_auto_packs_where_it_pays_and_off_nowhere(monkeypatch):
    assert policy(on="auto").modes.packed and not policy(on="off").modes.packed
    monkeypatch.setattr(capabilities, "quick", lambda device, numbers: numbers == torch.bfloat16)
    made = policy(on="auto")
    assert not made.modes.packed
    assert made.to(torch.bfloat16).modes.packed and not made.float().modes.packed  # found out again
    with pytest.raises(OperantError, match="packing='always': it must be auto, on or off"):
        ModelOptions(packing="always")


def test_attention_is_as_it_was_afterwards():
    made = policy("llama")
    name = made.config._attn_implementation
    made(ragged())
    with pytest.raises(IndexError):  # an id that the model has not
        made(ragged().with_(tokens=ragged().tokens + 1000))
    assert made.config._attn_implementation == name != kernels.NAME


# --- the kernel -------------------------------------------------------------------------------------------------------
def one_by_one(query, key, value, edges, edges_too, longest, longest_too, *, scale, window_size, enable_gqa):
    """The function of torch's kernel, computed for one row at a time, with the same parameters."""
    from torch.nn.attention.varlen import varlen_attn

    given = {"scale": scale, "window_size": window_size, "enable_gqa": enable_gqa}
    inspect.signature(varlen_attn).bind(query, key, value, edges, edges_too, longest, longest_too, **given)
    bare = [x.to("meta") for x in (query, key, value, edges)]
    assert varlen_attn(*bare, bare[-1], longest, longest, **given).shape == query.shape
    assert edges.dtype == torch.int32 and edges[0] == 0 and edges[-1] == len(query) and window_size == (-1, 0)
    assert torch.equal(edges, edges_too) and longest == longest_too == int(edges.diff().max())
    out, share = [], query.shape[1] // key.shape[1]
    assert enable_gqa == (share > 1)
    for a, b in pairwise(edges.tolist()):
        k, v = (x[a:b].repeat_interleave(share, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[a:b], k) * scale
        seen = torch.ones(b - a, b - a, dtype=torch.bool).tril()
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
    return torch.cat(out)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_kernel_is_told_the_same_rows(name, monkeypatch):
    """On a GPU, one kernel computes all rows: a function in its place on the CPU gives the same numbers."""
    used = []

    def twin(*args, **kwargs):
        used.append(len(args[0]))
        return one_by_one(*args, **kwargs)

    monkeypatch.setattr(kernels, "kernel", lambda device, numbers: twin)
    made = policy(name)
    used.clear()
    mine = outputs_of(made, ragged())
    assert used == [29, 29]
    for ours, right in zip(mine, outputs_of(policy(name, "off"), ragged()), strict=True):
        same(ours, right)


def test_there_is_no_kernel_for_a_processor_or_float32():
    assert kernels.kernel(torch.device("cpu"), torch.bfloat16) is None
    assert kernels.kernel(torch.device("cuda"), torch.float32) is None
    assert kernels.quick(torch.device("cpu"), torch.float32) and not kernels.quick(torch.device("cuda"), torch.float32)
