"""An encoder-decoder takes the same steps as a decoder: collate, engine, policy, PPO."""

import torch
from cases import cases, slow
from toys import bare_logprobs, lm

from operant import Learner, Policy, Rollout, Sampling, Task, Turn, ValueOptions
from operant.engines.native.capabilities import try_decoding
from operant.engines.native.engine import NativeEngine
from operant.rollouts.collate import collate

PROMPTS = [[5, 6, 7, 8, 9, 10], [4, 11], [12, 13, 14], [3]]


@cases("t5", "bart")
def test_samples_are_scored_as_drawn_and_as_transformers_does(kind):
    policy = Policy(lm(kind), value=ValueOptions(init="normal"))
    assert try_decoding(policy).cached and policy.modes.padded
    sampling = Sampling(max_tokens=6, stop_tokens=(2, 7, 17), temperature=0.7)
    completions = NativeEngine(policy).generate(PROMPTS, sampling, [1, 2, 3, 4])
    assert len({len(c.action) for c in completions}) > 1
    going_on = PROMPTS[1] + completions[1].action + [15]  # the second prompt of an episode of two turns
    completions += NativeEngine(policy).generate([going_on], sampling, [9])
    turns = [
        Turn(prompt, c.action, c.logprobs, c.values, c.end)
        for prompt, c in zip([*PROMPTS, going_on], completions, strict=True)
    ]
    episodes = [[turns[0]], [turns[1], turns[4]], [turns[2]], [turns[3]]]
    played = [Rollout(Task(str(i), each[0].prompt), i, each, [""] * len(each)) for i, each in enumerate(episodes)]

    batch = collate(played, [1.0] * 4, joined=False)
    assert len(batch) == 5 and batch.episodes.tolist() == [0, 1, 1, 2, 3]
    with torch.no_grad():
        out = policy.forward(batch, sampling)
    for row, turn in enumerate(turn for each in episodes for turn in each):
        at = batch.actions[row]
        truth = bare_logprobs(policy.model, turn.prompt, turn.action, 0.7)
        assert torch.allclose(torch.tensor(turn.logprobs).double(), truth, atol=1e-4)
        assert torch.allclose(out.logprobs[row][at].double(), truth, atol=1e-4)
        assert torch.allclose(out.values[row][at], torch.tensor(turn.values), atol=1e-4)


@cases(slow("t5"), slow("bart"))  # test_gradient.py has the gradient of every architecture
def test_ppo_teaches_it_a_token(kind):
    options = {"optimizer.lr": 1e-2, "max_tokens": 4, "kl.coef": 0.0, "minibatch": 16, "value.init": "zero"}
    learner = Learner(lm(kind, 15, spread=0.1), **options)
    shares = []
    for _ in range(10):
        replies = learner.generate(PROMPTS * 8)
        scores = [r.ids.count(7) / 4 for r in replies]
        shares.append(sum(scores) / len(scores))
        assert learner.step(replies, scores)["rollout/logprob_gap"] < 1e-4
    assert shares[0] < 0.3 and shares[-1] > 0.8
