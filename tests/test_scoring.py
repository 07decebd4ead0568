"""Sampling and scoring agree: padding, the end token, temperature, truncation and dropout change no log-prob.

The truth is the model's own bare forward: one row, no padding, no cache, softmax in float64 (`toys.bare_logprobs`).
"""

from dataclasses import replace

import pytest
import torch
from rigs import gap, said, wider
from toys import CAUSAL, SPECIAL, bare_logprobs, lm, says

from operant import Batch, Learner, OperantError, Policy, Task, ValueOptions
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


def pushed_right(batch: Batch, junk: int) -> Batch:
    """The same rows padded on the left with `junk`."""

    def push(x: torch.Tensor, fill) -> torch.Tensor:
        out = torch.full_like(x, fill)
        for row, n in enumerate(batch.mask.sum(1).tolist()):
            out[row, x.shape[1] - n :] = x[row, :n]
        return out

    fills = {"tokens": junk, "mask": False, "actions": False, "turns": -1, "rewards": 0.0}
    return batch.with_(**{name: push(getattr(batch, name), fill) for name, fill in fills.items()})


def bare_values(policy: Policy, prompt, action) -> torch.Tensor:
    """[A] the value head applied to the model's last hidden states."""
    with torch.no_grad():
        states = policy.model(torch.tensor([prompt + action]), output_hidden_states=True).hidden_states[-1][0]
    head = policy.value_head.net[0]
    return (states[len(prompt) - 1 : -1].double() @ head.weight[0].double() + head.bias.double()).detach()


# --- padding (test 2) -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("padding", ["right", "wider", "left"])
@pytest.mark.parametrize("kind", CAUSAL)
def test_padding_changes_neither_logprobs_nor_values(kind, padding):
    policy = Policy(lm(kind), value=ValueOptions(init="normal"))
    modes = try_decoding(policy)
    assert modes.padded and modes.left and modes.cached
    batch = collate([said(*turn) for turn in TURNS], [0.0] * 4)
    batch = {"right": batch, "wider": wider(batch, 5, EOS, 0.0), "left": pushed_right(batch, 13)}[padding]
    with torch.no_grad():
        out = policy.forward(batch)
    for row, (prompt, action) in enumerate(TURNS):
        at = batch.actions[row]
        assert torch.allclose(out.logprobs[row][at].double(), bare_logprobs(policy.model, prompt, action), atol=1e-4)
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
        assert c.action == slowly(policy.model, prompt, key, sampling)


def slowly(model, prompt: list[int], key: int, sampling: Sampling) -> list[int]:
    """The same reply, computed from whole rows: each token is the first whose cumulative probability passes it."""
    ids = list(prompt)
    for place in range(sampling.max_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].double() / sampling.temperature
        passed = logits.softmax(0).cumsum(0) > float(uniforms([key], place))
        ids.append(int(passed.nonzero()[0]))
        if ids[-1] in sampling.stop_tokens:
            break
    return ids[len(prompt) :]


# --- pad is eos (test 3) ----------------------------------------------------------------------------------------------
THREE = [([5, 6], [8, 9, 4, EOS]), ([4, 3, 7], [7, EOS, 7, 5, 6]), ([9], [6, 10, 11, 12, 13])]
"""One ends with the end token, one holds that id in its middle, one never ends: 14 actions."""


@pytest.mark.parametrize("kind", CAUSAL)
def test_with_pad_equal_to_eos_exactly_the_reply_is_trained(kind):
    policy = Policy(lm(kind, pad_token_id=EOS))
    batch = collate([said(*turn) for turn in THREE], [1.0] * 3)
    batch = wider(batch, 3, EOS, 0.0)
    batch = batch.with_(weights=token_weights(batch))
    assert int((batch.weights > 0).sum()) == 14
    losses.total(losses.sft(policy.forward(batch), batch)["loss"], batch).backward()
    mine = torch.cat([p.grad.flatten() for p in policy.trainable()])

    twin = lm(kind, pad_token_id=EOS).double()
    whole = sum(
        -twin(torch.tensor([p + a])).logits[0, len(p) - 1 : -1].log_softmax(-1)[range(len(a)), a].sum()
        for p, a in THREE
    )
    (whole / 14).backward()
    assert gap(mine, torch.cat([p.grad.flatten() for p in twin.parameters()])) < 1e-5


