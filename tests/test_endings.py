"""Where a reply ends, what is paid there and what follows; and that a prompt arrives whole."""

from dataclasses import replace

import pytest
import torch
from cases import cases
from rigs import said
from tokenizers.processors import TemplateProcessing
from toys import CAUSAL, SPECIAL, letters, lm
from worlds import Turns

from operant import Learner, OperantError, Policy, Rollout, Step, Task, ValueOptions
from operant.engines.native.engine import NativeEngine
from operant.objectives.advantages import with_gae
from operant.rollouts.collate import collate
from operant.rollouts.play import play
from operant.sampling import Sampling, encode_more, encode_prompt
from operant.training.scoring import bootstrap_prompts, with_bootstraps

EOS = SPECIAL["eos_token_id"]
ALL = range(len(letters()))


def valuing(number: float, kind: str = "gpt2", **config) -> Policy:
    """A policy whose critic says `number` of every state."""
    policy = Policy(lm(kind, vocab=len(ALL), **config), letters(), value=ValueOptions())
    torch.nn.init.constant_(policy.value_head.net[0].bias, number)
    return policy


class Cutting(Turns):
    """A world that says ` go` after each reply, pays 1, and is cut after two replies, or ends there."""

    def __init__(self, *, cut: bool, fresh: bool = False):
        self.cut, self.fresh = cut, fresh

    def answer(self, slot, reply):
        over = self.turn[slot] == 2
        return Step(" go", self.fresh, 1.0, terminated=over and not self.cut, truncated=over and self.cut)


def played(policy: Policy, prompt: object, world: Cutting, **sampling) -> Rollout:
    known = {"engine": NativeEngine(policy), "tokenizer": policy.tokenizer}
    (attempt,) = play([Task("t", prompt)], env=world, sampling=Sampling(max_tokens=3, **sampling), **known)
    return attempt


def only(*pieces: str | int) -> tuple[int, ...]:
    """What to ban so that these tokens alone can be said."""
    ids = {letters().convert_tokens_to_ids(p) if isinstance(p, str) else p for p in pieces}
    return tuple(v for v in ALL if v not in ids)


# --- rewards and what follows (test 17) -------------------------------------------------------------------------------
HAND_MADE = {
    "stop": said([5, 6], [7, 8, EOS], end="stop"),
    "stop string": said([5], [9, 10, 11, 12], end="stop"),
    "length": said([5, 6, 7], [8] * 5, end="length"),
    "cut": replace(said([6], [9, 9], end="cut"), following=[6, 9, 9, 4]),
}


@pytest.mark.parametrize("lengths_too", [False, True])
def test_reward_lands_last_and_only_a_cut_has_a_next_value(lengths_too):
    """Every state is worth 5: the target of the last action is 1, and 1 + 5 where the episode goes on unseen."""
    policy, attempts = valuing(5.0), list(HAND_MADE.values())
    batch = collate(attempts, [1.0] * 4)
    batch = with_bootstraps(batch, bootstrap_prompts(attempts, lengths_too=lengths_too), policy)
    batch = with_gae(batch.with_(values=policy.values(batch).detach()), gamma=1.0, lam=1.0, whiten_scope="none")
    for row, (name, attempt) in enumerate(HAND_MADE.items()):
        at = batch.actions[row]
        prompt, n = attempt.turns[0].prompt, len(attempt.ids)
        assert batch.tokens[row][batch.mask[row]].tolist() == prompt + attempt.ids  # nothing is appended
        assert batch.rewards[row][at].tolist() == [0.0] * (n - 1) + [1.0]
        goes_on = name == "cut" or (name == "length" and lengths_too)
        assert batch.returns[row][at].tolist() == pytest.approx([6.0 if goes_on else 1.0] * n)


@pytest.mark.parametrize("kind", CAUSAL)
def test_what_follows_a_cut_is_valued_as_the_model_itself_would(kind):
    """The value is the head's own arithmetic on the state behind prompt, reply and the world's last words."""
    policy = Policy(lm(kind, vocab=len(ALL)), letters(), value=ValueOptions(init="normal"))
    attempt = played(policy, [5, 6], Cutting(cut=True))
    assert attempt.end == "cut" and len(attempt.turns) == 2
    first, second = attempt.turns
    go = encode_more(letters(), " go")
    assert second.prompt == first.prompt + first.action + go
    ids = second.prompt + second.action + go
    with torch.no_grad():
        state = policy.model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1]
        truth = float(state @ policy.value_head.net[0].weight[0] + policy.value_head.net[0].bias[0])
    batch = with_bootstraps(collate([attempt], [0.0]), bootstrap_prompts([attempt]), policy)
    assert batch.bootstrap.tolist() == pytest.approx([truth], abs=1e-4) and abs(truth) > 0.01
    assert batch.rewards[batch.actions].nonzero().flatten().tolist() == [2, 5]


