"""Policy copies: reference, polyak target and refreshed mask model; and a token mask inside `Sampling`."""

from copy import deepcopy

import torch
from toys import lm

from operant import Learner, Policy, ValueOptions
from operant.engines.native.engine import NativeEngine
from operant.models.reference import PolicyCopy
from operant.objectives.kl import KLOptions
from operant.rollouts.collate import collate
from operant.training.scoring import score_batch


def flat(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def nucleus(model, prefix):
    """The ids that can follow `prefix`: the smallest set with probability 0.6, by sorting, and never 9."""
    with torch.no_grad():
        logits = model(torch.tensor([prefix])).logits[0, -1].double()
    logits[9] = -torch.inf
    probs, order = logits.softmax(0).sort(descending=True)
    return set(order[: int((probs.cumsum(0) < 0.6).sum()) + 1].tolist())


def test_one_kind_three_rules():
    policy = Policy(lm("gpt2"), value=ValueOptions())
    frozen, target, masks = PolicyCopy(policy), PolicyCopy(policy, ("polyak", 0.25)), PolicyCopy(policy, ("every", 2))
    first, closed = flat(policy.model), flat(policy.model)
    engine = NativeEngine(policy)
    engine.mask_with(masks.policy)
    top_p = {"top_p": 0.6, "truncation": "stored", "max_tokens": 5, "banned": (9,)}
    learner = Learner(policy, reference=frozen, engine=engine, lr=3e-2, **top_p)
    learner.copies = {"target": target, "mask": masks}
    history = [begun := deepcopy(policy.model)]
    for step in range(4):
        replies = learner.generate([[5, 6, 7, 8], [4, 11], [12, 13, 14]] * 4)
        drawn_by = history[step - step % 2]  # refreshed after updates 2 and 4
        for reply in replies:
            turn = reply.turns[0]
            for place, allowed in enumerate(turn.allowed):
                assert turn.action[place] in allowed
                assert set(allowed) == nucleus(drawn_by, turn.prompt + turn.action[:place])
        scores = [r.ids.count(7) - r.ids.count(3) for r in replies]
        if step in (0, 2):
            check_ratio_and_kl(policy, frozen, replies, learner.sampling, begun, same=step == 0)
        assert learner.step(replies, scores)["rollout/logprob_gap"] < 1e-4
        closed = closed + 0.25 * (flat(policy.model) - closed)
        history.append(deepcopy(policy.model))

    assert float((flat(policy.model) - first).abs().max()) > 0.05
    assert torch.equal(flat(frozen.policy.model), first)
    assert frozen.fingerprint == PolicyCopy(Policy(begun)).fingerprint != PolicyCopy(policy).fingerprint
    assert torch.allclose(flat(target.policy.model), closed, atol=1e-6)
    assert torch.equal(flat(masks.policy.model), flat(policy.model))
    assert not [p for s in (frozen, target, masks) for p in s.policy.parameters() if p.grad is not None]


def check_ratio_and_kl(policy, frozen, replies, sampling, begun, *, same):
    """The ratio is of the truncated distributions, the KL of the whole ones."""
    batch = collate(replies, [0.0] * len(replies))
    ids, offsets = batch.allowed
    assert ids.tolist() == [i for r in replies for piece in r.turns[0].allowed for i in piece]
    assert int(offsets[-1]) == len(ids)
    with torch.no_grad():
        out = policy.forward(batch, sampling)
    assert float(((out.logprobs - batch.logprobs) * batch.actions).abs().max()) < 1e-4
    batch = score_batch(batch, policy, frozen.policy, sampling, KLOptions(kind="k1"))
    for row, reply in enumerate(replies):
        mine, theirs = (whole(m, reply.turns[0]) for m in (policy.model, begun))
        assert torch.allclose(batch.kl[row][batch.actions[row]].double(), mine - theirs, atol=1e-4)
    gap = (batch.logprobs - batch.raw_logprobs)[batch.actions]
    assert bool((gap > -1e-5).all()) and float(gap.max()) > 0.1
    assert (float(batch.kl.abs().max()) < 1e-4) == same


def whole(model, turn):
    with torch.no_grad():
        logits = model(torch.tensor([turn.prompt + turn.action])).logits[0, len(turn.prompt) - 1 : -1].double()
    logits[:, 9] = -torch.inf
    return logits.log_softmax(-1).gather(-1, torch.tensor(turn.action)[:, None]).squeeze(-1)
