"""Faults that earlier libraries shipped, each as a test that fails when the fault is put back: scores and updates.

The numbers are those of a list of such faults in TRL, its TextWorld fork, RL4LMs and OpenAI's code. The rest of the
list is in `test_prior_worlds.py`.
"""

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from rigs import Caught, gap, said
from toys import CAUSAL, lm

from operant import Learner, OperantError, Policy, Sampling, ValueOptions
from operant.engines.native.engine import NativeEngine
from operant.objectives import losses
from operant.objectives.kl import KLOptions, estimate
from operant.rollouts.collate import collate
from operant.rollouts.generation_kwargs import from_generation_kwargs
from operant.training.objective import Objective
from operant.training.optimizer import OptimizerOptions, apply, make_optimizer
from operant.training.scoring import score_batch
from operant.training.update import UpdateOptions, update

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [4], [12, 2, 2, 13], [3, 9], [6, 6, 6]]
SAMPLING = Sampling(max_tokens=6, stop_tokens=(2, 7, 11), temperature=0.9)


def spoken(policy, times=1):
    """Rollouts whose numbers are those that decoding noted, and their batch."""
    prompts = PROMPTS * times
    completions = NativeEngine(policy).generate(prompts, SAMPLING, list(range(len(prompts))))
    kept = [{"logprobs": c.logprobs, "values": c.values, "end": c.end} for c in completions]
    rollouts = [said(p, c.action, **k) for p, c, k in zip(prompts, completions, kept, strict=True)]
    return rollouts, collate(rollouts, [1.0] * len(rollouts))


def on_the_left(batch):
    """The same rows with their padding in front, full of an id that is pad and EOS at once."""
    width = batch.tokens.shape[1]
    places = (torch.arange(width) - (width - batch.mask.sum(1))[:, None]) % width
    moved = {n: getattr(batch, n).gather(1, places) for n in ("tokens", "mask", "actions", "turns", "logprobs")}
    moved["tokens"] = torch.where(moved["mask"], moved["tokens"], 2)
    return batch.with_(**moved)


@pytest.mark.parametrize("pad", [0, 2])
@pytest.mark.parametrize("kind", CAUSAL)
def test_1_with_unchanged_weights_every_ratio_is_one(kind, pad):
    policy = Policy(lm(kind, pad_token_id=pad), value=ValueOptions())
    rollouts, right = spoken(policy, times=12)
    assert len({len(r.ids) for r in rollouts}) > 2 and any(r.ids[-1] == 2 for r in rollouts)
    assert int(right.actions.sum()) == sum(len(r.ids) for r in rollouts)
    for batch in (right, on_the_left(right)):
        with torch.no_grad():
            ratio = (policy.forward(batch, SAMPLING).logprobs - batch.logprobs).exp()[batch.actions]
        assert float((ratio - 1).abs().max()) < 1e-4


@pytest.mark.parametrize("kind", CAUSAL)
def test_2_a_minibatch_has_the_mean_gradient_of_its_samples(kind):
    policy = Policy(lm(kind), value=ValueOptions(init="small"))
    _, batch = spoken(policy)
    batch = score_batch(batch, policy, None, SAMPLING, KLOptions())
    torch.manual_seed(1)
    batch = batch.with_(advantages=torch.randn(batch.tokens.shape), returns=torch.randn(batch.tokens.shape))

    def gradient(part):
        caught, options = Caught(policy.parameters()), UpdateOptions(epochs=1, micro_tokens=20)
        optimizer_options = OptimizerOptions(max_grad_norm=None)
        aim = Objective(losses.ppo, per="episode")
        update(policy, caught, part, aim, options=options, optimizer_options=optimizer_options, sampling=SAMPLING)
        return caught.gradients[0]

    alone = [gradient(batch.rows(slice(i, i + 1)).with_(episodes=torch.zeros(1, dtype=torch.long))) for i in range(5)]
    whole = gradient(batch)
    assert gap(whole, sum(alone) / 5) < 1e-5
    for i in range(5):
        changed = batch.advantages.clone()
        changed[i] += 1
        assert gap(gradient(batch.with_(advantages=changed)), whole) > 1e-3


