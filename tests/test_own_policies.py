"""Policies that are no transformers models: a table of bigrams."""

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cases import cases
from torch import nn
from toys import lm

from operant import Completion, Learner, OperantError, Policy, PolicyBase, Sampling, ValueOptions, load_policy, train
from operant.engines.transformers import OwnEngine
from operant.models import base
from operant.models.adapters import LoraOptions
from operant.models.loading import export, load_own_weights
from operant.sampling import uniforms
from operant.types import Outputs

V, WANTED = 6, 4
PLAIN = {"algorithm": "rloo", "samples": 4, "batch": 16, "max_tokens": 3, "fixed_length": True, "kl.coef": 0.0}
PLAIN |= {"probes": 2, "lr": 0.3}
TASKS, PURE = [[1], [2], [3]], Sampling()


class Bigrams(PolicyBase):
    """The next token depends on the last one: a table of logits [V, V]."""

    def __init__(self, vocabulary: int = V):
        super().__init__()
        self.vocabulary = vocabulary
        self.table = nn.Parameter(torch.zeros(vocabulary, vocabulary))

    def forward(self, batch, sampling=PURE, **kwargs):
        logits = (self.table[batch.tokens.roll(1, 1)] / sampling.temperature).log_softmax(-1)
        logprobs = logits.gather(-1, batch.tokens[..., None])[..., 0] * batch.actions
        return Outputs(logprobs, logprobs, -(logits.exp() * logits).sum(-1) * batch.actions)

    @torch.no_grad()
    def generate(self, prompts, sampling, keys):
        last, made = torch.tensor([prompt[-1] for prompt in prompts]), []
        for place in range(sampling.max_tokens):
            last, logprobs = sampling.draw(self.table[last] / sampling.temperature, uniforms(keys, place))
            made.append((last.tolist(), logprobs.tolist()))
        rows = [[list(part) for part in zip(*row, strict=True)] for row in zip(*map(lambda m: zip(*m), made))]
        return [Completion(ids, logprobs, None, "length", self.version) for ids, logprobs in rows]


def wanted(rollouts):
    return [float(r.ids.count(WANTED)) for r in rollouts]


def test_a_table_trains_exports_loads_and_resumes_exactly(tmp_path):
    given = {"tasks": TASKS, "reward": wanted, **PLAIN}
    whole = train(Bigrams(), out=tmp_path / "whole", steps=8, **given)
    assert whole.metrics[0]["reward/mean"] < 1 and whole.metrics[-1]["reward/mean"] > 1.5, "3 is the optimum"
    assert whole.metrics[0]["rollout/logprob_gap"] < 1e-6
    train(Bigrams(), out=tmp_path / "half", steps=5, **given)
    half = train(Bigrams(), out=tmp_path / "half", steps=8, resume=True, **given)
    assert torch.equal(half.policy.table, whole.policy.table)
    with pytest.raises(OperantError, match="has other weights than this policy"):
        load_own_weights(Bigrams(7), tmp_path / "whole/export")
    for folder in (tmp_path / "whole/export", export(Valued(), tmp_path / "from Python")):
        with pytest.raises(OperantError, match="not installed under that name"):
            load_policy(folder)


def test_a_policy_of_transformers_may_have_a_generate_of_its_own():
    def given(prompt):
        return Completion(prompt[:1], [0.0], None, "length", 0)

    policy = load_policy(lm(), device="cpu")
    with pytest.raises(OperantError, match="policy Policy lacks a method `generate`"):
        OwnEngine(policy)
    policy.__class__ = type("Repeating", (Policy,), {"generate": lambda self, prompts, *_: [given(p) for p in prompts]})
    instance = SimpleNamespace(version=3, generate=policy.generate)  # its class has none
    assert OwnEngine(instance).generate([[7]], PURE, [0]) == [replace(given([7]), version=3)]
    assert [made.action for made in OwnEngine(policy).generate([[3], [5]], PURE, [0, 1])] == [[3], [5]]


