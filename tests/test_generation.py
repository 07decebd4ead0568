"""The schedule of generation: it saves work, and never changes a reply."""

import numpy as np
import pytest
import torch
from cases import cases
from sampled import model_of, replies
from toys import lm, says
from transformers import RoCBertConfig, RoCBertForCausalLM

from operant import Policy, ValueOptions
from operant.engines.native import engine as native
from operant.engines.native.capabilities import try_decoding
from operant.engines.native.cuda_graphs import static
from operant.engines.native.decoding import Cached, Pooled, Whole
from operant.engines.native.kv_cache import Window
from operant.sampling import Sampling, task_key

GROUPS = [[5, 6, 7, 8, 9]] * 3 + [[4]] * 2 + [[12, 13, 14], [3, 3], [10, 11, 4, 5, 6, 7, 8]] * 2 + [[15, 16], [4], [4]]
KEYS = [task_key(0, "train", 3, f"task/{i}") for i in range(len(GROUPS))]
RAGGED = Sampling(max_tokens=12, stop_tokens=(2, 7, 11))
POOLED = ("gpt2", "llama", "gpt_neox", "opt", "bloom")


def policy_of(kind: str) -> Policy:
    return Policy(model_of(kind), value=ValueOptions(init="normal"))


def same(mine, plain, near=1e-4):
    for a, b in zip(mine, plain, strict=True):
        assert (a.action, a.end) == (b.action, b.end) and a.logprobs == pytest.approx(b.logprobs, abs=near)
        assert a.values == pytest.approx(b.values, abs=near)


@pytest.mark.parametrize("kind", [*POOLED, "t5", "bart", "mistral"])
@pytest.mark.slow
def test_replies_are_the_same_for_every_number_of_rows(kind):
    policy = policy_of(kind)
    assert try_decoding(policy).pooled == (kind in POOLED)
    alone = [replies(policy, RAGGED, [p], [k])[0] for p, k in zip(GROUPS, KEYS, strict=True)]
    assert len({len(c.action) for c in alone}) > 3
    for rows in (1, 3, 256):
        same(replies(policy, RAGGED, GROUPS, KEYS, batch=rows), alone)
    order = np.random.default_rng(0).permutation(len(GROUPS)).tolist()
    mixed = replies(policy, RAGGED, [GROUPS[i] for i in order], [KEYS[i] for i in order], batch=4)
    same(mixed, [alone[i] for i in order])


@cases((0.0, 0.25), (1.0, 0.0), (0.5, 1.0))
def test_compaction_and_admission_at_any_share_change_nothing(compact, admit, monkeypatch):
    policy = policy_of("llama")
    whole = replies(policy, RAGGED, GROUPS, KEYS)
    monkeypatch.setattr("operant.engines.native.engine.COMPACT_AT", compact)
    monkeypatch.setattr("operant.engines.native.engine.ADMIT_AT", admit)
    same(replies(policy, RAGGED, GROUPS, KEYS, batch=5), whole)


@cases(("growing", 4), ("fixed", 256))
def test_checking_seldom_for_ended_replies_changes_nothing(shapes, rows, monkeypatch):
    policy = policy_of("gpt2")
    whole = replies(policy, RAGGED, GROUPS * 2, KEYS + KEYS[::-1])
    monkeypatch.setattr("operant.engines.native.engine.check_every", lambda device: 5)
    policy = fixed(policy) if shapes == "fixed" else policy
    same(replies(policy, RAGGED, GROUPS * 2, KEYS + KEYS[::-1], batch=rows), whole)


def test_a_sliding_window_that_holds_whole_rows_is_none():
    """Mistral's sliding window: the rows of the probe fit into it, and so do rows of 9 tokens, but not of 10."""
    policy = Policy(model_of("mistral", window=9), value=ValueOptions(init="normal"))
    assert isinstance(native.decode(policy, 4, 9), Pooled) and isinstance(native.decode(policy, 4, 10), Cached)
    short = Sampling(max_tokens=2, stop_tokens=(2, 7))
    for prompt, c in zip(GROUPS, replies(policy, short, GROUPS, KEYS, batch=4), strict=True):
        assert says(policy.model, prompt, c)
    assert static(policy, 4, 9, moves=False) is not None and static(policy, 4, 10, moves=False) is None