def test_the_end_token_has_a_ratio_and_a_reward_where_pad_is_eos():
    policy = Policy(lm(pad_token_id=EOS))
    learner = Learner(policy.model, **{"lr": 0.0, "epochs": 1, "loss.value_coef": 0.0, "stop_tokens": (EOS,)})
    replies = learner.generate(
        [[5, 6]] * 24, min_length=-1, top_k=0.0, top_p=1.0, do_sample=True, pad_token_id=EOS, max_new_tokens=8
    )
    ended = [r for r in replies if r.ids[-1] == EOS]
    assert ended and all(r.end == ("stop" if r in ended else "length") for r in replies)
    batch = collate(ended, [1.0] * len(ended))
    last = batch.mask.sum(1) - 1
    assert bool(batch.actions.gather(1, last[:, None]).all()) and batch.rewards.sum() == len(ended)
    assert batch.rewards.gather(1, last[:, None]).tolist() == [[1.0]] * len(ended)
    metrics = learner.step(replies, [1.0] * 24)
    assert metrics["rollout/reply_tokens"] == pytest.approx(sum(len(r.ids) for r in replies) / 24)


# --- what sampling does, scoring does (test 4) ------------------------------------------------------------------------
@pytest.mark.parametrize("kind", CAUSAL)
def test_replies_at_low_temperature_score_as_they_were_sampled(kind):
    policy = Policy(lm(kind))
    sampling = Sampling(max_tokens=12, fixed_length=True, temperature=0.7)
    prompts = [[3 + i % 17] * (1 + i % 5) for i in range(64)]
    completions = NativeEngine(policy).generate(prompts, sampling, list(range(64)))
    rollouts = [said(p, c.action, logprobs=c.logprobs) for p, c in zip(prompts, completions, strict=True)]
    batch = collate(rollouts, [0.0] * 64)
    with torch.no_grad():
        out = policy.forward(batch, sampling)
    assert batch.actions.sum() == 64 * 12
    assert float((out.logprobs - batch.logprobs).abs().max()) < 1e-4
    for prompt, c in list(zip(prompts, completions, strict=True))[::8]:
        assert says(policy.model, prompt, c, 0.7)


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


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_half_precision_logits_are_scored_in_float32(temperature):
    torch.manual_seed(0)
    states, head = torch.randn(50, 16).bfloat16(), (torch.randn(5000, 16) * 0.6).bfloat16()
    ids = torch.randint(5000, (50,))
    sampling = Sampling(temperature=temperature)
    out = score(lambda s: s @ head.T, states, ids, torch.zeros(50, dtype=torch.long), sampling, vocabulary=5000)
    truth = ((states @ head.T).double() / temperature).log_softmax(-1)
    assert out["logprobs"].dtype == out["entropy"].dtype == torch.float32
    assert float((out["logprobs"] - truth.gather(1, ids[:, None]).squeeze(1)).abs().max()) < 2e-5
    assert float((out["entropy"] + (truth.exp() * truth).sum(-1)).abs().max()) < 2e-5


@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5", "bart"])
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
    states = learner.policy.states(batch)
    head = learner.policy.head
    assert states.dtype == head.weight.dtype == torch.bfloat16
    scaled = states.float() @ head.weight.float().T
    truth = learner.policy.modes.finish(scaled).log_softmax(-1).gather(1, batch.tokens[batch.actions][:, None])[:, 0]
    torch.testing.assert_close(learner.policy(batch).logprobs[batch.actions], truth, atol=1e-6, rtol=1e-6)
    assert learner.reference.policy.logits(states).dtype == torch.float32
    assert plain.policy.logits(states).dtype == torch.bfloat16
    learner.learn(replies, [1.0, 0.0, 0.0, 0.0])
    assert head.weight.grad.dtype == torch.bfloat16 and bool(head.weight.grad.any())


# --- what cuts the distribution (test 5) ------------------------------------------------------------------------------
CUTS = {"top_p": {"top_p": 0.8}, "top_k": {"top_k": 5}, "min_p": {"min_p": 0.2}}


