"""A choice among options is one action: its distribution, gradient and KL, with and without generated replies."""

import math
from copy import copy
from itertools import product

import pytest
import torch
from cases import cases
from rigs import Caught, gap
from sampled import model_of
from toys import bare_logprobs, letters, lm
from worlds import Turns

from operant import Batch, Learner, OperantError, Policy, Rollout, Step, Task, Turn, ValueOptions
from operant.engines.native.engine import NativeEngine
from operant.engines.transformers import TransformersEngine
from operant.models.choices import among, branches
from operant.rollouts.collate import collate
from operant.sampling import Sampling, uniforms

END = 2
KINDS = ["gpt2", "llama", "qwen2", "gpt_neox", "t5", "bart"]
PROMPTS = [[5, 6, 7], [8], [9, 10]]
OPTIONS = [[[11], [11, 12], [13, 14, 15]], [[16, 17], [18]], [[11, 12], [5], [6], [7, 8, 9, 10]]]
"""Among them one that is the beginning of another."""


def right(model, prompt, options, temperature=1.0, choice="mean", end=END):
    """[O] log-probs of the options, by bare forward passes of single rows."""
    scores = []
    for option in options:
        logprobs = bare_logprobs(model, prompt, option + ([] if end is None else [end]))
        scores.append((logprobs.mean() if choice == "mean" else logprobs.sum()) / temperature)
    return torch.stack(scores).log_softmax(0)


def tables(policy, sampling, prompts=PROMPTS, options=OPTIONS):
    with torch.no_grad():
        table, values = policy.choice_logprobs(Batch.choosing(prompts, options), sampling)
    return [row[: len(o)].double() for row, o in zip(table, options, strict=True)], values


# --- the distribution -------------------------------------------------------------------------------------------------
@cases(*((kind, "mean", (END,)) for kind in KINDS), ("llama", "sum", (-1,)), ("t5", "sum", (-1,)))
def test_options_have_the_probability_of_their_scores(kind, choice, stops):
    model = lm(kind, vocab=24)
    policy = Policy(model, value=ValueOptions(init="normal"))
    sampling = Sampling(temperature=0.7, stop_tokens=stops, choice=choice, min_tokens=2 if stops == (END,) else 0)
    mine, values = tables(policy, sampling)
    end = END if stops == (END,) else None
    for table, prompt, options in zip(mine, PROMPTS, OPTIONS, strict=True):
        assert torch.allclose(table, right(model, prompt, options, 0.7, choice, end), atol=2e-5)
    alone = [float(policy.values(Batch.given([p], [[11]]))[0, -1].detach()) for p in PROMPTS]
    assert values[Batch.choosing(PROMPTS, OPTIONS).actions].tolist() == pytest.approx(alone, abs=1e-5)


@cases(("mistral", 14), ("gpt_neo", 14), ("gpt_neo", 5))
def test_options_of_a_row_that_is_longer_than_the_window_are_rows_of_their_own(kind, length):
    """GPT-Neo's window is of columns, and so the row with all its options counts."""
    policy, prompt = Policy(model_of(kind, window=9)), [*range(3, 3 + length)]
    options = [[11], [13, 14, 15], [12, 5, 4]]
    [table], _ = tables(policy, Sampling(stop_tokens=(END,)), [prompt], [options])
    assert torch.allclose(table, right(policy.model, prompt, options), atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_branches_of_a_row_are_rows_of_their_own(kind):
    """Branches and separate rows agree in their numbers and gradients; a probe chooses between them."""
    policy, sampling = Policy(lm(kind, vocab=24), value=ValueOptions()), Sampling(stop_tokens=(END,))
    grown, _ = tables(policy, sampling)
    assert policy.modes.branched is (None if kind in ("t5", "bart") else True)
    gradients = []
    for branched in (policy.modes.branched, False):
        policy.modes.__dict__["branched"] = branched
        policy.zero_grad()
        policy.forward(Batch.choosing(PROMPTS, OPTIONS), sampling).logprobs.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
        plain, _ = tables(policy, sampling)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(grown, plain, strict=True))
    assert gap(*gradients) < 1e-4


