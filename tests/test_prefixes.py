"""What the native engine keeps from turn to turn: only new tokens are read, and no number changes."""

import math

import numpy as np
import pytest
import torch
from cases import cases
from sampled import model_of
from toys import letters, lm, says
from worlds import Turns

from operant import Batch, OperantError, Policy, Sampling, Step, Task, ValueOptions
from operant.engines.native import engine as native
from operant.engines.native.capabilities import chooses_on, continues
from operant.engines.native.cuda_graphs import static
from operant.engines.native.engine import NativeEngine
from operant.engines.native.kv_cache import Window
from operant.engines.native.prefixes import Prefixes
from operant.envs import SingleTurn
from operant.models.options import ModelOptions
from operant.rollouts.play import play

FIRST = [[5, 6, 7, 8, 9], [12, 13, 14, 4, 3], [10, 11, 4, 5, 6], [15, 16, 17, 3, 4]]
NEXT = [[11, 5, 12], [6, 7, 13], [14, 15, 8], [9, 9, 16]]
TURNS = 3
EXACT = Sampling(max_tokens=4, min_tokens=4)
KEPT = ("gpt2", "llama", "gpt_neox", "opt")


def policy_of(kind, **options):
    model = lm(kind, 20) if kind in ("gpt2", "llama", "gpt_neox") else model_of(kind)
    return Policy(model.double(), value=ValueOptions(init="normal"), options=ModelOptions(**options))


def reading(policy):
    """A list to which every call of the model adds the number of tokens that it is fed."""
    fed, call = [], policy.call

    def counting(**feed):
        fed.append(feed.get("input_ids", feed.get("decoder_input_ids")).numel())
        return call(**feed)

    policy.call = counting
    return fed


def episodes(engine, *, ask, text=lambda i, turn: NEXT[(i + turn) % 4], at_once=4):
    """(prompt, completion) of each turn of four episodes with appended text, `at_once` of them in a call."""
    prompts, made = list(FIRST), []
    with engine.remembering():
        for turn in range(TURNS):
            for start in range(0, 4, at_once):
                rows = range(start, min(start + at_once, 4))
                keys = [100 * i + turn for i in rows]
                for i, c in zip(rows, ask(engine, [prompts[i] for i in rows], keys, turn), strict=True):
                    made.append((prompts[i], c))
                    prompts[i] = prompts[i] + c.action + text(i, turn)
    return made


def generated(engine, prompts, keys, turn):
    return engine.generate(prompts, EXACT, keys)


def chosen(engine, prompts, keys, turn):
    options = [[[3 + turn, 4], [5], [6, 7, 8 + turn]] for _ in prompts]
    return [c for _, c in engine.choose(prompts, options, Sampling(stop_tokens=(-1,)), keys)]


def both(engine, prompts, keys, turn):
    return (generated if turn % 2 else chosen)(engine, prompts, keys, turn)


# --- the same numbers -------------------------------------------------------------------------------------------------
@cases(
    ("gpt2", generated, 3),
    ("gpt2", both, 4),
    ("llama", both, 2),
    ("gpt_neox", generated, 3),
    ("opt", both, 2),
    ("bloom", both, 4),
    ("mistral", generated, 3),
    ("t5", both, 2),
)
def test_numbers_are_those_of_a_fresh_pass(kind, ask, at_once):
    """Also where calls of some episodes and of others alternate; a model that does not allow it reads all again."""
    policy = policy_of(kind)
    assert chooses_on(policy, 50) == continues(policy) == (kind in KEPT)
    ragged = {"at_once": at_once, "text": lambda i, turn: NEXT[i][: 1 + (i + turn) % 3]}
    fed, fresh = reading(policy), episodes(NativeEngine(policy, kept_gb=0, batch=3), ask=ask, **ragged)
    whole = sum(fed)
    fed.clear()
    kept = episodes(NativeEngine(policy, batch=3), ask=ask, **ragged)
    assert sum(fed) < 0.7 * whole if kind in KEPT else sum(fed) == whole
    for (prompt, mine), (_, plain) in zip(kept, fresh, strict=True):
        assert mine.action == plain.action and mine.logprobs == pytest.approx(plain.logprobs, abs=1e-9)
        assert mine.values == pytest.approx(plain.values, abs=1e-9)
        if ask is generated:
            assert says(policy.model, prompt, mine, atol=1e-9)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_every_token_is_read_once(kind):
    """Of each episode: 5 tokens of the first prompt, 3 new ones in 2 turns, and all 12 of the replies but the last."""
    policy = policy_of(kind)
    assert continues(policy)
    fed = reading(policy)
    made = episodes(NativeEngine(policy), ask=generated)
    assert sum(fed) == 4 * (5 + 2 * 3 + 12 - 1) and all(len(c.action) == 4 for _, c in made)


