"""The critic of outcomes: pooling, what it learns, the returns that it makes, replies beside the greedy one, CodeRL."""

import itertools
import re
from dataclasses import replace

import pytest
import torch
from cases import cases
from page_commands import read
from texts import write_rows
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from toys import CAUSAL, bare_logprobs, letters, lm, on_disk
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

import operant
from operant import Judgement, Learner, OperantError, Policy, Rollout, Task, export
from operant.apps.code.critic_reward import CriticReward
from operant.apps.code.critic_score import CriticScore, Reading
from operant.apps.code.outcome_critic import OutcomeCritic, area_under_curve, calibration_error, metrics
from operant.models.safe_loading import load_tensors
from operant.rewards import held_out, judge, read_with, resolve
from operant.rewards.combine import MinusGreedy
from operant.runs.folder import RunFolder
from operant.runs.scored_rollouts import judge_beside
from operant.storage.checkpoint import read_part
from operant.storage.checkpoint_store import newest_whole
from operant.tools.report import parquet
from operant.types import OUTCOMES, Turn

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = [([4, 9, 5], [7, 8, 11, 6, 2]), ([5], [10, 2]), ([4, 6], [9, 3, 5, 2]), ([8, 8, 8, 4], [2])]
"""Prompts, and programs with their end token."""


def critic(folder, kind="gpt2", **more):
    made = OutcomeCritic(on_disk(folder, lm(kind, 40)), **more)
    torch.manual_seed(5)
    for p in made.outcome_head.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return made


def by_hand(made, prompt, program, padding=0):
    """[A, C] the head on the states that transformers returns for one row: behind no token of the program, one, ..."""
    model, program = made.model, (program + [0] * padding)[: padding or None]
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            start = [model.config.decoder_start_token_id, *program[:-1]]
            known = {"input_ids": torch.tensor([prompt]), "decoder_input_ids": torch.tensor([start])}
            states = model(**known, output_hidden_states=True).decoder_hidden_states[-1][0]
        else:
            whole = torch.tensor([prompt + program])
            states = model(whole, output_hidden_states=True).hidden_states[-1][0, len(prompt) - 1 : -1]
        return made.outcome_head(states)


# --- the model --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [*CAUSAL, "t5", "bart"])
def test_pooling_is_a_loop_over_positions_in_any_batch(kind, tmp_path):
    made = critic(tmp_path, kind)
    for (prompt, program), (own, pooled) in zip(ROWS, made.read(ROWS), strict=True):
        wanted = by_hand(made, prompt, program)
        assert torch.allclose(own, wanted, atol=1e-4) and len(own) == len(program)
        for t in range(len(program)):
            assert pooled[t].tolist() == pytest.approx(wanted[: t + 1].amax(0).tolist(), abs=1e-4)
        [(_, alone)] = made.read([(prompt, program)])
        assert torch.allclose(alone, pooled, atol=1e-4)


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_pooling_over_padding_is_coderls_and_tells_another_story(kind, tmp_path):
    made, won_by_padding = critic(tmp_path, kind, pool_padding=12), 0
    for (prompt, program), (own, pooled) in zip(ROWS, made.read(ROWS), strict=True):
        wanted = by_hand(made, prompt, program, 12)
        assert pooled[-1].tolist() == pytest.approx(wanted.amax(0).tolist(), abs=1e-5)
        assert torch.allclose(own, wanted[: len(program)], atol=1e-5)
        won_by_padding += sum(place >= len(program) for place in wanted.argmax(0).tolist())
        if len(program) > 1:  # a beginning is not padded
            assert pooled[0].tolist() == pytest.approx(wanted[0].tolist(), abs=1e-5)
    assert won_by_padding >= 8  # of 16 maxima


def test_padding_takes_the_room_that_programs_have(tmp_path):
    made = critic(tmp_path / "trunk", pool_padding=12)  # of 64 positions
    assert made.misfit(52, 2) is None and "64" in made.misfit(53, 2)
    [reading] = CriticScore(str(export(made, tmp_path / "export"))).read([("a" * 100, "b")])
    assert reading.program == "b"
    with pytest.raises(OperantError, match=r"policy.pool_padding=64: .* reads 64 tokens; lower it"):
        critic(tmp_path / "trunk", pool_padding=64)


