"""Sampling and scoring agree: padding, the end token, temperature, truncation and dropout change no log-prob.

The truth is the model's own bare forward: one row, no padding, no cache, softmax in float64 (`toys.bare_logprobs`).
"""

from dataclasses import replace

import pytest
import torch
from cases import cases
from rigs import gap, pushed_right, said, wider
from toys import CAUSAL, SPECIAL, bare_logprobs, lm, says

from operant import Learner, OperantError, Policy, Task, ValueOptions
from operant.engines.native.capabilities import try_decoding
from operant.engines.native.engine import NativeEngine
from operant.envs import SingleTurn
from operant.models.logprobs import Sweep, SweepInput, _spread, _statistics, compiled, score
from operant.objectives import losses
from operant.objectives.kl import EXACT
from operant.rollouts.collate import collate, token_weights
from operant.sampling import Sampling, uniforms

EOS = SPECIAL["eos_token_id"]
TURNS = [([5, 6, 7], [8, 2, 9, 4]), ([4], [7, 7]), ([9, 3, 3, 3, 11, 3, 12], [6, 10, 2]), ([1, 19], [18] * 9)]
PROMPTS = [prompt for prompt, _ in TURNS]


def bare_values(policy: Policy, prompt, action) -> torch.Tensor:
    with torch.no_grad():
        states = policy.model(torch.tensor([prompt + action]), output_hidden_states=True).hidden_states[-1][0]
    head = policy.value_head.net[0]
    return (states[len(prompt) - 1 : -1].double() @ head.weight[0].double() + head.bias.double()).detach()


@pytest.mark.parametrize("kind", CAUSAL)
def test_padding_changes_neither_logprobs_nor_values(kind):
    policy = Policy(lm(kind), value=ValueOptions(init="normal"))
    modes = try_decoding(policy)
    assert modes.padded and modes.left and modes.cached
    plain = collate([said(*turn) for turn in TURNS], [0.0] * 4)
    for batch in (plain, wider(plain, 5, EOS, 0.0), pushed_right(plain, 13)):
        with torch.no_grad():
            out = policy.forward(batch)
        for row, (prompt, action) in enumerate(TURNS):
            at, truth = batch.actions[row], bare_logprobs(policy.model, prompt, action)
            assert torch.allclose(out.logprobs[row][at].double(), truth, atol=1e-4)
            assert torch.allclose(out.values[row][at].double(), bare_values(policy, prompt, action), atol=1e-4)
        assert not out.logprobs[~batch.actions].any() and not out.values[~batch.actions].any()


@pytest.mark.parametrize("kind", CAUSAL)
def test_decoding_keeps_what_a_bare_forward_says(kind):
    """Log-probs, values and draws agree for prompts of 1 to 7 tokens and replies of unequal length in one batch."""
    policy = Policy(lm(kind), value=ValueOptions(init="normal"))
    sampling = Sampling(max_tokens=12, stop_tokens=(2, 4, 6, 7, 8, 15), temperature=0.7)
    keys = [11, 12, 13, 14, 15, 16, 17, 18]
    completions = NativeEngine(policy).generate(PROMPTS * 2, sampling, keys)
    assert len({len(c.action) for c in completions}) > 2
    for prompt, key, c in zip(PROMPTS * 2, keys, completions, strict=True):
        assert says(policy.model, prompt, c, 0.7)
        assert c.values == pytest.approx(bare_values(policy, prompt, c.action).tolist(), abs=1e-4)
        ids = list(prompt)  # each token is the first whose cumulative probability passes the number that is drawn
        for place in range(sampling.max_tokens):
            with torch.no_grad():
                logits = policy.model(torch.tensor([ids])).logits[0, -1].double() / 0.7
            ids.append(int((logits.softmax(0).cumsum(0) > float(uniforms([key], place))).nonzero()[0]))
            if ids[-1] in sampling.stop_tokens:
                break
        assert c.action == ids[len(prompt) :]


