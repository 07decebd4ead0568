"""An encoder-decoder takes the same steps as a decoder: collate, engine, policy, PPO."""

import pytest
import torch
from cases import slow
from toys import bare_logprobs, lm

from operant import Learner, Policy, Rollout, Sampling, Task, Turn, ValueOptions
from operant.engines.native.capabilities import try_decoding
from operant.engines.native.engine import NativeEngine
from operant.rollouts.collate import collate

PROMPTS = [[5, 6, 7, 8, 9, 10], [4, 11], [12, 13, 14], [3]]


def rollouts(prompts, completions):
    """Two attempts of one turn, and one whose second prompt continues after the first reply."""
    turns = [Turn(p, c.action, c.logprobs, c.values, c.end) for p, c in zip(prompts, completions, strict=True)]
    return [Rollout(Task(str(i), t.prompt), i, [t], [""]) for i, t in enumerate(turns)]


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_samples_are_scored_as_drawn_and_as_transformers_does(kind):
    policy = Policy(lm(kind), value=ValueOptions(init="normal"))
    assert try_decoding(policy).cached and policy.modes.padded
    sampling = Sampling(max_tokens=6, stop_tokens=(2, 7, 17), temperature=0.7)
    completions = NativeEngine(policy).generate(PROMPTS, sampling, [1, 2, 3, 4])
    assert len({len(c.action) for c in completions}) > 1
    played = rollouts(PROMPTS, completions)
    first = played[1].turns[0]
    going_on = first.prompt + first.action + [15]
    (later,) = NativeEngine(policy).generate([going_on], sampling, [9])
    second = Turn(going_on, later.action, later.logprobs, later.values, later.end)
    played[1] = Rollout(played[1].task, 1, [first, second], ["", ""])

    batch = collate(played, [1.0] * 4, joined=False)
    assert len(batch) == 5 and batch.episodes.tolist() == [0, 1, 1, 2, 3]
    with torch.no_grad():
        out = policy.forward(batch, sampling)
    turns = [turn for r in played for turn in r.turns]
    for row, turn in enumerate(turns):
        at = batch.actions[row]
        truth = bare_logprobs(policy.model, turn.prompt, turn.action, 0.7)
        assert torch.allclose(torch.tensor(turn.logprobs).double(), truth, atol=1e-4)
        assert torch.allclose(out.logprobs[row][at].double(), truth, atol=1e-4)
        assert torch.allclose(out.values[row][at], torch.tensor(turn.values), atol=1e-4)


@pytest.mark.parametrize("kind", ["t5", slow("bart")])
def test_ppo_teaches_it_a_token(kind):
    options = {"optimizer.lr": 5e-3, "max_tokens": 5, "kl.coef": 0.0, "minibatch": 16, "value.init": "zero"}
    learner = Learner(lm(kind, 15, spread=0.1), **options)
    shares = []
    for _ in range(15):
        replies = learner.generate(PROMPTS * 8)
        scores = [r.ids.count(7) / 5 for r in replies]
        shares.append(sum(scores) / len(scores))
        metrics = learner.step(replies, scores)
        assert metrics["rollout/logprob_gap"] < 1e-4
    assert shares[0] < 0.3
    assert min(shares[-3:]) > 0.8