@pytest.mark.parametrize("kind", POOLED)
def test_small_buffers_grow_and_prompts_are_read_in_portions(kind, monkeypatch):
    """Rows that are admitted beside others have the log-probs of a plain forward pass."""
    policy = policy_of(kind)
    assert try_decoding(policy).pooled
    monkeypatch.setattr("operant.engines.native.kv_cache.START_WITH", 1)
    monkeypatch.setattr("operant.engines.native.decoding.READ_AT_ONCE", 8)
    for prompt, c in zip(GROUPS, replies(policy, RAGGED, GROUPS, KEYS, batch=4), strict=True):
        assert says(policy.model, prompt, c)


@pytest.mark.parametrize("broken", ["pooled", "cached"])
def test_another_way_of_decoding_gives_the_same_replies(broken):
    policy = policy_of("gpt2")
    whole = replies(policy, RAGGED, GROUPS, KEYS, batch=6)
    assert isinstance(native.decode(policy, 2, 9), Pooled)
    object.__setattr__(policy.modes, broken, False)
    assert isinstance(native.decode(policy, 2, 9), Cached if broken == "pooled" else Whole)
    same(replies(policy, RAGGED, GROUPS, KEYS, batch=6), whole)


def test_no_number_that_was_left_in_the_buffer_reaches_a_row(monkeypatch):
    """Unused parts of the buffer contain NaN, which a mask alone would let through."""
    policy = policy_of("llama")
    whole = replies(policy, RAGGED, GROUPS, KEYS)
    made = Window._buffer
    monkeypatch.setattr(Window, "_buffer", lambda self, *a: made(self, *a).fill_(torch.nan))
    monkeypatch.setattr("operant.engines.native.decoding.READ_AT_ONCE", 8)  # short prompts into rows never used before
    same(replies(policy, RAGGED, GROUPS, KEYS, batch=8), whole)


def counted(policy):
    """The numbers of rows of the calls that read prompts, and of those that make a step, from here on."""
    try_decoding(policy)  # it makes calls of its own, once
    read, steps, call = [], [], policy.call

    def counting(**feed):
        rows, columns = feed.get("input_ids", feed.get("decoder_input_ids")).shape
        (steps if columns == 1 else read).append(rows)
        return call(**feed)

    policy.call = counting
    return read, steps


def test_rows_leave_when_their_reply_ends():
    policy = policy_of("gpt2")
    _, steps = counted(policy)
    generated = replies(policy, RAGGED, GROUPS, KEYS)
    assert sum(steps) == sum(len(c.action) - 1 for c in generated)
    assert len(steps) == max(len(c.action) for c in generated) - 1


def test_a_group_is_read_once_and_also_when_it_does_not_fit(monkeypatch):
    monkeypatch.setattr("operant.engines.native.engine.ADMIT_AT", 0.0)
    prompts = [[5, 6, 7]] * 7 + [[8, 9, 10]] * 6 + [[3, 4]] * 5
    keys = list(range(len(prompts)))
    for rows in (2, 4, 64):
        policy = policy_of("gpt2")
        read, _ = counted(policy)
        replies(policy, RAGGED, prompts, keys, batch=rows)
        assert sum(read) == 3


def test_waiting_prompts_are_admitted_and_steps_are_saved():
    policy = policy_of("gpt2")
    long = Sampling(max_tokens=30, stop_tokens=(2, 7, 11, 15))
    prompts, keys = [[4 + i % 11, 5] for i in range(32)], list(range(32))
    _, steps = counted(policy)
    lengths = [len(c.action) for c in replies(policy, long, prompts, keys, batch=8)]
    assert max(steps) <= 8 and len(steps) < 0.8 * sum(max(lengths[i : i + 8]) - 1 for i in range(0, 32, 8))