@pytest.mark.parametrize("kind", CAUSAL)
def test_with_pad_equal_to_eos_exactly_the_reply_is_trained(kind):
    """One reply ends with the end token, one holds that id in its middle, one never ends: 14 actions."""
    replies = [([5, 6], [8, 9, 4, EOS]), ([4, 3, 7], [7, EOS, 7, 5, 6]), ([9], [6, 10, 11, 12, 13])]
    policy, batch = Policy(lm(kind, pad_token_id=EOS)), collate([said(*turn) for turn in replies], [1.0] * 3)
    batch = wider(batch, 3, EOS, 0.0)
    batch = batch.with_(weights=token_weights(batch))
    assert int((batch.weights > 0).sum()) == 14
    losses.total(losses.sft(policy.forward(batch), batch)["loss"], batch).backward()
    mine = torch.cat([p.grad.flatten() for p in policy.trainable()])

    twin = lm(kind, pad_token_id=EOS).double()
    whole = sum(
        -twin(torch.tensor([p + a])).logits[0, len(p) - 1 : -1].log_softmax(-1)[range(len(a)), a].sum()
        for p, a in replies
    )
    (whole / 14).backward()
    assert gap(mine, torch.cat([p.grad.flatten() for p in twin.parameters()])) < 1e-5


def test_a_minimum_length_and_bans_score_as_they_were_sampled():
    """Some of twenty tokens cannot be drawn; the expected log-probs are renormalised over the others in float64."""
    policy = Policy(lm())
    sampling = Sampling(max_tokens=6, min_tokens=3, stop_tokens=(2, 3, 4, 5), banned=(9, 10), temperature=1.3)
    completions = NativeEngine(policy).generate([[6, 7]] * 32, sampling, list(range(32)))
    assert {len(c.action) for c in completions} >= {4, 6} and all(len(c.action) > 3 for c in completions)
    batch = collate([said([6, 7], c.action, logprobs=c.logprobs) for c in completions], [0.0] * 32)
    with torch.no_grad():
        out = policy.forward(batch, sampling)
        for row, c in enumerate(completions):
            logits = policy.model(torch.tensor([[6, 7, *c.action]])).logits[0, 1:-1].double() / 1.3
            for place, token in enumerate(c.action):
                gone = {9, 10} | ({2, 3, 4, 5} if place < 3 else set())
                left = logits[place, [v for v in range(20) if v not in gone]]
                truth = float(logits[place, token] - left.logsumexp(0))
                assert c.logprobs[place] == pytest.approx(truth, abs=1e-4)
                assert float(out.logprobs[row, 2 + place]) == pytest.approx(truth, abs=1e-4)


def test_a_row_that_the_reference_cannot_read_is_a_sentence():
    learner = Learner(lm(), reference=lm("llama", max_position_embeddings=8), max_tokens=9, fixed_length=True)
    with pytest.raises(OperantError, match=r"row 0 of the reference .*shorten it"):
        learner.step(learner.generate([[3, 4]] * 2), [0.0, 1.0])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_half_precision_logits_are_scored_in_float32(temperature):
    torch.manual_seed(0)
    states, head = torch.randn(50, 16).bfloat16(), (torch.randn(5000, 16) * 0.6).bfloat16()
    ids, sampling = torch.randint(5000, (50,)), Sampling(temperature=temperature)
    out = score(lambda s: s @ head.T, states, ids, torch.zeros(50, dtype=torch.long), sampling, vocabulary=5000)
    truth = ((states @ head.T).double() / temperature).log_softmax(-1)
    assert out["logprobs"].dtype == out["entropy"].dtype == torch.float32
    assert float((out["logprobs"] - truth.gather(1, ids[:, None]).squeeze(1)).abs().max()) < 2e-5
    assert float((out["entropy"] + (truth.exp() * truth).sum(-1)).abs().max()) < 2e-5


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_bfloat16_model_may_have_an_output_head_in_float32(kind, tmp_path, monkeypatch):
    """Log-probs in the update and in generation are those of float32 products of bfloat16 states and weights."""
    lm(kind).save_pretrained(tmp_path)
    how = {"model.precision": "bfloat16", "max_tokens": 4, "lr": 0.0, "keep_gradients": True}
    learner, plain = (
        Learner(lm(kind), reference=str(tmp_path), **how, **{"model.head_precision": head})
        for head in ("float32", "same")
    )
    drawn_from, logits = list[torch.dtype](), Policy.logits
    monkeypatch.setattr(Policy, "logits", lambda *given: drawn_from.append((x := logits(*given)).dtype) or x)
    replies = learner.play([Task(f"t{i}", [5 + i, 6]) for i in range(4)], env=SingleTurn())
    assert {*drawn_from} == {torch.float32}
    batch = collate(replies, [0.0] * 4)
    states, head = learner.policy.states(batch), learner.policy.head
    assert states.dtype == head.weight.dtype == torch.bfloat16
    scaled = states.float() @ head.weight.float().T
    truth = learner.policy.modes.finish(scaled).log_softmax(-1).gather(1, batch.tokens[batch.actions][:, None])[:, 0]
    torch.testing.assert_close(learner.policy(batch).logprobs[batch.actions], truth, atol=1e-6, rtol=1e-6)
    assert learner.reference.policy.logits(states).dtype == torch.float32
    assert plain.policy.logits(states).dtype == torch.bfloat16
    learner.learn(replies, [1.0, 0.0, 0.0, 0.0])
    assert head.weight.grad.dtype == torch.bfloat16 and bool(head.weight.grad.any())