@pytest.mark.parametrize(("kind", "auto"), [("gpt2", AutoModelForCausalLM), ("t5", AutoModelForSeq2SeqLM)])
def test_the_export_is_a_plain_model_with_the_head_beside_it(kind, auto, tmp_path):
    made = critic(tmp_path / "trunk", kind, hidden=16)
    folder = export(made, tmp_path / "export")
    assert not list(folder.glob("*.bin")) and not list(folder.glob("*.pt"))
    theirs, head = auto.from_pretrained(folder), load_tensors(folder / "outcome_head.safetensors")
    assert theirs.get_output_embeddings().weight.equal(made.model.get_output_embeddings().weight)
    assert sorted(list(x.shape) for x in head.values()) == [[4], [4, 16], [16], [16, 32]]
    for (_, a), (_, b) in zip(made.read(ROWS), OutcomeCritic(str(folder)).read(ROWS), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(OperantError, match=r"policy.hidden=8.*head with 16; leave it out"):
        OutcomeCritic(str(folder), hidden=8)
    (folder / "outcome_critic.json").write_text("{}")
    with pytest.raises(OperantError, match=r"outcome_critic.json is damaged"):
        OutcomeCritic(str(folder))


def characters():
    """A tokenizer of single letters."""
    known = {letter: i for i, letter in enumerate("?$ .abcdefghijklmnopqrstuvwxyz")}
    core = Tokenizer(models.WordLevel(known, unk_token="?"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    own = {"unk_token": "?", "eos_token": "$", "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=core, **own)


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scorer")
    return CriticScore(str(export(critic(folder / "trunk"), folder / "export")))


@pytest.mark.parametrize("text", ["the end.a b", " then the end", ""])
def test_a_token_has_the_score_of_what_is_read_by_its_end(text, scorer):
    whole = scorer.prefixes("go a", text)
    [reading] = scorer.read([("go a", text)])
    pieces = [letters().decode([i]) for i in scorer.rows([("go a", text)])[0][1][:-1]]
    assert "".join(pieces) == text and len(pieces) == len(whole) == len(reading.pooled) - 1
    other, after = characters(), []
    ids = other(text).input_ids
    for end in range(1, len(text) + 1):  # the longest beginning of whole pieces within the first `end` letters
        fitting = [k for k in range(len(pieces) + 1) if len("".join(pieces[:k])) <= end]
        after.append(float(reading.pooled[max(fitting), 3]))
    if text:
        assert scorer.prefixes("go a", ids, other) == after
    assert scorer.prefixes("go a", [*ids, other.eos_token_id], other) == [*after, float(reading.pooled[-1, 3])]
    own = [*scorer.rows([("go a", text)])[0][1][:-1], 2]
    assert scorer.prefixes("go a", own, letters()) == [*whole, float(reading.pooled[-1, 3])]


def test_what_does_not_fit_is_cut(scorer):
    [(prompt, program)] = scorer.rows([("a" * 100, "bcd")])
    assert len(prompt) + len(program) == 64 and len(program) == 4
    [(prompt, program)] = scorer.rows([("a", "b" * 100)])
    assert len(prompt) == 1 and len(program) == 63 and len(scorer.prefixes("a", "b" * 100)) == 62
    assert len(set(scorer.prefixes("a", letters()("b" * 100).input_ids, letters())[62:])) == 1


# --- training ---------------------------------------------------------------------------------------------------------
def programs(count, seed, shuffled=False):
    """A program passes with an e, else fails a test with an a, else crashes."""
    chance, rows = torch.Generator().manual_seed(seed), []
    for i in range(count):
        word = "".join("abcdefgh"[k] for k in torch.randint(8, (6,), generator=chance))
        rows.append({"prompt": "go " + "abc"[i % 3], "completion": " " + word, "outcome": OUTCOMES[kind_of(word)]})
    if shuffled:
        order = torch.randperm(count, generator=chance).tolist()
        return [row | {"outcome": rows[j]["outcome"]} for row, j in zip(rows, order, strict=True)]
    return rows


def kind_of(text):
    return 3 if "e" in text else 2 if "a" in text else 1


def trained(folder, *, shuffled=False, **more):
    given = {"algorithm": "outcome-critic", "steps": 60, "batch": 32, "lr": 2e-3, "quiet": True, "out": folder / "run"}
    folder.mkdir(exist_ok=True)
    tasks = write_rows(folder / "a.jsonl", programs(300, 1, shuffled))
    held = write_rows(folder / "b.jsonl", programs(100, 2, shuffled))
    policy = {"name": "outcome_critic", "trunk": on_disk(folder / "trunk", lm(vocab=40))}
    return operant.train(policy, tasks, evaluate=held, **given | more)


@pytest.mark.slow
def test_it_learns_the_rule_and_from_shuffled_outcomes_nothing(tmp_path):
    learnt = trained(tmp_path / "learnt")
    found = learnt.after.metrics()
    assert found["evaluate/critic/accuracy"] > 0.9 > 0.6 > found["evaluate/critic/majority"]
    assert found["evaluate/critic/loss"] < 0.4 < learnt.before.metrics()["evaluate/critic/loss"]
    areas = [found[f"evaluate/critic/auc_{share}"] for share in (25, 50, 75, 100)]
    assert areas == sorted(areas) and areas[0] < 0.75 and areas[-1] > 0.97
    chance = trained(tmp_path / "chance", shuffled=True).after.metrics()
    assert chance["evaluate/critic/accuracy"] < chance["evaluate/critic/majority"] + 0.1
    assert 0.3 < chance["evaluate/critic/auc_100"] < 0.7


def test_the_numbers_of_held_out_programs_by_hand():
    chances = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.1, 0.62, 0.08, 0.2], [0.2, 0.15, 0.0, 0.65], [0.9, 0.1, 0.0, 0.0]])
    true = torch.tensor([0, 0, 3, 0])
    # Two in (0.6, 0.7]: 0.62 wrong, 0.65 right; 0.7 lies in that interval as well; one in (0.8, 0.9].
    wanted = (abs(0.62 + 0.65 + 0.7 - 2) + abs(0.9 - 1)) / 4
    assert calibration_error(chances.double(), true) == pytest.approx(wanted, abs=1e-6)
    scores, positive = torch.tensor([0.1, 0.4, 0.35, 0.8, 0.4]), torch.tensor([False, False, True, True, True])
    pairs = [(a, b) for a in (0.35, 0.8, 0.4) for b in (0.1, 0.4)]
    wanted = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / 6
    assert area_under_curve(scores, positive) == pytest.approx(wanted)
    assert area_under_curve(scores, torch.ones(5, dtype=torch.bool)) is None
    rising = [torch.tensor([[0.0, 0, 0, k * sign] for k in range(5)]) for sign in (1.0, -1.0)]
    found = metrics(rising, [3.0, 1.0])
    assert found["critic/majority"] == 0.5
    assert [found[f"critic/auc_{share}"] for share in (25, 50, 75, 100)] == [1.0] * 4
    assert "critic/auc_25" not in metrics(rising, [1.0, 1.0])


@cases(
    ({"completion": "a", "outcome": "passed"}, ("a",), (3.0,)),
    ({"completion": "a", "outcome": 0}, ("a",), (0.0,)),
    ({"completions": ["a", "b", "c"], "outcomes": ["failed test", None, 1]}, ("a", "c"), (2.0, 1.0)),
)
def test_rows_with_outcomes(row, replies, scores):
    [task] = operant.data.load_tasks([{"prompt": "p"} | row], with_replies=True, labelled=True)
    assert (task.prompt, task.replies, task.scores) == ("p", replies, scores)


@cases(
    ({"tasks": [{"prompt": "p", "completion": "a", "outcome": "pased"}]}, r"outcome 'pased' must be one of compile"),
    ({"tasks": [{"prompt": "p", "completion": "a", "outcome": True}]}, r"outcome True must be one of compile"),
    ({"tasks": [{"prompt": "p", "completions": ["a"], "outcomes": [1, 2]}]}, r"one for each of `completions`"),
    ({"tasks": [{"prompt": "p", "completion": "a", "outcome": 1}]}, r"all programs have the outcome 'runtime error'"),
    ({"tasks": [{"prompt": "p", "completion": "a", "chosen": "a", "rejected": "b", "margin": 9}]}, r"label 9 is no"),
    ({"policy": "builtin:reviews-lm"}, r"use policy=outcome_critic with policy.trunk=MODEL"),
    ({"policy": {"name": "outcome_critic", "trunk": "builtin:reviews-lm", "hidden": -1}}, r"hidden=-1: it must be"),
    ({"reward": "letters:e"}, r"it generates no replies that could be scored"),
)
def test_a_critic_that_cannot_be_trained_is_a_sentence(given, message, tmp_path):
    both = [{"prompt": "p", "completion": "a", "outcome": 1}, {"prompt": "p", "completion": "b", "outcome": 3}]
    given = {"policy": {"name": "outcome_critic"}, "tasks": both, "algorithm": "outcome-critic"} | given
    with pytest.raises(OperantError, match=message):
        operant.train(**given, steps=1, quiet=True, out=tmp_path / "x")


# --- returns ----------------------------------------------------------------------------------------------------------
def by_rule(rollouts):
    """CodeRL's rewards by the rule of `programs`."""
    kinds = [kind_of(rollout.reply) for rollout in rollouts]
    return [Judgement(WORTH[kind], {}, OUTCOMES[kind], "why") for kind in kinds]


class Told:
    """A critic that says what it was given: of every program the same numbers, at positions 0 to 3."""

    path, batch = "told", 4
    own = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], [0.25, 0.25, 0.0, 0.5], [0.0, 0.1, 0.1, 0.8]])
    pooled = torch.tensor([[0.1, 0.5, 0.2, 0.2], [0.1, 0.2, 0.3, 0.4], [0.0, 0.3, 0.3, 0.4], [0.0, 0.1, 0.0, 0.9]])

    def read(self, attempts):
        return [Reading(self.own.double(), self.pooled.double(), [0, 1, 2, 3], text) for _, text in attempts]