def test_an_encoder_reads_a_group_once():
    policy = policy_of("t5")
    try_decoding(policy)
    seen, encoder = [], policy.model.get_encoder()
    encoder.register_forward_hook(lambda m, a, k, o: seen.append(len(k["input_ids"])), with_kwargs=True)
    replies(policy, RAGGED, GROUPS, KEYS)
    assert seen == [6]


@pytest.mark.parametrize("vocabulary", [5, 257, 5000])
def test_drawing_in_two_levels_is_inverse_cdf(vocabulary):
    """Draws agree with one cumulative sum in float64, except within rounding of a border."""
    torch.manual_seed(0)
    scores = torch.randn(64, vocabulary) * 3
    scores[:32, : vocabulary // 2] = -torch.inf
    scores[5, 1:] = -torch.inf
    scores[5, 0] = 0
    chances = torch.rand(64, dtype=torch.float64)
    chances[0], chances[1], chances[2] = 0, 1 - 2**-53, 0.5
    ids, logprobs = Sampling.draw(scores, chances)
    cumulative = scores.double().softmax(-1).cumsum(-1)
    upto = cumulative.gather(1, ids[:, None]).squeeze(1)
    below = torch.where(ids > 0, cumulative.gather(1, (ids[:, None] - 1).clamp(min=0)).squeeze(1), 0)
    assert (below <= chances + 1e-6).all() and (chances <= upto + 1e-6).all()
    assert scores.gather(1, ids[:, None]).isfinite().all()
    truth = scores.double().log_softmax(-1).gather(1, ids[:, None]).squeeze(1)
    assert torch.allclose(logprobs.double(), truth, atol=1e-5)
    again = Sampling.draw(scores, chances, torch.full_like(scores, torch.nan))
    assert torch.equal(again[0], ids) and torch.equal(again[1], logprobs)


FIXED = {}


@pytest.fixture(autouse=True)
def static_where_a_test_asks_for_it(monkeypatch):
    plain = native.decode

    def decode(policy, rows, columns, *, moves=True):
        if policy not in FIXED:
            return plain(policy, rows, columns, moves=moves)
        return static(policy, rows, columns, moves=moves, capture=FIXED[policy])

    monkeypatch.setattr(native, "decode", decode)
    yield
    FIXED.clear()


def fixed(policy, capture=False):
    """Decode as on a GPU, without graphs."""
    try_decoding(policy)
    FIXED[policy] = capture
    return policy


@cases(("gpt2", 1), ("llama", 256), ("gpt_neox", 4))
def test_a_fixed_buffer_says_the_same_to_rounding(kind, rows):
    policy = Policy(model_of(kind).double(), value=ValueOptions(init="normal"))
    long, prompts, keys = Sampling(max_tokens=18, stop_tokens=(2, 7)), GROUPS, KEYS
    grown = replies(policy, long, prompts, keys, batch=rows)
    for _ in range(2):  # and once more in the buffer that is there
        same(replies(fixed(policy), long, prompts, keys, batch=rows), grown, 1e-5)
    assert not native.decode(policy, rows, 8).buffer.graphs and says(policy.model, prompts[0], grown[0], atol=1e-5)


def test_fewer_rows_are_computed_and_trunk_states_are_stored():
    policy = policy_of("gpt2")
    policy.trunk = Below(policy.model.transformer.h[1])
    prompts, keys = [[4 + i % 11, 5, 3] for i in range(64)], list(range(64))
    long = Sampling(max_tokens=30, stop_tokens=(2, 7, 11))
    plain = replies(policy, long, prompts, keys)
    native.decode(fixed(policy), 1, 4)
    _, steps = counted(policy)
    generated = replies(policy, long, prompts, keys)
    assert set(steps) == {64, 16}
    for mine, other in zip(generated, plain, strict=True):
        assert mine.action == other.action and torch.allclose(mine.states, other.states, atol=1e-4)


def test_buffers_are_reused_while_weights_keep_their_addresses():
    policy = policy_of("llama")
    first = static(policy, 4, 20, moves=False)
    assert static(policy, 3, 18, moves=False).buffer is first.buffer
    with torch.no_grad():
        policy.model.lm_head.weight.add_(0.1)
    assert static(policy, 4, 20, moves=False).buffer is first.buffer
    policy.model.lm_head.weight.data = policy.model.lm_head.weight.data.clone()
    assert static(policy, 4, 20, moves=False).buffer is not first.buffer
    assert static(policy, 9, 20, moves=False).buffer.window.rows == 9


def test_a_model_that_differs_over_a_fixed_buffer_says_so(caplog, monkeypatch):
    policy = policy_of("gpt2")
    assert not any(static(Policy(model_of(kind, window=20)), 4, 20, moves=False) for kind in ("t5", "gpt_neo"))
    monkeypatch.setattr("operant.engines.native.cuda_graphs.StaticWindow.seen", lambda self, rows, dtype: (None, None))
    assert static(policy, 4, 20, moves=False) is None and "without graphs" in caplog.text


def test_without_a_captured_step_generation_goes_on(caplog):
    if torch.cuda.is_available():
        pytest.skip("here it can")
    policy = policy_of("gpt2")
    plain = replies(policy, RAGGED, GROUPS, KEYS)
    same(replies(fixed(policy, capture=True), RAGGED, GROUPS, KEYS), plain)
    assert "cannot be captured" in caplog.text and static(policy, 4, 20, moves=False) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["gpt2", "llama", "gpt_neox"])