CUTS = [("top_p", 0.8), ("top_k", 5), ("min_p", 0.2)]


@cases(*CUTS)
def test_truncated_sampling_is_refused_in_training(name, value):
    with pytest.raises(OperantError, match=rf"{name}=.*truncation='stored'"):
        Learner(lm(), **{name: value})
    learner = Learner(lm(), max_tokens=3)
    with pytest.raises(OperantError, match=name):
        learner.generate([[5]], **{name: value})
    freely = replace(learner.sampling, **{name: value})
    assert len(learner.play([Task("t", [5])], sampling=freely, stream="evaluate")) == 1


@cases(*CUTS)
def test_stored_truncation_makes_the_mean_ratio_one(name, value):
    """The sum of q(v) x ratio(v) over the tokens that could be drawn is 1, also after an update."""
    policy, other = Policy(lm(spread=0.2)), lm(spread=0.2, seed=1)
    sampling = Sampling(max_tokens=1, truncation="stored", temperature=0.9, **{name: value})
    prompt = [5, 6, 7]
    (drawn,) = NativeEngine(policy).generate([prompt], sampling, [3])
    with torch.no_grad():
        probs = (policy.model(torch.tensor([prompt])).logits[0, -1].double() / 0.9).softmax(0).tolist()
    ordered = sorted(range(20), key=lambda v: -probs[v])
    above = [sum(probs[v] for v in ordered[:rank]) for rank in range(20)]
    within = {"top_p": lambda rank: above[rank] < value, "top_k": lambda rank: rank < value}
    within["min_p"] = lambda rank: probs[ordered[rank]] >= value * max(probs)
    allowed_ids = {v for rank, v in enumerate(ordered) if within[name](rank)}
    mass = sum(probs[v] for v in allowed_ids)
    assert set(drawn.allowed[0]) == allowed_ids and 2 < len(allowed_ids) < 20 and mass < 0.99
    assert drawn.logprobs[0] == pytest.approx(float(torch.tensor(probs[drawn.action[0]] / mass).log()), abs=1e-5)
    every = [said(prompt, [v], logprobs=[0.0], allowed=[sorted(allowed_ids)]) for v in sorted(allowed_ids)]
    batch = collate(every, [0.0] * len(every))
    q = torch.tensor([probs[v] / mass for v in sorted(allowed_ids)], dtype=torch.float64)
    for model in (policy.model, other):
        policy.model.load_state_dict(model.state_dict())
        with torch.no_grad():
            out = policy.forward(batch, sampling)
        ratio = out.logprobs[:, -1].double().exp() / q
        assert float((q * ratio).sum()) == pytest.approx(1.0, abs=1e-4)
        assert float((out.raw_logprobs[:, -1].double().exp()).sum()) < 0.999  # KL is measured untruncated
    assert float((ratio - 1).abs().max()) > 0.1