def rollout(reply, task="t", group=0):
    ids = [*letters()(reply).input_ids, 2]
    return Rollout(Task(task, "go"), group, [Turn([4], ids, [0.0] * len(ids))], [reply], query="go")


def told(returns, **more):
    made = CriticReward("told", by_rule, returns=returns, **more)
    made.scorer = Told()
    read_with(made, letters())
    return made


Q = {kind: [float(Told.own[t, kind]) for t in (1, 2, 3, 3)] for kind in range(4)}
"""q of each class after the three letters and the stop token."""
BEFORE = {kind: [float(Told.own[t, kind]) for t in (0, 1, 2, 3)] for kind in range(4)}
"""q of each class at the state that predicts each of them."""
WORTH = (-1.0, -0.6, -0.3, 1.0)
V = [sum(p * v for p, v in zip(row, WORTH, strict=True)) for row in Told.pooled.tolist()]


@cases(
    # The replies pass (+1), crash (-0.6) and fail a test (-0.3); the greedy one fails a test.
    ("coderl", [[1.3 * q for q in BEFORE[3]], [-0.3 * q for q in BEFORE[1]], [0.0] * 4]),
    ("coderl_after", [[1.3 * q for q in Q[3]], [-0.3 * q for q in Q[1]], [0.0] * 4]),
    ("group", [[(1 - 0.1 / 3) * q for q in Q[3]], [(-0.6 - 0.1 / 3) * q for q in Q[1]], [-1.0 / 3 * q for q in Q[2]]]),
    ("plain", [[1.0] * 4, [-0.6] * 4, [-0.3] * 4]),
    ("difference", [[V[1] - V[0], V[2] - V[1], V[3] - V[2], r - V[3]] for r in (1.0, -0.6, -0.3)]),
)
def test_returns_are_the_formulas(returns, wanted):
    made = told(returns)
    made.see_greedy([rollout("bab")])
    found = judge(made, [rollout(reply) for reply in ("bed", "dud", "dad")])
    for mine, right in zip(found.scores, wanted, strict=True):
        assert mine == pytest.approx(right, abs=1e-6)
    assert found.passing == [pytest.approx([0.4, 0.4, 0.9, 0.9])] * 3
    assert found.parts["by_rule"] == [1.0, -0.6, -0.3] and found.remark(1) == (("runtime error",), "why")
    assert found.parts["critic/accuracy"] == [1.0, 0.0, 0.0]