def test_a_choice_reads_the_prompt_once_and_each_option():
    """A call reads, of each row, what is new, one token of the taken option's columns, and 0 + 1 + 2 of the options."""
    policy = policy_of("gpt2")
    episodes(NativeEngine(policy), ask=chosen)
    fed = reading(policy)
    episodes(NativeEngine(policy), ask=chosen)
    longest = 5 + 1 + 3
    assert fed[0] == 4 * longest and len(fed) == TURNS
    assert fed[1:] == [4 * (1 + 3 + 1 + 3)] * 2, "the last token of the reply, three new ones, a column, the options"


def test_a_fresh_prompt_reads_what_follows_the_common_beginning():
    policy = policy_of("llama")
    engine = NativeEngine(policy)
    objective = [5, 6, 7, 8, 9, 10, 11, 12]
    continues(policy)
    with engine.remembering():
        engine.generate([[*objective, 3, 4]], EXACT, [1])
        fed = reading(policy)
        c = engine.generate([[*objective, 13, 14, 15]], EXACT, [2])[0]
    assert fed == [3, 1, 1, 1] and says(policy.model, [*objective, 13, 14, 15], c, atol=1e-9)


@pytest.mark.parametrize("ask", [generated, both])
def test_trunk_states_are_those_of_the_whole_prompt(ask):
    """A row that was last read by a choice has none: its prompt is read again."""
    policy = policy_of("gpt2", train_layers=1)
    for prompt, c in episodes(NativeEngine(policy), ask=ask):
        if ask is both and c.states is None:
            continue
        batch = Batch.given([prompt], [c.action])
        assert torch.allclose(c.states, policy.trunk_states(batch)[0, : len(c.states)], atol=1e-9)
        assert len(c.states) == len(prompt) + len(c.action) - 1


def test_a_fixed_buffer_goes_on_too(monkeypatch):
    """The way of decoding of a GPU, without graphs."""
    policy = policy_of("gpt2")
    fresh = episodes(NativeEngine(policy, kept_gb=0), ask=generated)
    continues(policy)
    fixed = lambda p, rows, columns, moves: static(p, rows, 64, moves=True, capture=False)  # noqa: E731
    monkeypatch.setattr(native, "decode", fixed)
    static(policy, 4, 64, moves=True)
    fed = reading(policy)
    for (_, mine), (_, plain) in zip(episodes(NativeEngine(policy), ask=generated), fresh, strict=True):
        assert mine.action == plain.action and mine.logprobs == pytest.approx(plain.logprobs, abs=1e-9)
    assert sum(n for n in fed if n != 4) < 4 * (5 + 3 * 3 + 3 * 8)


def test_a_model_that_goes_on_otherwise_reads_everything(monkeypatch):
    plain = Window.reading
    more = lambda self, count, width, kept=(): plain(self, count, width, [1.1 * x for x in kept])  # noqa: E731
    monkeypatch.setattr(Window, "reading", more)
    policy = policy_of("gpt2")
    assert not continues(policy) and not chooses_on(policy, 50)
    fed = reading(policy)
    for prompt, c in episodes(NativeEngine(policy), ask=generated):
        assert says(policy.model, prompt, c, atol=1e-9)
    assert sum(fed) > 4 * (5 + 8 + 15)


# --- how long, and how much -------------------------------------------------------------------------------------------
class Rooms(Turns):
    """Appends text, or shows a new prompt with the same first sentence, for three turns."""

    first = Step()

    def __init__(self, fresh=False):
        self.fresh = fresh

    def answer(self, slot, reply):
        text = ("find the key. " if self.fresh else " ") + "abcdef"[self.turn[slot]]
        return Step(text, fresh=self.fresh, reward=1.0, terminated=self.turn[slot] == 3)


