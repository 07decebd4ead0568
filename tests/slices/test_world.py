"""An environment of two turns: a fresh prompt in the second, two discounts, and a choice among options."""

import pytest
import torch
from toys import bare_logprobs, letters, lm

from operant.engines.native.engine import NativeEngine
from operant.models.policy import Policy
from operant.models.value_head import ValueOptions
from operant.objectives.advantages import with_gae
from operant.rollouts.collate import collate
from operant.rollouts.play import play
from operant.sampling import Sampling, task_key, uniforms
from operant.training.learner import Learner
from operant.types import Step, Task

DOORS = ["up", "go", "inn"]


class House:
    """Generate a reply; then forget it, and choose a door. The second door pays 2."""

    def reset(self, tasks):
        self.turn = dict.fromkeys(tasks, 0)
        return {slot: Step(fresh=True) for slot in tasks}

    def step(self, replies):
        return {slot: self._answer(slot, reply) for slot, reply in replies.items()}

    def _answer(self, slot, reply):
        self.turn[slot] += 1
        if self.turn[slot] == 1:
            return Step("a door.", fresh=True, reward=0.5, options=DOORS)
        assert reply in DOORS
        return Step(reward=2.0 if reply == "go" else 0.0, terminated=True, info={"door": reply})


def test_fresh_prompts_choices_and_two_discounts():
    tokenizer = letters()
    policy = Policy(lm("llama", 40, spread=0.1), tokenizer, value=ValueOptions(init="normal"))
    sampling = Sampling(max_tokens=3, stop_tokens=(2,))
    tasks = [Task(f"t{i}", "in the house") for i in range(6)]
    rollouts = play(tasks, env=House(), engine=NativeEngine(policy), tokenizer=tokenizer, sampling=sampling, seed=5)

    fresh = tokenizer("a door.")["input_ids"]
    options = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in DOORS]
    scores = torch.stack([bare_logprobs(policy.model, fresh, [*ids, 2]).mean() for ids in options])  # 2 ends each
    edges = scores.softmax(0).cumsum(0)
    for rollout in rollouts:
        second = rollout.turns[1]
        assert second.prompt == fresh and second.options == options
        u = uniforms([task_key(5, "train", 0, rollout.task.id, 0, 1)], 0)
        assert second.chosen == int((edges <= u).sum())
        assert second.action == options[second.chosen]
        assert rollout.info["door"] == rollout.reply == DOORS[second.chosen]
        truth = scores.log_softmax(0)[second.chosen]
        assert second.logprobs == pytest.approx([float(truth)], abs=1e-4)
        assert rollout.end == "world"
    assert len({r.turns[1].chosen for r in rollouts}) > 1

    batch = collate(rollouts, [0.0] * len(rollouts))
    assert batch.episodes.tolist() == [i // 2 for i in range(12)]
    gamma, turn_gamma, lam, turn_lam = 0.9, 0.5, 0.8, 0.3
    credited = with_gae(batch, gamma=gamma, lam=lam, turn_gamma=turn_gamma, turn_lam=turn_lam, whiten_scope="none")
    for e, rollout in enumerate(rollouts):
        expected = by_hand(rollout, gamma, turn_gamma, lam, turn_lam)
        for row, turn in ((2 * e, expected[0]), (2 * e + 1, expected[1])):
            assert torch.allclose(credited.advantages[row][batch.actions[row]], torch.tensor(turn), atol=1e-5)


def by_hand(rollout, gamma, turn_gamma, lam, turn_lam):
    """Advantages of both turns, from the last token back, with the discount of turns between the two."""
    ahead, value, crossing = 0.0, 0.0, False
    out = []
    for turn in reversed(rollout.turns):
        advantages = []
        for place in reversed(range(turn.count)):
            last = place == turn.count - 1
            paid = turn.reward if last else 0.0
            discount = gamma * turn_gamma if last and crossing else gamma if not last else 0.0
            trace = turn_lam if last else lam
            ahead = paid + discount * value - turn.values[place] + discount * trace * ahead
            value = turn.values[place]
            advantages.insert(0, ahead)
        out.insert(0, advantages)
        crossing = True
    return out


def test_a_learner_finds_the_door():
    options = {"optimizer.lr": 1e-2, "max_tokens": 2, "kl.coef": 0.0, "turn_gamma": 0.9, "turn_lam": 0.5}
    learner = Learner(lm("llama", 40, spread=0.1), tokenizer=letters(), env=House(), **options)
    won = []
    for step in range(14):
        replies = learner.play([Task(f"{step}/{i}", "in the house") for i in range(16)])
        won.append(sum(r.info["door"] == "go" for r in replies) / 16)
        learner.step(replies, [0.0] * 16)
    assert won[0] < 0.8 and won[-1] > 0.9, won
