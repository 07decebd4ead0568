"""Canaries: the task is to say a given token, whose best mean reward is 1. Learning finds it, noise does not."""

import pytest
import torch
from toys import lm

from operant.learner import Learner
from operant.sampling import counter

WANTED, PROMPTS = 7, [[1, 2, 3], [4, 5], [6], [8, 9, 10, 11]]
OPTIONS = {"optimizer.lr": 1e-2, "max_tokens": 5, "fixed_length": True, "kl.coef": 0.0, "minibatch": 16}


def score(rollout):
    return rollout.ids.count(WANTED) / len(rollout.ids)


def learner(kind, **more):
    return Learner(lm(kind, 12, spread=0.05), **OPTIONS | more)


def run(policy, steps, credit=lambda step, scores: scores, count=32):
    """Mean reward of every step, before its update."""
    means = []
    for step in range(steps):
        replies = policy.generate(PROMPTS * (count // 4))
        scores = [score(r) for r in replies]
        means.append(sum(scores) / count)
        metrics = policy.step(replies, credit(step, scores))
        assert metrics["rollout/logprob_gap"] < 1e-3
    return means


def shuffled(step, scores):
    """The same scores, each given to another reply."""
    return [scores[i] for i in sorted(range(len(scores)), key=lambda i: counter(5, step, i))]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_ppo_finds_the_optimum(kind):
    means = run(learner(kind), 12)
    assert means[0] < 0.2 and means[-1] > 0.95


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_shuffled_rewards_teach_nothing(kind):
    means = run(learner(kind), 12, shuffled)
    assert sum(means[-4:]) / 4 < 0.35


@pytest.mark.parametrize("kind", [pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
def test_triplets_from_anywhere_teach_the_same(kind):
    """The replies come from transformers' own `generate`; the learner gets tensors that it has never seen."""
    student = learner(kind)
    means = []
    torch.manual_seed(0)
    for _ in range(12):
        triplets = []
        for prompt in PROMPTS:
            query = torch.tensor([prompt] * 8)
            out = student.policy.model.generate(
                query,
                attention_mask=torch.ones_like(query),
                max_new_tokens=5,
                min_new_tokens=5,
                do_sample=True,
                top_k=0,
                pad_token_id=0,
                eos_token_id=None,
            )
            triplets += [(q, r[len(prompt) :]) for q, r in zip(query, out, strict=True)]
        queries, responses = ([t[i] for t in triplets] for i in (0, 1))
        scores = [float((r == WANTED).float().mean()) for r in responses]
        means.append(sum(scores) / len(scores))
        student.step(queries, responses, torch.tensor(scores))
    assert means[0] < 0.2 and means[-1] > 0.95