@cases(
    (told("coderl"), r"'critic' compares with the policy's greedy replies, and has none to task 't'"),
    (told("group"), r"returns=group with one reply to each prompt pays nothing: give --samples 2"),
    (CriticReward("told", lambda rollouts: [1.0] * len(rollouts)), r"names no outcomes of task 't' \(none\)"),
    (CriticReward("told", lambda rollouts: [[1.0] * 4]), r"scores each token: a critic needs one score a reply"),
    (resolve("minus_greedy:letters:e"), r"'letters' compares with the policy's greedy replies"),
)
def test_a_return_that_has_no_meaning_is_a_sentence(reward, message):
    with pytest.raises(OperantError, match=message):
        judge(reward, [rollout("bed")])


@cases(told("coderl"), resolve("minus_greedy:letters:e"))
def test_replies_whose_greedy_episode_failed_are_left_out(reward):
    failed = replace(rollout("bab"), end="raised", texts=[], turns=[])
    assert judge_beside(reward, [rollout("bed")], [failed], pays=False).scores == [None]


def test_held_out_replies_are_judged_by_the_outcome_alone():
    for form in ("", "minus_query:"):
        names = (f"{form}minus_greedy:letters:e", f"{form}letters:e")
        made, plain = (resolve({name: 2.0, "length:<=3": 1.0}) for name in names)
        assert judge(held_out(made), [rollout("bed")]).scores == judge(plain, [rollout("bed")]).scores
    assert held_out(told("group")) is by_rule


