"""Soft Q-learning and the MLP before the output head: losses by hand in float64, a bandit with a known best policy.

The truth is the bare model of transformers, on whose last hidden states an MLP is computed by hand.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import cases
from toys import letters, lm

from operant import Batch, Learner, OperantError, export, load_policy, train
from operant.algorithms import find, presets
from operant.models import output_mlp
from operant.models.adapters import OutputMlpOptions
from operant.models.options import ModelOptions
from operant.options import values
from operant.training.options import learner_options

PROMPTS, REPLIES, SCORES = [[3, 4], [5], [3, 4]], [[6, 7, 2], [8], [9, 6]], [0.5, -1.0, 2.0]
WIDE = OutputMlpOptions(width=6, gain=1.5, bias=0.1, logit_bias=-0.5)
V = 20


def mlp_policy(kind="gpt2", **more):
    return load_policy(lm(kind, V), mlp=WIDE, seed=5, **more).double()


def logits_by_hand(bare, mlp, prompt, action):
    """[A, V] the logits at an action: the bare model's states through two matrices, its own head, and the constant."""
    caught, head = [], bare.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda module, given: caught.append(given[0]))
    if bare.config.is_encoder_decoder:
        start = bare.config.decoder_start_token_id
        bare(input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([[start, *action[:-1]]]))
        states = caught[0][0]
    else:
        bare(torch.tensor([prompt + action]))
        states = caught[0][0, len(prompt) - 1 : -1]
    hook.remove()
    hidden = (states @ mlp.up.weight.T + mlp.up.bias).clamp(min=0)
    return (hidden @ mlp.down.weight.T + mlp.down.bias) @ head.weight.T + mlp.logit_bias


# --- the MLP ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5"])
def test_logprobs_go_through_the_mlp_which_alone_is_trained(kind):
    policy, bare = mlp_policy(kind), lm(kind, V).double()
    mlp, batch = output_mlp.find(policy.model), Batch.given(PROMPTS, REPLIES)
    out = policy.forward(batch)
    truth = [logits_by_hand(bare, mlp, p, a) for p, a in zip(PROMPTS, REPLIES, strict=True)]
    chosen = torch.cat([x.log_softmax(-1)[range(len(a)), a] for x, a in zip(truth, REPLIES, strict=True)])
    assert torch.allclose(out.logprobs[batch.actions], chosen, atol=1e-10)
    assert torch.allclose(out.logsumexp[batch.actions], torch.cat(truth).logsumexp(-1), atol=1e-10)
    for one in (policy, mlp_policy(kind, options=ModelOptions(train_head=False))):
        assert {*map(id, one.trainable())} == {*map(id, output_mlp.find(one.model).parameters())}