@pytest.mark.parametrize("kind", CAUSAL)
def test_3_old_and_new_values_speak_of_the_same_tokens(kind):
    learner = Learner(lm(kind), **{"value.init": "normal", "temperature": 0.9, "epochs": 1, "lr": 0.0, "kl.coef": 0.0})
    _, batch = spoken(learner.policy)
    with torch.no_grad():
        out = learner.policy.forward(batch, SAMPLING)
    terms = losses.value_error(out, batch.with_(returns=batch.values), value_clip=None)
    assert float(terms["loss"][batch.actions].max()) < 1e-9
    assert float(batch.values[batch.actions].std()) > 0.1
    # And of the state before the token: the value of a first action is that of the prompt's last state.
    for row, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            states = learner.policy.model.base_model(torch.tensor([prompt])).last_hidden_state[0, -1]
            value = float(learner.policy.value_head(states))
        assert float(batch.values[row, len(prompt)]) == pytest.approx(value, abs=1e-4)


@pytest.mark.parametrize("kind", CAUSAL)
def test_5_kl_is_negative_only_if_sampling_is_cut(kind):
    """Enumerated over every first token of a reply: its probability under the sampler times what would be noted."""
    policy, reference = Policy(lm(kind)), Policy(lm(kind))
    norms = {name: module for name, module in reference.model.base_model.named_modules() if "." not in name}
    (last,) = (norms[name] for name in ("ln_f", "norm", "final_layer_norm") if name in norms)
    last.weight.data *= 2  # a reference that is surer than the policy of what both like best

    def expected(sampling, name):
        rows = [said([5, 6, 7], [token], logprobs=[0.0]) for token in range(20)]
        batch = collate(rows, [0.0] * 20).with_(logprobs=None)
        seen = score_batch(batch, policy, reference, sampling, KLOptions())
        noted = estimate(name, seen.raw_logprobs, seen.ref_logprobs)[:, 3].double()
        probs = seen.raw_logprobs[:, 3].double().exp()
        assert float(probs.sum()) == pytest.approx(1, abs=1e-5)
        logits = [m.model(torch.tensor([[5, 6, 7]])).logits[0, -1].detach().double() for m in (policy, reference)]
        p, q = ((x / sampling.temperature).log_softmax(0) for x in logits)
        return float((probs * noted).sum()), float((p.exp() * (p - q)).sum()), noted, probs

    for temperature in (1.0, 0.6):
        for name in ("k1", "k3"):
            mean, truth, noted, _ = expected(Sampling(temperature=temperature), name)
            if name == "k1":
                assert mean == pytest.approx(truth, abs=1e-5) and truth > 0.05 and float(noted.min()) < 0
            else:
                assert float(noted.min()) > -1e-6
    # With the sampler cut to the likeliest tokens, the same estimate is negative in expectation.
    _, _, noted, probs = expected(Sampling(), "k1")
    kept = Sampling(top_k=2).kept(probs.log()[None])[0]
    assert float((probs * noted)[kept].sum() / probs[kept].sum()) < -0.05
    for given in ({"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}, {"do_sample": False}):
        sampling = from_generation_kwargs(Sampling(), given)
        assert "may be negative" in sampling.warning()
        with pytest.raises(OperantError, match=r"negative KL in training|a greedy reply is no sample"):
            sampling.for_training()
    assert Sampling().warning() is None
    with pytest.raises(OperantError, match="min_length=4 counts the prompt too"):
        from_generation_kwargs(Sampling(), {"min_length": 4})


@pytest.mark.parametrize("kind", CAUSAL)
def test_10_entropy_is_that_of_response_tokens_alone(kind):
    learner = Learner(lm(kind), **{"lr": 0.0, "epochs": 1, "max_tokens": 5, "temperature": 0.9, "value.init": "normal"})
    replies = learner.generate(PROMPTS)
    metrics = learner.step(replies, [1.0, 0.0, 2.0, 0.0, 1.0])
    entropies, values = [], []
    for reply in replies:
        prompt = reply.turns[0].prompt
        logits = learner.policy.model(torch.tensor([prompt + reply.ids])).logits[0, len(prompt) - 1 : -1].double() / 0.9
        entropies += (-(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)).tolist()
        values += reply.turns[0].values
    assert metrics["policy/entropy"] == pytest.approx(sum(entropies) / len(entropies), abs=1e-4)
    assert metrics["value/mean"] == pytest.approx(sum(values) / len(values), abs=1e-5)
    assert metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-4)


def test_20_the_two_places_of_adams_epsilon_differ():
    """Five steps of both forms written out in float64; eps so large that they differ by more than a tenth."""
    gradients = [[0.5, -1e-3], [0.4, 2e-3], [-0.3, 1e-3], [0.2, -1e-3], [0.1, 3e-3]]
    lr, eps, b1, b2 = 0.1, 1e-2, 0.9, 0.999

    def golden(place):
        weights, m, v = [1.0, 2.0], [0.0, 0.0], [0.0, 0.0]
        for t, gradient in enumerate(gradients, 1):
            for i, g in enumerate(gradient):
                m[i] = b1 * m[i] + (1 - b1) * g
                v[i] = b2 * v[i] + (1 - b2) * g * g
                if place == "tensorflow":  # lr_t = lr sqrt(1 - b2^t) / (1 - b1^t); w -= lr_t m / (sqrt(v) + eps)
                    weights[i] -= lr * math.sqrt(1 - b2**t) / (1 - b1**t) * m[i] / (math.sqrt(v[i]) + eps)
                else:
                    weights[i] -= lr * (m[i] / (1 - b1**t)) / (math.sqrt(v[i] / (1 - b2**t)) + eps)
        return weights

    def ours(place):
        module = torch.nn.Sequential(*(torch.nn.Linear(2, 1, bias=False) for _ in range(2))).double()
        idle, moved = module.parameters()
        moved.data = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
        options = OptimizerOptions(lr=lr, eps=eps, eps_placement=place, max_grad_norm=None)
        optimizer = make_optimizer(module, options)
        for t, gradient in enumerate(gradients):
            moved.grad = torch.tensor([gradient], dtype=torch.float64)
            idle.grad = torch.ones_like(idle) if t else None  # of another age, as where a critic begins alone
            apply(optimizer, options)
        return moved.detach()[0].tolist()

    for place in ("torch", "tensorflow"):
        assert ours(place) == pytest.approx(golden(place), abs=1e-9)
    assert max(abs(a - b) for a, b in zip(golden("torch"), golden("tensorflow"), strict=True)) > 0.1


def test_20_the_presets_choose_their_own():
    assert Learner(lm(), preset="openai", total_steps=10).options["optimizer"].eps_placement == "tensorflow"
    assert Learner(lm(), preset="trl").options["optimizer"].eps_placement == "torch"
    with pytest.raises(OperantError, match="torch or tensorflow"):
        replace(OptimizerOptions(), eps_placement="inside")


def test_neither_adam_moves_a_frozen_weight():
    model = lm()
    model.transformer.wte.requires_grad_(False)
    before = deepcopy(model.transformer.wte.weight)
    learner = Learner(model, **{"optimizer.eps_placement": "tensorflow", "optimizer.lr": 0.1, "max_tokens": 4})
    replies = learner.generate(PROMPTS)
    learner.step(replies, [1.0, 0.0, 2.0, 0.0, 1.0])
    assert torch.equal(before, model.transformer.wte.weight)