def test_graphs_say_on_a_gpu_what_the_plain_way_says(kind):
    policy = Policy(model_of(kind).cuda(), value=ValueOptions(init="normal"))
    generated = replies(policy, RAGGED, GROUPS, KEYS, batch=4)
    assert native.decode(policy, 4, 19).buffer.graphs
    policy.model.cpu()
    for prompt, c in zip(GROUPS, generated, strict=True):
        assert says(policy.model, prompt, c, atol=1e-3)


class Below:
    """A substitute for a trunk, which records the input of a block."""

    def __init__(self, block):
        self.last = torch.empty(0)
        block.register_forward_pre_hook(lambda module, args: setattr(self, "last", args[0].detach()))


def test_an_encoder_drops_nothing_although_somebody_has_called_train():
    policy = Policy(lm("t5", dropout_rate=0.5))
    try_decoding(policy)
    policy.model.train()
    (reply,) = replies(policy, RAGGED, [[3, 4, 5]], [1])
    assert says(policy.model.eval(), [3, 4, 5], reply)


@pytest.mark.parametrize("mode", ["pooled", "cached", "whole"])
def test_states_at_the_cut_are_kept_of_all_tokens_but_the_last(mode):
    policy = policy_of("gpt2")
    try_decoding(policy)
    for name in {"pooled": (), "cached": ("pooled",), "whole": ("pooled", "cached")}[mode]:
        object.__setattr__(policy.modes, name, False)
    policy.trunk = Below(policy.model.transformer.h[1])
    for prompt, c in zip(GROUPS, replies(policy, RAGGED, GROUPS, KEYS, batch=4), strict=True):
        policy.model(torch.tensor([prompt + c.action[:-1]]))
        assert c.states.shape == (len(prompt) + len(c.action) - 1, 32)
        assert torch.allclose(c.states, policy.trunk.last[0], atol=1e-4)


def test_a_configuration_that_knows_no_end_token_has_no_stop_tokens():
    sizes = dict.fromkeys(("vocab_size", "pronunciation_vocab_size", "shape_vocab_size"), 40)
    sizes |= dict.fromkeys(("hidden_size", "intermediate_size", "pronunciation_embed_dim", "shape_embed_dim"), 8)
    config = RoCBertConfig(num_hidden_layers=1, num_attention_heads=2, is_decoder=True, **sizes)
    assert not hasattr(config, "eos_token_id") and Policy(RoCBertForCausalLM(config)).stop_tokens == ()