def test_a_value_can_follow_a_reply_that_fills_the_context():
    """Prompt and reply fill all 64 places; the state behind them still has a value."""
    learner = Learner(valuing(5.0), max_tokens=60, on_length="bootstrap", fixed_length=True, lr=0.0, **{"gamma": 0.9})
    metrics = learner.step(learner.generate([[5, 6, 7, 8]]), [1.0])
    # Values of 5 everywhere: delta is 1 + 0.9 * 5 - 5 at the end and 0.9 * 5 - 5 before it.
    advantage, total = 1 / (0.9 * 0.95), 0.0
    for _ in range(60):
        advantage = 0.9 * 5 - 5 + 0.9 * 0.95 * advantage
        total += advantage + 5
    assert metrics["returns/mean"] == pytest.approx(total / 60, abs=1e-3)


@cases(
    ({"banned": only("</s>")}, "stop", ["</s>"], ""),
    ({"banned": only("a"), "max_tokens": 4}, "length", ["a"] * 4, "aaaa"),
    ({"banned": only("end.a"), "stop_strings": ("d.",)}, "stop", ["end.a"], "en"),
    ({"banned": only("e"), "stop_strings": ("eee",)}, "stop", ["e"] * 3, ""),
    ({"banned": only("</s>"), "fixed_length": True, "max_tokens": 3}, "length", ["</s>"] * 3, ""),
    ids=["stop token", "length", "stop string inside a token", "stop string over tokens", "fixed length"],
)
def test_how_a_reply_ends(sampling, end, ids, text):
    """One token alone can be said, so that the reply is known; the ids keep the whole last token."""
    (reply,) = Learner(valuing(0.0), **{"max_tokens": 8, "lr": 0.0} | sampling).generate([[5, 6]])
    assert reply.ids == letters().convert_tokens_to_ids(ids) and (reply.end, reply.reply) == (end, text)


def test_what_a_reply_at_its_length_limit_gets_is_a_choice():
    def learnt(**options) -> dict[str, float]:
        learner = Learner(valuing(0.0), lr=0.0, max_tokens=4, **{"advantage.lam": 1.0} | options)
        return learner.step([[5], [6]], [[5, 6, EOS], [7, 7, 7, 7]], [1.0, 1.0])

    plain = learnt()
    assert plain["reward/scaled_mean"] == 1.0 and plain["rollout/count"] == 2 and plain["returns/mean"] == 1.0
    penalised = learnt(on_length="penalty", **{"score.missing_stop": -2.0})
    assert penalised["reward/scaled_mean"] == -0.5 and penalised["returns/mean"] == pytest.approx((3 * 1 + 4 * -2) / 7)
    dropped = learnt(on_length="drop")
    assert dropped["rollout/count"] == 1 and dropped["rollout/reply_tokens"] == 3
    with pytest.raises(OperantError, match=r"bootstrap.*fixed_length.*gamma"):
        learnt(on_length="bootstrap", fixed_length=True)


# --- scores that are none (test 19) -----------------------------------------------------------------------------------
def attempts() -> tuple[Learner, list[Rollout]]:
    learner = Learner(valuing(0.0), lr=0.01, max_tokens=4, seed=3)
    return learner, learner.generate([[5], [6], [7], [8]])