def test_a_choice_may_fill_the_context_and_not_exceed_it():
    """The model has 64 positions. The options of a row together have more tokens; each of them alone fits."""
    policy, sampling = Policy(lm(vocab=24)), Sampling(stop_tokens=(END,))
    prompts, options = [[5] * 54, [8]], [[[11] * 9, [12] * 9, [13] * 8], [[16], [17]]]
    mine, _ = tables(policy, sampling, prompts, options)
    assert torch.allclose(mine[0], right(lm(vocab=24), prompts[0], options[0]), atol=2e-5)
    with pytest.raises(OperantError, match=r"an option .* 54 tokens, and with 12 of the reply does not fit .* 64"):
        tables(policy, sampling, prompts, [[[11] * 11], [[16]]])


def test_of_equal_options_the_first_is_taken():
    policy, twice, n = Policy(lm(vocab=24)), [[11], [12, 13], [11], [11]], 200
    picked = NativeEngine(policy).choose([[5, 6]] * n, [twice] * n, Sampling(stop_tokens=(END,)), [*range(n)])
    share = sum(index == 0 for index, _ in picked) / 200
    once = float(right(policy.model, [5, 6], twice[:2]).exp()[0])
    assert {index for index, _ in picked} == {0, 1} and share == pytest.approx(once, abs=0.1)


def test_what_is_no_choice_is_refused():
    engine = NativeEngine(Policy(lm(vocab=24)))
    empty = "needs at least one option, and each option at least one token"
    wrong = [([], [[5], [6]], "prompt 0 has no tokens"), ([5], [[24]], "an option of prompt 0 holds the id 24")]
    for prompt, options, why in (([5], [], empty), ([5], [[5], []], empty), *wrong):
        with pytest.raises(OperantError, match=why):
            engine.choose([prompt], [options], Sampling(), [0])
    turn = Turn([5], [6], options=[[6], [7]], chosen=1)
    with pytest.raises(OperantError, match=r"option 1 of 2 was chosen, and its ids are not the reply's"):
        collate([Rollout(Task("a", [5]), 0, [turn], [""])], [0.0])


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_choices_are_drawn_by_their_keys_in_one_pass(kind):
    policy, calls = Policy(lm(kind, vocab=24)), []
    policy.model.register_forward_hook(lambda *given: calls.append(1))
    sampling = Sampling(stop_tokens=(END,))
    NativeEngine(policy).choose(PROMPTS, OPTIONS, sampling, [1, 2, 3])  # the first call tries branches out
    calls.clear()
    picked = NativeEngine(policy).choose(PROMPTS, OPTIONS, sampling, [1, 2, 3])
    assert len(calls) <= 2  # of an encoder-decoder one for the values, and one for the options
    for (index, completion), prompt, options, key in zip(picked, PROMPTS, OPTIONS, [1, 2, 3], strict=True):
        logprobs = right(policy.model, prompt, options)
        assert index == int((logprobs.exp().cumsum(0) <= uniforms([key], 0)).sum())
        assert completion.action == options[index]
        assert completion.logprobs == pytest.approx([float(logprobs[index])], abs=2e-5)
    greedy = NativeEngine(policy).choose(PROMPTS, OPTIONS, Sampling(stop_tokens=(END,), top_k=1), [4, 5, 6])
    likeliest = [int(right(policy.model, *row).argmax()) for row in zip(PROMPTS, OPTIONS, strict=True)]
    assert [index for index, _ in greedy] == likeliest


def test_a_copy_of_an_engine_chooses_by_its_own_weights():
    """As the one that plays steps ahead."""
    one = TransformersEngine(Policy(lm(vocab=24)))
    copy(one).sync(Policy(lm(vocab=24, seed=1)), 3)
    [(index, made)] = one.choose(PROMPTS[:1], OPTIONS[:1], Sampling(stop_tokens=(END,)), [1])
    logprob = float(right(lm(vocab=24), PROMPTS[0], OPTIONS[0])[index])
    assert made.logprobs == pytest.approx([logprob], abs=2e-5) and made.version == 0