def test_an_untrained_mlp_makes_tokens_almost_equally_likely(tmp_path):
    fresh = load_policy(lm("gpt2", V), mlp=OutputMlpOptions(width=64), seed=1)
    assert fresh.forward(Batch.given(PROMPTS, REPLIES)).logprobs[0, 2].exp().item() == pytest.approx(1 / V, rel=1e-2)
    policy = load_policy(lm("llama", V), mlp=WIDE, seed=1)
    learner = Learner(policy, algorithm="soft_q", max_tokens=4, stop_tokens=-1)
    reply = learner.generate([[3, 4]], top_k=1, truncation="stored")[0].turns[0].action
    wanted = policy.model.generate(torch.tensor([[3, 4]]), max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert reply == wanted[0, 2:].tolist()


def test_an_export_has_the_mlp_alone_and_knows_its_model(tmp_path, monkeypatch):
    base, other, out = tmp_path / "base", tmp_path / "other", tmp_path / "out"
    export(load_policy(lm("gpt2", V), tokenizer=letters()), base)
    before = [path.read_bytes() for path in sorted(base.glob("*.*"))]
    run = train(
        str(base), ["ab"], reward="letters:e", algorithm="soft_q", out=tmp_path / "run", steps=2, batch=4, max_tokens=2,
        quiet=True, probes=0, **{"output_mlp.width": 6, "output_mlp.gain": 1.0, "lr": 0.1},
    )  # fmt: skip
    assert [path.read_bytes() for path in sorted(base.glob("*.*"))] == before
    export(run.learner.policy, out)
    assert sum(path.stat().st_size for path in out.glob("*.safetensors")) < 10_000
    again, batch = load_policy(out), Batch.given(PROMPTS, REPLIES)
    assert torch.equal(again.forward(batch).logprobs, run.learner.policy.forward(batch).logprobs)
    assert output_mlp.find(again.model) is not None and again.tokenizer is not None
    for options in (ModelOptions(train_head=True), ModelOptions(train_layers=1)):
        with pytest.raises(OperantError, match="the MLP is trained alone"):
            load_policy(out, options=options)
    monkeypatch.chdir(tmp_path)  # where a model that no file held has a relative path
    export(load_policy(export(mlp_policy(), "bare")), "again")
    config = json.loads((tmp_path / "again/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "bare/base")
    model = lm("gpt2", V)
    model.transformer.ln_f.weight.data[0] += 0.1
    export(load_policy(model, tokenizer=letters()), other)
    config = json.loads((out / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(other)}))
    with pytest.raises(OperantError, match="is not the model that the MLP in"):
        load_policy(out)


def test_fluent_replies_have_tokens_of_the_frozen_model_alone():
    policy, bare = load_policy(lm("gpt2", V), mlp=WIDE, seed=1), lm("gpt2", V)
    learner = Learner(
        policy, algorithm="soft_q", max_tokens=3, stop_tokens=-1,
        **{"mask.by": "model", "sampling.top_k": 3, "sampling.truncation": "stored", "lr": 0.1},
    )  # fmt: skip
    for _ in range(2):  # the mask stays that of the frozen model when the policy has learnt
        replies = learner.generate([[3, 4]] * 16)
        for reply in replies:
            ids = reply.turns[0].action
            logits = bare(torch.tensor([[3, 4, *ids]])).logits[0, 1:-1]
            assert all(token in logits[i].topk(3).indices for i, token in enumerate(ids))
        assert learner.step(replies, [float(i) for i in range(16)])["rollout/logprob_gap"] < 1e-4


# --- the losses -------------------------------------------------------------------------------------------------------
def twin(version, q, v, q_copy, v_copy, rewards, freeze):
    """The sum over the actions of one reply, an action at a time, from lists of numbers [A]."""
    last, total = len(q) - 1, 0.0
    a = [q[t] - v[t] for t in range(len(q))]
    for t in range(len(q)):
        ahead = v_copy[t + 1] if t < last else 0.0
        if version == "v1":
            total = total + (q[t] - (rewards[t] if t == last else ahead)) ** 2
        if version in ("v2", "v2_v3"):
            wanted = (rewards[t] if t == last else ahead) - v_copy[t]
            total = total + (a[t] - wanted) ** 2 * (0.5 if version == "v2_v3" else 1.0)
        if version in ("v3", "v2_v3"):
            later = sum((x.detach() if freeze else x for x in a[t + 1 :]), start=a[t])
            total = total + (later - (rewards[last] - v_copy[t])) ** 2 * (0.5 if version == "v2_v3" else 1.0)
    return total


@cases(
    ("v1", 1.0, False, "gpt2", None),
    ("v2", 1.0, False, "gpt2", None),
    ("v2", 0.3, False, "llama", "copy"),
    ("v3", 1.0, False, "gpt2", None),
    ("v3", 0.3, True, "gpt2", None),
    ("v2_v3", 0.6, True, "t5", None),
    ("v2_v3", 1.0, False, "llama", "copy"),
)
def test_every_loss_and_gradient_is_that_of_a_twin(version, share, freeze, kind, reference):
    policy = mlp_policy(kind)
    learner = Learner(
        policy, algorithm="soft_q", lr=0.0, max_grad_norm=None, keep_gradients=True, minibatch=3, reference=reference,
        **{"loss.version": version, "loss.forward_share": share, "loss.freeze_later": freeze},
        **{"advantage.shape": (0, 1, -1, 3)},
    )  # fmt: skip
    copy = learner.copies["target"].policy
    for p in output_mlp.find(copy.model).parameters():
        p.data += 0.05
    mlp, bare = output_mlp.find(policy.model), lm(kind, V).double()
    total = 0.0
    for prompt, action, score in zip(PROMPTS, REPLIES, SCORES, strict=True):
        both = []
        for layers in (mlp, output_mlp.find(copy.model)):
            logits = logits_by_hand(bare, layers, prompt, action)
            both += [[logits[t, a] for t, a in enumerate(action)], list(logits.logsumexp(-1))]
        rewards = [0.0] * (len(action) - 1) + [-1 + 4 * score]
        q, v, q_copy, v_copy = both
        if reference is not None:  # the policy as it is now, whose own gradient is none
            now = [[x.detach() for x in numbers] for numbers in (q, v)]
            q, v = ([x - y for x, y in zip(*pair, strict=True)] for pair in ((q, now[0]), (v, now[1])))
            q_copy, v_copy = ([x - y for x, y in zip(*p, strict=True)] for p in ((q_copy, now[0]), (v_copy, now[1])))
        of_copy = ([x.detach() for x in q_copy], [x.detach() for x in v_copy])
        loss = twin(version, q, v, *of_copy, rewards, freeze)
        if share < 1:  # the copy's A, and the policy's own V
            loss = share * loss + (1 - share) * twin(version, *of_copy, q, v, rewards, freeze)
        total = total + loss / len(PROMPTS)
    wanted = torch.autograd.grad(total, list(mlp.parameters()))
    assert learner.step(PROMPTS, REPLIES, SCORES)["loss/total"] == pytest.approx(total.item(), abs=1e-8)
    for mine, truth in zip(mlp.parameters(), wanted, strict=True):
        assert torch.allclose(mine.grad, truth, atol=1e-8)


def test_rewards_are_standardised_and_mapped_to_a_range():
    shaped = find("soft_q").advantage
    batch = replace(Batch.given([[3], [3], [4], [4]], [[5, 6], [7], [8], [9]]), groups=torch.tensor([0, 0, 1, 1]))
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 3.0, 0.0], [0.0, 7.0, 0.0], [0.0, 7.0, 0.0]])
    batch = replace(batch, rewards=rewards.double())

    def totals(**options):
        paid = shaped(batch, **options).rewards
        assert bool((paid[:, 0] == 0).all()) and paid[0, 1] == 0, "only the last action is paid"
        return paid.sum(1)

    assert totals(shape=(0.0, 1.0, -20.0, 80.0)).tolist() == [80.0, 280.0, 680.0, 680.0]
    step = torch.tensor([1.0, 3.0, 7.0, 7.0], dtype=torch.float64)
    assert torch.allclose(totals(standardise="step"), (step - 4.5) / step.std(), atol=1e-6)
    population = step.numpy()
    theirs = (population - np.mean(population)) / (np.std(population) + 1e-4)
    assert totals(standardise="rlprompt").tolist() == pytest.approx(theirs.tolist(), abs=1e-12)
    of_group = 1 / (1 + 1e-6)  # of 1 and 3, whose deviation is 1 as numpy has it
    assert totals(standardise="group").tolist() == pytest.approx([-of_group, of_group, 0.0, 0.0])


def test_a_mask_needs_the_model_that_it_names():
    with pytest.raises(OperantError, match="no MLP behind a frozen model"):
        Learner(lm(), algorithm="soft_q", **{"mask.by": "model", "sampling.top_k": 4, "sampling.truncation": "stored"})


@cases(
    # The configurations of RLPrompt's few-shot classification and of its style transfer, as shipped.
    ("rlprompt", {"top_k": 256, "logit_bias": 0.0, "shape": [0, 1, 0, 5], "steps": 12_000, "batch": 16}),
    ("rlprompt-transfer", {"top_k": 50, "logit_bias": -10, "shape": [0, 1, -20, 80], "steps": 12_000, "batch": 8}),
    ("rl4lms-numbers-nlpo", {"max_tokens": 20, "fixed_length": True, "top_p": 0.9, "steps": 200, "batch": 64}),
)
def test_presets_have_the_published_numbers(preset, wanted):
    chosen = presets()[preset]
    options = learner_options(str(chosen["algorithm"]), preset, {})[0]
    known = {name: value for own in options.values() for name, value in values(own).items()} | chosen
    assert {name: list(x) if isinstance(x := known[name], tuple) else x for name in wanted} == wanted