# --- runs -------------------------------------------------------------------------------------------------------------
def test_a_run_subtracts_the_score_of_the_greedy_reply(tmp_path):
    """ReMax: the greedy reply is the bare model's, decoded by argmax; it is played once a prompt and not trained on."""
    calls, model = [], lm(vocab=40)

    def seen(rollouts):
        calls.append(rollouts)
        return [float(sum(r.ids)) for r in rollouts]

    options = {"algorithm": "reinforce", "batch": 8, "samples": 2, "reward_chunks": 2, "score.centre": False, "lr": 0.0}
    options |= {"tokenizer": letters(), "steps": 1, "max_tokens": 5, "probes": 0, "quiet": True, "out": tmp_path / "x"}
    run = operant.train(model, ["go", "abc", "the", "d."], MinusGreedy(seen), **options)
    greedy, own = calls[0::2], calls[1::2]
    assert [len(call) for call in greedy] == [2, 2] and [len(call) for call in own] == [4, 4]
    expected = {}
    for one in itertools.chain(*greedy):
        ids = list(one.turns[0].prompt)
        for _ in range(5):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == 2:
                break
        assert one.ids == ids[len(one.turns[0].prompt) :]
        expected[one.task.id] = sum(one.ids)
    right = [sum(r.ids) - expected[r.task.id] for r in itertools.chain(*own)]
    assert run.metrics[0]["reward/mean"] == pytest.approx(sum(right) / 8)