def test_an_installed_policy_is_made_again_from_its_export(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "POLICIES", base.POLICIES)
    monkeypatch.setitem(base.POLICIES.built_in, "bigrams", Bigrams)
    run = train("bigrams", TASKS, wanted, out=tmp_path / "run", steps=1, **PLAIN, **{"policy.vocabulary": 8})
    again = load_policy(tmp_path / "run/export")
    assert isinstance(again, Bigrams) and again.vocabulary == 8 and torch.equal(again.table, run.policy.table)
    monkeypatch.setattr("operant.models.lora.check", lambda *given: None)  # which wants a GPU
    with pytest.raises(OperantError, match="its own class takes no lora"):
        load_policy(tmp_path / "run/export", lora=LoraOptions(quantise="8bit"))
    monkeypatch.setitem(base.POLICIES.built_in, "around", Around)
    made = load_policy(Around(), value=ValueOptions(init="normal"))
    folder = export(made, tmp_path / "around", made_by={"name": "around", "options": {}})
    again = load_policy(folder, value=ValueOptions())
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in made.state_dict().items())
    assert not isinstance(load_policy(export(load_policy(lm()), folder)).model, Around), "of the export before"


def test_kl_to_the_first_table_is_exact():
    learner = Learner(Bigrams(), **{k: x for k, x in PLAIN.items() if k not in ("samples", "batch", "probes")})
    replies = learner.generate([[1]] * 8)
    learner.step(replies, wanted(replies))
    moved, replies = learner.policy.table.detach().log_softmax(-1), learner.generate([[1]] * 8)
    metrics = learner.step(replies, wanted(replies))
    each = [sum(float(moved[a, b]) + math.log(V) for a, b in zip([1, *r.ids], r.ids, strict=False)) for r in replies]
    assert metrics["kl/per_reply"] == pytest.approx(sum(each) / 8, rel=1e-4)


@cases(
    ({}, None),
    ({"algorithm": "soft_q"}, r"computed no `Outputs.logsumexp`"),
    ({"kl.coef": 0.1, "kl.kind": "reverse"}, "computed no divergence"),
    ({"kl.loss_coef": 0.1, "kl.loss_kind": "reverse"}, "computed no divergence"),
)
def test_replies_from_elsewhere_need_log_probs_alone(given, lacks):
    learner = Learner(Bigrams(), **{"algorithm": "rloo"} | given)
    with pytest.raises(OperantError, match=lacks) if lacks else nullcontext():
        metrics = learner.step([[1]] * 4, [[2, 3]] * 4, [1.0, 0.0, 0.0, 1.0])
        assert metrics["policy/entropy"] == pytest.approx(math.log(V))


class Silent(Bigrams):
    generate = PolicyBase.generate


class Valued(Bigrams):
    has_values = True


class Around(nn.Module):
    """A module around a model, without `save_pretrained`."""

    def __init__(self):
        super().__init__()
        self.base = lm(vocab=V)
        self.config, self.forward = self.base.config, self.base.forward
        self.get_output_embeddings = self.base.get_output_embeddings


@cases(
    (type("Bare", (PolicyBase,), {}), "Bare lacks a number `vocabulary` and a method `forward` and parameters", {}),
    (Silent, "policy Silent lacks a method `generate`: write it, or name an engine", {}),
    (Valued, "policy Valued lacks a method `values`", {"algorithm": "ppo"}),
    (Bigrams, "needs a critic, and the policy has none: set has_values and write values", {"algorithm": "ppo"}),
    (lambda: nn.Linear(2, 2), "a Linear is no language model of transformers: .* a policy of your own", {}),
    (lambda: load_policy(Around(), value=ValueOptions(critic="copy")), "no Around can be saved", {"algorithm": "ppo"}),
    (Bigrams, r"model.\*: a Bigrams takes none of them", {"model.precision": "bfloat16"}),
    (type("Own", (Valued,), {"values": len}), "critic_steps=2 with a Own", {"algorithm": "ppo", "critic_steps": 2}),
    (object, "is no policy: .* derived from operant.PolicyBase", {}),
)
def test_what_a_policy_lacks_is_named_at_once(policy, message, given):
    with pytest.raises(OperantError, match=message):
        Learner(policy(), **{"algorithm": "rloo", "kl.coef": 0.0} | given)


def test_a_choice_has_the_version_of_the_weights():
    class Choosing(Bigrams):
        def choose(self, prompts, options, sampling, keys):
            return [(0, Completion(among[0], [0.0], None, "stop", 7)) for among in options]

    engine = OwnEngine(Choosing())
    engine.sync(engine.policy, 3)
    assert [made.version for _, made in engine.choose([[1]], [[[2], [3]]], PURE, [0])] == [3]