@pytest.mark.parametrize("fresh", [False, True])
def test_nothing_is_kept_after_play_nor_for_one_turn(fresh, monkeypatch):
    added, plain = [], Prefixes.add
    policy = Policy(lm("gpt2", 40), letters())
    continues(policy)
    monkeypatch.setattr(Prefixes, "add", lambda self, *a, **k: (added.append(self), plain(self, *a, **k)))
    kept = {"tokenizer": letters(), "sampling": Sampling(max_tokens=3), "engine": NativeEngine(policy)}
    tasks = [Task(str(i), f"find the key. {c}") for i, c in enumerate("abc")]
    play(tasks, env=SingleTurn(), **kept)
    assert not added
    rollouts = play(tasks, env=Rooms(fresh), **kept)
    assert len(added) == 9 and len(added[0]) >= 3 and kept["engine"].kept is None
    again = play(tasks, env=Rooms(fresh), **kept | {"engine": NativeEngine(policy, kept_gb=0)})
    assert len(added) == 9
    for mine, other in zip(rollouts, again, strict=True):
        assert mine.texts == other.texts and mine.turns[-1].prompt == other.turns[-1].prompt


def test_new_weights_compute_everything_anew():
    policy = policy_of("gpt2")
    engine = NativeEngine(policy)
    with engine.remembering():
        c = engine.generate(FIRST[:1], EXACT, [1])[0]
        prompt = FIRST[0] + c.action + NEXT[0]
        with torch.no_grad():
            policy.model.transformer.h[0].mlp.c_fc.weight.add_(0.3)
        engine.sync(policy, 1)
        c = engine.generate([prompt], EXACT, [2])[0]
    assert says(policy.model, prompt, c, atol=1e-9)


@pytest.mark.parametrize("rows", [0, 1, 2.5])
def test_no_more_is_kept_than_allowed(rows):
    """A token has 2 layers x keys and values x 32 numbers of 8 bytes; the longest row has 23 tokens."""
    policy, most = policy_of("gpt2"), rows * 23 * 2 * 2 * 32 * 8
    engine, sizes = NativeEngine(policy, kept_gb=most / 1e9), []

    def looking(engine, prompts, keys, turn):
        made = generated(engine, prompts, keys, turn)
        sizes.append((engine.kept.bytes, len(engine.kept)) if engine.kept is not None else (0, 0))
        return made

    plain = [c for _, c in episodes(NativeEngine(policy, kept_gb=0), ask=generated)]
    for (_, mine), other in zip(episodes(engine, ask=looking), plain, strict=True):
        assert mine.action == other.action and mine.logprobs == pytest.approx(other.logprobs, abs=1e-9)
    assert all(size <= most for size, _ in sizes) and [n for _, n in sizes][-1] == int(rows)


@cases(({"kept_gb": -1}, "0 keeps nothing"), ({"kept_gb": math.inf}, "0 keeps nothing"), ({"batch": 0}, "at least 1"))
def test_a_size_that_is_none_is_refused(given, says):
    with pytest.raises(OperantError, match=f"engine.{next(iter(given))}=.*{says}"):
        NativeEngine(policy_of("gpt2"), **given)


def test_the_longest_common_beginning_is_found():
    chance, kept = np.random.default_rng(0), Prefixes(1)
    rows = [tuple(chance.integers(0, 3, size=chance.integers(1, 9)).tolist()) for _ in range(60)]
    for row in rows:
        kept.add(row, torch.zeros(1, 2, 1, len(row), 1))
    kept.add((0,) * 99, torch.zeros(1, 2, 1, 2**28, 1, device="meta"))  # larger than all that may be kept
    assert 10 < len(kept) < len(set(rows)) and kept.bytes == sum(8 * len(row) for row in kept._rows)
    beginnings = {row[:n] for row in kept._rows for n in range(len(row) + 1)}
    assert set(rows) <= beginnings
    for _ in range(300):
        prompt = chance.integers(0, 3, size=chance.integers(1, 9)).tolist()
        prefix, shared = kept.find(prompt)
        assert shared == max(n for n in range(len(prompt)) if tuple(prompt[:n]) in beginnings)
        assert shared == 0 or prefix.ids[:shared] == tuple(prompt[:shared])