@cases(
    ("gpt2", {}),
    ("t5", {"sampling.min_tokens": 5}),
    ("gpt2", {"sampling.top_k": 4, "sampling.truncation": "stored"}),
    ("gpt2", {"importance": "sequence", "importance_cap": 0.5}),
    ("gpt2", {"importance": "token", "importance_cap": 0.5, "importance_mask": True}),
    ("gpt2", {"kl.loss_coef": 0.3, "kl.loss_kind": "k2"}),
    ("gpt2", {"kl.coef": 0.3, "kl.kind": "k3"}),
)
def test_the_gradient_of_coderl_is_the_sum_of_two_means_by_hand(kind, options):
    """Own programs with a number for every token, and given ones; and the same in three minibatches of any length.

    Given programs have no sampler: importance weights, KL and what was allowed are about the policy's own alone.
    """
    torch.manual_seed(0)
    fixed = {"max_tokens": 6, "keep_gradients": True, "optimizer.max_grad_norm": None, "loss.given_coef": 0.7}
    other = lm(kind, seed=1).double()
    known = fixed | {"update.micro_tokens": 12, "reference": Policy(other)} | options
    learner = Learner(Policy(lm(kind).double()), algorithm="coderl", **known)
    own = learner.generate([[3, 4, 5], [6, 7], [3, 4, 5], [8]])
    paid = [torch.randn(one.count).tolist() for one in own]
    texts = [([3, 4], [9, 8, 2]), ([5], [7, 7, 7, 7, 2])]
    given = [
        Rollout(Task(f"g{i}", p), i, [Turn(p, r)], [""], demonstrated=True, place=100 + i)
        for i, (p, r) in enumerate(texts)
    ]
    metrics = learner.learn(own + given, [*paid, None, None])
    mine = torch.cat([p.grad.flatten() for p in learner.policy.trainable()])
    twin, loss, count, in_loss = lm(kind).double(), 0.0, sum(r.count for r in own), 0.0

    def said(model, prompt, reply, turn=None):
        if kind == "t5":
            start = torch.tensor([[model.config.decoder_start_token_id, *reply[:-1]]])
            logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=start).logits[0]
        else:
            logits = model(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
        out = torch.zeros_like(logits)  # of what could not be drawn
        if turn is not None:
            out[: options.get("sampling.min_tokens", 0), list(learner.sampling.stops)] = -torch.inf
            for row, ids in zip(out, turn.allowed or [], strict=turn.allowed is not None):
                row[[i for i in range(len(row)) if i not in list(ids)]] = -torch.inf
        return (logits + out).log_softmax(-1).gather(-1, torch.tensor(reply)[:, None])[:, 0]

    for prompt, reply in texts:
        loss = loss - 0.7 * said(twin, prompt, reply).sum() / sum(len(r) for _, r in texts)
    weight = 0.0 if "importance_mask" in options else options.get("importance_cap", 1.0)
    for rollout, numbers in zip(own, paid, strict=True):
        chosen = said(twin, rollout.turns[0].prompt, rollout.ids, rollout.turns[0])
        with torch.no_grad():
            ref = said(other, rollout.turns[0].prompt, rollout.ids)
        advantages, apart = torch.tensor(numbers, dtype=torch.float64), chosen - ref
        if "kl.kind" in options:
            charge = 0.3 * ((-apart).exp() - 1 + apart)
            advantages, loss = advantages - charge.detach(), loss + charge.sum() / count
        loss = loss - weight * (advantages * chosen).sum() / count
        if "kl.loss_kind" in options:
            in_loss = in_loss + (apart**2 / 2).sum() / count
    loss = loss + 0.3 * in_loss
    loss.backward()
    truth = torch.cat([p.grad.flatten() for p in twin.parameters()])
    assert float((mine - truth).abs().max()) < 1e-6 * float(truth.abs().max())
    assert metrics["loss/total"] == pytest.approx(float(loss), rel=1e-5)
    right = -sum(bare_logprobs(twin, *pair).sum() for pair in texts) / sum(len(r) for _, r in texts)
    assert metrics["given/loss"] == pytest.approx(float(right), rel=1e-5)
    assert metrics.get("kl/in_loss", 0.0) == pytest.approx(float(in_loss), rel=1e-5)
    if "importance" in options:
        assert metrics["rollout/importance_mean"] == pytest.approx(weight)
        assert metrics["rollout/engine_gap"] < 1e-12, "of its own programs, beside given ones"


@cases(None, torch.tensor([1.0, 0.5]), [None, 0.5])
def test_a_reward_that_pays_one_token_of_a_reply_is_refused(scores):
    learner = Learner(lm(), algorithm="coderl", max_tokens=6, fixed_length=True)
    replies = learner.generate([[3, 4], [5]])
    with pytest.raises(OperantError, match=r"only the last token of each would learn.*set advantage.gamma=1"):
        learner.learn(replies, scores)
    assert learner.progress.step == 0
    learner.learn(replies, [[0.5] * 6, None])
    Learner(lm(), algorithm="coderl", max_tokens=6, **{"advantage.gamma": 1.0}).learn(replies, [1.0, 0.5])


def test_the_outcomes_of_a_run_may_be_those_of_a_part_of_its_reward(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {"steps": 1})
    known = {"task": "t", "query": "q", "reply": "r", "end": "stop", "rollout": 0, "turn": 0, "ids": [1]}
    named = ("tests/passed", "style/polite, tests/failed test", "runtime error", "good", "a/passed, b/passed", "")
    folder.rollouts(1, [known | {"outcome": name} for name in named])
    folder.close()
    rows = operant.data.sources.SOURCES.find("outcomes")(run=str(folder.path))
    assert [row["outcome"] for row in rows] == ["passed", "failed test", "runtime error", "passed"]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("begun"), steps=1)