def test_an_abstention_is_left_out_and_counted_and_is_not_a_zero():
    learner, replies = attempts()
    metrics = learner.step(replies, [2.0, None, 4.0, None])
    assert metrics["reward/abstained"] == 0.5 and metrics["rollout/count"] == 2
    assert metrics["reward/mean"] == 3.0 and metrics["reward/min"] == 2.0
    alone, same = attempts()
    alone.step([same[0], same[2]], [2.0, 4.0])
    for mine, theirs in zip(learner.policy.parameters(), alone.policy.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("bad", [float("nan"), -float("inf"), [0.0, float("nan")]])
def test_a_score_of_nan_names_its_reply_and_changes_nothing(bad):
    learner, replies = attempts()
    before = [p.clone() for p in learner.policy.parameters()]
    with pytest.raises(OperantError, match=rf"{replies[2].task.id.replace('[', '.').replace(']', '.')}.* (nan|-?inf)"):
        learner.step(replies, [1.0, 2.0, bad, 1.0])
    with pytest.raises(OperantError, match=r"turn 1 is (nan|-?inf)"):
        learner.step([[5], [6]], [[7], [8]], [0.0, bad[-1] if isinstance(bad, list) else bad], episodes=[0, 0])
    with pytest.raises(OperantError, match="no reply is left to train on"):
        learner.step(replies, [None] * 4)
    assert all(torch.equal(a, b) for a, b in zip(before, learner.policy.parameters(), strict=True))
    assert learner.progress.step == 0


# --- prompts (test 21) ------------------------------------------------------------------------------------------------
BOS = SPECIAL["bos_token_id"]
ASKED = [{"role": "user", "content": "hi"}]
RENDERED = "{% for m in messages %}{{ m['content'] }}.{% endfor %}{% if add_generation_prompt %}!{% endif %}"


def tokenizer(*, adds: bool, template: str | None = None):
    """A tokenizer that declares a beginning-of-text token for plain text, or does not; and a template of its own."""
    made = letters(template)
    if adds:
        made.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return made


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize(("start", "count"), [("<s>", 1), ("", 0)])
def test_as_many_beginnings_as_the_template_says(adds, start, count):
    ids = encode_prompt(tokenizer(adds=adds, template=start + RENDERED), ASKED)
    assert ids.count(BOS) == count and letters().decode(ids, skip_special_tokens=True) == "hi.!"


@pytest.mark.parametrize("adds", [True, False])
def test_as_many_beginnings_as_the_tokenizer_declares(adds):
    made, hi = tokenizer(adds=adds), letters().convert_tokens_to_ids(["h", "i"])
    assert encode_prompt(made, "hi") == [BOS] * adds + hi
    assert encode_more(made, "hi") == hi  # what a world appends begins nothing
    assert encode_prompt(made, "") == [BOS]
    assert encode_prompt(made, [BOS, 9, BOS]) == [BOS, 9, BOS]  # ids are taken as they are


def test_what_was_said_is_not_rendered_again():
    """The next prompt begins with the very ids of the last one and of its reply, whatever a template makes of them."""
    policy = Policy(lm(vocab=len(ALL)), tokenizer(adds=True, template="<s>" + RENDERED), value=ValueOptions())
    attempt = played(policy, ASKED, Cutting(cut=False), banned=(BOS,))
    first, second = attempt.turns
    assert second.prompt == first.prompt + first.action + encode_more(letters(), " go")
    assert second.prompt.count(BOS) == 1 and len(collate([attempt], [0.0])) == 1 and attempt.end == "world"


def test_messages_need_a_template_and_texts_a_tokenizer():
    with pytest.raises(OperantError, match="no chat template"):
        encode_prompt(letters(), ASKED)
    with pytest.raises(OperantError, match="no tokenizer"):
        Learner(lm()).generate(["hi"])


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_prompt_fits_whole_or_is_refused_by_name(kind):
    learner = Learner(Policy(lm(kind, vocab=len(ALL)), letters(), value=ValueOptions()), max_tokens=10, lr=0.0)
    fits = [5 + i % 20 for i in range(54)]
    with pytest.raises(OperantError, match=r"prompt 1 has 55 tokens.*context of 64.*shorten"):
        learner.generate([fits, [*fits, 9], [4]])
    (reply,) = learner.generate([fits], fixed_length=True)
    assert reply.turns[0].prompt == fits and len(reply.ids) == 10
    learner.step([reply], [1.0])
    with pytest.raises(OperantError, match=r"row 1 has 54 tokens, and with 11 of the reply.*context of 64"):
        learner.step([[4], fits], [[5], [6] * 11], [0.0, 1.0])
    with pytest.raises(OperantError, match="prompt 0 has no tokens"):
        learner.generate([[]])


def test_rows_of_longrope_stay_below_the_length_that_changes_the_angles_of_all_rows():
    """Beyond it, the longest row of a call decides on the angles of every row (Phi-3.5)."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 24}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    learner = Learner(lm("llama", rope_parameters=rope), max_tokens=4)
    learner.generate([[5] * 20])
    with pytest.raises(OperantError, match=r"prompt 0 has 21 tokens.*context of 24"):
        learner.generate([[5] * 21])


def test_a_cut_behind_a_fresh_prompt_has_a_next_value():
    policy = valuing(5.0)
    attempt = played(policy, [5, 6], Cutting(cut=True, fresh=True))
    assert with_bootstraps(collate([attempt], [0.0]), bootstrap_prompts([attempt]), policy).bootstrap.tolist() == [5.0]
