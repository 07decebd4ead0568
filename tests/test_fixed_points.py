"""Where the methods end that have a known end with KL present: one prompt and six tokens, real samples, a real model.

PPO and its like maximise E[reward] - price * KL, whose best policy is reference * exp(reward / price) / Z. Supervised
training ends at the frequencies of the data. A policy is held to its end within a total variation of 0.02, as the mean
over the second half of a run whose rate falls to 0. This runs in CI alone: every day, the gradients of all methods are
held to their claims in test_expected_gradients.py and test_group_methods.py.
"""

from typing import Any

import pytest
import torch
from cases import cases
from torch import Tensor
from toys import lm

from operant import Learner, Task

V, PROMPT, GROUP = 6, [3, 4], 4
PRICE = 0.5
REWARDS = torch.tensor([0.0, 1.0, 0.4, -0.6, 0.8, 0.2], dtype=torch.float64)
DATA = [v for v, count in enumerate([12, 24, 96, 60, 12, 36]) for _ in range(count)]
SHARES = torch.bincount(torch.tensor(DATA)).double() / len(DATA)


def spoken(model: Any, prompt: list[int] = PROMPT) -> Tensor:
    """[V] the model's own probabilities behind the prompt."""
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0, -1].double().softmax(0)


def begun() -> Any:
    return lm(vocab=V, spread=0.1)


REFERENCE = spoken(begun())


def apart(p: Tensor, q: Tensor) -> float:
    """Total variation."""
    return float((p - q).abs().sum() / 2)


def tilted(price: float) -> Tensor:
    """[V] the best policy at a price of a nat of KL(policy || reference)."""
    return (REFERENCE.log() + REWARDS / price).softmax(0)


CHARGED = {"kl.coef": PRICE}


@pytest.mark.slow
@cases(
    ("ppo", CHARGED, 40),
    ("a2c", CHARGED | {"optimizer.kind": "adamw"}, 40),
    ("reinforce", CHARGED, 48),
    ("coderl", CHARGED | {"score.centre": True}, 48),
    ("nlpo", CHARGED | {"top_p": 1.0, "top_k": V}, 40),
    ("trpo", CHARGED | {"update.target_kl": 0.003}, 64),
    ("rloo", CHARGED, 48),
    ("sft", {"minibatch": 60}, 32),
)
def test_a_method_ends_where_it_says(name, options, steps):
    end = SHARES if name == "sft" else tilted(PRICE)
    assert apart(end, REFERENCE) > 0.1 and apart(end, tilted(2 * PRICE)) > 0.04
    fixed = {"lr": 5e-3, "max_tokens": 1, "fixed_length": True, "watch_every": 0, "optimizer.schedule": "linear"}
    learner = Learner(begun(), algorithm=name, total_steps=steps, **fixed | options)
    asked, policies = [Task(f"group {i // GROUP}", PROMPT) for i in range(256)], []
    for _ in range(steps):
        if name == "sft":
            learner.step([PROMPT] * len(DATA), [[v] for v in DATA])
        else:
            replies = learner.generate(asked)
            learner.step(replies, [float(REWARDS[r.ids[0]]) for r in replies])
        policies.append(spoken(learner.policy.model))
    assert apart(torch.stack(policies[steps // 2 :]).mean(0), end) < 0.02