def test_the_snippet_of_the_page_runs(begun, tmp_path, monkeypatch):
    [snippet] = re.findall(r"```python\n(.*?)```", read("docs/code.md#a-critic-of-programs"), re.S)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "critic").symlink_to(begun.path)
    monkeypatch.chdir(tmp_path)
    known = {"ids": letters()("return x + x").input_ids, "tokenizer": letters()}
    exec(snippet, known)
    assert float(known["reading"].pooled[-1].sum()) == pytest.approx(1)


def test_a_run_with_a_refreshed_critic_resumes_exactly(begun, tmp_path):
    """A run of CodeRL whose critic is refreshed on every step's outcomes."""
    gold = [{k: v for k, v in row.items() if k != "outcome"} for row in programs(60, 7) if row["outcome"] == "passed"]
    tasks, policy = write_rows(tmp_path / "gold.jsonl", gold), on_disk(tmp_path / "policy", lm(vocab=40))
    given = {"algorithm": "coderl", "batch": 8, "samples": 4, "max_tokens": 6, "lr": 1e-3, "quiet": True, "probes": 2}
    given |= {"evaluate": tasks, "data.limit": 12, "checkpoint_every": 1}

    def reward():
        return resolve(f"critic:{begun.path}", {"of": by_rule, "returns": "coderl", "refresh": 1e-3, "batch": 4})

    whole = operant.train(policy, tasks, reward(), steps=2, out=tmp_path / "whole", **given)
    operant.train(policy, tasks, reward(), steps=1, out=tmp_path / "parts", **given)
    parts = operant.train(reward=reward(), out=tmp_path / "parts", resume=True, steps=2, quiet=True)
    for a, b in zip(whole.metrics, parts.metrics, strict=True):
        names = [n for n in a if not n.startswith(("time/", "memory/", "tokens/", "speed/", "checkpoint/"))]
        assert {n: a[n] for n in names} == {n: b[n] for n in names}
    ends = [read_part(newest_whole(run.path / "checkpoints"), "reward") for run in (whole, parts)]
    first = CriticScore(str(begun.path)).critic.state_dict()
    assert ends[0]["weights"] and all(torch.equal(x, ends[1]["weights"][n]) for n, x in ends[0]["weights"].items())
    assert any(not torch.equal(x, first[n]) for n, x in ends[0]["weights"].items())
    # Held-out replies are scored by the rule, whatever the critic says.
    assert whole.after.scores == [WORTH[kind_of(r.reply)] for r in whole.after.rollouts]
    for seen in whole.metrics:
        worth = sum(WORTH[k] * seen.get(f"outcome/{OUTCOMES[k]}", 0.0) for k in range(4))
        assert seen["reward/by_rule/mean"] == pytest.approx(worth)
        assert {"reward/critic/accuracy/mean", "reward/critic/passed/mean", "given/loss"} <= seen.keys()
    rows = parquet.tokens(sorted((whole.path / "rollouts").glob("*.parquet"))[-1], range(8))
    assert all(len(row["passing"]) == len(row["tokens"]) and min(row["passing"]) >= 0 for row in rows)
    # What the run stored is what the next critic is trained on.
    rows = operant.data.sources.SOURCES.find("outcomes")(run=str(whole.path))
    stored = operant.data.load_tasks(rows, with_replies=True, labelled=True)
    assert len(stored) == 16 and {task.scores[0] for task in stored} <= {1.0, 2.0, 3.0}
    assert [kind_of(task.replies[0]) for task in stored] == [task.scores[0] for task in stored]
