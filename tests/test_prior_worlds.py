"""The same list of old faults, continued: how episodes end, what credit they get, and what rewards may see."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from toys import CAUSAL, letters, lm
from worlds import Turns

from operant import Policy, Sampling, Step, Task, ValueOptions, distributed
from operant.engines.native.engine import NativeEngine
from operant.objectives import advantages
from operant.objectives.advantages import whiten, with_gae
from operant.rewards import NAMES
from operant.rewards.text_scores import SCORES
from operant.rollouts.collate import collate
from operant.rollouts.play import play
from operant.training.scoring import bootstrap_prompts, with_bootstraps


class Corridor(Turns):
    """One turn that pays 1; then the episode is over, or cut by a step limit."""

    def __init__(self, end):
        self.end = {end: True}

    def answer(self, slot, reply):
        return Step("a wall.", fresh=True, reward=1.0, **self.end)


@pytest.mark.parametrize("kind", CAUSAL)
def test_7_a_cut_is_followed_by_the_next_states_value(kind):
    policy, tokenizer = Policy(lm(kind, 40), letters(), value=ValueOptions(init="normal")), letters()
    ahead = tokenizer("a wall.")["input_ids"]
    with torch.no_grad():
        value = float(policy.value_head(policy.model.base_model(torch.tensor([ahead])).last_hidden_state[0, -1]))
    assert abs(value) > 0.05
    for end, expected in (("truncated", value), ("terminated", 0.0)):
        tasks = [Task("x", "a hall"), Task("y", "the")]
        kept = {"engine": NativeEngine(policy), "tokenizer": tokenizer, "sampling": Sampling(max_tokens=3)}
        rollouts = play(tasks, env=Corridor(end), **kept)
        batch = with_bootstraps(collate(rollouts, [0.0, 0.0]), bootstrap_prompts(rollouts), policy)
        assert batch.bootstrap.tolist() == pytest.approx([expected] * 2, abs=1e-4)
        credited = with_gae(batch, gamma=0.9, turn_gamma=0.5, whiten_scope="none")
        for row, rollout in enumerate(rollouts):
            last = batch.actions[row].nonzero()[-1, 0]
            surprise = 1.0 + 0.9 * 0.5 * expected - rollout.turns[0].values[-1]
            assert float(credited.advantages[row, last]) == pytest.approx(surprise, abs=1e-4)


def test_8_whitening_on_ranks_is_whitening_of_the_whole(monkeypatch):
    """Three ranks with 4, 1 and 0 numbers, as threads that meet wherever a rank would wait for the others."""
    parts = [torch.tensor([3.0, -1.0, 8.0, 2.5]), torch.tensor([40.0]), torch.tensor([7.0])]
    masks = [torch.ones(4, dtype=torch.bool), torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.bool)]
    barrier, told = threading.Barrier(3, timeout=20), {}

    def total(number):
        told[threading.get_ident()] = number
        barrier.wait()
        summed = sum(told.values())
        barrier.wait()
        return summed

    whole = whiten(torch.cat(parts[:2]), torch.ones(5, dtype=torch.bool))
    monkeypatch.setattr(distributed, "total_float", total)
    assert advantages.distributed is distributed
    with ThreadPoolExecutor(3) as threads:
        first, second, none = threads.map(whiten, parts, masks)
    assert torch.allclose(torch.cat([first, second]), whole, atol=1e-6) and none.tolist() == [0.0]


def test_14_every_reward_has_a_test_of_its_neighbours():
    plain = {"length", "letters", "pattern", "repetition", *SCORES}  # tests/test_text_scores.py
    models = {"builtin", "classifier", "vader", "minus_query"}  # of models: tests/test_rewards.py
    # In processes of their own: tests/test_isolated.py. Of targets and of ends: tests/test_recipes.py
    elsewhere = models | {"isolated", "keyword", "ended", "per_token"}
    elsewhere |= {"reward_model", "humans"}  # tests/test_reward_model.py, tests/test_humans.py
    elsewhere |= {"prompt", "style_transfer"}  # tests/test_prompt_reward.py, tests/test_style_transfer.py
    elsewhere |= {"maths", "think_answer", "judge"}  # tests/test_maths.py, tests/test_reward_model.py
    elsewhere |= {"tests", "critic", "minus_greedy"}  # tests/test_programs.py, tests/test_critic.py
    assert plain | elsewhere == NAMES.keys(), "a new reward stands here, or says where its test is"