# --- a world of two turns, enumerated ---------------------------------------------------------------------------------
V, ASKED, DOORS = 6, [3, 4], [[5], [5, 3], [4]]
PAYS = torch.tensor(
    [[0.5, 2.0, 0.0], [1.0, -1.0, 0.3], [0.0, 0.7, 0.1], [2.0, 0.2, 0.4], [0.1, 0.1, 1.5], [0.0, 1.0, 0.6]]
)
SPEAKS = Sampling(max_tokens=1, fixed_length=True, temperature=0.8)


def behind(token):
    return [*ASKED, token, 5]


def expected(pays, ref=None, beta=0.0):
    """The gradient of the expected reward minus beta times both turns' KL, by plain forward passes in float64."""
    model = lm(vocab=V, spread=0.35).double()
    speech = (model(torch.tensor([ASKED])).logits[0, -1] / 0.8).log_softmax(-1)
    doors = torch.stack([_doors(model, behind(t)) for t in range(V)])
    value = (speech.exp()[:, None] * doors.exp() * pays.double()).sum()
    if ref is not None:
        with torch.no_grad():
            q = (ref(torch.tensor([ASKED])).logits[0, -1] / 0.8).log_softmax(-1)
            theirs = torch.stack([_doors(ref, behind(t)) for t in range(V)])
        whole = speech[:, None] + doors
        value = value - beta * (whole.exp() * (whole - q[:, None] - theirs)).sum()
    model.zero_grad()
    value.backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def _doors(model, prompt):
    scores = []
    for option in DOORS:
        logits = model(torch.tensor([prompt + option])).logits[0, len(prompt) - 1 : -1]
        scores.append(logits.log_softmax(-1).gather(-1, torch.tensor(option)[:, None]).mean() / 0.8)
    return torch.stack(scores).log_softmax(0)


def found(pays, ref=None, beta=0.0):
    """The library's gradient: that of one step on each of the 18 attempts, weighted by its probability."""
    model = lm(vocab=V, spread=0.35).double()
    options = {"advantage.lam": 1.0, "advantage.whiten_scope": "none", "loss.value_coef": 0.0, "max_grad_norm": None}
    more = {"epochs": 1, "fixed_length": True, "max_tokens": 1, "temperature": 0.8, "kl.coef": beta}
    reference = None if ref is None else Policy(ref)
    learner = Learner(Policy(model, value=ValueOptions()), reference=reference, **options, **more)
    whole = 0.0
    for token, door in product(range(V), range(len(DOORS))):
        with torch.no_grad():
            drawn = (model(torch.tensor([ASKED])).logits[0, -1] / 0.8).log_softmax(-1)[token]
            went = _doors(model, behind(token))[door]
        paid = {"options": DOORS, "chosen": door, "reward": float(pays[token, door])}
        turns = [
            Turn(ASKED, [token], [float(drawn)], [0.0], "length"),
            Turn(behind(token), DOORS[door], [float(went)], [0.0], **paid),
        ]
        learner.optimizer = Caught(learner.policy.model.parameters())
        learner.learn([Rollout(Task("a", ASKED), 0, turns, ["", ""], "world")], [0.0], SPEAKS)
        assert len(learner.last_step.batch) == 1  # both turns in one row
        whole = whole - float((drawn + went).exp()) * 2 * learner.optimizer.gradients[0]  # a mean over two actions
    return whole


def test_the_expected_gradient_is_that_of_reward_and_kl():
    for given in ((PAYS,), (PAYS, lm(vocab=V, seed=1, spread=0.35).double(), 0.3)):
        assert gap(found(*given), expected(*given)) < 1e-6


# --- beside free speech -----------------------------------------------------------------------------------------------
class House(Turns):
    """A generated reply, a choice among doors, and another generated reply, all in one row."""

    def answer(self, slot, reply):
        if self.turn[slot] == 1:
            return Step("a door.", options=["up", "go", "go on"])
        if self.turn[slot] == 2:
            return Step("go on.", reward=float(reply == "go"))
        return Step(terminated=True)


