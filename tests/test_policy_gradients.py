"""A2C and REINFORCE against PPO and a hand calculation; NLPO's mask against PPO, and against the copy that makes it."""

import pytest
import torch
from cases import cases, slow
from toys import bare_logprobs, bare_table, lm

from operant import Learner, Policy, Sampling, ValueOptions
from operant.runs.config import configure, recipes

PROMPTS = [[3, 4, 5], [6, 7]] * 8


def scores(rollouts):
    return [sum(token < 10 for token in r.ids) - 0.3 * len(r.ids) for r in rollouts]


def policy(kind="gpt2", seed=0):
    return Policy(lm(kind, seed=seed).double(), value=ValueOptions(init="normal"))


def gradient(learner) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in learner.policy.trainable()])


@cases(("gpt2", 0.9), ("t5", 1.0))
def test_the_gradient_of_a2c_is_that_of_ppos_first_minibatch(kind, lam):
    same = {"max_tokens": 6, "kl.coef": 0.1, "keep_gradients": True, "epochs": 1, "optimizer.max_grad_norm": None}
    same |= {"loss.value_coef": 0.3, "loss.entropy_coef": 0.01, "advantage.lam": lam, "advantage.gamma": 0.95}
    found = []
    for algorithm, more in {"a2c": {}, "ppo": {"loss.value_clip": None, "advantage.whiten_scope": "none"}}.items():
        torch.manual_seed(0)
        learner = Learner(policy(kind), reference=lm(kind, seed=1).double(), algorithm=algorithm, **same, **more)
        rollouts = learner.generate(PROMPTS)
        learner.step(rollouts, scores(rollouts))
        found.append(gradient(learner))
    assert float((found[0] - found[1]).abs().max()) < 1e-10 and float(found[0].norm()) > 0.1