def nucleus(probs: list[float], *, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> set[int]:
    """The ids that can be drawn, by the definition of each cut."""
    ordered = sorted(range(len(probs)), key=lambda v: -probs[v])
    allowed_ids, mass = set(), 0.0
    for rank, v in enumerate(ordered):
        if mass < top_p and (not top_k or rank < top_k) and probs[v] >= min_p * probs[ordered[0]]:
            allowed_ids.add(v)
        mass += probs[v]
    return allowed_ids


@pytest.mark.parametrize("cut", CUTS)
def test_truncated_sampling_is_refused_in_training(cut):
    named = next(iter(CUTS[cut]))
    with pytest.raises(OperantError, match=rf"{named}=.*truncation='stored'"):
        Learner(lm(), **CUTS[cut])
    learner = Learner(lm(), max_tokens=3)
    with pytest.raises(OperantError, match=named):
        learner.generate([[5]], **CUTS[cut])
    freely = replace(learner.sampling, **CUTS[cut])
    assert len(learner.play([Task("t", [5])], sampling=freely, stream="evaluate")) == 1


@pytest.mark.parametrize("cut", CUTS)
def test_stored_truncation_makes_the_mean_ratio_one(cut):
    """The sum of q(v) x ratio(v) over the tokens that could be drawn is 1, also after an update."""
    policy, other = Policy(lm(spread=0.2)), lm(spread=0.2, seed=1)
    sampling = Sampling(max_tokens=1, truncation="stored", temperature=0.9, **CUTS[cut])
    prompt = [5, 6, 7]
    (drawn,) = NativeEngine(policy).generate([prompt], sampling, [3])
    with torch.no_grad():
        probs = (policy.model(torch.tensor([prompt])).logits[0, -1].double() / 0.9).softmax(0).tolist()
    allowed_ids = nucleus(probs, **CUTS[cut])
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


def test_allowed_ids_travel_with_their_action():
    with pytest.warns(UserWarning, match="top_k=4"):
        learner = Learner(lm(spread=0.2), top_k=4, truncation="stored", max_tokens=7, epochs=2, minibatch=3, lr=0.0)
    replies = learner.generate([[5, 6], [7], [8, 9, 10], [11], [12, 13]])
    assert {len(ids) for r in replies for ids in r.turns[0].allowed} == {4}
    metrics = learner.step(replies, [1.0, 0.0, 2.0, 3.0, 1.0])
    assert metrics["policy/ratio_max"] == pytest.approx(1, abs=1e-4) and metrics["rollout/logprob_gap"] < 1e-4


# --- dropout (test 6) -------------------------------------------------------------------------------------------------
DROPPED = {
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "gpt_neox": {"attention_dropout": 0.1},
    "llama": {"attention_dropout": 0.3},
    "qwen2": {"attention_dropout": 0.3},
}


@pytest.mark.parametrize("kind", CAUSAL)
def test_dropout_in_the_checkpoint_is_off_whatever_is_asked(kind):
    model = lm(kind, **DROPPED[kind])
    learner = Learner(model, max_tokens=8, lr=0.0, epochs=2, minibatch=4)
    model.train()
    learner.policy.train()
    replies = learner.generate([[5, 6, 7], [8], [9, 10]] * 4)
    model.train()
    metrics = learner.step(replies, [float(len(r.ids)) for r in replies])
    assert metrics["policy/clip_fraction"] == 0
    assert metrics["policy/ratio_min"] == pytest.approx(1, abs=1e-4) == metrics["policy/ratio_max"]
    assert metrics["rollout/logprob_gap"] < 1e-4
    assert metrics["kl/per_reply"] == pytest.approx(0, abs=1e-5)
    model.eval()
    for r in replies:
        assert says(model, r.turns[0].prompt, r.turns[0])


def test_the_gap_between_sampler_and_trainer_is_measured():
    """A sampler that is off by 0.3 nats at one token is reported with that number."""
    learner = Learner(lm(), max_tokens=5, lr=0.0)
    replies = learner.play([Task(f"t{i}", [5 + i]) for i in range(6)], env=SingleTurn())
    turn = replies[2].turns[0]
    off = [turn.logprobs[0] + 0.3, *turn.logprobs[1:]]
    replies[2] = replace(replies[2], turns=[replace(turn, logprobs=off)])
    assert learner.step(replies, [1.0] * 6)["rollout/logprob_gap"] == pytest.approx(0.3, abs=1e-4)


@pytest.mark.parametrize("how", [{}, {"temperature": 0.7}, {"banned": (2, 5)}, {"min_tokens": 2, "stop_tokens": (0,)}])
@pytest.mark.parametrize(("beside", "top_k"), [(False, None), (True, None), (True, 2), (True, 8), (True, 9)])
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
    inputs = SweepInput(zero, zero, Sampling(), other)
    sum(Sweep.apply(logits, inputs)).sum().backward()
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