@cases(("gpt2", {"top_k": 5, "truncation": "stored"}), ("llama", {"kl.kind": "reverse"}), ("t5", {}))
@pytest.mark.filterwarnings("ignore:replies come from a distribution")
def test_free_and_choice_turns_together_score_as_drawn(kind, more):
    options = {"max_tokens": 4, "temperature": 0.7, "minibatch": 4, "optimizer.lr": 0.0}
    given = {"tokenizer": letters(), "reference": Policy(lm(kind, 40, seed=1)), "env": House()}
    learner = Learner(lm(kind, 40), **given, **options, **more)
    rollouts = learner.play([Task(str(i), "in the house") for i in range(8)])
    assert {len(r.turns) for r in rollouts} == {3} and all(len(r.turns[1].logprobs) == 1 for r in rollouts)
    metrics = learner.learn(rollouts, [0.0] * 8)
    assert metrics["rollout/logprob_gap"] < 1e-4 and metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)
    batch = learner.last_step.batch
    if kind != "t5":
        assert len(batch) == 8
    for number, rollout in enumerate(rollouts):
        turn = rollout.turns[1]
        at = (batch.episodes[:, None] == number) & (batch.turns == 1)
        assert int(at.sum()) == 1
        models = (learner.policy.model, learner.reference.policy.model)
        logprobs = [right(m, turn.prompt, turn.options, 0.7) for m in models]
        if more.get("kl.kind") == "reverse":
            exact = (logprobs[0].exp() * (logprobs[0] - logprobs[1])).sum()
            assert float(batch.kl[at]) == pytest.approx(float(exact), abs=1e-4)
        assert float(batch.ref_logprobs[at]) == pytest.approx(float(logprobs[1][turn.chosen]), abs=1e-4)
        paid = (rollout.texts[1] == "go") - 0.1 * float(batch.kl[at])
        assert batch.rewards[at].item() == pytest.approx(paid, abs=1e-6)


def test_given_choices_are_learnt_by_their_share_of_options():
    """Supervised: the loss is minus the log-prob among the options, and one choice is one action."""
    model = lm(vocab=40).double()
    learner = Learner(model, tokenizer=letters(), algorithm="sft", lr=0.0, temperature=0.5)
    rollouts = [
        Rollout(Task(str(i), p), i, [Turn(p, o[-1], options=o, chosen=len(o) - 1)], ["up"])
        for i, (p, o) in enumerate(zip(PROMPTS, OPTIONS, strict=True))
    ]
    logprobs = [float(right(model, p, o)[-1]) for p, o in zip(PROMPTS, OPTIONS, strict=True)]
    metrics = learner.learn(rollouts, None)
    assert metrics["supervised/loss"] == pytest.approx(-sum(logprobs) / 3, rel=1e-6)
    assert metrics["supervised/bits_per_byte"] == pytest.approx(-sum(logprobs) / math.log(2) / 6, rel=1e-6)


def test_micro_batches_and_a_bundle_keep_choices(tmp_path):
    from operant.training import refused_step
    from operant.training.nonfinite import NonFinite

    def gradient(tokens):
        learner = Learner(lm("llama", 40), tokenizer=letters(), env=House(), max_tokens=4, micro_tokens=tokens)
        rollouts = learner.play([Task(str(i), "in the house") for i in range(6)])
        learner.optimizer = Caught(learner.policy.parameters())
        learner.learn(rollouts, [0.1 * i for i in range(6)])
        return learner, learner.optimizer.gradients[0]

    learner, whole = gradient(8192)
    assert gap(gradient(64)[1], whole) < 1e-5
    batch = learner.last_step.batch
    refusal = refused_step.RefusedStep("observe", NonFinite("loss", "nan"), [(batch, {})], Sampling(), 0.1, 64)
    (restored, _), *_ = refused_step.read(refused_step.write(tmp_path / "step-00001", refusal, {}, {}))[0].parts
    assert restored.choices.listed() == batch.choices.listed()
    held = branches(batch, END)
    assert among(torch.zeros(sum(len(b.ids) for b in held)), held, batch.choices, Sampling()).shape == (6, 3)