@cases(True, False)
def test_reinforce_is_the_hand_calculation(centre):
    """Two steps at rate 0: the baseline of the second is the mean of both steps' scores."""
    options = {"max_tokens": 6, "kl.coef": 0.0, "keep_gradients": True, "advantage.gamma": 0.9}
    options |= {"optimizer.lr": 0.0, "optimizer.max_grad_norm": None, "score.centre": centre}
    learner = Learner(lm().double(), algorithm="reinforce", **options)
    seen = []
    for _ in range(2):
        rollouts = learner.generate(PROMPTS)
        seen += scores(rollouts)
        learner.step(rollouts, scores(rollouts))
    baseline = sum(seen) / len(seen) if centre else 0.0
    twin, count, loss = lm().double(), sum(len(r.ids) for r in rollouts), 0.0
    for rollout, score in zip(rollouts, scores(rollouts), strict=True):
        prompt, ids = rollout.turns[0].prompt, rollout.ids
        logits = twin(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        left = torch.tensor([0.9 ** (len(ids) - 1 - t) for t in range(len(ids))], dtype=torch.float64)
        loss = loss - ((score - baseline) * left * chosen).sum() / count
    loss.backward()
    truth = torch.cat([p.grad.flatten() for p in twin.parameters()])
    assert float((gradient(learner) - truth).abs().max()) < 1e-6 * float(truth.abs().max())


@cases("a2c", slow("nlpo"), slow("reinforce"), "trpo")
def test_every_recipe_of_ppo_can_be_trained_with_the_method(algorithm):
    """What a recipe says of PPO's update does not stand in the way of a method with one of its own."""
    named = {"policy": "builtin:reviews-lm", "tasks": "rows.jsonl", "algorithm": algorithm}
    written = [name for name, path in recipes().items() if "algorithm: ppo" in path.read_text(encoding="utf-8")]
    assert len(written) > 12
    for name in written:
        own = {} if name in ("rooms", "textworld", "numbers", "dates") else named
        own = own if name not in ("sentiment", "letters", "keyword", "chat") else {"algorithm": algorithm}
        assert configure({"algorithm": algorithm, **own}, name).train.algorithm == algorithm


# --- NLPO -------------------------------------------------------------------------------------------------------------
@cases(slow("gpt2"), slow("t5"))
def test_a_mask_that_allows_everything_is_ppo(kind):
    """The same ids, and the same numbers to 1e-6, through the whole path of the mask."""
    same = {"max_tokens": 6, "optimizer.lr": 1e-2, "kl.coef": 0.1, "epochs": 2, "minibatch": 8, "fixed_length": True}
    found = {}
    for algorithm, more in {"ppo": {}, "nlpo": {"top_p": 1.0, "top_k": 20, "mask.every": 2}}.items():
        torch.manual_seed(0)
        learner, known = Learner(policy(kind), algorithm=algorithm, **same, **more), []
        for _ in range(4):
            rollouts = learner.generate(PROMPTS)
            known.append([r.ids for r in rollouts])
            metrics = learner.step(rollouts, scores(rollouts))
        found[algorithm] = known, metrics
    assert found["ppo"][0] == found["nlpo"][0]
    ppo, nlpo = found["ppo"][1], found["nlpo"][1]
    shared = [name for name in ppo if name in nlpo and not name.startswith(("time/", "memory/", "speed/"))]
    assert len(shared) > 40
    assert {n: (ppo[n], nlpo[n]) for n in shared if abs(ppo[n] - nlpo[n]) > 1e-6 * max(1, abs(ppo[n]))} == {}


def nucleus(model, prompt, ids, top_p, least, always):
    """The sets that top-p leaves at each place, by the model's own forward, sorting in Python."""
    sets = []
    for chances in bare_table(model, prompt, ids).exp().tolist():
        order, total, kept = sorted(range(20), key=lambda token: -chances[token]), 0.0, set(always)
        for rank, token in enumerate(order):
            if rank >= least and total >= top_p:
                break
            kept.add(token)
            total += chances[token]
        sets.append(kept)
    return sets


@cases(("gpt2", 2), ("t5", 0))
def test_the_mask_is_the_nucleus_of_a_following_copy(kind, every):
    options = {"max_tokens": 4, "optimizer.lr": 5e-2, "kl.coef": 0.0, "top_p": 0.6, "top_p_least": 3, "epochs": 1}
    learner = Learner(lm(kind).double(), algorithm="nlpo", **options, **{"mask.every": every})
    first, copy, changes = lm(kind).double(), lm(kind).double(), 0
    for step in range(4):
        if every and step % every == 0:
            copy.load_state_dict(learner.policy.model.state_dict())
        rollouts = learner.generate(PROMPTS[:2])
        for rollout in rollouts:
            (turn,) = rollout.turns
            found = [set(ids) for ids in turn.allowed]
            assert found == nucleus(copy, turn.prompt, turn.action, 0.6, 3, {2})
            changes += found != nucleus(first, turn.prompt, turn.action, 0.6, 3, {2})
            assert all(token in kept for token, kept in zip(turn.action, found, strict=True))
        metrics = learner.step(rollouts, scores(rollouts))
        assert metrics["rollout/logprob_gap"] < 1e-6
        sizes = [len(ids) for r in rollouts for ids in r.turns[0].allowed]
        assert metrics["policy/allowed_tokens"] == pytest.approx(sum(sizes) / len(sizes))
    assert (changes > 0) == bool(every)


def test_the_ratio_is_masked_and_kl_is_not():
    known = {"reference": lm(seed=1).double(), "top_p": 0.5, "top_p_least": 2, "max_tokens": 3}
    learner = Learner(lm().double(), algorithm="nlpo", **known)
    rollouts, bare = learner.generate(PROMPTS[:4]), lm().double()
    metrics, kl, count = learner.step(rollouts, scores(rollouts)), 0.0, 0
    for rollout in rollouts:
        (turn,) = rollout.turns
        plain, table = (of(bare, turn.prompt, turn.action) for of in (bare_logprobs, bare_table))
        inside = [float(table[t, list(kept)].exp().sum()) for t, kept in enumerate(turn.allowed)]
        masked = plain - torch.tensor(inside, dtype=torch.float64).log()
        assert torch.allclose(masked, torch.tensor(turn.logprobs, dtype=torch.float64), atol=1e-6)
        kl += float((plain - bare_logprobs(lm(seed=1).double(), turn.prompt, turn.action)).sum())
        count += 1
    assert metrics["kl/per_reply"] == pytest.approx(kl / count, rel=1e-6)


def test_a_mask_by_the_policy_itself_keeps_no_copy():
    learner = Learner(lm(), algorithm="nlpo", top_k=5, top_p=1.0, max_tokens=3, **{"mask.by": "policy"})
    assert not learner.copies and learner.engine.mask_model is None
    assert all(len(set(ids) - {2}) in (4, 5) for ids in learner.generate(PROMPTS[:1])[0].turns[0].allowed)


def test_stop_tokens_and_a_least_number_of_tokens_stay():
    logits = torch.tensor([[5.0, 4.0, 0.0, -1.0, -9.0], [9.0, 0.0, -1.0, -2.0, -9.0]])
    tests = [({}, [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]), ({"top_p_least": 3}, [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0]])]
    stops = {"keep_stops": True, "stop_tokens": (4,)}
    tests += [(stops, [[1, 1, 0, 0, 1], [1, 0, 0, 0, 1]]), (stops | {"top_k": 1}, [[1, 0, 0, 0, 0]] * 2)]  # greedy
    for options, kept in tests:
        assert Sampling(top_p=0.9, **options).kept(logits).int().tolist() == kept