@cases(
    ("gpt2", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
    ("gpt_neox", {"attention_dropout": 0.1}),
    ("qwen2", {"attention_dropout": 0.3}),
)
def test_dropout_in_the_checkpoint_is_off_whatever_is_asked(kind, dropped):
    model = lm(kind, **dropped)
    learner = Learner(model, max_tokens=8, lr=0.0, epochs=2, minibatch=4)
    model.train()
    learner.policy.train()
    replies = learner.generate([[5, 6, 7], [8], [9, 10]] * 4)
    model.train()
    metrics = learner.step(replies, [float(len(r.ids)) for r in replies])
    assert metrics["policy/clip_fraction"] == 0
    assert metrics["policy/ratio_min"] == pytest.approx(1, abs=1e-4) == metrics["policy/ratio_max"]
    assert metrics["rollout/logprob_gap"] < 1e-4 and metrics["kl/per_reply"] == pytest.approx(0, abs=1e-5)
    model.eval()
    for r in replies:
        assert says(model, r.turns[0].prompt, r.turns[0])


@cases(
    ({"temperature": 0.7}, False, None),
    ({"banned": (2, 5)}, True, None),
    ({"min_tokens": 2, "stop_tokens": (0,)}, True, 2),
    ({}, True, 8),
    ({"temperature": 0.7, "banned": (2, 5)}, True, 9),
)
def test_the_sweep_has_the_gradient_of_its_numbers(how, beside, top_k):
    """The gradient of every number agrees with finite differences in float64, and every number with its definition."""
    torch.manual_seed(1)
    logits = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)
    other = torch.randn(6, 9, dtype=torch.float64) * 2 if beside else None
    ids, places = torch.tensor([1, 3, 4, 6, 7, 8]), torch.arange(6)
    inputs = SweepInput(ids, places, Sampling(**how), other, EXACT, top_k, True)
    assert torch.autograd.gradcheck(lambda x: Sweep.apply(x, inputs), (logits,))
    z = inputs.sampling.adjust(logits.detach(), places)
    p = z.softmax(-1)
    logp = p.clamp(min=1e-300).log()
    right = [logp[range(6), ids], z.logsumexp(-1), -(p * logp).sum(-1)]
    if other is not None:
        q = inputs.sampling.adjust(other, places).softmax(-1)
        if top_k is not None:  # k + 1 outcomes: the likeliest tokens one by one, and all others together
            order = p.argsort(-1, descending=True)
            top, rest = order[:, :top_k], order[:, top_k:]
            p, q = (torch.cat([x.gather(1, top), x.gather(1, rest).sum(-1, keepdim=True)], -1) for x in (p, q))
            logp = p.clamp(min=1e-300).log()
        logq = q.clamp(min=1e-300).log()
        logm = ((p + q) / 2).clamp(min=1e-300).log()
        right += [(p * (logp - logq)).sum(-1), (q * (logq - logp)).sum(-1)]
        right += [((p * (logp - logm)).sum(-1) + (q * (logq - logm)).sum(-1)) / 2]
    for mine, true in zip(Sweep.apply(logits, inputs), right, strict=True):
        torch.testing.assert_close(mine.detach(), true, atol=1e-12, rtol=1e-10)


def test_an_all_but_impossible_token_has_a_finite_gradient():
    logits = torch.tensor([[0.0, -900.0, 1.0]], dtype=torch.float64, requires_grad=True)
    zero, other = torch.tensor([0]), torch.tensor([[0.0, 5.0, 1.0]], dtype=torch.float64)
    sum(Sweep.apply(logits, SweepInput(zero, zero, Sampling(), other))).sum().backward()
    assert logits.grad.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [None, 4])
def test_what_a_gpu_runs_compiled_compiles_and_says_the_same(top_k):
    """The two functions agree with themselves compiled, here for a CPU."""
    torch.manual_seed(1)
    z, other, ids = torch.randn(5, 40), torch.randn(5, 40), torch.tensor([1, 3, 4, 6, 7])
    how = (True, EXACT, top_k)
    plain = _statistics(z, other, ids, how)
    torch.testing.assert_close(compiled(_statistics)(z, other, ids, how), plain)
    given = torch.stack(plain[2:-1])[..., None], [torch.randn(5, 1) for _ in range(1 + len(EXACT))]
    torch.testing.assert_close(compiled(_spread)(z, other, *given, how), _spread(z, other, *given, how))
